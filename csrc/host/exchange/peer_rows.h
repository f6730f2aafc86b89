// De-duplicated pull within a memory domain: rows of neighbours are copied once per batch and
// pooled from the copies. The results are bitwise the same. Between domains this is always done,
// see exchange.h.
//
// Measured duplication decides for each table whether to copy. Numbering ids and copying rows only
// pays off if reads of neighbours' memory are slower: ranks on one NUMA node read each other's rows
// as fast as their own, and caches retain repeated rows.
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
  // Copies the rows of the tables for which copying was chosen, and gives the batch their
  // addresses. Every kCountEvery passes it also counts duplication. The caller must hold `turn`
  // until the batch has been looked up; concurrent lookups that do not get it read rows in place.
  Status stage(Context& context, Batch& batch, bool collective);
  std::mutex turn;

  struct OfTable {
    int64_t num_ids = 0, num_rows = 0;  // neighbours' rows, as last counted: ids, distinct rows
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
