// The directory: from an id to the place of its row. Shared by host and device.
//
// 1. From the id to its position in hotness order: they are equal if ids are in that order. Otherwise
//    the table has an explicit head, a list of the positions of its hottest rows; all other rows
//    follow in ascending order of id.
// 2. From the position to its tier, by comparison with the first positions of the tiers.
// 3. Within the tier by arithmetic. Rows are assigned to places in rounds of `period` rows each: row
//    k of round q is at base[k] + q * step[k], where q and k are quotient and remainder of
//    (position - start) / period.
//
// There are two such maps. The read map gives the byte address from which this rank reads the row.
// The home map gives the row's linear index, by which the backward pass sorts: all rows of a table
// are numbered by owner, then by slot.
#pragma once

#include "common/platform.h"

namespace oper {

struct TierMap {
  int64_t start;        // first position of the tier
  int64_t period;       // offsets in one round, >= 1
  int32_t shift;        // log2(period), or -1 if period is not a power of two
  uint64_t magic;       // floor(2^63 / period) + 1
  const int64_t* base;  // [period]
  const int64_t* step;  // [period]
};

// offset / period as a multiplication, exact for offsets below 2^51 and periods below 2^12
// (Granlund and Montgomery, "Division by invariant integers using multiplication", PLDI 1994): the
// error, at most offset / 2^63, stays below 1 / period.
OPER_HD uint64_t round_of(const TierMap& tier, uint64_t offset) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(offset << 1, tier.magic);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(offset << 1) * tier.magic) >> 64);
#endif
}

OPER_HD int64_t locate_in_tier(const TierMap& tier, int64_t position) {
  const uint64_t offset = static_cast<uint64_t>(position - tier.start);
  const uint64_t round = round_of(tier, offset);
  const uint64_t k = offset - round * static_cast<uint64_t>(tier.period);
  return tier.base[k] + static_cast<int64_t>(round) * tier.step[k];
}

// Explicit head of a table whose ids are not in hotness order. A word describes 32 ids, so that a
// lookup reads one word and, for a head row, one position.
struct HeadMap {
  // [ceil(num_rows / 32)], or null: position = id. Low half: bit i is set if id 32 * w + i is a head
  // row; high half: head rows with lower ids than the word's.
  const uint64_t* words;
  const uint32_t* positions;  // [num_head], of the head rows in ascending order of id
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

// Does not branch on the word, because a predictor cannot learn which ids are hot.
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

// Ids of the explicit head, to map a position back to its id; null pointers: position = id.
struct HeadIds {
  const uint32_t* by_position;  // [num_head], in hotness order
  const uint32_t* ascending;    // [num_head]
  int64_t num_head;
};

// The column piece, one of n, whose owner adds up the sums of squares of the row at a position. Only
// used if ranks are in several memory domains. It is chosen by a hash, since position % n could follow
// the pattern in which rows are striped over ranks: some ranks would then add up all of their rows,
// others none. It mixes twice: with one multiplication, an owner of every 8th row would add up all of
// the hottest few hundred, or none. `summing_piece` in oper/rows/directory.py must return the same.
OPER_HD int32_t summing_piece(int64_t position, int32_t n) {
  constexpr uint64_t kMix = 0x9E3779B97F4A7C15u;
  uint64_t mixed = static_cast<uint64_t>(position) * kMix;
  mixed = (mixed ^ mixed >> 32) * kMix;
  return static_cast<int32_t>((mixed >> 32) % static_cast<uint64_t>(n));
}

// The rows of one replicated tier whose master copies one rank owns.
struct Refresh {
  int32_t table;
  int32_t owner;
  int64_t slot_begin, slot_end;  // their slots at the owner
  int64_t first, stride;         // slot s is row first + (s - slot_begin) * stride of the replicas
  const char* masters;           // address of the owner's slot 0
  char* replicas;                // this rank's copy of the whole tier, or null if it has none
};

namespace host {
struct FlatTiers;  // the tiers as arrays of constants, for vector code; see host/context.h
}

struct TableMap {
  int64_t num_rows;
  int32_t num_tiers;
  const TierMap* tiers;  // [num_tiers], ascending start
  HeadMap head;
  const host::FlatTiers* flat;  // host back end only; null if there are too many tiers
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
