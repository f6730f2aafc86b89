// How Python describes dynamic tables, as both back ends read it.
#pragma once

#include <vector>

#include "common/handles.h"
#include "common/keys.h"

namespace oper {

// Columns of the int64 and float64 arrays that describe dynamic tables, one row each, as
// oper/shmem/keys/directories.py writes them.
enum KeyTableColumn {
  kSlots, kSeed, kDraws, kMinCount, kAdmitBelow, kEviction, kHalfLife, kTimeToLive, kFeature,
  kFirstWidth, kSecondWidth, kKeyTableWidth
};
enum KeyNumberColumn { kBound, kFirstState, kKeyNumberWidth };

inline std::vector<KeyTableRules> key_rules_of(const Tensor& tables, const Tensor& numbers) {
  const int64_t T = tables.numel() / kKeyTableWidth;
  STD_TORCH_CHECK(tables.numel() == T * kKeyTableWidth && numbers.numel() == T * kKeyNumberWidth &&
                      numbers.scalar_type() == ScalarType::Double && numbers.is_contiguous(),
                  "internal: not the rules of dynamic tables");
  std::vector<KeyTableRules> rules;
  for (int64_t t = 0; t < T; ++t) {
    const int64_t* x = int64_data(tables) + t * kKeyTableWidth;
    const double* y = static_cast<const double*>(numbers.data_ptr()) + t * kKeyNumberWidth;
    KeyTableRules of{x[kSlots], {}, {}};
    of.keys.seed = static_cast<uint64_t>(x[kSeed]);
    of.keys.draws = static_cast<uint64_t>(x[kDraws]);
    of.keys.min_count = static_cast<uint64_t>(x[kMinCount]);
    of.keys.admit_below = static_cast<uint64_t>(x[kAdmitBelow]);
    of.keys.eviction = static_cast<Eviction>(x[kEviction]);
    of.keys.half_life = static_cast<uint32_t>(x[kHalfLife]);
    of.keys.time_to_live = static_cast<uint32_t>(x[kTimeToLive]);
    of.rows.seed = static_cast<uint64_t>(x[kDraws]);
    of.rows.bound = static_cast<float>(y[kBound]);
    of.rows.first_state = static_cast<float>(y[kFirstState]);
    of.rows.widths[0] = static_cast<StateWidth>(x[kFirstWidth]);
    of.rows.widths[1] = static_cast<StateWidth>(x[kSecondWidth]);
    of.rows.feature = static_cast<int32_t>(x[kFeature]);
    STD_TORCH_CHECK(of.num_slots > 0, "internal: a dynamic table without rows");
    rules.push_back(of);
  }
  return rules;
}

}  // namespace oper
