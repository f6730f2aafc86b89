// The directory: from an id to the place of its row. Shared by host and device.
//
// id -> position in hotness order (identity, or a bitmap with popcount ranks for the explicit head)
//    -> tier (a few boundaries) -> arithmetic inside the tier.
//
// Arithmetic inside a tier: offset = position - start; one turn of the stripe covers `period`
// offsets, and offset k of turn q is at base[k] + q * step[k]. A read map has byte addresses in
// base and step, and gives the address of the row; a home map gives the key that orders the
// backward pass.
#pragma once

#include "common/platform.h"

namespace oper {

struct TierMap {
  int64_t start;        // first position of the tier
  int64_t period;       // offsets in one turn, >= 1
  int32_t shift;        // log2(period), or -1 if period is no power of two
  uint64_t magic;       // floor(2^63 / period) + 1
  const int64_t* base;  // [period]
  const int64_t* step;  // [period]
};

// offset / period without a branch, exact for offsets below 2^51 and periods below 2^12 (Granlund
// and Montgomery 1994: the error 2 * offset / 2^64 stays below 1 / period).
OPER_HD uint64_t turn_of(const TierMap& tier, uint64_t offset) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(offset << 1, tier.magic);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(offset << 1) * tier.magic) >> 64);
#endif
}

OPER_HD int64_t locate_in_tier(const TierMap& tier, int64_t position) {
  const uint64_t offset = static_cast<uint64_t>(position - tier.start);
  const uint64_t turn = turn_of(tier, offset);
  const uint64_t k = offset - turn * static_cast<uint64_t>(tier.period);
  return tier.base[k] + static_cast<int64_t>(turn) * tier.step[k];
}

// Explicit head of a table whose ids are not in hotness order: 2 bits per row, in words that hold
// what one lookup needs, then one position per head row in ascending order of id.
struct HeadMap {
  const uint64_t* words;      // [ceil(num_rows / 32)], or null: position = id. Low half: bit i marks
                              // a head row; high half: how many head rows come before the word
  const uint32_t* positions;  // [num_head]
  int64_t num_head;
};

OPER_HD int popcount32(uint32_t x) {
#if defined(__CUDA_ARCH__)
  return __popc(x);
#else
  return __builtin_popcount(x);
#endif
}

OPER_HD int popcount64(uint64_t x) {
  return popcount32(static_cast<uint32_t>(x)) + popcount32(static_cast<uint32_t>(x >> 32));
}

// Has no branches that depend on the id, because a predictor cannot learn which ids are hot.
OPER_HD int64_t position_of(const HeadMap& head, int64_t id) {
  if (head.words == nullptr) return id;
  const uint64_t word = head.words[id >> 5];
  const uint32_t bit = uint32_t{1} << (id & 31);
  const uint32_t bits = static_cast<uint32_t>(word);
  const int64_t rank = static_cast<int64_t>(word >> 32) + popcount32(bits & (bit - 1));
  const int64_t hot = -static_cast<int64_t>((bits & bit) != 0);
  const int64_t listed = head.positions[rank & hot];
  return (listed & hot) | ((head.num_head + id - rank) & ~hot);
}

// Ids of the explicit head, to map a position back to its id; null: position = id.
struct HeadIds {
  const uint32_t* by_position;  // [num_head], in hotness order
  const uint32_t* ascending;    // [num_head]
  int64_t num_head;
};

// Rows of one replicated tier whose masters are on one owner.
struct Refresh {
  int32_t table;
  int32_t owner;
  int64_t slot_begin, slot_end;  // slots at the owner
  int64_t first, stride;         // replica row of slot s: first + (s - slot_begin) * stride
  const char* masters;           // the owner's shard of the table (slot 0)
  char* replicas;                // this rank's copy of the tier, or null
};

namespace host {
struct FlatTiers;  // the tiers' constants in arrays, for vector code
}

struct TableMap {
  int64_t num_rows;
  int32_t num_tiers;
  const TierMap* tiers;  // [num_tiers], ascending start
  HeadMap head;
  const host::FlatTiers* flat;  // or null
};

OPER_HD int32_t tier_of(const TableMap& table, int64_t position) {
  int32_t k = 0;
  for (int32_t j = 1; j < table.num_tiers; ++j) k += position >= table.tiers[j].start;
  return k;
}

// Place of a valid id (0 <= id < num_rows).
OPER_HD int64_t locate(const TableMap& table, int64_t id) {
  const int64_t position = position_of(table.head, id);
  return locate_in_tier(table.tiers[tier_of(table, position)], position);
}

}  // namespace oper
