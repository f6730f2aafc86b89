// Orchestration of one batch: tasks over features and tables, phases, barriers, replicas.
#include "host/context.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <new>

#include "host/exchange/exchange.h"
#include "host/exchange/peer_rows.h"
#include "host/faults.h"
#include "host/kernels/kernels.h"
#include "host/memory.h"
#include "host/tasks.h"

namespace oper::host {

void Scratch::Block::grow(size_t need) {
  std::free(data);
  size = need + need / 4;
  const size_t unit = size >= kHugePage ? kHugePage : 64;
  const size_t bytes = (size + unit - 1) / unit * unit;
  data = static_cast<char*>(std::aligned_alloc(unit, bytes));
  if (data == nullptr) {
    size = 0;
    throw std::bad_alloc();
  }
  // Sorted and gathered in random order: small pages would need more entries than the processor has.
  if (unit == kHugePage) want_huge(data, bytes);
}

Scratch::~Scratch() {
  for (Block& block : blocks_) std::free(block.data);
}

std::unique_ptr<FlatTiers> flatten(const TableMap& map) {
  if (map.num_tiers > FlatTiers::kTiers) return nullptr;
  auto flat = std::make_unique<FlatTiers>();
  for (int k = 0; k < FlatTiers::kTiers; ++k) {
    const bool there = k < map.num_tiers;
    flat->start[k] = there ? map.tiers[k].start : INT64_MAX;
    flat->period[k] = there ? map.tiers[k].period : 1;
    flat->inverse[k] = 1.0 / static_cast<double>(flat->period[k]);
    flat->first[k] = static_cast<int64_t>(flat->base.size());
    if (!there) continue;
    flat->base.insert(flat->base.end(), map.tiers[k].base, map.tiers[k].base + flat->period[k]);
    flat->step.insert(flat->step.end(), map.tiers[k].step, map.tiers[k].step + flat->period[k]);
  }
  flat->num_entries = static_cast<int64_t>(flat->base.size());
  const size_t size = std::max<size_t>(flat->base.size(), FlatTiers::kInRegisters);
  flat->base.resize(size);
  flat->step.resize(size);
  return flat;
}

Scratch* Context::take_scratch() {
  std::lock_guard<std::mutex> lock(scratch_mutex_);
  if (scratch_free_.empty()) {
    scratch_all_.push_back(
        std::make_unique<Scratch>(static_cast<int64_t>(tables.size()), world_size));
    return scratch_all_.back().get();
  }
  Scratch* scratch = scratch_free_.back();
  scratch_free_.pop_back();
  return scratch;
}

void Context::give_scratch(Scratch* scratch) {
  std::lock_guard<std::mutex> lock(scratch_mutex_);
  scratch_free_.push_back(scratch);
}

void Context::start_counting() {
  const int64_t W = world_size, T = static_cast<int64_t>(tables.size());
  moved_.assign(static_cast<size_t>(kNumMoved * T * W), 0);
  for (int32_t r = 0; r < W; ++r) arenas.rank.push_back(r);
  std::sort(arenas.rank.begin(), arenas.rank.end(),
            [&](int32_t a, int32_t b) { return outbox[a] < outbox[b]; });
  for (int32_t r : arenas.rank) arenas.outbox.push_back(reinterpret_cast<int64_t>(outbox[r]));
  for (int64_t t = 0; t < T; ++t) {
    tables[t].index = static_cast<int32_t>(t);
    tables[t].counters = TableCounters(moved_.data() + t * W, T * W);
    tables[t].arenas = &arenas;
  }
}

int64_t Context::traced_bytes() const {
  return exchange && times.is_traced() ? exchange->messages.total_sent() : 0;
}

std::vector<int64_t> Context::moved() {
  std::lock_guard<std::mutex> lock(scratch_mutex_);
  std::vector<int64_t> result = moved_;
  const size_t each = tables.size() * static_cast<size_t>(world_size);
  for (const auto& scratch : scratch_all_)
    for (Moved kind : {kRows, kWeightRows})
      for (size_t i = 0; i < each; ++i)
        result[static_cast<size_t>(kind) * each + i] += scratch->rows_read(kind, 0)[i];
  return result;
}

void Context::mark_changes(bool on) {
  changed_storage.assign(on ? tables.size() : 0, {});
  for (size_t t = 0; t < tables.size(); ++t) {
    tables[t].changed = nullptr;
    if (!on) continue;
    changed_storage[t].assign(static_cast<size_t>(slots_of(static_cast<int64_t>(t)) / 64 + 1), 0);
    tables[t].changed = changed_storage[t].data();
  }
}

int64_t Context::num_changes(int64_t table) const {
  int64_t count = 0;
  if (!changed_storage.empty())
    for (uint64_t word : changed_storage[table]) count += std::popcount(word);
  return count;
}

void Context::take_changes(int64_t table, uint32_t* slots) {
  if (changed_storage.empty()) return;
  std::vector<uint64_t>& words = changed_storage[table];
  for (size_t k = 0; k < words.size(); ++k) {
    for (uint64_t word = words[k]; word; word &= word - 1)
      *slots++ = static_cast<uint32_t>(64 * k + std::countr_zero(word));
    words[k] = 0;
  }
}

void Context::reset_moved() {
  std::lock_guard<std::mutex> lock(scratch_mutex_);
  std::fill(moved_.begin(), moved_.end(), 0);
  for (auto& passes : num_passes) passes.store(0);
  const size_t each = tables.size() * static_cast<size_t>(world_size);
  for (const auto& scratch : scratch_all_)
    for (Moved kind : {kRows, kWeightRows})
      std::fill_n(scratch->rows_read(kind, 0), each, 0);
}

namespace {
int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
}  // namespace

void Context::reset_outbox() {
  outbox_cursor_.store(round_up(header_bytes(), 4096));
  partial_cursor_.store(outbox_half());
}

bool Context::take_outbox(const Table& table, int64_t count, OutboxTable* entry) {
  entry->slots_offset = take_bytes(count * 4);
  entry->rows_offset = take_bytes(count * table.gradient_bytes());
  return entry->slots_offset >= 0 && entry->rows_offset >= 0;
}

void Context::collapse_outbox(int32_t owner_rank) {
  OutboxHeader* header = outbox_header(owner_rank);
  if (owner_rank == rank) {
    const int64_t used = std::min(outbox_cursor_.load(), outbox_half());
    if (used > header->used_bytes) header->used_bytes = used;
  }
  outbox_collapsed_.resize(static_cast<size_t>(world_size));
  int64_t& done = outbox_collapsed_[owner_rank];
  if (header->used_bytes <= done) return;
  // A quarter more than needed, so that slowly growing batches do not come here every step.
  const int64_t want = std::min(
      round_up(header->used_bytes + header->used_bytes / 4, static_cast<int64_t>(kHugePage)),
      outbox_bytes / static_cast<int64_t>(kHugePage) * static_cast<int64_t>(kHugePage));
  if (want > done) collapse_huge(outbox[owner_rank] + done, static_cast<size_t>(want - done));
  done = std::max(want, header->used_bytes);
}

const Kernels& kernels() {
#if defined(__x86_64__)
  static const Kernels& chosen = [&]() -> const Kernels& {
    const char* wanted = std::getenv("OPER_CPU_KERNELS");
    const bool has512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
    const bool has2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    if (wanted != nullptr && std::strcmp(wanted, "generic") == 0) return kKernelsGeneric;
    if (wanted != nullptr && std::strcmp(wanted, "avx2") == 0 && has2) return kKernelsAvx2;
    return has512 ? kKernelsAvx512 : has2 ? kKernelsAvx2 : kKernelsGeneric;
  }();
  return chosen;
#else
  return kKernelsGeneric;
#endif
}

namespace {

int64_t num_ids(const Table& table, const Batch& batch) {
  int64_t n = 0;
  for (int32_t f : table.features) {
    const FeatureBags& bags = batch.features[f];
    n += bags.bounds[bags.num_bags] - bags.bounds[0];
  }
  return n;
}

// Tables by work, so that no thread starts the longest task last.
std::vector<int32_t> largest_first(const Context& context, const Batch& batch) {
  std::vector<int32_t> order(context.tables.size());
  std::vector<int64_t> sizes(context.tables.size());
  for (size_t t = 0; t < order.size(); ++t) {
    order[t] = static_cast<int32_t>(t);
    sizes[t] = num_ids(context.tables[t], batch) * context.tables[t].dim;
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return sizes[a] > sizes[b]; });
  return order;
}

// Room that the order of one table's `n` ids takes at most: pairs or keys and bags, and with weights
// bags and positions.
int64_t order_bytes(int64_t n, bool weighted) {
  return round_up(8 * n, 64) + (weighted ? round_up(4 * n, 64) + round_up(8 * n, 64) : 64);
}

// Fewer ids than this take less time than waking a thread.
bool is_small(const Batch& batch) {
  constexpr int64_t kSmallIds = 2048;
  int64_t n = 0;
  for (const FeatureBags& bags : batch.features) n += bags.bounds[bags.num_bags] - bags.bounds[0];
  return n < kSmallIds;
}

// Runs task(feature, range of its bags, scratch) over the whole batch in blocks of about a
// thousand bags.
template <class Task>
void run_bag_tasks(Context& context, const Batch& batch, bool small, ParallelFor parallel,
                   const Task& task) {
  std::vector<int64_t> first;  // first task of each feature
  int64_t count = 0;
  for (const FeatureBags& bags : batch.features) {
    first.push_back(count);
    count += (bags.num_bags + kTaskBags - 1) / kTaskBags;
  }
  run_tasks(context, count, small || is_small(batch), parallel, [&](int64_t index, Scratch& scratch) {
    const size_t f = static_cast<size_t>(
        std::upper_bound(first.begin(), first.end(), index) - first.begin() - 1);
    const FeatureBags& bags = batch.features[f];
    const int64_t begin = (index - first[f]) * kTaskBags;
    task(f, BagRange{batch, bags, begin, std::min(bags.num_bags, begin + kTaskBags), f}, scratch);
  });
}

// Copy the rows that their owners have just updated into this rank's replicas.
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

Status wait_for_domain(Context& context, uint32_t phase, bool refuses = false) {
  const int64_t begin_ns = PhaseTimes::now_ns();
  int32_t culprit = -1;
  const Barrier::Result result = context.barrier->arrive(phase, &culprit, refuses);
  context.times.note(kBarrier, begin_ns, PhaseTimes::now_ns());
  return {static_cast<int64_t>(result), culprit < 0 ? culprit : context.domain[culprit]};
}

// Waits until all ranks have come this far and, across memory domains, exchanges what they have left
// for each other. `mine` is an error of this rank alone: within a memory domain all ranks then leave out
// this batch and may go on with the next; between domains nobody waits for this rank any more.
Status meet(Context& context, Meeting what, const Batch& batch, ParallelFor parallel,
            Status mine = {}) {
  if (context.barrier) {
    if (mine.code != 0 && context.exchange) {
      context.barrier->give_up();
    } else {
      const Status found = wait_for_domain(context, static_cast<uint32_t>(what), mine.code != 0);
      if (mine.code == 0) mine = found;
    }
  }
  return context.exchange ? context.exchange->meet(what, batch, parallel, mine) : mine;
}

// Features of tables for which `direct(table)`: those that are read directly.
template <class Direct>
Status pool_direct(Context& context, const Batch& batch, float* out, Direct direct,
                   ParallelFor parallel) {
  std::atomic<int64_t> bad{-1};
  const auto task = [&](size_t f, const BagRange& range, Scratch& scratch) {
    reach(FaultPoint::kForward);
    const Table& table = context.tables[context.features[f].table];
    if (direct(table)) note_bad(bad, kernels().pool(table, range, out, scratch));
  };
  run_bag_tasks(context, batch, false, parallel, task);
  if (bad.load() >= 0) return {4, bad.load()};
  return {};
}

// Tables with pushed tiers, one task each: those that any rank asks for, or this one.
std::vector<int32_t> push_tables(const Context& context, bool of_this_rank) {
  std::vector<int32_t> result;
  for (size_t t = 0; t < context.tables.size(); ++t)
    if (of_this_rank ? context.tables[t].has_push : context.tables[t].is_pushed)
      result.push_back(static_cast<int32_t>(t));
  return result;
}

// Ids that the ranks have asked this owner for, whose weights and rows go with them.
void count_requests(Context& context, const std::vector<int32_t>& tables, bool is_forward) {
  for (int32_t t : tables) {
    const TableCounters& counters = context.tables[t].counters;
    for (int32_t r = 0; r < context.world_size; ++r) {
      RequestTable* entry = context.request_table(r, t);
      const int64_t* begin = Context::request_begin(entry);
      const int64_t n = begin[context.rank + 1] - begin[context.rank];
      counters.add(is_forward ? kIds : kGradientIds, r, n);
      if (entry->weights_offset) counters.add(is_forward ? kIdWeights : kGradientWeights, r, n);
      counters.add(is_forward ? kPooledRows : kBagGradients, is_forward ? context.rank : r, n);
    }
  }
}

// Reduced rows that this owner finds in the outboxes. Unless it `keeps` their sums, a table whose owners
// exchange squares is merged twice.
void count_gradients(Context& context, bool keeps) {
  for (size_t t = 0; t < context.tables.size(); ++t) {
    const Table& table = context.tables[t];
    for (int32_t r = 0; r < context.world_size; ++r) {
      const int64_t* begin =
          Context::outbox_begin(context.outbox_table(r, static_cast<int64_t>(t)));
      const int64_t n = begin[context.rank + 1] - begin[context.rank];
      table.counters.add(kGradientRows, r, n * (1 + (keeps ? 0 : table.rounds_of_squares())));
    }
  }
}

// What others hold, rows and sums, is asked for in one meeting and comes in another: a link that
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
  std::atomic<int64_t> bad{status.code ? status.detail : -1};
  if (pulls) note_bad(bad, exchange->list_far_rows(batch, kRows, true, parallel));
  std::atomic<bool> full{false};
  run_tasks(context, num_own, false, parallel, [&](int64_t k, Scratch& scratch) {
    const int64_t result = kernels().request(context, own[k], batch, scratch);
    if (result == kReduceFull) full.store(true);
    note_bad(bad, result);
  });
  if (bad.load() >= 0) return meet(context, Meeting::kRequests, batch, parallel, {4, bad.load()});
  if (full.load()) return meet(context, Meeting::kRequests, batch, parallel, {3, -1});
  status = meet(context, Meeting::kRequests, batch, parallel);
  if (status.code != 0) return status;
  count_requests(context, tables, true);
  run_tasks(context, n * context.world_size, false, parallel, [&](int64_t k, Scratch&) {
    const int32_t reader = static_cast<int32_t>((context.rank + k / n) % context.world_size);
    if (!kernels().pool_for(context, tables[k % n], reader)) full.store(true);
  });
  if (full.load()) return meet(context, Meeting::kPartials, batch, parallel, {3, -1});
  status = meet(context, Meeting::kPartials, batch, parallel);
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
    // A rank that cannot look up learns of it where it meets the others.
    if (status.code != 0 && !pushes) return status;
  }
  const Status status =
      pushes ? forward_with_push(context, found, out, parallel)
             : pool_direct(context, found, out, [](const Table&) { return true; }, parallel);
  context.count_pass(0);
  return status;
}

int64_t order_bytes(const Context& context, const Batch& batch) {
  int64_t bytes = round_up(static_cast<int64_t>(context.tables.size() * sizeof(TableOrder)), 64);
  for (const Table& table : context.tables)
    bytes += order_bytes(num_ids(table, batch), batch.weights != nullptr);
  return bytes;
}

Status resolve(Context& context, const Batch& batch, int64_t* addresses, const Resolved& resolved,
               ParallelFor parallel) {
  std::atomic<int64_t> bad{-1};
  run_bag_tasks(context, batch, false, parallel, [&](size_t f, const BagRange& range, Scratch&) {
    reach(FaultPoint::kResolve);
    const Table& table = context.tables[context.features[f].table];
    const int64_t at = range.bags.bounds[range.begin] - range.bags.bounds[0];
    note_bad(bad, kernels().locate(table, range, addresses + resolved.first[f] + at));
  });
  if (bad.load() >= 0) return {4, bad.load()};
  if (resolved.order == nullptr) return {};
  const std::vector<int32_t> by_size = largest_first(context, batch);
  TableOrder* orders = reinterpret_cast<TableOrder*>(resolved.order);
  std::vector<int64_t> memory;
  int64_t at = round_up(static_cast<int64_t>(context.tables.size() * sizeof(TableOrder)), 64);
  for (const Table& table : context.tables) {
    memory.push_back(at);
    at += order_bytes(num_ids(table, batch), batch.weights != nullptr);
  }
  run_tasks(context, static_cast<int64_t>(by_size.size()), is_small(batch), parallel,
            [&](int64_t task, Scratch& scratch) {
              const int32_t t = by_size[task];
              kernels().arrange(context.tables[t], batch, resolved.order, memory[t], scratch,
                                orders[t]);
            });
  return {};
}

Status weight_gradient(Context& context, const Batch& batch, const float* grad, float* out,
                       ParallelFor parallel) {
  Batch found = batch;
  if (context.exchange && context.exchange->gathers(false)) {
    const Status status = context.exchange->gather(found, kWeightRows, false, parallel);
    if (status.code != 0) return status;
  }
  // The pieces of a split table, and several features of one key, add to the same numbers: in order,
  // on one thread.
  std::vector<const int64_t*> bounds;
  for (const FeatureBags& bags : batch.features) bounds.push_back(bags.bounds);
  std::sort(bounds.begin(), bounds.end());
  const bool in_order = std::adjacent_find(bounds.begin(), bounds.end()) != bounds.end();
  const auto task = [&](size_t f, const BagRange& range, Scratch& scratch) {
    const Table& table = context.tables[context.features[f].table];
    kernels().weight_gradient(table, range, grad, out, scratch);
  };
  run_bag_tasks(context, found, in_order, parallel, task);
  return {};
}

namespace {
// Reduces a batch's gradients and exchanges them: afterwards owners find those of their rows in the
// outboxes and in Table::pushed.
Status collect(Context& context, const Batch& batch, const float* grad, bool keeps,
               PhaseClock& clock, ParallelFor parallel) {
  context.reset_outbox();
  const int64_t T = static_cast<int64_t>(context.tables.size());
  const std::vector<int32_t> order = largest_first(context, batch);
  std::atomic<int64_t> bad{-1};
  std::atomic<bool> full{false};
  const bool small = is_small(batch);
  run_tasks(context, T, small, parallel, [&](int64_t task, Scratch& scratch) {
    const int32_t t = order[task];
    reach(FaultPoint::kOutbox);
    int64_t result = kReduceOk;
    if (context.tables[t].has_push) {
      result = kernels().request(context, t, batch, scratch);
      if (result == kReduceOk && !kernels().stage(context, t, batch, grad)) result = kReduceFull;
    }
    if (result == kReduceOk) result = kernels().reduce(context, t, batch, grad, scratch);
    if (result == kReduceFull) full.store(true);
    note_bad(bad, result);
  });
  if (bad.load() >= 0) return meet(context, Meeting::kGradients, batch, parallel, {4, bad.load()});
  if (full.load()) return meet(context, Meeting::kGradients, batch, parallel, {3, -1});
  context.collapse_outbox(context.rank);
  clock.end(kReduce);
  Status status = meet(context, Meeting::kGradients, batch, parallel);
  if (status.code != 0) return status;
  for (int32_t r = 0; r < context.world_size; ++r)
    if (r != context.rank) context.collapse_outbox(r);
  clock.end(kWaitForGradients);
  count_gradients(context, keeps);
  if (context.has_push) {
    const std::vector<int32_t> pushed = push_tables(context, false);
    count_requests(context, pushed, false);
    const int64_t n = static_cast<int64_t>(pushed.size());
    run_tasks(context, n * context.world_size, false, parallel, [&](int64_t k, Scratch& scratch) {
      kernels().reduce_pushed(context, pushed[k % n], static_cast<int32_t>(k / n), scratch);
    });
  }
  return {};
}
}  // namespace

Status leave(Context& context, const Batch& batch, const float* grad, ParallelFor parallel) {
  PhaseClock clock(context);
  const Status status = collect(context, batch, grad, true, clock, parallel);
  if (status.code != 0) return status;
  for (Table& table : context.tables)
    for (std::vector<PushedRows>& parts : table.left)
      if (parts.size() == context.num_left) parts.emplace_back();
  run_tasks(context, static_cast<int64_t>(context.tables.size()), is_small(batch), parallel,
            [&](int64_t t, Scratch&) { kernels().keep(context, static_cast<int32_t>(t)); });
  ++context.num_left;
  clock.end(kUpdate);
  // Neighbours may fill their outboxes anew.
  return context.barrier ? wait_for_domain(context, kSharing) : Status{};
}

Status backward(Context& context, const Batch& batch, const float* grad, float gradient_scale,
                ParallelFor parallel) {
  PhaseClock clock(context);
  Status status = collect(context, batch, grad, false, clock, parallel);
  if (status.code != 0) return status;
  const int64_t T = static_cast<int64_t>(context.tables.size());
  const std::vector<int32_t> order = largest_first(context, batch);
  const bool small = is_small(batch) && context.num_left == 0;
  int32_t rounds = 0;
  for (const Table& table : context.tables) rounds = std::max(rounds, table.rounds_of_squares());
  for (int32_t round = 0; round < rounds; ++round) {
    run_tasks(context, T, small, parallel, [&](int64_t task, Scratch&) {
      if (round < context.tables[order[task]].rounds_of_squares())
        kernels().squares(context, order[task], gradient_scale, round);
    });
    status = meet(context, Meeting::kSquares, batch, parallel);
    if (status.code != 0) return status;
  }
  if (context.barrier) context.barrier->note_update(true);
  run_tasks(context, T, small, parallel, [&](int64_t task, Scratch&) {
    reach(FaultPoint::kUpdate);
    kernels().update(context, order[task], gradient_scale);
  });
  if (context.barrier) context.barrier->note_update(false);
  context.num_left = 0;
  clock.end(kUpdate);
  status = meet(context, Meeting::kRefreshes, batch, parallel);
  if (status.code != 0) return status;
  clock.end(kWaitForUpdates);
  refresh_replicas(context);
  // Neighbours read them too.
  if (context.exchange && context.exchange->shares_replicas() && context.barrier)
    status = wait_for_domain(context, kSharing);
  context.count_pass(1);
  clock.end(kRefresh);
  return status;
}

}  // namespace oper::host
