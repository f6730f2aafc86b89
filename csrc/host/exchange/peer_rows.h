// De-duplicated pull within a memory domain: each row of another rank (a peer) is copied once per
// batch, and pooled from the copy. The results are bitwise the same. Between domains rows are
// always de-duplicated, see exchange.h.
//
// Finding the distinct rows and copying them only pays off if many ids repeat rows and reading a
// peer's memory takes longer. Ranks on one NUMA node read each other's rows as fast as their own,
// and caches retain repeated rows. So it is decided for each table, by the measured share of
// repeated rows.
#pragma once

#include <atomic>
#include <deque>
#include <mutex>
#include <vector>

#include "host/context.h"
#include "host/memory.h"

namespace oper::host {

// Nanoseconds.
struct PullCosts {
  double extra_per_byte;   // cost of reading a peer's row, beyond reading an own row
  double per_id;           // cost of finding the distinct rows
  double per_copied_byte;  // cost of writing a copy and reading it from the cache
};

class PeerRows {
 public:
  enum Choice { kNever, kAlways, kMeasured };
  explicit PeerRows(const Context& context) : tables(context.tables.size()) {}
  // Waits for a lookup that copies rows.
  void choose(Choice choice, PullCosts costs);
  // Whether rows may be copied; if not, rows of other ranks are always read in place.
  bool is_on() const { return choice_.load(std::memory_order_relaxed) != kNever; }
  // Copies peers' rows of the tables for which that was chosen, and sets FeatureBags::rows to the
  // addresses. Every kCountEvery passes it also counts distinct rows and chooses again.
  // `collective`: see `forward`. The caller must hold `turn` until the batch has been looked up;
  // lookups that cannot get it, because another is running, read rows in place.
  Status stage(Context& context, Batch& batch, bool collective);
  std::mutex turn;  // guards all members

  struct OfTable {
    int64_t num_ids = 0, num_rows = 0;  // ids of peers' rows and distinct ones, as last counted
    bool is_chosen = false;             // whether they are copied
    Buffer places, sources, copies;
  };
  std::deque<OfTable> tables;

 private:
  static constexpr int64_t kCountEvery = 256;  // forward passes
  bool pays(const Table& table, const DistinctRows& rows) const;

  std::atomic<Choice> choice_{kNever};
  PullCosts costs_{};
  int64_t num_passes_ = 0;
};

}  // namespace oper::host
