// Counters of a rank's reads in every batch, by the rank whose memory it reads.
//
// Ranks get data from each other by reading it, so each transfer is counted once, by the reader.
// Rows, ids and numbers are counted; oper/rows/traffic.py defines the unit of each kind, and its
// bytes.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace oper::host {

// The order is that of KINDS in oper/rows/traffic.py.
enum Moved {
  kRows,         // forward: rows read one by one, from this rank's replica where there is one
  kIds,          // forward: ids whose rows a reader requests this owner to pool
  kIdWeights,    // forward: their weights
  kPooledRows,   // forward: rows that this owner pools for readers
  kPartialSums,  // forward: partial sums that owners have pooled for this reader
  kWeightRows,   // backward: rows read for the gradient of per-sample weights
  kGradientIds,  // backward: ids of pushed rows
  kGradientWeights,
  kBagGradients,   // backward: gradients of bags, one per id of a pushed row
  kGradientRows,   // backward: reduced gradients in the ranks' send buffers
  kSquares,        // backward: sums of squares of the pieces of a row
  kUpdatedRows,    // backward: rows of this owner that the optimizer has changed
  kRefreshedRows,  // backward: master rows copied into this rank's replicas
  kNumMoved
};

// One table's counters, a view of int64 [kNumMoved][T][W].
class TableCounters {
 public:
  TableCounters() = default;
  TableCounters(int64_t* first, int64_t stride) : first_(first), stride_(stride) {}
  // Not atomic: only one task at a time may count for a table.
  void add(Moved kind, int32_t peer, int64_t count) const { first_[kind * stride_ + peer] += count; }

 private:
  int64_t* first_ = nullptr;
  int64_t stride_ = 0;
};

// Finds the rank whose arena contains an address: an arena is one range of addresses, whose last
// part is the send buffer.
struct Arenas {
  std::vector<int64_t> send_buffer;  // [W] addresses of the send buffers, ascending
  std::vector<int32_t> rank;         // [W] whose send buffer it is
};

}  // namespace oper::host
