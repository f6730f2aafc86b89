// How Python describes a rank's tables: the columns of the int64 arrays of oper/shmem/placement/layout.py
// (KernelMaps). Read by the bindings of both back ends.
#pragma once

#include <cstdint>

#include "common/directory.h"
#include "common/optimizer.h"
#include "common/philox.h"

namespace oper {

enum TableColumn {
  kNumRows, kDim, kMean, kTierBegin, kTierEnd, kRowAddress, kMomentum1, kMomentum2, kHead, kLogical,
  kRowColumns, kRowType, kFirstColumn, kHeadIds, kTableWidth
};
enum OptimizerColumn {
  kKind, kDecay, kLearningRate, kEps, kWeightDecay, kBeta1, kBeta2, kCorrection1, kCorrection2,
  kMaxNorm, kKey0, kKey1, kStep, kOptimizerWidth
};
enum TierColumn { kStart, kReadAt, kReadPeriod, kHomeAt, kHomePeriod, kPush, kTierWidth };
enum FeatureColumn { kFeatureTable, kColumn, kFeatureLogical, kPieceStart, kFeatureWidth };
enum RefreshColumn {
  kTable, kOwner, kSlotBegin, kSlotEnd, kFirst, kStride, kMasters, kReplicas, kRefreshWidth
};

// `maps`: int64 [2, num_maps], bases and steps; `at`: where this tier's begin.
inline TierMap tier_map(const int64_t* maps, int64_t num_maps, int64_t start, int64_t at,
                        int64_t period) {
  TierMap tier;
  tier.start = start;
  tier.period = period;
  tier.shift =
      (period & (period - 1)) == 0 ? __builtin_ctzll(static_cast<uint64_t>(period)) : -1;
  tier.magic = (uint64_t{1} << 63) / static_cast<uint64_t>(period) + 1;
  tier.base = maps + at;
  tier.step = maps + num_maps + at;
  return tier;
}

// One row of the optimizers' float64 [T, kOptimizerWidth].
inline OptimizerArgs optimizer_args(const double* x) {
  return {static_cast<Optimizer>(static_cast<int32_t>(x[kKind])),
          static_cast<Decay>(static_cast<int32_t>(x[kDecay])),
          static_cast<float>(x[kLearningRate]),
          static_cast<float>(x[kEps]),
          static_cast<float>(x[kWeightDecay]),
          static_cast<float>(x[kBeta1]),
          static_cast<float>(x[kBeta2]),
          static_cast<float>(x[kCorrection1]),
          static_cast<float>(x[kCorrection2]),
          static_cast<float>(x[kMaxNorm])};
}

inline RoundingKey rounding_key(const double* x) {
  const uint64_t step = static_cast<uint64_t>(x[kStep]);
  return {static_cast<uint32_t>(x[kKey0]), static_cast<uint32_t>(x[kKey1]),
          static_cast<uint32_t>(step), static_cast<uint32_t>(step >> 32)};
}

}  // namespace oper
