#include "host/exchange/peer_rows.h"

#include "host/exchange/exchange.h"

#include <cstring>

#include "host/kernels/kernels.h"
#include "host/tasks.h"

namespace oper::host {

void PeerRows::choose(Choice choice, PullCosts costs) {
  const std::lock_guard<std::mutex> lock(turn);
  tables = std::deque<OfTable>(tables.size());
  for (OfTable& of : tables) of.is_chosen = choice == kAlways;
  choice_.store(choice);
  costs_ = costs;
  num_passes_ = 0;
}

bool PeerRows::pays(const Table& table, const DistinctRows& rows) const {
  const double bytes = static_cast<double>(table.row_bytes());
  const double ids = static_cast<double>(rows.num_ids), distinct = static_cast<double>(rows.num_rows);
  // Each distinct row is still read once from its owner.
  return (ids - distinct) * costs_.extra_per_byte * bytes >
         ids * costs_.per_id + distinct * costs_.per_copied_byte * bytes;
}

Status PeerRows::stage(Context& context, Batch& batch, bool collective) {
  const bool counts = choice_ == kMeasured && num_passes_++ % kCountEvery == 0;
  Found found;
  run_tasks(context, static_cast<int64_t>(context.tables.size()), false,
            [&](int64_t t, Scratch& scratch) {
    const Table& table = context.tables[t];
    OfTable& of = tables[t];
    if ((!counts && !of.is_chosen) || (collective && table.has_push)) return;
    // The exchange with other memory domains has already set the addresses of this table's rows.
    if (context.exchange && context.exchange->has_remote_rows(table, false)) return;
    const int64_t total = batch.num_ids(table);
    DistinctRows rows{reinterpret_cast<int64_t*>(of.places.get(total * 8)),
                      reinterpret_cast<int64_t*>(of.sources.get(total * 8)), 0, 0};
    const int64_t bad = kernels().distinct_rows(table, batch, context.rank, rows, scratch);
    if (bad >= 0) return found.note(bad);
    of.num_ids = rows.num_ids;
    of.num_rows = rows.num_rows;
    if (counts) of.is_chosen = pays(table, rows);
    if (!of.is_chosen) return;
    const int64_t bytes = table.row_bytes();
    char* copies = of.copies.get(rows.num_rows * bytes);
    constexpr int64_t kAhead = 16;
    for (int64_t i = 0; i < rows.num_rows; ++i) {
      if (i + kAhead < rows.num_rows)
        for (int64_t b = 0; b < bytes; b += 64)
          __builtin_prefetch(reinterpret_cast<const char*>(rows.sources[i + kAhead]) + b);
      std::memcpy(copies + i * bytes, reinterpret_cast<const char*>(rows.sources[i]),
                  static_cast<size_t>(bytes));
    }
    for (int64_t i = 0; i < total; ++i)
      if (rows.places[i] < 0)
        rows.places[i] = reinterpret_cast<int64_t>(copies) + (-1 - rows.places[i]) * bytes;
    kernels().count(table, rows, total, context.rank, scratch);
    const int64_t* place = rows.places;
    for (int32_t f : table.features) {
      FeatureBags& bags = batch.features[f];
      bags.rows = place;
      place += bags.num_ids();
    }
  });
  return found.status();
}

}  // namespace oper::host
