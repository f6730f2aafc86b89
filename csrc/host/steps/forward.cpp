// The forward pass of a batch, and its id-only part, which may run ahead of it.
#include <mutex>

#include "host/exchange/exchange.h"
#include "host/exchange/peer_rows.h"
#include "host/faults.h"
#include "host/memory.h"
#include "host/steps/step.h"

namespace oper::host {
namespace {

// Features of tables for which `direct(table)`: those that are read directly.
template <class Direct>
Status pool_direct(Context& context, const Batch& batch, float* out, Direct direct,
                   ParallelFor parallel) {
  Found found;
  const auto task = [&](size_t f, const BagRange& range, Scratch& scratch) {
    reach(FaultPoint::kForward);
    const Table& table = context.tables[context.features[f].table];
    if (direct(table)) found.note(kernels().pool(table, range, out, scratch));
  };
  run_bag_tasks(context, batch, false, parallel, task);
  return found.status();
}

// What others hold, rows and sums, is asked for in one phase and comes in another: a link that
// carries much of the one carries little of the other, and nobody waits for it twice.
Status forward_with_push(Context& context, Batch& batch, float* out, ParallelFor parallel) {
  Exchange* const exchange = context.exchange.get();
  const bool pulls = exchange && exchange->gathers(true);
  const auto is_awaited = [&](const Table& table) {
    return pulls && exchange->has_far_rows(table, true);
  };
  const std::vector<int32_t> tables = push_tables(context, false);
  const std::vector<int32_t> own = push_tables(context, true);
  const int64_t n = static_cast<int64_t>(tables.size());
  const int64_t num_own = static_cast<int64_t>(own.size());
  context.reset_outbox();
  Status status = pool_direct(
      context, batch, out,
      [&](const Table& table) { return !table.has_push && !is_awaited(table); }, parallel);
  Found asked;
  if (status.code) asked.note(status.detail);
  if (pulls) asked.note(exchange->list_far_rows(batch, kRows, true, parallel));
  run_tasks(context, num_own, false, parallel, [&](int64_t k, Scratch& scratch) {
    asked.note(kernels().request(context, own[k], batch, scratch));
  });
  status = synchronize(context, CollectivePhase::kRequests, batch, parallel, asked.status());
  if (status.code != 0) return status;
  count_requests(context, tables, true);
  Found pooled;
  run_tasks(context, n * context.world_size, false, parallel, [&](int64_t k, Scratch&) {
    const int32_t reader = static_cast<int32_t>((context.rank + k / n) % context.world_size);
    if (!kernels().pool_for(context, tables[k % n], reader)) pooled.full.store(true);
  });
  status = synchronize(context, CollectivePhase::kPartials, batch, parallel, pooled.status());
  if (status.code != 0) return status;
  if (pulls) {
    exchange->address_rows(batch, parallel);
    status = pool_direct(
        context, batch, out,
        [&](const Table& table) { return !table.has_push && is_awaited(table); }, parallel);
    if (status.code != 0) return status;
  }
  run_tasks(context, num_own, false, parallel, [&](int64_t k, Scratch& scratch) {
    kernels().pool_pushed(context, own[k], batch, out, scratch);
  });
  for (int32_t t : own)
    for (int32_t r = 0; r < context.world_size; ++r)
      context.tables[t].counters.add(kPartialSums, r,
                                     context.partial_table(r, t, context.rank)->count);
  return {};
}

// Where the order of each table's ids lies behind the TableOrders, in bytes; and the end. At most it takes
// pairs or keys and bags, and with weights bags and positions.
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

Status forward(Context& context, const Batch& batch, float* out, bool collective,
               ParallelFor parallel) {
  Batch found = batch;
  const bool pushes = collective && context.has_push;
  if (!pushes && context.exchange && context.exchange->gathers(false)) {
    const Status status = context.exchange->gather(found, kRows, collective, parallel);
    if (status.code != 0) return status;
  }
  std::unique_lock<std::mutex> copies;
  if (context.peer_rows) copies = std::unique_lock(context.peer_rows->turn, std::try_to_lock);
  if (copies.owns_lock()) {
    const Status status = context.peer_rows->stage(context, found, collective, parallel);
    // A rank that cannot look up learns of it where it synchronizes with the others.
    if (status.code != 0 && !pushes) return status;
  }
  const Status status =
      pushes ? forward_with_push(context, found, out, parallel)
             : pool_direct(context, found, out, [](const Table&) { return true; }, parallel);
  context.count_pass(0);
  return status;
}

int64_t order_bytes(const Context& context, const Batch& batch) {
  return order_places(context, batch).back();
}

Status resolve(Context& context, const Batch& batch, int64_t* addresses, const Resolved& resolved,
               ParallelFor parallel) {
  Found found;
  run_bag_tasks(context, batch, false, parallel, [&](size_t f, const BagRange& range, Scratch&) {
    reach(FaultPoint::kResolve);
    const Table& table = context.tables[context.features[f].table];
    const int64_t at = range.bags.bounds[range.begin] - range.bags.bounds[0];
    found.note(kernels().locate(table, range, addresses + resolved.first[f] + at));
  });
  if (found.bad.load() >= 0 || resolved.order == nullptr) return found.status();
  const std::vector<int32_t> by_size = largest_first(context, batch);
  TableOrder* orders = reinterpret_cast<TableOrder*>(resolved.order);
  const std::vector<int64_t> memory = order_places(context, batch);
  run_tasks(context, static_cast<int64_t>(by_size.size()), is_small(batch), parallel,
            [&](int64_t task, Scratch& scratch) {
              const int32_t t = by_size[task];
              kernels().arrange(context.tables[t], batch, resolved.order, memory[t], scratch,
                                orders[t]);
            });
  return {};
}

}  // namespace oper::host
