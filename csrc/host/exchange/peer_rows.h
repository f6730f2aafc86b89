// De-duplicated pull within a memory domain: rows of neighbours are copied once per batch and
// pooled from the copies. The results are bitwise the same. Between domains this is always done,
// see exchange.h.
//
// Whether it pays off is decided table by table from measured duplication. Numbering ids and
// copying rows take time, which is saved only if reads of neighbours' memory are slower: ranks on
// one memory read each other's rows as fast as their own, and caches keep repeated rows.
#pragma once

#include <deque>
#include <mutex>
#include <vector>

#include "host/context.h"
#include "host/memory.h"

namespace oper::host {

// Nanoseconds.
struct PullCosts {
  double extra_per_byte;   // of a neighbour's row beyond that of an own one
  double per_id;           // numbering
  double per_copied_byte;  // read once, written, and found in the cache
};

class PeerRows {
 public:
  enum Choice { kNever, kAlways, kMeasured };
  PeerRows(const Context& context, Choice choice, PullCosts costs)
      : tables(context.tables.size()), choice_(choice), costs_(costs) {
    for (OfTable& of : tables) of.is_chosen = choice == kAlways;
  }
  // Copies the rows of the tables where that was chosen, and gives the batch their addresses. Counts
  // duplication now and then. Only under `turn`, which is held until the batch has been looked up: of
  // lookups at once, the others read rows where they are.
  Status stage(Context& context, Batch& batch, bool collective);
  std::mutex turn;

  struct OfTable {
    int64_t num_ids = 0, num_rows = 0;  // of neighbours, as last counted; distinct ones
    bool is_chosen = false;             // they are copied
    Buffer places, sources, copies;
  };
  std::deque<OfTable> tables;

 private:
  static constexpr int64_t kCountEvery = 256;  // forward passes
  bool pays(const Table& table, const DistinctRows& rows) const;

  Choice choice_;
  PullCosts costs_;
  int64_t num_passes_ = 0;
};

}  // namespace oper::host
