// From a slot of a rank back to the row's position in hotness order.
#pragma once

#include <cstdint>
#include <vector>

#include "common/directory.h"

namespace oper {

// The rows of one tier that a rank owns, in slots [slot_begin, slot_end). With n offsets, slot
// slot_begin + i has position start + i / n * period + offsets[i % n].
struct HomeTier {
  int64_t slot_begin, slot_end;
  int64_t start, period;         // see TierMap
  std::vector<int64_t> offsets;  // those of a round's rows that the rank owns
};

// Tier k of a home map; `owner_begin` [W + 1]: first linear index of each rank.
inline HomeTier home_tier(const TableMap& home, const int64_t* owner_begin, int32_t k,
                          int32_t rank) {
  const int64_t first = owner_begin[rank], last = owner_begin[rank + 1];
  const TierMap& tier = home.tiers[k];
  const int64_t stop = k + 1 < home.num_tiers ? home.tiers[k + 1].start : home.num_rows;
  HomeTier found{0, 0, tier.start, tier.period, {}};
  const int64_t rounds = (stop - tier.start) / tier.period,
                rest = (stop - tier.start) % tier.period;
  int64_t rows = 0;
  for (int64_t o = 0; o < tier.period; ++o) {
    // If the tier has fewer rows than a round, the keys at its missing offsets may be any.
    if (tier.base[o] < first || tier.base[o] >= last) continue;
    if (rounds == 0 && o >= rest) continue;
    if (found.offsets.empty()) found.slot_begin = tier.base[o] - first;
    found.offsets.push_back(o);
    rows += rounds + (o < rest ? 1 : 0);
  }
  found.slot_end = found.slot_begin + rows;
  return found;
}

}  // namespace oper
