// The directory: from an id to the place of its row. Shared by host and device.
//
// id -> position in hotness order (identity, or a bitmap with popcount ranks for the explicit head)
//    -> tier (a few boundaries) -> arithmetic inside the tier.
//
// Arithmetic inside a tier: offset = position - start; one turn of the deal covers `period`
// offsets, and offset k of turn q lies at base[k] + q * step[k]. With byte addresses in base and
// step this gives the row to read; with home keys it gives the key that orders the backward pass.
#pragma once

#include "oper/platform.h"

namespace oper {

struct TierMap {
  int64_t start;        // first position of the tier
  int64_t period;       // offsets in one turn, >= 1
  int32_t shift;        // log2(period), or -1 when period is no power of two
  uint64_t magic;       // floor(2^64 / period) + 1, used when shift < 0
  const int64_t* base;  // [period]
  const int64_t* step;  // [period]
};

// Exact for offsets below 2^52 and periods below 2^12 (Granlund and Montgomery 1994, 64-bit form:
// the error offset / 2^64 stays below 1 / period).
OPER_HD uint64_t turn_of(const TierMap& tier, uint64_t offset) {
  if (tier.shift >= 0) return offset >> tier.shift;
#if defined(__CUDA_ARCH__)
  return __umul64hi(offset, tier.magic);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(offset) * tier.magic) >> 64);
#endif
}

OPER_HD int64_t locate_in_tier(const TierMap& tier, int64_t position) {
  const uint64_t offset = static_cast<uint64_t>(position - tier.start);
  const uint64_t turn = turn_of(tier, offset);
  const uint64_t k = offset - turn * static_cast<uint64_t>(tier.period);
  return tier.base[k] + static_cast<int64_t>(turn) * tier.step[k];
}

// Explicit head of a table whose ids are not in hotness order: 1 bit per row and a 32-bit rank per
// 64 rows (1.5 bits per row), then one position per head row in ascending order of id.
struct HeadMap {
  const uint64_t* bits;       // [ceil(num_rows / 64)], or null: position = id
  const uint32_t* ranks;      // [ceil(num_rows / 64)] head rows before the word
  const uint32_t* positions;  // [num_head]
  int64_t num_head;
};

OPER_HD int popcount64(uint64_t x) {
#if defined(__CUDA_ARCH__)
  return __popcll(x);
#else
  return __builtin_popcountll(x);
#endif
}

OPER_HD int64_t position_of(const HeadMap& head, int64_t id) {
  if (head.bits == nullptr) return id;
  const uint64_t word = head.bits[id >> 6];
  const uint64_t below = word & ((uint64_t{1} << (id & 63)) - 1);
  const int64_t rank = static_cast<int64_t>(head.ranks[id >> 6]) + popcount64(below);
  return (word >> (id & 63)) & 1 ? head.positions[rank] : head.num_head + id - rank;
}

struct TableMap {
  int64_t num_rows;
  int32_t num_tiers;
  const TierMap* tiers;  // [num_tiers], ascending start
  HeadMap head;
};

OPER_HD int32_t tier_of(const TableMap& table, int64_t position) {
  int32_t k = table.num_tiers - 1;
  while (k > 0 && position < table.tiers[k].start) --k;
  return k;
}

// Place of a valid id (0 <= id < num_rows).
OPER_HD int64_t locate(const TableMap& table, int64_t id) {
  const int64_t position = position_of(table.head, id);
  return locate_in_tier(table.tiers[tier_of(table, position)], position);
}

}  // namespace oper
