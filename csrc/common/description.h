// How Python describes a rank's tables to both back ends: the columns of the int64 arrays that
// `context_arguments` in oper/shmem/placement/layout.py writes.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "common/directory.h"
#include "common/optimizer.h"
#include "common/philox.h"

namespace oper {

// One row per column piece of a table ("table" below means a piece, too).
enum TableColumn {
  kNumRows,
  kDim,        // columns of the piece
  kMean,       // 1: mean pooling, 0: sum
  kTierBegin,  // its tiers are [kTierBegin, kTierEnd)
  kTierEnd,
  kRowAddress,  // of this rank's rows
  kMomentum1,   // addresses of this rank's optimizer states; 0 = none
  kMomentum2,
  kHead,        // index of its head map among `heads`; -1 = ids are in hotness order
  kLogical,     // number of the entire table; its pieces have the same one
  kRowColumns,  // columns of the entire table
  kRowType,
  kFirstColumn,  // of the piece in the entire table
  kHeadIds,      // index of its HeadIds among `heads`; -1 = none
  kTableWidth
};
enum OptimizerColumn {
  kKind, kDecay, kLearningRate, kEps, kWeightDecay, kBeta1, kBeta2, kCorrection1, kCorrection2,
  kMaxNorm, kKey0, kKey1, kStep, kOptimizerWidth
};
// Read and home maps (see directory.h) are ranges of `maps`: `...At` is the first entry,
// `...Period` the number of entries.
enum TierColumn {
  kStart, kReadAt, kReadPeriod, kHomeAt, kHomePeriod, kPush, kTierRowType, kTierWidth
};
// See Feature in host/context.h.
enum FeatureColumn { kFeatureTable, kColumn, kFeatureLogical, kPieceStart, kFeatureWidth };
// The members of Refresh in directory.h.
enum RefreshColumn {
  kTable, kOwner, kSlotBegin, kSlotEnd, kFirst, kStride, kMasters, kReplicas, kRefreshWidth
};

// Pointers to these arrays: `maps` [2, num_maps], bases and steps; `owner_begin` [T, W + 1];
// addresses of `touched` and `squares` [T, W] and of send buffers [W]. For tables in device memory,
// addresses in the arrays are device addresses.
struct Description {
  const int64_t *tables, *owner_begin, *tiers, *maps, *features, *refreshes, *touched, *squares,
      *send_buffers;
  int64_t num_tables, num_maps, num_features, num_refreshes;
  // Where kernels read the arrays of HeadMaps and HeadIds, two each.
  std::vector<const void*> heads;
  std::vector<int64_t> head_sizes;
  int64_t send_buffer_bytes;
  int32_t rank, world_size;

  const int64_t* table(int64_t t) const { return tables + t * kTableWidth; }
  // [W + 1]: the linear indices of the rows that rank r owns are [owners[r], owners[r + 1]).
  const int64_t* owners(int64_t t) const { return owner_begin + t * (world_size + 1); }
  int64_t num_slots(int64_t t, int64_t rank) const {
    return owners(t)[rank + 1] - owners(t)[rank];
  }
  // Tiers of a table with their read maps or, if `which` is kHomeAt instead of kReadAt, home maps.
  // `at`: where kernels read the copy of `maps`.
  std::vector<TierMap> tier_maps(int64_t t, TierColumn which, const int64_t* at) const {
    std::vector<TierMap> found;
    for (int64_t k = table(t)[kTierBegin]; k < table(t)[kTierEnd]; ++k) {
      const int64_t* x = tiers + k * kTierWidth;
      const int64_t* bases = at + x[which];
      const uint64_t period = static_cast<uint64_t>(x[which + 1]);
      found.push_back({x[kStart], x[which + 1],
                       std::has_single_bit(period) ? std::countr_zero(period) : -1,
                       (uint64_t{1} << 63) / period + 1, bases, bases + num_maps});
    }
    return found;
  }
  // Per tier of a table, whether it is pushed.
  std::vector<uint8_t> pushes(int64_t t) const {
    std::vector<uint8_t> found;
    for (int64_t k = table(t)[kTierBegin]; k < table(t)[kTierEnd]; ++k)
      found.push_back(tiers[k * kTierWidth + kPush] != 0);
    return found;
  }
  bool is_piece(int64_t t) const { return table(t)[kDim] != table(t)[kRowColumns]; }
  // The column pieces of the table that piece t belongs to, in column order; empty if the table is
  // not split.
  std::vector<int32_t> pieces(int64_t t) const {
    std::vector<int32_t> found;
    for (int64_t p = 0; p < num_tables && is_piece(t); ++p)
      if (table(p)[kLogical] == table(t)[kLogical]) found.push_back(static_cast<int32_t>(p));
    return found;
  }
  HeadMap head_map(int64_t t) const {
    const int64_t k = table(t)[kHead];
    if (k < 0) return {nullptr, nullptr, 0};
    return {static_cast<const uint64_t*>(heads[k]), head(k + 1),
            head_sizes[k + 1]};
  }
  HeadIds head_ids(int64_t t) const {
    const int64_t k = table(t)[kHeadIds];
    if (k < 0) return {nullptr, nullptr, 0};
    return {head(k), head(k + 1), head_sizes[k]};
  }
  Refresh refresh(int64_t k) const {
    const int64_t* x = refreshes + k * kRefreshWidth;
    return {static_cast<int32_t>(x[kTable]), static_cast<int32_t>(x[kOwner]),
            x[kSlotBegin], x[kSlotEnd], x[kFirst], x[kStride],
            reinterpret_cast<const char*>(x[kMasters]), reinterpret_cast<char*>(x[kReplicas])};
  }

 private:
  const uint32_t* head(int64_t k) const {
    return static_cast<const uint32_t*>(heads[k]);
  }
};

// `x`: one row of the optimizers' float64 [T, kOptimizerWidth].
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

// A hash of the optimizers' constants except those for rounding. Ranks compare it before an update,
// to detect different learning rates, frozen tables or (with Adam) step counts.
inline uint32_t settings_of(const double* rows, size_t num_rows) {
  uint64_t hash = 0;
  for (size_t t = 0; t < num_rows; ++t)
    for (int k = 0; k <= kMaxNorm; ++k) {
      // float32, as kernels use the value; adding 0 turns -0 into 0.
      const float value = static_cast<float>(rows[t * kOptimizerWidth + k]) + 0.0f;
      hash = (hash ^ std::bit_cast<uint32_t>(value)) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 32;
    }
  return static_cast<uint32_t>(hash);
}

inline RoundingKey rounding_key(const double* x) {
  const uint64_t step = static_cast<uint64_t>(x[kStep]);
  return {static_cast<uint32_t>(x[kKey0]), static_cast<uint32_t>(x[kKey1]),
          static_cast<uint32_t>(step), static_cast<uint32_t>(step >> 32)};
}

}  // namespace oper
