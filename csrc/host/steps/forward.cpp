// The forward pass of a batch, and `resolve`, which does the part that depends on ids only.
#include <mutex>

#include "host/exchange/exchange.h"
#include "host/exchange/peer_rows.h"
#include "host/faults.h"
#include "host/memory.h"
#include "host/steps/step.h"

namespace oper::host {
namespace {

// Pools the features of the tables for which direct(table) is true from rows that this rank reads
// itself.
template <class Direct>
void pool_direct(Context& context, const Batch& batch, float* out, Found& found, Direct direct) {
  run_bag_tasks(context, batch, false, [&](size_t f, const BagRange& range, Scratch& scratch) {
    reach(FaultPoint::kForward);
    const Table& table = context.tables[context.features[f].table];
    if (direct(table)) found.note(kernels().pool(table, range, out, scratch));
  });
}

// A forward pass in which owners pool rows. With other memory domains, one phase requests both rows
// and partial sums, and the next one delivers both, so that ranks wait once instead of twice.
void forward_with_push(Context& context, Batch& batch, float* out) {
  Exchange* const exchange = context.exchange.get();
  const bool pulls = exchange && exchange->setup.pulls;
  const auto is_awaited = [&](const Table& table) {
    return pulls && exchange->has_remote_rows(table, true);
  };
  const std::vector<int32_t> tables = push_tables(context, false);
  const std::vector<int32_t> own = push_tables(context, true);
  const int64_t n = static_cast<int64_t>(tables.size());
  const int64_t num_own = static_cast<int64_t>(own.size());
  context.reset_send_buffer();
  Found asked;
  pool_direct(context, batch, out, asked,
              [&](const Table& table) { return !table.has_push && !is_awaited(table); });
  if (pulls) asked.note(exchange->list_remote_rows(batch, kRows, true));
  run_tasks(context, num_own, false, [&](int64_t k, Scratch& scratch) {
    asked.note(kernels().request(context, own[k], batch, scratch));
  });
  synchronize(context, CollectivePhase::kRequests, batch, asked.status());
  count_requests(context, tables, true);
  Found pooled;
  run_tasks(context, n * context.world_size, false, [&](int64_t k, Scratch&) {
    const int32_t reader = static_cast<int32_t>((context.rank + k / n) % context.world_size);
    if (!kernels().pool_for(context, tables[k % n], reader)) pooled.full.store(true);
  });
  synchronize(context, CollectivePhase::kPartials, batch, pooled.status());
  if (pulls) {
    exchange->address_rows(batch);
    Found found;
    pool_direct(context, batch, out, found,
                [&](const Table& table) { return !table.has_push && is_awaited(table); });
    raise(found.status());
  }
  run_tasks(context, num_own, false, [&](int64_t k, Scratch& scratch) {
    kernels().pool_pushed(context, own[k], batch, out, scratch);
  });
  for (int32_t t : own)
    for (int32_t r = 0; r < context.world_size; ++r)
      context.tables[t].counters.add(kPartialSums, r,
                                     context.partial_table(r, t, context.rank)->count);
}

// Byte offsets of the arrays of each table's TableOrder, which follow the TableOrders, and their
// end. A table has pairs of up to 8 bytes, or keys and bags of 4 bytes each, per id; with weights
// also bags and positions.
std::vector<int64_t> order_places(const Context& context, const Batch& batch) {
  std::vector<int64_t> places{
      round_up(static_cast<int64_t>(context.tables.size() * sizeof(TableOrder)), 64)};
  for (const Table& table : context.tables) {
    const int64_t n = batch.num_ids(table);
    const int64_t beside = batch.weights ? round_up(4 * n, 64) + round_up(8 * n, 64) : 64;
    places.push_back(places.back() + round_up(8 * n, 64) + beside);
  }
  return places;
}

}  // namespace

void forward(Context& context, const Batch& batch, float* out, bool collective) {
  Batch found = batch;
  const bool pushes = collective && context.has_push;
  if (!pushes && context.exchange && context.exchange->setup.gathers)
    context.exchange->gather(found, kRows, collective);
  std::unique_lock<std::mutex> copies;
  // Not if bounds are computed while pooling, which was decided before another thread chose to copy.
  if (!batch.lengths && context.peer_rows->is_on())
    copies = std::unique_lock(context.peer_rows->turn, std::try_to_lock);
  if (copies.owns_lock()) {
    const Status status = context.peer_rows->stage(context, found, collective);
    // With pushed tiers, the lookup finds the same error again and tells the peers of it.
    if (!pushes) raise(status);
  }
  context.count_pass(0);
  if (pushes) return forward_with_push(context, found, out);
  Found pooled;
  pool_direct(context, found, out, pooled, [](const Table&) { return true; });
  raise(pooled.status());
}

void refuse_forward(Context& context, bool collective) {
  const Status mine{4, -1};  // sent to peers; the caller raises this rank's error
  status_of([&] {
    if (collective && context.has_push) {
      synchronize(context, CollectivePhase::kRequests, Batch{}, mine);
    } else if (context.exchange && context.exchange->setup.gathers) {
      context.exchange->synchronize(CollectivePhase::kGather, Batch{}, mine);
    } else if (collective && context.barrier && !context.exchange) {
      // The others do not wait for this rank in this lookup, but they will in its backward pass.
      context.barrier->refuse(static_cast<uint32_t>(CollectivePhase::kGradients));
    }
  });
}

void skip(Context& context) {
  if (context.barrier && !context.exchange)
    context.barrier->refuse(static_cast<uint32_t>(CollectivePhase::kRequests));
}

int64_t order_bytes(const Context& context, const Batch& batch) {
  return order_places(context, batch).back();
}

void resolve(Context& context, const Batch& batch, int64_t* addresses, const Resolved& resolved) {
  Found found;
  run_bag_tasks(context, batch, false, [&](size_t f, const BagRange& range, Scratch&) {
    reach(FaultPoint::kResolve);
    const Table& table = context.tables[context.features[f].table];
    const int64_t at = range.bags.bounds[range.begin] - range.bags.bounds[0];
    found.note(kernels().locate(table, range, addresses + resolved.first[f] + at));
  });
  raise(found.status());
  if (resolved.order == nullptr) return;
  const std::vector<int32_t> by_size = largest_first(context, batch);
  TableOrder* orders = reinterpret_cast<TableOrder*>(resolved.order);
  const std::vector<int64_t> memory = order_places(context, batch);
  run_tasks(context, static_cast<int64_t>(by_size.size()), is_small(batch),
            [&](int64_t task, Scratch& scratch) {
              const int32_t t = by_size[task];
              kernels().arrange(context.tables[t], batch, resolved.order, memory[t], scratch,
                                orders[t]);
            });
}

}  // namespace oper::host
