// Counters of what a rank reads in every batch, by the rank whose arena it reads.
//
// Ranks exchange by reading, so that a transfer is counted once, by its reader. Counts are units
// (rows, ids, numbers); oper/rows/traffic.py says what a unit is and how many bytes it has.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace oper::host {

// The order is that of KINDS in oper/rows/traffic.py.
enum Moved {
  kRows,           // forward: rows read one by one, of this rank's copy where there is one
  kIds,            // forward: ids that a reader requests this owner to pool
  kIdWeights,      // forward: their weights
  kPooledRows,     // forward: rows that this owner pools for readers
  kPartialSums,    // forward: partial sums that owners have left for this reader
  kWeightRows,     // backward: rows read for the gradient of per-sample weights
  kGradientIds,    // backward: ids of pushed rows
  kGradientWeights,
  kBagGradients,   // backward: gradients of bags, one per id of a pushed row
  kGradientRows,   // backward: reduced gradients in the ranks' outboxes
  kSquares,        // backward: sums of squares of the pieces of a row
  kUpdatedRows,    // backward: rows of this owner that the optimizer has changed
  kRefreshedRows,  // backward: master rows copied into this rank's replicas
  kNumMoved
};

// A view of one table's counters: int64 [kNumMoved][T][W], by the rank that is read.
class TableCounters {
 public:
  TableCounters() = default;
  TableCounters(int64_t* first, int64_t stride) : first_(first), stride_(stride) {}
  // Not atomic: callers let only one task at a time work on a table.
  void add(Moved kind, int32_t peer, int64_t count) const { first_[kind * stride_ + peer] += count; }

 private:
  int64_t* first_ = nullptr;
  int64_t stride_ = 0;
};

// Finds the rank in whose arena an address lies. Every arena is one range that ends in the outbox.
struct Arenas {
  std::vector<int64_t> outbox;  // [W] ascending
  std::vector<int32_t> rank;    // [W] whose it is
};

}  // namespace oper::host
