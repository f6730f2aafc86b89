// The backward pass of a batch: gradients to their owners, the update, replicas.
#include <cstring>
#include <utility>

#include "host/exchange/exchange.h"
#include "host/faults.h"
#include "host/steps/step.h"

namespace oper::host {
namespace {

// Copies the rows that their owners have just updated into this rank's replicas.
void refresh_replicas(const Context& context) {
  for (const Refresh& part : context.refreshes) {
    if (part.replicas == nullptr) continue;
    reach(FaultPoint::kReplicas);
    const Table& table = context.tables[part.table];
    const size_t bytes = static_cast<size_t>(table.row_bytes());
    const uint32_t* touched = table.touched[part.owner];
    const char* packed = table.packed_masters.empty() ? nullptr : table.packed_masters[part.owner];
    const uint32_t* end = touched + 1 + touched[0];
    const uint32_t* slot =
        std::lower_bound(touched + 1, end, static_cast<uint32_t>(part.slot_begin));
    const uint32_t* first = slot;
    for (; slot != end && *slot < part.slot_end; ++slot) {
      const int64_t row = part.first + (*slot - part.slot_begin) * part.stride;
      const char* master = packed ? packed + (slot - touched - 1) * static_cast<int64_t>(bytes)
                                  : part.masters + *slot * static_cast<int64_t>(bytes);
      std::memcpy(part.replicas + row * static_cast<int64_t>(bytes), master, bytes);
    }
    table.counters.add(kRefreshedRows, part.owner, slot - first);
  }
}

// Counts the reduced gradients that this owner reads from the send buffers: once, and once more for
// every exchange of sums of squares. `keeps`: it only keeps their sums (see `leave`), without such
// exchanges.
void count_gradients(Context& context, bool keeps) {
  for (size_t t = 0; t < context.tables.size(); ++t) {
    const Table& table = context.tables[t];
    for (int32_t r = 0; r < context.world_size; ++r) {
      const int64_t* begin = context.send_buffer_table(r, static_cast<int64_t>(t))->begin();
      const int64_t n = begin[context.rank + 1] - begin[context.rank];
      table.counters.add(kGradientRows, r, n * (1 + (keeps ? 0 : table.rounds_of_squares())));
    }
  }
}

// Reduces a batch's gradients and exchanges them. Owners then find the gradients of their rows in
// the ranks' send buffers and, for pushed tiers, in Table::pushed.
void collect(Context& context, const Batch& batch, bool keeps, PhaseClock& clock) {
  context.reset_send_buffer();
  if (batch.shared) add_up(context, *batch.shared);
  const int64_t T = static_cast<int64_t>(context.tables.size());
  const std::vector<int32_t> order = largest_first(context, batch);
  Found found;
  const bool small = is_small(batch);
  run_tasks(context, T, small, [&](int64_t task, Scratch& scratch) {
    const int32_t t = order[task];
    reach(FaultPoint::kSendBuffer);
    int64_t result = kReduceOk;
    if (context.tables[t].has_push) {
      result = kernels().request(context, t, batch, scratch);
      if (result == kReduceOk && !kernels().stage(context, t, batch)) result = kReduceFull;
    }
    if (result == kReduceOk) result = kernels().reduce(context, t, batch, scratch);
    found.note(result);
  });
  const Status mine = found.status();
  if (mine.code == 0) {
    context.collapse_send_buffer(context.rank);
    clock.end(kReduce);
  }
  synchronize(context, CollectivePhase::kGradients, batch, mine);
  for (int32_t r = 0; r < context.world_size; ++r)
    if (r != context.rank) context.collapse_send_buffer(r);
  clock.end(kWaitForGradients);
  count_gradients(context, keeps);
  if (context.has_push) {
    const std::vector<int32_t> pushed = push_tables(context, false);
    count_requests(context, pushed, false);
    const int64_t n = static_cast<int64_t>(pushed.size());
    run_tasks(context, n * context.world_size, false, [&](int64_t k, Scratch& scratch) {
      kernels().reduce_pushed(context, pushed[k % n], static_cast<int32_t>(k / n), scratch);
    });
  }
}

}  // namespace

void weight_gradient(Context& context, const Batch& batch, const float* grad, float* out) {
  Batch found = batch;
  if (context.exchange && context.exchange->setup.gathers)
    context.exchange->gather(found, kWeightRows, false);
  // Several features with the ids of one key (also those of a split table's pieces) add to the same
  // numbers, so that one thread must process them in order.
  std::vector<const int64_t*> bounds;
  for (const FeatureBags& bags : batch.features) bounds.push_back(bags.bounds);
  std::sort(bounds.begin(), bounds.end());
  const bool in_order = std::adjacent_find(bounds.begin(), bounds.end()) != bounds.end();
  const auto task = [&](size_t f, const BagRange& range, Scratch& scratch) {
    const Table& table = context.tables[context.features[f].table];
    kernels().weight_gradient(table, range, grad, out, scratch);
  };
  run_bag_tasks(context, found, in_order, task);
}

void refuse_backward(Context& context) {
  // The status of the error is for the peers only; the caller raises the error itself.
  status_of([&] { synchronize(context, CollectivePhase::kGradients, Batch{}, {4, -1}); });
}

void leave(Context& context, const Batch& batch) {
  PhaseClock clock(context);
  collect(context, batch, true, clock);
  for (Table& table : context.tables)
    for (std::vector<PushedRows>& parts : table.left)
      if (parts.size() == context.num_left) parts.emplace_back();
  run_tasks(context, static_cast<int64_t>(context.tables.size()), is_small(batch),
            [&](int64_t t, Scratch&) { kernels().keep(context, static_cast<int32_t>(t)); });
  ++context.num_left;
  clock.end(kUpdate);
  // After this, other ranks may overwrite their send buffers.
  if (context.barrier) raise(wait_for_domain(context, kSharing));
}

void backward(Context& context, const Batch& batch, float gradient_scale) {
  PhaseClock clock(context);
  // It is only for this pass, even if that ends with an error.
  const Context::BesideUpdate beside = std::exchange(context.beside_update, {});
  collect(context, batch, false, clock);
  const int64_t T = static_cast<int64_t>(context.tables.size());
  const std::vector<int32_t> order = largest_first(context, batch);
  const bool small = is_small(batch) && context.num_left == 0;
  int32_t rounds = 0;
  for (const Table& table : context.tables) rounds = std::max(rounds, table.rounds_of_squares());
  for (int32_t round = 0; round < rounds; ++round) {
    run_tasks(context, T, small, [&](int64_t task, Scratch&) {
      if (round < context.tables[order[task]].rounds_of_squares())
        kernels().squares(context, order[task], gradient_scale, round);
    });
    synchronize(context, CollectivePhase::kSquares, batch);
    // Totals that one rank has added up are read by the other ranks of its domain.
    if (context.exchange && context.barrier)
      raise(wait_for_domain(context, static_cast<uint32_t>(CollectivePhase::kSquares)));
  }
  if (context.barrier) context.barrier->note_update(true);
  if (beside.first) {
    beside.first();
    if (context.barrier) context.barrier->come(kKeys);
  }
  run_tasks(context, T, small, [&](int64_t task, Scratch&) {
    reach(FaultPoint::kUpdate);
    kernels().update(context, order[task], gradient_scale);
  });
  if (beside.last) {
    if (context.barrier) raise(wait_for_domain(context));
    beside.last();
  }
  if (context.barrier) context.barrier->note_update(false);
  context.num_left = 0;
  clock.end(kUpdate);
  synchronize(context, CollectivePhase::kRefreshes, batch);
  clock.end(kWaitForUpdates);
  refresh_replicas(context);
  // Other ranks of this domain read these replicas, too, so that they wait until all are refreshed.
  Status status;
  if (context.exchange && context.exchange->setup.shares_replicas && context.barrier)
    status = wait_for_domain(context, kSharing);
  context.count_pass(1);
  clock.end(kRefresh);
  raise(status);
}

}  // namespace oper::host
