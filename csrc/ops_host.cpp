// torch operators of the host back end, on libtorch's stable ABI.
//
// Placement data (addresses, deal tables, head maps) is laid out by Python and copied or referenced
// here; see oper/directory.py for its meaning.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "host/context.h"
#include "host/exchange.h"
#include "host/kernels.h"
#include "host/memory.h"
#include "host/peer_rows.h"
#include "oper/description.h"

using torch::stable::Tensor;
using torch::headeronly::ScalarType;

namespace oper::host {
namespace {

void parallel_over_tasks(int64_t count, void (*body)(int64_t, int64_t, void*), void* argument) {
  torch::stable::parallel_for(0, count, 1,
                              [=](int64_t begin, int64_t end) { body(begin, end, argument); });
}

// ---- tensors -----------------------------------------------------------------------------------

Tensor pooled_tensor(ScalarType type, size_t item, std::vector<int64_t> sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t count = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = count;
    count *= sizes[i];
  }
  const size_t bytes = static_cast<size_t>(count) * item;
  void* data = pool_take(bytes);
  return torch::stable::from_blob(
      data, {sizes.data(), sizes.size()}, {strides.data(), strides.size()},
      torch::stable::Device(torch::headeronly::DeviceType::CPU), type,
      [bytes](void* block) { pool_give(block, bytes); });
}

const int64_t* int64_data(const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Long && tensor.is_contiguous(),
                  "internal: expected a contiguous int64 tensor");
  return static_cast<const int64_t*>(tensor.data_ptr());
}

// ---- contexts ----------------------------------------------------------------------------------

struct Owned {
  Context context;
  std::vector<Tensor> keep_alive;  // head maps, referenced and not copied
};

std::mutex registry_mutex;
std::map<int64_t, std::unique_ptr<Owned>>& registry() {
  static auto* instance = new std::map<int64_t, std::unique_ptr<Owned>>;
  return *instance;
}

Context& context_of(int64_t handle) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  auto found = registry().find(handle);
  STD_TORCH_CHECK(found != registry().end(), "sharded tables used after they were closed");
  return found->second->context;
}

// The rows of a tier that live on a rank.
HomeTier home_tier(const Table& table, int32_t k, int32_t rank) {
  const int64_t first = table.owner_begin[rank], last = table.owner_begin[rank + 1];
  const TierMap& tier = table.home.tiers[k];
  const int64_t stop =
      k + 1 < table.home.num_tiers ? table.home.tiers[k + 1].start : table.home.num_rows;
  HomeTier found{0, 0, tier.start, tier.period, {}};
  const int64_t turns = (stop - tier.start) / tier.period, rest = (stop - tier.start) % tier.period;
  int64_t rows = 0;
  for (int64_t o = 0; o < tier.period; ++o) {
    // A key past the rank's range may only come from an offset that the tier does not reach.
    if (tier.base[o] < first || tier.base[o] >= last) continue;
    if (turns == 0 && o >= rest) continue;
    if (found.offsets.empty()) found.slot_begin = tier.base[o] - first;
    found.offsets.push_back(o);
    rows += turns + (o < rest ? 1 : 0);
  }
  found.slot_end = found.slot_begin + rows;
  return found;
}

// What follows from the home map: this rank's part of each tier, and which keys are pushed.
void fill_home(Table& table, int32_t rank) {
  const int32_t W = static_cast<int32_t>(table.owner_begin.size()) - 1;
  for (int32_t k = 0; k < table.home.num_tiers; ++k) {
    for (int32_t r = 0; r < W; ++r) {
      HomeTier part = home_tier(table, k, r);
      if (part.slot_end == part.slot_begin) continue;
      if (table.pushes[k])
        table.pushed_keys.emplace_back(
            static_cast<uint32_t>(table.owner_begin[r] + part.slot_begin),
            static_cast<uint32_t>(table.owner_begin[r] + part.slot_end));
      if (r == rank) table.home_tiers.push_back(std::move(part));
    }
  }
  const auto is_push = [](bool x) { return x; };
  table.is_pushed = std::any_of(table.pushes.begin(), table.pushes.end(), is_push);
  table.all_pushed = std::all_of(table.pushes.begin(), table.pushes.end(), is_push);
  const bool owns_all = table.owner_begin[rank + 1] - table.owner_begin[rank] == table.home.num_rows;
  table.has_push = table.is_pushed && !(table.all_pushed && owns_all);
}

void fill_tables(Owned& owned, const Tensor& tables, const Tensor& owner_begin,
                 const Tensor& tiers, const std::vector<Tensor>& heads) {
  Context& context = owned.context;
  const int64_t* table_data = int64_data(tables);
  const int64_t* begin_data = int64_data(owner_begin);
  const int64_t* tier_data = int64_data(tiers);
  const int64_t* maps = context.map_storage.data();
  const int64_t num_maps = static_cast<int64_t>(context.map_storage.size()) / 2;
  const int64_t T = tables.size(0), W = context.world_size;
  context.tier_storage.resize(static_cast<size_t>(2 * T));
  context.tables.resize(static_cast<size_t>(T));
  for (int64_t t = 0; t < T; ++t) {
    const int64_t* d = table_data + t * kTableWidth;
    Table& table = context.tables[t];
    table.dim = static_cast<int32_t>(d[kDim]);
    table.mean = static_cast<int32_t>(d[kMean]);
    table.row_type = static_cast<RowType>(d[kRowType]);
    table.first_column = static_cast<int32_t>(d[kFirstColumn]);
    table.rows = reinterpret_cast<char*>(d[kRowAddress]);
    table.momentum1 = reinterpret_cast<float*>(d[kMomentum1]);
    table.momentum2 = reinterpret_cast<float*>(d[kMomentum2]);
    table.owner_begin.assign(begin_data + t * (W + 1), begin_data + (t + 1) * (W + 1));
    table.has_replicas = false;
    auto& read = context.tier_storage[2 * t];
    auto& home = context.tier_storage[2 * t + 1];
    for (int64_t k = d[kTierBegin]; k < d[kTierEnd]; ++k) {
      const int64_t* x = tier_data + k * kTierWidth;
      read.push_back(tier_map(maps, num_maps, x[kStart], x[kReadAt], x[kReadPeriod]));
      home.push_back(tier_map(maps, num_maps, x[kStart], x[kHomeAt], x[kHomePeriod]));
      table.pushes.push_back(x[kPush] != 0);
    }
    table.pushed.resize(static_cast<size_t>(W));
    table.row_columns = static_cast<int32_t>(d[kRowColumns]);
    for (int64_t p = 0; p < T; ++p)
      if (table_data[p * kTableWidth + kLogical] == d[kLogical] && table.dim != table.row_columns)
        table.pieces.push_back(static_cast<int32_t>(p));
    HeadMap head{nullptr, nullptr, 0};
    if (d[kHead] >= 0) {
      head.words = static_cast<const uint64_t*>(heads[d[kHead]].data_ptr());
      head.positions = static_cast<const uint32_t*>(heads[d[kHead] + 1].data_ptr());
      head.num_head = heads[d[kHead] + 1].numel();
    }
    if (d[kHeadIds] >= 0) {
      table.head_ids.by_position = static_cast<const uint32_t*>(heads[d[kHeadIds]].data_ptr());
      table.head_ids.ascending = static_cast<const uint32_t*>(heads[d[kHeadIds] + 1].data_ptr());
      table.head_ids.num_head = heads[d[kHeadIds]].numel();
    }
    const int32_t n = static_cast<int32_t>(read.size());
    table.read = TableMap{d[kNumRows], n, read.data(), head, nullptr};
    table.home = TableMap{d[kNumRows], n, home.data(), head, nullptr};
    for (TableMap* map : {&table.read, &table.home}) {
      context.flat_storage.push_back(flatten(*map));
      map->flat = context.flat_storage.back().get();
    }
    fill_home(table, context.rank);
    context.has_push |= table.is_pushed;
  }
}

void fill_replicas(Context& context, const Tensor& refreshes, const Tensor& touched) {
  const int64_t* data = int64_data(refreshes);
  const int64_t* lists = int64_data(touched);
  const int64_t W = context.world_size;
  for (int64_t i = 0; i < refreshes.size(0); ++i) {
    const int64_t* x = data + i * kRefreshWidth;
    Refresh part{static_cast<int32_t>(x[kTable]), static_cast<int32_t>(x[kOwner]),
                 x[kSlotBegin], x[kSlotEnd], x[kFirst], x[kStride],
                 reinterpret_cast<const char*>(x[kMasters]), reinterpret_cast<char*>(x[kReplicas])};
    Table& table = context.tables[part.table];
    table.has_replicas = true;
    if (part.owner == context.rank)
      table.replicated_slots.emplace_back(static_cast<uint32_t>(part.slot_begin),
                                          static_cast<uint32_t>(part.slot_end));
    context.refreshes.push_back(part);
  }
  for (size_t t = 0; t < context.tables.size(); ++t)
    for (int64_t r = 0; r < W; ++r)
      context.tables[t].touched.push_back(
          reinterpret_cast<uint32_t*>(lists[static_cast<int64_t>(t) * W + r]));
}

int64_t context_create(int64_t rank, int64_t world_size, Tensor tables, Tensor owner_begin,
                       Tensor tiers, Tensor maps, Tensor features, Tensor refreshes,
                       Tensor touched, Tensor squares, Tensor outboxes, int64_t outbox_bytes,
                       std::vector<Tensor> heads) {
  auto owned = std::make_unique<Owned>();
  owned->keep_alive = heads;
  Context& context = owned->context;
  context.rank = static_cast<int32_t>(rank);
  context.world_size = static_cast<int32_t>(world_size);
  const int64_t* map_data = int64_data(maps);
  context.map_storage.assign(map_data, map_data + maps.numel());
  fill_tables(*owned, tables, owner_begin, tiers, heads);
  fill_replicas(context, refreshes, touched);
  const int64_t* square_data = int64_data(squares);
  for (size_t t = 0; t < context.tables.size(); ++t)
    for (int64_t r = 0; r < world_size; ++r)
      context.tables[t].squares.push_back(
          reinterpret_cast<float*>(square_data[static_cast<int64_t>(t) * world_size + r]));
  const int64_t* feature_data = int64_data(features);
  for (int64_t f = 0; f < features.size(0); ++f) {
    const int64_t* x = feature_data + f * kFeatureWidth;
    Table& table = context.tables[x[kFeatureTable]];
    context.features.push_back({static_cast<int32_t>(x[kFeatureTable]), x[kColumn],
                                static_cast<int32_t>(x[kFeatureLogical]), x[kPieceStart]});
    table.features.push_back(static_cast<int32_t>(f));
    context.output_columns = std::max<int64_t>(context.output_columns, x[kColumn] + table.dim);
    context.unpooled_columns = table.row_columns;
  }
  const int64_t* outbox_data = int64_data(outboxes);
  for (int64_t r = 0; r < world_size; ++r)
    context.outbox.push_back(reinterpret_cast<char*>(outbox_data[r]));
  context.outbox_bytes = outbox_bytes;
  context.start_counting();
  std::lock_guard<std::mutex> lock(registry_mutex);
  static int64_t next_handle = 1;
  registry()[next_handle] = std::move(owned);
  return next_handle++;
}

// `domain`: the ranks that share memory with this one, itself included, ascending; `pidfds` likewise.
void context_set_barrier(int64_t handle, int64_t lines, std::vector<int64_t> domain,
                         std::vector<int64_t> pidfds, int64_t deadline_ms) {
  Context& context = context_of(handle);
  context.domain.assign(domain.begin(), domain.end());
  const auto mine = std::find(domain.begin(), domain.end(), context.rank) - domain.begin();
  context.barrier = std::make_unique<Barrier>(
      reinterpret_cast<BarrierLine*>(lines), static_cast<int32_t>(mine),
      static_cast<int32_t>(domain.size()), std::vector<int>(pidfds.begin(), pidfds.end()),
      deadline_ms);
}

// `targets`: int64 [K, 4], see ReplicaTarget. `transport`: address of a function, see Transport.
void context_set_exchange(int64_t handle, std::vector<int64_t> domain, Tensor targets, bool gathers,
                          bool refreshes, bool shares_replicas, int64_t wire, int64_t transport) {
  Context& context = context_of(handle);
  ExchangeSetup setup;
  setup.near.assign(static_cast<size_t>(context.world_size), false);
  for (int64_t r : domain) setup.near[static_cast<size_t>(r)] = true;
  const int64_t* data = int64_data(targets);
  for (int64_t k = 0; k < targets.size(0); ++k)
    setup.targets.push_back({static_cast<int32_t>(data[4 * k]),
                             static_cast<int32_t>(data[4 * k + 1]), data[4 * k + 2],
                             data[4 * k + 3]});
  setup.gathers = gathers;
  setup.refreshes = refreshes;
  setup.shares_replicas = shares_replicas;
  setup.wire = static_cast<RowType>(wire);
  setup.transport = reinterpret_cast<Transport>(transport);
  context.exchange = std::make_shared<Exchange>(context, std::move(setup));
}

// Number of exchanges, then bytes sent [kinds][W], see enum Sent.
std::vector<int64_t> context_sent_bytes(int64_t handle, bool reset) {
  Context& context = context_of(handle);
  if (!context.exchange) return {};
  Exchange& exchange = *context.exchange;
  std::vector<int64_t> result = exchange.sent_bytes;
  result.insert(result.begin(), exchange.num_exchanges);
  if (reset) {
    std::fill(exchange.sent_bytes.begin(), exchange.sent_bytes.end(), 0);
    exchange.num_exchanges = 0;
  }
  return result;
}

// De-duplicated pull, see host/peer_rows.h. `costs`: float64 [3], PullCosts.
void context_set_pull(int64_t handle, int64_t choice, Tensor costs) {
  Context& context = context_of(handle);
  const double* c = static_cast<const double*>(costs.data_ptr());
  const auto kind = static_cast<PeerRows::Choice>(choice);
  context.peer_rows = kind == PeerRows::kNever
                          ? nullptr
                          : std::make_shared<PeerRows>(context, kind, PullCosts{c[0], c[1], c[2]});
}

// By table: ids of neighbours' rows when last counted, distinct ones, whether they are copied; [3][T].
std::vector<int64_t> context_duplication(int64_t handle) {
  Context& context = context_of(handle);
  if (!context.peer_rows) return {};
  const PeerRows& peers = *context.peer_rows;
  std::vector<int64_t> result = peers.num_ids;
  result.insert(result.end(), peers.num_rows.begin(), peers.num_rows.end());
  result.insert(result.end(), peers.is_chosen.begin(), peers.is_chosen.end());
  return result;
}

std::tuple<int64_t, int64_t> context_barrier(int64_t handle) {
  Context& context = context_of(handle);
  if (!context.barrier) return {0, -1};
  int32_t culprit = -1;
  const auto result = context.barrier->arrive(&culprit);
  return {static_cast<int64_t>(result), culprit < 0 ? culprit : context.domain[culprit]};
}

// Nanoseconds of the last batch: forward, reduce, wait, update, wait, refresh.
std::vector<int64_t> context_phases(int64_t handle) {
  const Context& context = context_of(handle);
  return {context.phase_ns, context.phase_ns + kNumPhases};
}

// Forward passes, backward passes, then units moved [kinds][T][W], see host/traffic.h.
std::vector<int64_t> context_traffic(int64_t handle, bool reset) {
  Context& context = context_of(handle);
  std::vector<int64_t> result = context.moved();
  result.insert(result.begin(), context.num_passes, context.num_passes + 2);
  if (reset) context.reset_moved();
  return result;
}

void context_close(int64_t handle) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  registry().erase(handle);
}

// ---- lookups -----------------------------------------------------------------------------------

// Status codes that Python turns into errors, after those of `Status`.
constexpr int64_t kBadLengths = 5;  // a negative length, or lengths do not add up to the ids

template <class Length>
bool offsets_from(const Length* lengths, int64_t n, int64_t total, int64_t* out) {
  int64_t sum = 0;
  bool negative = false;
  for (int64_t i = 0; i < n; ++i) {
    out[i] = sum;
    negative |= lengths[i] < 0;
    sum += lengths[i];
  }
  out[n] = sum;
  return !negative && sum == total;
}

// 0, 1, 2, ...: the bounds of bags with one id each. Grows; old blocks stay for their users.
const int64_t* ascending(int64_t count) {
  static std::mutex mutex;
  static auto* blocks = new std::vector<std::unique_ptr<std::vector<int64_t>>>;
  std::lock_guard<std::mutex> lock(mutex);
  if (blocks->empty() || static_cast<int64_t>(blocks->back()->size()) < count) {
    auto block = std::make_unique<std::vector<int64_t>>(static_cast<size_t>(count + count / 2));
    for (size_t i = 0; i < block->size(); ++i) (*block)[i] = static_cast<int64_t>(i);
    blocks->push_back(std::move(block));
  }
  return blocks->back()->data();
}

// What identifies a batch of lookups in the operators below.
struct Lookup {
  Tensor ids, offsets, key_of;  // offsets int64 [num_keys * batch_size + 1], key_of int64 [F]
  std::optional<Tensor> weights;
  int64_t batch_size;
  bool pooled;
};

// Pooled: features side by side in the columns of one row per sample. Unpooled: one row per id,
// feature after feature.
Batch make_batch(const Context& context, const Lookup& lookup, int64_t* num_rows) {
  Batch batch;
  batch.ids = lookup.ids.data_ptr();
  batch.ids_are_32_bit = lookup.ids.scalar_type() == ScalarType::Int;
  batch.weights = lookup.weights.has_value()
                      ? static_cast<const float*>(lookup.weights->data_ptr())
                      : nullptr;
  const int64_t* offsets = int64_data(lookup.offsets);
  const int64_t* key_of = int64_data(lookup.key_of);
  const int64_t B = lookup.batch_size;
  const int64_t* ones = lookup.pooled ? nullptr : ascending(lookup.ids.numel() + 1);
  int64_t first = 0, rows = 0;  // of the current feature of the collection, and behind it
  int32_t logical = -1;
  for (const Feature& feature : context.features) {
    const int64_t* bounds = offsets + key_of[feature.logical] * B;
    if (lookup.pooled) {
      batch.features.push_back({bounds, B, feature.column});
      rows = B;
      continue;
    }
    const int64_t n = bounds[B] - bounds[0];
    if (feature.logical != logical) {
      first = rows;
      rows += n;
      logical = feature.logical;
    }
    batch.features.push_back(
        {ones + bounds[0], n, first * context.unpooled_columns + feature.start});
  }
  batch.out_stride = lookup.pooled ? context.output_columns : context.unpooled_columns;
  *num_rows = rows;
  return batch;
}

// Bounds of bags, int64 [n + 1]; false when the lengths do not fit the ids.
bool make_offsets(const Tensor& lengths, int64_t num_ids, Tensor* offsets) {
  const int64_t n = lengths.numel();
  *offsets = pooled_tensor(ScalarType::Long, 8, {n + 1});
  int64_t* data = static_cast<int64_t*>(offsets->data_ptr());
  return lengths.scalar_type() == ScalarType::Int
             ? offsets_from(static_cast<const int32_t*>(lengths.data_ptr()), n, num_ids, data)
             : offsets_from(int64_data(lengths), n, num_ids, data);
}

// Where each feature's addresses begin; returns how many there are.
int64_t number_addresses(const Batch& batch, Resolved* resolved) {
  int64_t n = 0;
  for (const FeatureBags& bags : batch.features) {
    resolved->first.push_back(n);
    n += bags.bounds[bags.num_bags] - bags.bounds[0];
  }
  return n;
}

// What `lookup_resolve` has found, for a batch.
Resolved resolved_batch(const Batch& batch, const Tensor& addresses,
                        const std::optional<Tensor>& order) {
  Resolved resolved;
  resolved.addresses = int64_data(addresses);
  resolved.order =
      order.has_value() && order->numel() > 0 ? static_cast<char*>(order->data_ptr()) : nullptr;
  const int64_t n = number_addresses(batch, &resolved);
  STD_TORCH_CHECK(addresses.numel() == n + kAddressesAhead,
                  "internal: a resolved batch that is used with another batch");
  return resolved;
}

// Offsets int64 [num_keys * B + 1]; addresses of the rows of all features, int64, and a few more;
// the order for the backward pass, bytes.
std::tuple<Tensor, Tensor, Tensor, int64_t, int64_t> lookup_resolve(
    int64_t handle, Tensor ids, Tensor lengths, std::optional<Tensor> weights, Tensor key_of,
    int64_t batch_size, bool pooled, bool with_order) {
  Context& context = context_of(handle);
  Tensor offsets;
  if (!make_offsets(lengths, ids.numel(), &offsets))
    return {offsets, offsets, offsets, kBadLengths, int64_data(offsets)[lengths.numel()]};
  int64_t rows = 0;
  const Batch batch =
      make_batch(context, {ids, offsets, key_of, weights, batch_size, pooled}, &rows);
  Resolved resolved;
  const int64_t n = number_addresses(batch, &resolved);
  Tensor addresses = pooled_tensor(ScalarType::Long, 8, {n + kAddressesAhead});
  const int64_t bytes = with_order ? order_bytes(context, batch) : 0;
  Tensor order = pooled_tensor(ScalarType::Byte, 1, {bytes});
  resolved.order = with_order ? static_cast<char*>(order.data_ptr()) : nullptr;
  int64_t* data = static_cast<int64_t*>(addresses.data_ptr());
  const Status status = resolve(context, batch, data, resolved, parallel_over_tasks);
  std::fill(data + n, data + n + kAddressesAhead, n > 0 ? data[n - 1] : 0);
  return {offsets, addresses, order, status.code, status.detail};
}

std::tuple<Tensor, Tensor, int64_t, int64_t> lookup_forward(
    int64_t handle, Tensor ids, Tensor lengths, std::optional<Tensor> weights, Tensor key_of,
    int64_t batch_size, bool pooled, bool collective, std::optional<Tensor> known_offsets,
    std::optional<Tensor> addresses) {
  Context& context = context_of(handle);
  Tensor offsets;
  if (known_offsets.has_value()) {
    offsets = *known_offsets;
  } else if (!make_offsets(lengths, ids.numel(), &offsets)) {
    return {offsets, offsets, kBadLengths, int64_data(offsets)[lengths.numel()]};
  }
  int64_t rows = 0;
  Batch batch = make_batch(context, {ids, offsets, key_of, weights, batch_size, pooled}, &rows);
  Resolved resolved;
  if (addresses.has_value()) {
    resolved = resolved_batch(batch, *addresses, std::nullopt);
    batch.resolved = &resolved;
  }
  Tensor out = pooled_tensor(ScalarType::Float, 4, {rows, batch.out_stride});
  // Outputs of all ranks together that would not stay in the cache until they are used.
  batch.stream = rows * batch.out_stride * 4 * context.world_size > last_level_cache_bytes() / 2;
  const Status status =
      forward(context, batch, static_cast<float*>(out.data_ptr()), collective, parallel_over_tasks);
  return {out, offsets, status.code, status.detail};
}

std::tuple<Tensor, int64_t, int64_t> lookup_weight_gradient(int64_t handle, Tensor grad, Tensor ids,
                                                            Tensor offsets, Tensor weights,
                                                            Tensor key_of, int64_t batch_size) {
  Context& context = context_of(handle);
  int64_t rows = 0;
  const Batch batch =
      make_batch(context, {ids, offsets, key_of, weights, batch_size, true}, &rows);
  Tensor out = torch::stable::new_zeros(weights, {ids.numel()});
  const Status status =
      weight_gradient(context, batch, static_cast<const float*>(grad.data_ptr()),
                      static_cast<float*>(out.data_ptr()), parallel_over_tasks);
  return {out, status.code, status.detail};
}

std::tuple<int64_t, int64_t> lookup_backward(int64_t handle, Tensor grad, Tensor ids,
                                             Tensor offsets, std::optional<Tensor> weights,
                                             Tensor key_of, int64_t batch_size, bool pooled,
                                             Tensor optimizers, double gradient_scale,
                                             std::optional<Tensor> addresses,
                                             std::optional<Tensor> order) {
  Context& context = context_of(handle);
  STD_TORCH_CHECK(optimizers.scalar_type() == ScalarType::Double &&
                      optimizers.numel() ==
                          static_cast<int64_t>(context.tables.size()) * kOptimizerWidth,
                  "internal: optimizers must be float64 [T, ", int64_t{kOptimizerWidth}, "]");
  const double* data = static_cast<const double*>(optimizers.data_ptr());
  for (size_t t = 0; t < context.tables.size(); ++t) {
    const double* x = data + t * kOptimizerWidth;
    context.tables[t].optimizer = optimizer_args(x);
    context.tables[t].rounding = rounding_key(x);
  }
  int64_t rows = 0;
  Batch batch = make_batch(context, {ids, offsets, key_of, weights, batch_size, pooled}, &rows);
  // The output's layout, but for a gradient that is a slice of wider rows.
  if (rows > 0) batch.out_stride = grad.stride(0);
  Resolved resolved;
  if (addresses.has_value()) {
    resolved = resolved_batch(batch, *addresses, order);
    batch.resolved = &resolved;
  }
  const Status status = backward(context, batch, static_cast<const float*>(grad.data_ptr()),
                                 static_cast<float>(gradient_scale), parallel_over_tasks);
  return {status.code, status.detail};
}

// ---- memory ------------------------------------------------------------------------------------

int64_t map_segment(int64_t fd, int64_t bytes, bool writable) {
  void* data = map_shared(static_cast<int>(fd), static_cast<size_t>(bytes), writable);
  STD_TORCH_CHECK(data != nullptr, "cannot map a shared segment of ", bytes,
                  " bytes: ", std::strerror(errno));
  return reinterpret_cast<int64_t>(data);
}

void map_over_segment(int64_t address, int64_t fd, int64_t offset, int64_t bytes, bool writable) {
  STD_TORCH_CHECK(map_over(reinterpret_cast<void*>(address), static_cast<int>(fd),
                           static_cast<size_t>(offset), static_cast<size_t>(bytes), writable),
                  "cannot map ", bytes, " bytes of a shared segment: ", std::strerror(errno));
}

void unmap_segment(int64_t address, int64_t bytes) {
  unmap(reinterpret_cast<void*>(address), static_cast<size_t>(bytes));
}

int64_t collapse_segment(int64_t address, int64_t bytes) {
  return static_cast<int64_t>(
      collapse_huge(reinterpret_cast<void*>(address), static_cast<size_t>(bytes)));
}

// View [rows, columns] of mapped memory, elements of a `RowType`; the caller keeps the mapping alive.
Tensor segment_view(int64_t address, int64_t rows, int64_t columns, int64_t type) {
  constexpr ScalarType kTypes[] = {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16};
  const int64_t sizes[] = {rows, columns}, strides[] = {columns, 1};
  return torch::stable::from_blob(
      reinterpret_cast<void*>(address), {sizes, 2}, {strides, 2},
      torch::stable::Device(torch::headeronly::DeviceType::CPU), kTypes[type]);
}

std::string kernel_name() { return kernels().name; }

}  // namespace
}  // namespace oper::host

STABLE_TORCH_LIBRARY(oper, m) {
  m.def("map_segment(int fd, int bytes, bool writable) -> int");
  m.def(
      "map_over_segment(int address, int fd, int offset, int bytes, bool writable) -> ()");
  m.def("unmap_segment(int address, int bytes) -> ()");
  m.def("collapse_segment(int address, int bytes) -> int");
  m.def("segment_view(int address, int rows, int columns, int type=0) -> Tensor");
  m.def("kernel_name() -> str");
  m.def(
      "context_create(int rank, int world_size, Tensor tables, Tensor owner_begin, Tensor tiers, "
      "Tensor maps, Tensor features, Tensor refreshes, Tensor touched, Tensor squares, "
      "Tensor outboxes, int outbox_bytes, Tensor[] heads) -> int");
  m.def(
      "context_set_barrier(int handle, int lines, int[] domain, int[] pidfds, int deadline_ms) -> "
      "()");
  m.def(
      "context_set_exchange(int handle, int[] domain, Tensor targets, bool gathers, "
      "bool refreshes, bool shares_replicas, int wire, int transport) -> ()");
  m.def("context_set_pull(int handle, int choice, Tensor costs) -> ()");
  m.def("context_duplication(int handle) -> int[]");
  m.def("context_sent_bytes(int handle, bool reset) -> int[]");
  m.def("context_barrier(int handle) -> (int, int)");
  m.def("context_phases(int handle) -> int[]");
  m.def("context_traffic(int handle, bool reset) -> int[]");
  m.def("context_close(int handle) -> ()");
  m.def(
      "lookup_forward(int handle, Tensor ids, Tensor lengths, Tensor? weights, Tensor key_of, "
      "int batch_size, bool pooled, bool collective, Tensor? offsets, Tensor? addresses) -> "
      "(Tensor, Tensor, int, int)");
  m.def(
      "lookup_resolve(int handle, Tensor ids, Tensor lengths, Tensor? weights, Tensor key_of, "
      "int batch_size, bool pooled, bool with_order) -> (Tensor, Tensor, Tensor, int, int)");
  m.def(
      "lookup_weight_gradient(int handle, Tensor grad, Tensor ids, Tensor offsets, Tensor weights, "
      "Tensor key_of, int batch_size) -> (Tensor, int, int)");
  m.def(
      "lookup_backward(int handle, Tensor grad, Tensor ids, Tensor offsets, Tensor? weights, "
      "Tensor key_of, int batch_size, bool pooled, Tensor optimizers, float gradient_scale, "
      "Tensor? addresses, Tensor? order) -> (int, int)");
}

STABLE_TORCH_LIBRARY_IMPL(oper, CompositeExplicitAutograd, m) {
  m.impl("map_segment", TORCH_BOX(&oper::host::map_segment));
  m.impl("map_over_segment", TORCH_BOX(&oper::host::map_over_segment));
  m.impl("unmap_segment", TORCH_BOX(&oper::host::unmap_segment));
  m.impl("collapse_segment", TORCH_BOX(&oper::host::collapse_segment));
  m.impl("segment_view", TORCH_BOX(&oper::host::segment_view));
  m.impl("kernel_name", TORCH_BOX(&oper::host::kernel_name));
  m.impl("context_create", TORCH_BOX(&oper::host::context_create));
  m.impl("context_set_barrier", TORCH_BOX(&oper::host::context_set_barrier));
  m.impl("context_set_exchange", TORCH_BOX(&oper::host::context_set_exchange));
  m.impl("context_set_pull", TORCH_BOX(&oper::host::context_set_pull));
  m.impl("context_duplication", TORCH_BOX(&oper::host::context_duplication));
  m.impl("context_sent_bytes", TORCH_BOX(&oper::host::context_sent_bytes));
  m.impl("context_barrier", TORCH_BOX(&oper::host::context_barrier));
  m.impl("context_phases", TORCH_BOX(&oper::host::context_phases));
  m.impl("context_traffic", TORCH_BOX(&oper::host::context_traffic));
  m.impl("context_close", TORCH_BOX(&oper::host::context_close));
}

STABLE_TORCH_LIBRARY_IMPL(oper, CPU, m) {
  m.impl("lookup_resolve", TORCH_BOX(&oper::host::lookup_resolve));
  m.impl("lookup_forward", TORCH_BOX(&oper::host::lookup_forward));
  m.impl("lookup_weight_gradient", TORCH_BOX(&oper::host::lookup_weight_gradient));
  m.impl("lookup_backward", TORCH_BOX(&oper::host::lookup_backward));
}
