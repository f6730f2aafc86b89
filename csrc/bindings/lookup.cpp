// torch operators of the host back end on batches and on shared memory. Contexts are created in
// bindings/context.cpp.
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/lookup.h"
#include "common/description.h"
#include "common/lookup_schemas.h"
#include "common/operators.h"
#include "host/exchange/peer_rows.h"
#include "host/interaction.h"
#include "host/kernels/kernels.h"
#include "host/memory.h"

namespace oper::host {

Tensor pooled_tensor(ScalarType type, const std::vector<int64_t>& sizes) {
  const size_t item = type == ScalarType::Long ? 8 : type == ScalarType::Byte ? 1 : 4;
  const size_t bytes = std::accumulate(sizes.begin(), sizes.end(), item, std::multiplies<>{});
  return tensor_at(pool_take(bytes), sizes, type, kHostMemory,
                   [bytes](void* block) { pool_give(block, bytes); });
}

namespace {

// ---- lookups -----------------------------------------------------------------------------------

// Writes the bounds of `n` bags, [n + 1]. Returns whether no length is negative and their sum is
// `total`.
template <class Length>
bool offsets_from(const Length* lengths, int64_t n, int64_t total, int64_t* out) {
  uint64_t sum = 0;  // wraps around if lengths do not fit
  bool fit = true;
  for (int64_t i = 0; i < n; ++i) {
    out[i] = static_cast<int64_t>(sum);
    fit &= lengths[i] >= 0 && lengths[i] <= total;
    sum += static_cast<uint64_t>(lengths[i]);
  }
  out[n] = static_cast<int64_t>(sum);
  return fit && out[n] == total;
}

// The numbers 0, 1, ..., count - 1: bounds of bags with one id each. Never freed, as batches in
// other threads may still use a block when a longer one is needed.
const int64_t* ascending(int64_t count) {
  static auto& mutex = *new ForkMutex;
  static auto* blocks = new std::vector<std::unique_ptr<std::vector<int64_t>>>;
  std::lock_guard<ForkMutex> lock(mutex);
  if (blocks->empty() || static_cast<int64_t>(blocks->back()->size()) < count) {
    auto block = std::make_unique<std::vector<int64_t>>(static_cast<size_t>(count + count / 2));
    for (size_t i = 0; i < block->size(); ++i) (*block)[i] = static_cast<int64_t>(i);
    blocks->push_back(std::move(block));
  }
  return blocks->back()->data();
}

// A batch as passed to the operators below.
struct Lookup {
  Tensor ids, offsets, key_of;  // offsets int64 [num_keys * batch_size + 1], key_of int64 [F]
  std::optional<Tensor> weights;
  int64_t batch_size;
  bool pooled;
  std::optional<Tensor> bags = {};  // see common/lookup_schemas.h
};

// The number of bags without the empty ones at the end.
int64_t without_padding(const int64_t* bounds, int64_t num_bags) {
  if (num_bags == 0 || bounds[num_bags - 1] != bounds[num_bags]) return num_bags;
  return std::lower_bound(bounds, bounds + num_bags, bounds[num_bags]) - bounds;
}

// The batch as passed to kernels. Output of a pooled lookup: one row per sample, with the features
// side by side in its columns. Unpooled: one row per id, feature after feature. `trims`: without
// empty bags at the ends of features, for steps in which empty bags have no effect.
Batch make_batch(const Context& context, const Lookup& lookup, bool trims = false) {
  Batch batch;
  batch.ids = lookup.ids.data_ptr();
  batch.ids_are_32_bit = lookup.ids.scalar_type() == ScalarType::Int;
  batch.weights = lookup.weights ? float_data(*lookup.weights) : nullptr;
  const int64_t* offsets = int64_data(lookup.offsets);
  const int64_t* key_of = int64_data(lookup.key_of);
  const int64_t B = lookup.batch_size;
  const int64_t* bags = lookup.bags ? int64_data(*lookup.bags) : nullptr;
  const int64_t* ones = lookup.pooled ? nullptr : ascending(lookup.ids.numel() + 1);
  int64_t first = 0, rows = 0;  // range of output rows of the current feature of the collection
  int32_t logical = -1;
  for (const Feature& feature : context.features) {
    const int64_t* bounds = offsets + key_of[feature.logical] * B;
    if (lookup.pooled) {
      int64_t num_bags = bags ? bags[key_of[feature.logical]] : B;
      if (trims) num_bags = without_padding(bounds, num_bags);
      batch.features.push_back({bounds, num_bags, feature.column});
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
  batch.num_rows = rows;
  return batch;
}

// Computes the bounds of bags, int64 [n + 1]. Returns whether the lengths fit the number of ids.
bool make_offsets(const Tensor& lengths, int64_t num_ids, Tensor* offsets) {
  const int64_t n = lengths.numel();
  *offsets = pooled_tensor(ScalarType::Long, {n + 1});
  int64_t* data = static_cast<int64_t*>(offsets->data_ptr());
  return lengths.scalar_type() == ScalarType::Int
             ? offsets_from(static_cast<const int32_t*>(lengths.data_ptr()), n, num_ids, data)
             : offsets_from(int64_data(lengths), n, num_ids, data);
}

// Whether each key has the bags of exactly one feature. Only then does pooling, if the bounds of
// bags are left to it, compute each of them exactly once.
bool has_own_keys(const Context& context, const Tensor& key_of, int64_t num_keys) {
  const size_t n = context.features.size();
  if (static_cast<int64_t>(n) != num_keys || key_of.numel() != num_keys) return false;
  std::vector<bool> seen(n);
  for (const Feature& feature : context.features) {
    const size_t key = static_cast<size_t>(int64_data(key_of)[feature.logical]);
    if (seen[key]) return false;
    seen[key] = true;
  }
  return true;
}

// Sets Resolved::first, and returns the number of all addresses.
int64_t number_addresses(const Batch& batch, Resolved* resolved) {
  int64_t n = 0;
  for (const FeatureBags& bags : batch.features) {
    resolved->first.push_back(n);
    n += bags.num_ids();
  }
  return n;
}

// The result of `lookup_resolve` for a batch; empty if it was not called.
std::optional<Resolved> resolved_batch(const Batch& batch, const std::optional<Tensor>& addresses,
                                       const std::optional<Tensor>& order) {
  if (!addresses) return std::nullopt;
  Resolved resolved;
  resolved.addresses = int64_data(*addresses);
  resolved.order = order && order->numel() > 0 ? static_cast<char*>(order->data_ptr()) : nullptr;
  const int64_t n = number_addresses(batch, &resolved);
  STD_TORCH_CHECK(addresses->numel() == n + kAddressesAhead,
                  "internal: results of lookup_resolve for another batch");
  return resolved;
}

// An empty tensor, returned in place of the results of a refused batch.
Tensor nothing() { return pooled_tensor(ScalarType::Long, {0}); }

// `oper::fault_of` for tables of this back end. Torch chooses the back end by the device of the
// batch, so that `handle` may belong to another one.
Fault fault_of(int64_t handle, const Tensor& ids, const Tensor& lengths,
               const std::optional<Tensor>& weights, const Tensor& key_of, int64_t batch_size) {
  if (!contexts().is_one(handle)) return kElsewhere;
  return oper::fault_of(kHostMemory, ids, lengths, weights, key_of, batch_size);
}

// Whether `fault_of` accepts a batch for tables on `device`. Does not check values of ids and
// lengths.
bool is_fit(Tensor ids, Tensor lengths, std::optional<Tensor> weights, Tensor key_of,
            int64_t batch_size, Device device) {
  return oper::fault_of(device, ids, lengths, weights, key_of, batch_size) == kFit;
}

// See common/lookup_schemas.h. The addresses are int64, feature by feature, followed by
// kAddressesAhead more that are only prefetched; the order is uint8.
std::tuple<Tensor, Tensor, Tensor, int64_t, int64_t> lookup_resolve(
    int64_t handle, Tensor ids, Tensor lengths, std::optional<Tensor> weights, Tensor key_of,
    int64_t batch_size, bool pooled, bool with_order) {
  if (const Fault fault = fault_of(handle, ids, lengths, weights, key_of, batch_size))
    return {nothing(), nothing(), nothing(), kBadBatch, fault};
  const auto context = context_of(handle);
  const int64_t begin_ns = PhaseTimes::now_ns();
  Tensor offsets;
  if (!make_offsets(lengths, ids.numel(), &offsets))
    return {offsets, offsets, offsets, kBadLengths, int64_data(offsets)[lengths.numel()]};
  const Batch batch =
      make_batch(*context, {ids, offsets, key_of, weights, batch_size, pooled}, true);
  Resolved resolved;
  const int64_t n = number_addresses(batch, &resolved);
  Tensor addresses = pooled_tensor(ScalarType::Long, {n + kAddressesAhead});
  const int64_t bytes = with_order ? order_bytes(*context, batch) : 0;
  Tensor order = pooled_tensor(ScalarType::Byte, {bytes});
  resolved.order = with_order ? static_cast<char*>(order.data_ptr()) : nullptr;
  int64_t* data = static_cast<int64_t*>(addresses.data_ptr());
  const Status status = status_of([&] { resolve(*context, batch, data, resolved); });
  std::fill(data + n, data + n + kAddressesAhead, n > 0 ? data[n - 1] : 0);
  context->times.note(kResolve, begin_ns, PhaseTimes::now_ns());
  return {offsets, addresses, order, status.code, status.detail};
}

// Whether `bags`, int64 [num_keys], can be numbers of bags of keys with batch_size lengths each.
bool are_bags(const Tensor& bags, int64_t batch_size, int64_t num_lengths) {
  const int64_t* first = int64_data(bags);
  return bags.numel() * batch_size == num_lengths &&
         std::all_of(first, first + bags.numel(),
                     [=](int64_t k) { return 0 <= k && k <= batch_size; });
}

std::tuple<Tensor, Tensor, int64_t, int64_t> lookup_forward(
    int64_t handle, Tensor ids, Tensor lengths, std::optional<Tensor> weights, Tensor key_of,
    int64_t batch_size, bool pooled, bool collective, std::optional<Tensor> known_offsets,
    std::optional<Tensor> addresses, std::optional<Tensor> bags, std::optional<Tensor> samples) {
  if (const Fault fault = fault_of(handle, ids, lengths, weights, key_of, batch_size))
    return {nothing(), nothing(), kBadBatch, fault};
  const auto context = context_of(handle);
  PhaseClock clock(*context);
  Tensor offsets;
  const int64_t n = lengths.numel();
  STD_TORCH_CHECK(!bags || (pooled && are_bags(*bags, batch_size, n)),
                  "internal: numbers of bags that do not fit the batch");
  STD_TORCH_CHECK(bags.has_value() == samples.has_value(), "internal: bags without samples");
  std::optional<Samples> shared;
  bool are_in_order = true;
  if (samples) {
    shared = samples_of(*samples, key_of);
    for (int64_t f = 0; f < shared->num_features; ++f) {
      const Samples::Kind kind = shared->kind(f, int64_data(*bags)[int64_data(key_of)[f]]);
      if (kind.is_outside) return {nothing(), nothing(), kBadSamples, f};
      are_in_order &= kind.are_in_order;
    }
  }
  // Whether pooling computes the bounds of bags (see host/kernels/bounds.inl): only if nothing else
  // reads them before.
  const bool on_the_way = !known_offsets.has_value() && !bags && pooled && n > 0 &&
                          !context->exchange && !context->peer_rows->is_on() &&
                          !(collective && context->has_push) &&
                          has_own_keys(*context, key_of, n / batch_size);
  const bool are_32_bit = lengths.scalar_type() == ScalarType::Int;
  if (known_offsets.has_value()) {
    offsets = *known_offsets;
  } else if (on_the_way) {
    offsets = pooled_tensor(ScalarType::Long, {n + 1});
    int64_t* data = static_cast<int64_t*>(offsets.data_ptr());
    if (kernels().start_bounds(lengths.data_ptr(), are_32_bit, n / batch_size, batch_size, data) !=
        ids.numel())
      return {offsets, offsets, kBadLengths, data[n]};
  } else if (!make_offsets(lengths, ids.numel(), &offsets)) {
    return {offsets, offsets, kBadLengths, int64_data(offsets)[n]};
  }
  Batch batch = make_batch(*context, {ids, offsets, key_of, weights, batch_size, pooled, bags});
  const std::optional<Resolved> resolved = resolved_batch(batch, addresses, std::nullopt);
  batch.resolved = resolved ? &*resolved : nullptr;
  if (on_the_way) {
    batch.lengths = lengths.data_ptr();
    batch.lengths_are_32_bit = are_32_bit;
    batch.offsets = static_cast<int64_t*>(offsets.data_ptr());
  }
  Tensor out = pooled_tensor(ScalarType::Float, {batch.num_rows, batch.out_stride});
  // If the outputs of all ranks take more than a quarter of the cache, they will not be there when
  // they are used. Measured on two cores, with a pass over the output: bypassing the cache took 10
  // % less time if the outputs take a fifth of it or more, 5 % more if a tenth. Not for rows that
  // `spread` reads next.
  batch.stream = !shared && batch.num_rows * batch.out_stride * 4 * context->world_size >
                                last_level_cache_bytes() / 4;
  const Status status = status_of([&] { forward(*context, batch, float_data(out), collective); });
  if (shared && status.code == 0) {
    const Tensor pooled = out;
    if (shared->count != batch.num_rows || !are_in_order)
      out = pooled_tensor(ScalarType::Float, {shared->count, batch.out_stride});
    spread(*context, *shared, float_data(pooled), float_data(out));
  }
  clock.end(kForward);
  return {out, offsets, status.code, status.detail};
}

// `keys`, bool [num_keys]: whether samples share the key's bags. `first`, int64 [B]: for each
// sample the first sample of its user. Writes the number of each sample's user to `user_of`, [B].
SharedBags shared_bags(const Tensor& first, const Tensor& keys, const Tensor& key_of,
                       int64_t* user_of) {
  STD_TORCH_CHECK(keys.scalar_type() == ScalarType::Bool && first.scalar_type() == ScalarType::Long,
                  "internal: shared bags must be int64 [B] and bool [num_keys]");
  SharedBags shared;
  for (int64_t f = 0; f < key_of.numel(); ++f) {
    const int64_t key = int64_data(key_of)[f];
    STD_TORCH_CHECK(key >= 0 && key < keys.numel(), "internal: a feature whose key does not exist");
    shared.features.push_back(static_cast<const bool*>(keys.data_ptr())[key]);
  }
  STD_TORCH_CHECK(shared.count() > 0, "internal: samples share no feature");
  const int64_t* at = int64_data(first);
  for (int64_t b = 0; b < first.numel(); ++b) {
    if (b == 0 || at[b] != at[b - 1]) shared.begins.push_back(b);
    STD_TORCH_CHECK(at[b] == shared.begins.back(),
                    "internal: a user's samples are not consecutive");
    user_of[b] = static_cast<int64_t>(shared.begins.size()) - 1;
  }
  shared.begins.push_back(first.numel());
  return shared;
}

// See `forward_shared_interaction` in host/interaction.h; for tables that are only read. `first`,
// `shared_keys`: see `shared_bags`. Without them no features are shared: `forward_interaction` computes
// `out`, and `users` and `user_of` are empty.
// Returns `users` and `out`, the number of each sample's user (int64 [B]), the bounds of the bags and
// a status.
std::tuple<Tensor, Tensor, Tensor, Tensor, int64_t, int64_t> lookup_interaction(
    int64_t handle, Tensor ids, Tensor lengths, std::optional<Tensor> weights, Tensor key_of,
    Tensor dense, std::optional<Tensor> first, std::optional<Tensor> shared_keys) {
  const int64_t size = dense.size(0), dim = dense.size(1);
  if (const Fault fault = fault_of(handle, ids, lengths, weights, key_of, size))
    return {nothing(), nothing(), nothing(), nothing(), kBadBatch, fault};
  const auto context = context_of(handle);
  PhaseClock clock(*context);
  const auto has_dim = [&](const Table& t) { return t.row_columns == dim; };
  STD_TORCH_CHECK(!context->exchange && !context->peer_rows->is_on() && !context->has_push &&
                      dense.scalar_type() == ScalarType::Float && dense.is_contiguous() &&
                      dim > 0 && context->output_columns <= key_of.numel() * dim &&
                      std::all_of(context->tables.begin(), context->tables.end(), has_dim),
                  "internal: a fused interaction needs tables of one memory domain without pushed "
                  "tiers, and contiguous float32 dense rows with as many columns as each feature");
  Tensor user_of = nothing(), users = nothing();
  SharedBags shared{std::vector<bool>(static_cast<size_t>(key_of.numel())), {0, size}};
  if (first) {
    STD_TORCH_CHECK(first->numel() == size && shared_keys,
                    "internal: expected a first sample for every sample, and the shared keys");
    user_of = pooled_tensor(ScalarType::Long, {size});
    shared = shared_bags(*first, *shared_keys, key_of, static_cast<int64_t*>(user_of.data_ptr()));
  }
  const int64_t common = shared.count(), own = key_of.numel() - common + 1;
  if (first)
    users = pooled_tensor(ScalarType::Float, {static_cast<int64_t>(shared.begins.size()) - 1,
                                              common * (common - 1) / 2});
  Tensor offsets;
  Tensor out = pooled_tensor(ScalarType::Float,
                             {size, dim + own * common + own * (own - 1) / 2});
  if (!make_offsets(lengths, ids.numel(), &offsets))
    return {users, out, user_of, offsets, kBadLengths, int64_data(offsets)[lengths.numel()]};
  const Batch batch = make_batch(*context, {ids, offsets, key_of, weights, size, true});
  const Status status = status_of([&] {
    const int32_t columns = static_cast<int32_t>(dim);
    if (first)
      forward_shared_interaction(*context, batch, shared, float_data(dense), columns,
                                 float_data(users), float_data(out));
    else
      forward_interaction(*context, batch, float_data(dense), columns, float_data(out));
  });
  clock.end(kForward);
  return {users, out, user_of, offsets, status.code, status.detail};
}

std::tuple<Tensor, int64_t, int64_t> lookup_weight_gradient(int64_t handle, Tensor grad, Tensor ids,
                                                            Tensor offsets, Tensor weights,
                                                            Tensor key_of, int64_t batch_size) {
  const auto context = context_of(handle);
  const Batch batch = make_batch(*context, {ids, offsets, key_of, weights, batch_size, true});
  Tensor out = torch::stable::new_zeros(weights, {ids.numel()});
  const Status status =
      status_of([&] { weight_gradient(*context, batch, float_data(grad), float_data(out)); });
  return {out, status.code, status.detail};
}

// Sets where each feature's gradients are: in the gradient of the whole output, or in one of
// several tensors, one per feature.
void place_gradients(const Context& context, const std::vector<Tensor>& grads, int64_t num_features,
                     Batch& batch) {
  const bool are_apart = num_features > 1 && std::ssize(grads) == num_features;
  STD_TORCH_CHECK(are_apart || grads.size() == 1,
                  "internal: expected one gradient, or one of each feature");
  for (size_t f = 0; f < batch.features.size(); ++f) {
    FeatureBags& bags = batch.features[f];
    const Feature& feature = context.features[f];
    const Tensor& grad = grads[are_apart ? feature.logical : 0];
    STD_TORCH_CHECK(!are_apart || (grad.size(0) == bags.num_bags && grad.is_contiguous() &&
                                   grad.size(1) == context.unpooled_columns),
                    "internal: a gradient without the shape of its feature's rows");
    bags.gradients = float_data(grad) + (are_apart ? feature.start : bags.out_begin);
    // The output's layout, unless the gradient is a slice of wider rows.
    bags.gradient_stride = batch.num_rows > 0 ? grad.stride(0) : batch.out_stride;
  }
}

std::tuple<int64_t, int64_t> lookup_backward(
    int64_t handle, std::vector<Tensor> grads, Tensor ids, Tensor offsets,
    std::optional<Tensor> weights, Tensor key_of, int64_t batch_size, bool pooled,
    Tensor optimizers, double gradient_scale,
    std::optional<Tensor> addresses, std::optional<Tensor> order, int64_t updates,
    std::optional<Tensor> bags, std::optional<Tensor> samples) {
  const auto context = context_of(handle);
  STD_TORCH_CHECK(
      optimizers.scalar_type() == ScalarType::Double &&
          optimizers.numel() == static_cast<int64_t>(context->tables.size()) * kOptimizerWidth,
      "internal: optimizers must be float64 [T, ", int64_t{kOptimizerWidth}, "]");
  const double* data = static_cast<const double*>(optimizers.data_ptr());
  if (context->world_size > 1)
    context->settings = settings_of(data, context->tables.size()) + static_cast<uint32_t>(updates);
  for (size_t t = 0; t < context->tables.size(); ++t) {
    const double* x = data + t * kOptimizerWidth;
    context->tables[t].optimizer = optimizer_args(x);
    context->tables[t].rounding = rounding_key(x);
  }
  Batch batch = make_batch(*context, {ids, offsets, key_of, weights, batch_size, pooled}, true);
  const std::optional<Resolved> resolved = resolved_batch(batch, addresses, order);
  batch.resolved = resolved ? &*resolved : nullptr;
  place_gradients(*context, grads, key_of.numel(), batch);
  std::optional<SampleGradients> shared;
  Tensor sums;
  if (samples) {
    shared = gradients_of(grads[0], *samples, key_of);
    // Checks the bags again, since a program may have changed `samples` after the lookup.
    const int64_t outside = place_sums(*context, *bags, key_of, *shared, batch, &sums);
    if (outside >= 0) {
      refuse_backward(*context);
      return {kBadSamples, outside};
    }
  }
  const Status status = status_of([&] {
    if (updates % 2 == 0) return leave(*context, batch);
    backward(*context, batch, static_cast<float>(gradient_scale));
  });
  return {status.code, status.detail};
}

// See `refuse_forward`, `skip` and `refuse_backward` in host/context.h.
void lookup_refuse(int64_t handle, bool collective) {
  refuse_forward(*context_of(handle), collective);
}

void lookup_skip(int64_t handle) { skip(*context_of(handle)); }

void lookup_refuse_update(int64_t handle) { refuse_backward(*context_of(handle)); }

// Drops the gradients that `leave` has kept since the last update.
void lookup_forget(int64_t handle) { context_of(handle)->num_left = 0; }

// ---- memory ------------------------------------------------------------------------------------

// See `map_shared` and `map_over` in host/memory.h. Returns an address, or -errno.
int64_t map_segment(int64_t fd, int64_t bytes, bool writable) {
  void* data = map_shared(static_cast<int>(fd), static_cast<size_t>(bytes), writable);
  return data != nullptr ? reinterpret_cast<int64_t>(data) : -errno;
}

// Returns 0 or -errno.
int64_t map_over_segment(int64_t address, int64_t fd, int64_t offset, int64_t bytes,
                         bool writable) {
  return map_over(reinterpret_cast<void*>(address), static_cast<int>(fd),
                  static_cast<size_t>(offset), static_cast<size_t>(bytes), writable)
             ? 0
             : -errno;
}

void unmap_segment(int64_t address, int64_t bytes) {
  unmap(reinterpret_cast<void*>(address), static_cast<size_t>(bytes));
}

int64_t collapse_segment(int64_t address, int64_t bytes) {
  return static_cast<int64_t>(
      collapse_huge(reinterpret_cast<void*>(address), static_cast<size_t>(bytes)));
}

// View, uint8 [bytes], of mapped memory; the caller keeps the mapping alive.
Tensor segment_bytes(int64_t address, int64_t bytes) {
  return tensor_at(reinterpret_cast<void*>(address), {bytes}, ScalarType::Byte, kHostMemory);
}

std::string kernel_name() { return kernels().name; }

}  // namespace

STABLE_TORCH_LIBRARY(oper, m) {
  OPER_OPERATOR(map_segment, "(int fd, int bytes, bool writable) -> int");
  OPER_OPERATOR(map_over_segment,
                "(int address, int fd, int offset, int bytes, bool writable) -> int");
  OPER_OPERATOR(unmap_segment, "(int address, int bytes) -> ()");
  OPER_OPERATOR(collapse_segment, "(int address, int bytes) -> int");
  OPER_OPERATOR(segment_bytes, "(int address, int bytes) -> Tensor");
  OPER_OPERATOR(kernel_name, "() -> str");
  OPER_OPERATOR(last_level_cache_bytes, "() -> int");
  m.def(oper::kLookupForward);
  m.def(
      "lookup_interaction(int handle, Tensor ids, Tensor lengths, Tensor? weights, Tensor key_of, "
      "Tensor dense, Tensor? first, Tensor? shared_keys) -> "
      "(Tensor, Tensor, Tensor, Tensor, int, int)");
  m.def(oper::kLookupResolve);
  m.def(oper::kLookupWeightGradient);
  m.def(oper::kLookupBackward);
  OPER_OPERATOR(is_fit,
                "(Tensor ids, Tensor lengths, Tensor? weights, Tensor key_of, int batch_size, "
                "Device device) -> bool");
  OPER_OPERATOR(lookup_refuse, "(int handle, bool collective) -> ()");
  OPER_OPERATOR(lookup_skip, "(int handle) -> ()");
  OPER_OPERATOR(lookup_refuse_update, "(int handle) -> ()");
  OPER_OPERATOR(lookup_forget, "(int handle) -> ()");
}

}  // namespace oper::host

// `ShardedTables` computes gradients itself. Registered for autograd, too, these do not take
// torch's detour by operators without a derivative.
STABLE_TORCH_LIBRARY_IMPL(oper, AutogradCPU, m) {
  m.impl("lookup_forward", TORCH_BOX(&oper::host::lookup_forward));
  m.impl("lookup_backward", TORCH_BOX(&oper::host::lookup_backward));
}

// For all devices, since batches on devices without a back end must reach `fault_of`, which refuses
// them.
STABLE_TORCH_LIBRARY_IMPL(oper, CompositeExplicitAutograd, m) {
  m.impl("lookup_resolve", TORCH_BOX(&oper::host::lookup_resolve));
  m.impl("lookup_forward", TORCH_BOX(&oper::host::lookup_forward));
  m.impl("lookup_interaction", TORCH_BOX(&oper::host::lookup_interaction));
  m.impl("lookup_weight_gradient", TORCH_BOX(&oper::host::lookup_weight_gradient));
  m.impl("lookup_backward", TORCH_BOX(&oper::host::lookup_backward));
}
