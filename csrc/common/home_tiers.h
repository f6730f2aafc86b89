// Maps a slot back to its position: the rows of each tier that a rank owns.
#pragma once

#include <cstdint>
#include <vector>

#include "common/directory.h"

namespace oper {

// Rows of one tier that a rank owns: slot -> position.
struct HomeTier {
  int64_t slot_begin, slot_end;
  int64_t start, period;
  std::vector<int64_t> offsets;  // offsets within a turn that the rank owns
};

// Tier k of a home map; `owner_begin`: [W + 1] first key of each rank.
inline HomeTier home_tier(const TableMap& home, const int64_t* owner_begin, int32_t k,
                          int32_t rank) {
  const int64_t first = owner_begin[rank], last = owner_begin[rank + 1];
  const TierMap& tier = home.tiers[k];
  const int64_t stop = k + 1 < home.num_tiers ? home.tiers[k + 1].start : home.num_rows;
  HomeTier found{0, 0, tier.start, tier.period, {}};
  const int64_t turns = (stop - tier.start) / tier.period, rest = (stop - tier.start) % tier.period;
  int64_t rows = 0;
  for (int64_t o = 0; o < tier.period; ++o) {
    // A key past the rank's range only comes from an offset that a short tier does not have.
    if (tier.base[o] < first || tier.base[o] >= last) continue;
    if (turns == 0 && o >= rest) continue;
    if (found.offsets.empty()) found.slot_begin = tier.base[o] - first;
    found.offsets.push_back(o);
    rows += turns + (o < rest ? 1 : 0);
  }
  found.slot_end = found.slot_begin + rows;
  return found;
}

}  // namespace oper
