// torch operators that create, query and close the host back end's contexts of sharded tables.
//
// Python describes the tables' placement (addresses, maps, head maps), which is copied or
// referenced here; see common/description.h.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <iterator>
#include <memory>
#include <thread>
#include <tuple>
#include <vector>

#include "bindings/lookup.h"
#include "common/home_tiers.h"
#include "common/operators.h"
#include "host/exchange/packing.h"
#include "host/exchange/peer_rows.h"

namespace oper::host {

namespace {

// Derives from the home map which rows of each tier this rank owns, and which linear indices are
// pushed.
void fill_home(Table& table, int32_t rank) {
  const int32_t W = static_cast<int32_t>(table.owner_begin.size()) - 1;
  for (int32_t k = 0; k < table.home.num_tiers; ++k) {
    for (int32_t r = 0; r < W; ++r) {
      HomeTier part = home_tier(table.home, table.owner_begin.data(), k, r);
      if (part.slot_end == part.slot_begin) continue;
      if (table.pushes[k])
        table.pushed_keys.emplace_back(
            static_cast<uint32_t>(table.owner_begin[r] + part.slot_begin),
            static_cast<uint32_t>(table.owner_begin[r] + part.slot_end));
      if (r == rank) table.home_tiers.push_back(std::move(part));
    }
  }
  const auto num_pushed = std::ranges::count(table.pushes, 1);
  table.is_pushed = num_pushed > 0;
  table.all_pushed = num_pushed == static_cast<int64_t>(table.pushes.size());
  const bool owns_all = table.owner_begin[rank + 1] - table.owner_begin[rank] == table.home.num_rows;
  table.has_push = table.is_pushed && !(table.all_pushed && owns_all);
}

// If a table's tiers have rows of several types: adds the types to the addresses in its read maps,
// see RowPlace. `x`: the table's row of `d.tables`; `maps`: a copy of `d.maps`.
void fill_types(Table& table, const Description& d, const int64_t* x, int64_t* maps) {
  std::vector<int64_t> bytes;
  for (int64_t k = x[kTierBegin]; k < x[kTierEnd]; ++k) {
    const RowType type = static_cast<RowType>(d.tiers[k * kTierWidth + kTierRowType]);
    if (std::ranges::find(table.types, type) == table.types.end()) table.types.push_back(type);
    bytes.push_back(bytes_of_row(type, table.dim));
    if (bytes.back() == std::ranges::max(bytes)) table.row_type = type;
  }
  if (table.types.size() == 1) return table.types.clear();
  for (int64_t k = x[kTierBegin]; k < x[kTierEnd]; ++k) {
    const int64_t* y = d.tiers + k * kTierWidth;
    for (int64_t i = 0; i < y[kReadPeriod]; ++i)
      maps[y[kReadAt] + i] |= RowPlace::mark_of(static_cast<RowType>(y[kTierRowType]),
                                                bytes[static_cast<size_t>(k - x[kTierBegin])]);
  }
}

void fill_tables(Context& context, const Description& d) {
  const int64_t T = d.num_tables, W = d.world_size;
  context.tables.resize(static_cast<size_t>(T));
  for (int64_t t = 0; t < T; ++t) {
    const int64_t* x = d.table(t);
    Table& table = context.tables[t];
    STD_TORCH_CHECK(x[kDim] >= 1 && x[kDim] <= 1024, "internal: a row of more than 1024 columns");
    table.dim = static_cast<int32_t>(x[kDim]);
    table.mean = static_cast<int32_t>(x[kMean]);
    table.row_type = static_cast<RowType>(x[kRowType]);
    fill_types(table, d, x, context.map_storage.data());
    table.row_columns = static_cast<int32_t>(x[kRowColumns]);
    table.first_column = static_cast<int32_t>(x[kFirstColumn]);
    table.rows = reinterpret_cast<char*>(x[kRowAddress]);
    table.momentum1 = reinterpret_cast<float*>(x[kMomentum1]);
    table.momentum2 = reinterpret_cast<float*>(x[kMomentum2]);
    table.owner_begin.assign(d.owners(t), d.owners(t) + W + 1);
    for (int64_t r = 0; r < W; ++r) {
      table.touched.push_back(reinterpret_cast<uint32_t*>(d.touched[t * W + r]));
      table.squares.push_back(reinterpret_cast<float*>(d.squares[t * W + r]));
    }
    table.pushes = d.pushes(t);
    table.pushed.resize(static_cast<size_t>(W));
    table.pieces = d.pieces(t);
    table.head_ids = d.head_ids(t);
    for (TableMap* map : {&table.read, &table.home}) {
      const std::vector<TierMap>& tiers = context.tier_storage.emplace_back(d.tier_maps(
          t, map == &table.read ? kReadAt : kHomeAt, context.map_storage.data()));
      *map = {x[kNumRows], static_cast<int32_t>(tiers.size()), tiers.data(), d.head_map(t), nullptr};
      map->flat = context.flat_storage.emplace_back(flatten(*map)).get();
    }
    fill_home(table, context.rank);
    context.has_push |= table.is_pushed;
  }
}

int64_t context_create(int64_t rank, int64_t world_size, std::vector<Tensor> arrays,
                       int64_t send_buffer_bytes, std::vector<Tensor> heads) {
  const Description d = description_of(rank, world_size, arrays, send_buffer_bytes, heads);
  auto owned = std::make_unique<Owned>();
  owned->keep_alive = heads;
  Context& context = owned->context;
  context.rank = d.rank;
  context.world_size = d.world_size;
  context.map_storage.assign(d.maps, d.maps + 2 * d.num_maps);
  fill_tables(context, d);
  for (int64_t k = 0; k < d.num_refreshes; ++k) {
    const Refresh part = d.refresh(k);
    Table& table = context.tables[part.table];
    table.has_replicas = true;
    if (part.owner == context.rank)
      table.replicated_slots.emplace_back(static_cast<uint32_t>(part.slot_begin),
                                          static_cast<uint32_t>(part.slot_end));
    context.refreshes.push_back(part);
  }
  for (int64_t f = 0; f < d.num_features; ++f) {
    const int64_t* x = d.features + f * kFeatureWidth;
    Table& table = context.tables[x[kFeatureTable]];
    context.features.push_back({static_cast<int32_t>(x[kFeatureTable]), x[kColumn],
                                static_cast<int32_t>(x[kFeatureLogical]), x[kPieceStart]});
    table.features.push_back(static_cast<int32_t>(f));
    context.output_columns = std::max<int64_t>(context.output_columns, x[kColumn] + table.dim);
    context.unpooled_columns = table.row_columns;
  }
  for (int64_t r = 0; r < world_size; ++r)
    context.send_buffer.push_back(reinterpret_cast<char*>(d.send_buffers[r]));
  context.send_buffer_bytes = send_buffer_bytes;
  context.peer_rows = std::make_shared<PeerRows>(context);
  context.start_counting();
  return contexts().add(std::move(owned));
}

// `domain`: the ranks of this memory domain, ascending; `pidfds`: of these ranks, see Barrier.
void context_set_barrier(int64_t handle, int64_t lines, std::vector<int64_t> domain,
                         std::vector<int64_t> pidfds, int64_t deadline_ms) {
  const auto context = context_of(handle);
  context->domain.assign(domain.begin(), domain.end());
  const auto mine = std::find(domain.begin(), domain.end(), context->rank) - domain.begin();
  context->barrier =
      std::make_unique<Barrier>(reinterpret_cast<BarrierLine*>(lines), static_cast<int32_t>(mine),
                                static_cast<int32_t>(domain.size()),
                                std::vector<int>(pidfds.begin(), pidfds.end()), deadline_ms);
}

// `targets`: int64 [K, 4], see ReplicaTarget. `bits`: see Messages::Setup. `transport`: address of
// a function, see Transport.
void context_set_exchange(int64_t handle, std::vector<int64_t> domain, Tensor targets, bool gathers,
                          bool pulls, bool refreshes, bool shares_replicas, std::vector<int64_t> bits,
                          int64_t collection, int64_t transport) {
  const auto context = context_of(handle);
  ExchangeSetup setup;
  setup.messages.local.assign(static_cast<size_t>(context->world_size), false);
  for (int64_t r : domain) setup.messages.local[r] = true;
  const int64_t* data = int64_data(targets);
  for (int64_t k = 0; k < targets.size(0); ++k)
    setup.targets.push_back({static_cast<int32_t>(data[4 * k]),
                             static_cast<int32_t>(data[4 * k + 1]), data[4 * k + 2],
                             data[4 * k + 3]});
  setup.gathers = gathers;
  setup.pulls = pulls;
  setup.refreshes = refreshes;
  setup.shares_replicas = shares_replicas;
  STD_TORCH_CHECK(bits.size() == 2 * context->tables.size(), "internal: bits are not by table");
  setup.messages.bits = std::move(bits);
  setup.messages.collection = static_cast<uint32_t>(collection);
  setup.transport = reinterpret_cast<Transport>(transport);
  context->exchange = std::make_shared<Exchange>(*context, std::move(setup));
}

// Bytes sent since the last reset, [kNumSent][W], see enum Sent; empty in a single domain.
std::vector<int64_t> context_sent_bytes(int64_t handle, bool reset) {
  const auto context = context_of(handle);
  if (!context->exchange) return {};
  Messages& messages = context->exchange->messages;
  return reset ? messages.take_sent() : messages.sent_bytes;
}

// Sets whether rows of peers are copied once per batch, see host/exchange/peer_rows.h. `choice`:
// PeerRows::Choice; `costs`: float64 [3], PullCosts.
void context_set_pull(int64_t handle, int64_t choice, Tensor costs) {
  const auto context = context_of(handle);
  const double* c = static_cast<const double*>(costs.data_ptr());
  context->peer_rows->choose(static_cast<PeerRows::Choice>(choice), {c[0], c[1], c[2]});
}

// [3][T], see PeerRows::OfTable: ids of peers' rows as last counted, distinct ones, whether they
// are copied. Empty if they never are.
std::vector<int64_t> context_duplication(int64_t handle) {
  const auto context = context_of(handle);
  if (!context->peer_rows->is_on()) return {};
  const std::lock_guard<std::mutex> lock(context->peer_rows->turn);
  const auto& tables = context->peer_rows->tables;
  std::vector<int64_t> result(3 * tables.size());
  for (size_t t = 0; t < tables.size(); ++t) {
    result[t] = tables[t].num_ids;
    result[tables.size() + t] = tables[t].num_rows;
    result[2 * tables.size() + t] = tables[t].is_chosen;
  }
  return result;
}

// Waits for the ranks of this memory domain. `phase`: see oper/shmem/group/desync.py. Returns a
// Status.
std::tuple<int64_t, int64_t> context_barrier(int64_t handle, int64_t phase) {
  const auto context = context_of(handle);
  if (!context->barrier) return {0, -1};
  const Status found = context->barrier->arrive(static_cast<uint32_t>(phase));
  return {found.code, found.detail < 0 ? -1 : context->domain[found.detail]};
}

// Nanoseconds of the last batch by phase, see enum Phase.
std::vector<int64_t> context_phases(int64_t handle) { return context_of(handle)->times.last_ns(); }

// Histograms of all batches since the last reset, see `PhaseTimes::histograms`.
std::vector<int64_t> context_phase_histograms(int64_t handle, bool reset) {
  return context_of(handle)->times.histograms(reset);
}

// See PhaseTimes::trace and take_spans.
void context_trace(int64_t handle, int64_t most) { context_of(handle)->times.trace(most); }

std::vector<int64_t> context_spans(int64_t handle) { return context_of(handle)->times.take_spans(); }

// Numbers of forward and of backward passes, then of what was read, [kNumMoved][T][W], see
// host/counters/traffic.h; since the last reset.
std::vector<int64_t> context_traffic(int64_t handle, bool reset) {
  const auto context = context_of(handle);
  std::vector<int64_t> result = context->moved();
  result.insert(result.begin(), std::begin(context->num_passes), std::end(context->num_passes));
  if (reset) context->reset_moved();
  return result;
}

// See Barrier::positions. Empty if this memory domain has a single rank.
std::vector<int64_t> context_positions(int64_t handle) {
  const auto context = context_of(handle);
  return context->barrier ? context->barrier->positions() : std::vector<int64_t>{};
}

// See Messages::last_phases. Empty in a single domain.
std::vector<int64_t> context_last_phases(int64_t handle) {
  const auto context = context_of(handle);
  return context->exchange ? context->exchange->messages.last_phases() : std::vector<int64_t>{};
}

// See Barrier::abort.
void context_abort(int64_t handle, int64_t verdict) {
  const auto context = context_of(handle);
  if (context->barrier) context->barrier->abort(verdict);
}

void context_mark_changes(int64_t handle, bool on) { context_of(handle)->mark_changes(on); }

// Slots of a table whose rows have changed since the last call, ascending, uint32 [n] stored as
// int32.
Tensor context_take_changes(int64_t handle, int64_t table) {
  const auto context = context_of(handle);
  STD_TORCH_CHECK(table >= 0 && table < static_cast<int64_t>(context->tables.size()),
                  "internal: no such table");
  Tensor out = pooled_tensor(ScalarType::Int, {context->num_changes(table)});
  context->take_changes(table, static_cast<uint32_t*>(out.mutable_data_ptr()));
  return out;
}

// Copies the rows of `from` [n, width] at `slots`, as `context_take_changes` returns them, to
// consecutive rows of `to` [number of slots, width].
void copy_rows(Tensor from, Tensor slots, Tensor to) {
  const int64_t count = slots.numel();
  STD_TORCH_CHECK(slots.scalar_type() == ScalarType::Int && from.dim() == 2 && to.dim() == 2 &&
                      from.scalar_type() == to.scalar_type() && to.size(0) == count &&
                      to.size(1) == from.size(1) && slots.is_contiguous() &&
                      from.is_contiguous() && to.is_contiguous(),
                  "internal: rows and a place for them do not match");
  const uint32_t* data = static_cast<const uint32_t*>(slots.data_ptr());
  uint32_t last = 0;
  for (int64_t i = 0; i < count; ++i) last = std::max(last, data[i]);
  STD_TORCH_CHECK(count == 0 || last < from.size(0), "internal: no slot ", last);
  const int64_t unit = from.size(1) * static_cast<int64_t>(from.element_size());
  pack(static_cast<char*>(to.mutable_data_ptr()), static_cast<const char*>(from.data_ptr()), data,
       {count, unit});
}

// How `rows`, float32 [n, width], are packed in a message with `bits` bits per number.
WireArray coded_array(const Tensor& rows, int64_t bits) {
  STD_TORCH_CHECK(rows.scalar_type() == ScalarType::Float && rows.dim() == 2 &&
                      rows.is_contiguous() && (bits == 32 || bits == 16 || bits == 8 || bits == 4),
                  "internal: rows that cannot be coded");
  return {rows.size(0), 4 * rows.size(1),
          bits_of_row(static_cast<int32_t>(bits), rows.size(1))};
}

void check_coded(const Tensor& codes, const WireArray& array) {
  STD_TORCH_CHECK(codes.scalar_type() == ScalarType::Byte && codes.is_contiguous() &&
                      codes.numel() == array.n * entry_bytes(array.bits, array.unit),
                  "internal: codes of the wrong size");
}

// Packs `rows`, float32 [n, width], into the bytes `to` as in a message with `bits` bits per
// number. `draws`: empty = rounds to nearest; otherwise the two words of the RoundingKey, the step,
// the sending replica group and the first column, for stochastic rounding. `names`: the rows'
// numbers, see Draws; uint32 [n] stored as int32.
void code_rows(Tensor rows, int64_t bits, std::vector<int64_t> draws, Tensor names, Tensor to) {
  WireArray array = coded_array(rows, bits);
  check_coded(to, array);
  Draws found{};
  if (!draws.empty()) {
    STD_TORCH_CHECK(draws.size() == 5 && names.scalar_type() == ScalarType::Int &&
                        names.is_contiguous() && names.numel() == array.n,
                    "internal: stochastic rounding needs 5 draws and an int32 name of each row");
    found = {{static_cast<uint32_t>(draws[0]), static_cast<uint32_t>(draws[1]),
              static_cast<uint32_t>(draws[2]), static_cast<uint32_t>(draws[2] >> 32)},
             kRoundingGroups + static_cast<uint32_t>(draws[3]), static_cast<uint32_t>(draws[4]),
             static_cast<const uint32_t*>(names.data_ptr())};
    array.draws = &found;
  }
  pack(static_cast<char*>(to.mutable_data_ptr()), static_cast<const char*>(rows.data_ptr()),
       nullptr, array);
}

// Unpacks the result `from` of `code_rows` to `rows`, float32 [n, width].
void decode_rows(Tensor from, int64_t bits, Tensor rows) {
  const WireArray array = coded_array(rows, bits);
  check_coded(from, array);
  unpack(static_cast<char*>(rows.mutable_data_ptr()), static_cast<const char*>(from.data_ptr()),
         array);
}

// Returns the sums of gradients of this rank's rows of a table that one backward pass without
// update has kept, of pulled tiers or, if `pushed`, of pushed tiers: slots, uint32 [n] stored as
// int32, and sums, float32 [n, dim].
std::tuple<Tensor, Tensor> context_kept(int64_t handle, int64_t table, bool pushed) {
  const auto context = context_of(handle);
  STD_TORCH_CHECK(context->num_left == 1, "internal: kept gradients are not those of one batch");
  const Table& of = context->tables.at(table);
  const PushedRows& kept = of.left[pushed][0];
  const int64_t n = std::ssize(kept.slots);
  Tensor slots = pooled_tensor(ScalarType::Int, {n});
  Tensor rows = pooled_tensor(ScalarType::Float, {n, of.dim});
  if (n > 0) {
    std::memcpy(slots.mutable_data_ptr(), kept.slots.data(), n * 4);
    std::memcpy(rows.mutable_data_ptr(), kept.rows.data(), n * of.gradient_bytes());
  }
  return {slots, rows};
}

// Replaces the sums that `context_kept` returns.
void context_keep(int64_t handle, int64_t table, bool pushed, Tensor slots, Tensor rows) {
  const auto context = context_of(handle);
  Table& of = context->tables.at(table);
  const int64_t n = slots.numel();
  STD_TORCH_CHECK(context->num_left == 1 && slots.is_contiguous() && rows.is_contiguous() &&
                      slots.scalar_type() == ScalarType::Int &&
                      rows.scalar_type() == ScalarType::Float && rows.numel() == n * of.dim,
                  "internal: kept gradients of the wrong shape or type");
  PushedRows& kept = of.left[pushed][0];
  const float* floats = static_cast<const float*>(rows.data_ptr());
  const uint32_t* data = static_cast<const uint32_t*>(slots.data_ptr());
  kept.slots.assign(data, data + n);
  kept.rows.assign(floats, floats + n * of.dim);
}

void context_close(int64_t handle) {
  const auto closed = contexts().close(handle);
  // Lookups on other threads may still read the arenas, which the caller unmaps next.
  while (closed.use_count() > 1) std::this_thread::sleep_for(std::chrono::microseconds(50));
  std::atomic_thread_fence(std::memory_order_acquire);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oper, m) {
  OPER_OPERATOR(
      context_create,
      "(int rank, int world_size, Tensor[] arrays, int send_buffer_bytes, Tensor[] heads) "
      "-> int");
  OPER_OPERATOR(context_set_barrier,
                "(int handle, int lines, int[] domain, int[] pidfds, int deadline_ms) -> ()");
  OPER_OPERATOR(context_set_exchange,
                "(int handle, int[] domain, Tensor targets, bool gathers, bool pulls, bool "
                "refreshes, bool shares_replicas, int[] bits, int collection, int transport) -> ()");
  OPER_OPERATOR(context_set_pull, "(int handle, int choice, Tensor costs) -> ()");
  OPER_OPERATOR(context_duplication, "(int handle) -> int[]");
  OPER_OPERATOR(context_sent_bytes, "(int handle, bool reset) -> int[]");
  OPER_OPERATOR(context_barrier, "(int handle, int phase) -> (int, int)");
  OPER_OPERATOR(context_positions, "(int handle) -> int[]");
  OPER_OPERATOR(context_last_phases, "(int handle) -> int[]");
  OPER_OPERATOR(context_abort, "(int handle, int verdict) -> ()");
  OPER_OPERATOR(context_phases, "(int handle) -> int[]");
  OPER_OPERATOR(context_phase_histograms, "(int handle, bool reset) -> int[]");
  OPER_OPERATOR(context_trace, "(int handle, int most) -> ()");
  OPER_OPERATOR(context_spans, "(int handle) -> int[]");
  OPER_OPERATOR(context_traffic, "(int handle, bool reset) -> int[]");
  OPER_OPERATOR(context_mark_changes, "(int handle, bool on) -> ()");
  OPER_OPERATOR(context_take_changes, "(int handle, int table) -> Tensor");
  OPER_OPERATOR(copy_rows, "(Tensor rows, Tensor slots, Tensor(a!) to) -> ()");
  OPER_OPERATOR(code_rows,
                "(Tensor rows, int bits, int[] draws, Tensor names, Tensor(a!) to) -> ()");
  OPER_OPERATOR(decode_rows, "(Tensor codes, int bits, Tensor(a!) rows) -> ()");
  OPER_OPERATOR(context_kept, "(int handle, int table, bool pushed) -> (Tensor, Tensor)");
  OPER_OPERATOR(context_keep,
                "(int handle, int table, bool pushed, Tensor slots, Tensor rows) -> ()");
  OPER_OPERATOR(context_close, "(int handle) -> ()");
}

}  // namespace oper::host
