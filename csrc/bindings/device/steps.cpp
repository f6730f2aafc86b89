// torch operators on batches of tables in device memory. Each launches a whole step on the current
// stream. None waits for the device, except exchanges between memory domains, and unpooled lookups
// whose number of output rows only the device knows.
#include "bindings/device/tables.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>

#include "common/lookup_schemas.h"
#include "device/range.h"

namespace oper::device {

Tensor make_bounds_of(const Tables& tables, const Tensor& lengths, int64_t num_ids,
                      cudaStream_t stream) {
  const Range range("oper bounds");
  const int64_t count = lengths.numel();
  Tensor bounds = tables.empty(count + 1, ScalarType::Long);
  if (count == 0) {
    if (num_ids != 0) throw Status{kIdsWithoutBags, num_ids};
    check(cudaMemsetAsync(bounds.data_ptr(), 0, 8, stream), "cannot clear device memory");
    return bounds;
  }
  const Tensor scratch = tables.empty(sum_scratch_bytes(count), ScalarType::Byte);
  sum_lengths({lengths.data_ptr(), lengths.scalar_type() == ScalarType::Int, count, num_ids},
              static_cast<int64_t*>(bounds.data_ptr()), scratch.data_ptr(),
              tables.context->view.error, stream);
  return bounds;
}

namespace {

// Interval, in forward passes, at which a batch plan is made only to measure how often rows repeat.
constexpr int64_t kMeasuredEvery = 256;

struct Lookup {
  const Tensor& ids;
  const std::optional<Tensor>& weights;
  const Tensor& key_of;
  int64_t batch_size;
  bool pooled;
};

// Calls the hook, if any.
void at(Tables& tables, Point point, int64_t value = 0) {
  if (tables.hook && tables.hook(static_cast<int64_t>(point), value) != 0)
    throw Status{kPointFailed, 0};
}

void barrier(const Call& call) {
  if (call.tables.barrier_in_hook) return at(call.tables, Point::kBarrier);
  call.context.barrier(call.stream);
}

// Throws an error that earlier kernels have found. Not if exchanges send it to all ranks; and not
// before a collective pass of several ranks, which all must enter: it is raised after that.
void stop_at_errors(const Tables& tables, bool collective = false) {
  const int64_t code = tables.context->error().code;
  const bool waits = collective && tables.context->view.world_size > 1;
  if (code != 0 && !tables.tells && !waits) throw Status{code, 0};
}

// ---- preparation --------------------------------------------------------------------------------

// Whether rows of peers are to be staged; reads host memory only.
bool pays_to_stage(const Tables& tables) {
  if (tables.context->view.world_size == 1) return false;
  if (tables.pull >= 0) return tables.pull > 0;
  return tables.context->rows_repeat();
}

Batch batch_of(const Lookup& x, const Prepared& prepared) {
  Batch batch{};
  batch.ids = x.ids.data_ptr();
  batch.ids_are_32_bit = x.ids.scalar_type() == ScalarType::Int;
  batch.num_ids = x.ids.numel();
  batch.bounds = int64_data(prepared.bounds);
  batch.num_bounds = prepared.bounds.numel();
  batch.key_of = static_cast<const int32_t*>(prepared.keys->on_device.data_ptr());
  batch.num_used_keys = prepared.keys->num_used;
  batch.users_begin = batch.key_of + prepared.keys->keys.size();
  batch.users = batch.users_begin + batch.num_used_keys + 1;
  batch.weights = x.weights ? static_cast<const float*>(x.weights->data_ptr()) : nullptr;
  batch.batch_size = x.batch_size;
  batch.pooled = x.pooled;
  batch.by_pair = prepared.by_pair || x.weights;
  batch.max_pairs = prepared.max_pairs;
  return batch;
}

// Number of ids before each key, then of all, [num_keys + 1]. Waits for the device.
std::vector<int64_t> ids_before_keys(const Tensor& bounds, int64_t batch_size,
                                     cudaStream_t stream) {
  const int64_t num_keys = (bounds.numel() - 1) / std::max<int64_t>(1, batch_size);
  std::vector<int64_t> before(static_cast<size_t>(num_keys) + 1);
  check(cudaMemcpy2DAsync(before.data(), 8, bounds.data_ptr(), static_cast<size_t>(8 * batch_size),
                          8, before.size(), cudaMemcpyDeviceToHost, stream),
        "cannot read the number of ids");
  check(cudaStreamSynchronize(stream), "cannot read the number of ids");
  return before;
}

// Allocates the memory of a batch plan, which is computed later. `may_wait`: if several features
// share a key, waits until the device has counted the ids of each key. Otherwise all ids are
// assumed to belong to the key with the most features, which makes sorting slower.
std::shared_ptr<Prepared> prepare(Tables& tables, const Lookup& x, const Tensor& bounds,
                                  cudaStream_t stream, bool may_wait = false) {
  const Context& context = *tables.context;
  auto made = std::make_shared<Prepared>();
  made->bounds = bounds;
  made->keys = &tables.key_map(x.key_of, stream);
  made->ids = x.ids.data_ptr();
  made->weights = x.weights ? x.weights->data_ptr() : nullptr;
  made->max_pairs = x.ids.numel() * made->keys->most;
  if (may_wait && made->keys->most > 1 && x.batch_size > 0 && !is_captured(stream)) {
    const std::vector<int64_t> before = ids_before_keys(bounds, x.batch_size, stream);
    made->max_pairs = 0;
    for (size_t k = 0; k < made->keys->num_users.size(); ++k)
      made->max_pairs += made->keys->num_users[k] * (before[k + 1] - before[k]);
  }
  if (x.ids.numel() >= kMostIds || made->max_pairs >= (int64_t{1} << 32) - 1)
    throw Status{kTooManyIds, x.ids.numel()};
  made->stages_local = pays_to_stage(tables);
  made->by_pair = made->stages_local || tables.gathers;
  made->made_on = made->last_on = stream;
  made->workspace =
      tables.empty(lay_out(context, batch_of(x, *made), nullptr).bytes, ScalarType::Byte);
  return made;
}

Call call_of(Tables& tables, const Lookup& x, Prepared& prepared, cudaStream_t stream) {
  prepared.use_on(stream);
  const Batch batch = batch_of(x, prepared);
  Workspace work = lay_out(*tables.context, batch, prepared.workspace.data_ptr());
  STD_TORCH_CHECK(work.bytes <= prepared.workspace.numel(), "internal: the workspace is too small");
  STD_TORCH_CHECK(
      bits_for(static_cast<uint64_t>(tables.context->view.num_features)) + work.plan.bag_bits <= 32,
      "a batch of ", x.batch_size, " samples with ", tables.context->view.num_features,
      " features is too large: samples times features must stay below 2^32");
  if (prepared.is_swapped) work.plan.swap_spare();
  return {tables, *tables.context, prepared, batch, work, stream};
}

// Computes the batch plan, unless that has been done.
void plan(Call& call) {
  if (call.prepared.is_planned) return;
  const Range range("oper plan");
  make_plan(call.launch(), call.context.num_keys, call.batch, call.work.plan);
  call.prepared.is_planned = true;
  call.prepared.is_swapped = call.work.plan.is_swapped;
}

// The result of `lookup_resolve`, which Python holds as the bytes of a tensor; null if it was not
// called.
std::shared_ptr<Prepared> made_ahead(const std::optional<Tensor>& addresses) {
  using Held = std::shared_ptr<Prepared>;
  if (!addresses) return nullptr;
  STD_TORCH_CHECK(addresses->numel() == static_cast<int64_t>(sizeof(Held)),
                  "internal: not a resolved batch of tables in device memory");
  return *static_cast<Held*>(addresses->data_ptr());
}

// Makes a call the current step of its tables, for the operators that Python calls within it.
class UnderWay {
 public:
  explicit UnderWay(const Call& call) : tables_(call.tables) {
    // Exchanges and counters wait for the device.
    if ((tables_.exchanges || tables_.counts) && is_captured(call.stream))
      throw Status{kNotInGraphs, kForOthers};
    tables_.received = {};
    tables_.current = &call;
  }
  ~UnderWay() {
    tables_.current = nullptr;
    tables_.received = {};
  }

 private:
  Tables& tables_;
};

// ---- forward ------------------------------------------------------------------------------------

// Bytes of staging memory for the rows of peers: a quarter more than the last batch needed.
int64_t local_bytes(const Call& call) {
  const int64_t most = call.context.max_row_bytes;
  const int64_t max_pairs = call.batch.max_pairs, rows = call.context.duplication()[1];
  const int64_t wanted = rows > 0 ? std::min(max_pairs, rows + rows / 4 + 1024) : max_pairs;
  return std::min<int64_t>(wanted * ((most + kStagingUnit - 1) / kStagingUnit * kStagingUnit),
                           call.tables.most_staging_bytes);
}

// Copies rows to staging memory: those of peers, each once, as far as there is space, and those of
// other domains, which the hook at `point` receives.
Staging stage_rows(const Call& call, Point point, std::optional<Tensor>* memory) {
  Tables& tables = call.tables;
  const bool local = call.prepared.stages_local && point != Point::kWeightRows;
  const int64_t first = local ? local_bytes(call) : 0;
  at(tables, point, first);
  const ReceivedRows& remote = tables.received;
  if (local) ++tables.num_staged;
  if (first + remote.num_bytes == 0) return {nullptr, 0};
  const Range range("oper staging");
  *memory = tables.empty(first + remote.num_bytes, ScalarType::Byte);
  const Staging staging{static_cast<char*>((*memory)->data_ptr()), first + remote.num_bytes};
  STD_TORCH_CHECK(staging.bytes / kStagingUnit < static_cast<int64_t>(kNotStaged),
                  "internal: too much staging memory");
  clear_staging(call.batch, call.work.plan, call.stream);
  if (remote.ranges)
    place_remote_rows(call.launch(), call.work.plan,
                      {int64_data(*remote.ranges), remote.ranges->size(0), remote.num_rows,
                       static_cast<const char*>(remote.rows->data_ptr())},
                      staging);
  if (first > 0)
    stage(call.launch(), call.batch, call.work.plan, {staging.data, first},
          point == Point::kPulledRows);
  return staging;
}

// The number of output rows; waits for the device if only the device knows it.
int64_t output_rows(const Call& call, const Lookup& x) {
  if (x.pooled) return x.batch_size;
  const KeyMap& keys = *call.prepared.keys;
  const int64_t num_keys = (call.batch.num_bounds - 1) / std::max<int64_t>(1, x.batch_size);
  if (num_keys == 0 || (keys.is_whole && num_keys == static_cast<int64_t>(keys.keys.size())))
    return x.ids.numel();
  if (is_captured(call.stream)) throw Status{kNotInGraphs, kForRows};
  const std::vector<int64_t> begin =
      ids_before_keys(call.prepared.bounds, x.batch_size, call.stream);
  int64_t rows = 0;
  for (int64_t key : keys.keys) rows += begin[key + 1] - begin[key];
  return rows;
}

// Has the owners pool the rows of pushed tiers, and adds their partial sums to `out`.
void forward_push(const Call& call, const Output& out) {
  const Range range("oper push");
  Tables& tables = call.tables;
  // Not in the batch plan's own memory, which may already contain the plan.
  const Tensor memory = tables.empty(call.work.bytes, ScalarType::Byte);
  Workspace work = lay_out(call.context, call.batch, memory.data_ptr());
  PushPlan& push = work.push;
  const auto find_messages = [&] {
    push.requests = static_cast<char* const*>(tables.requests->data_ptr());
    push.partials = static_cast<char* const*>(tables.partials->data_ptr());
    push.request_bytes = push.partial_bytes = tables.partial_bytes;
  };
  const std::optional<Tensor> requests = tables.requests, partials = tables.partials;
  find_messages();
  publish_requests(call.launch(), call.batch, work.plan, push,
                   static_cast<int64_t*>(call.prepared.bounds.data_ptr()), call.work.plan.refused);
  at(tables, Point::kRequests);  // with other domains, the hook replaces both addresses
  barrier(call);
  find_messages();
  pool_for_readers(call.launch(), push);
  at(tables, Point::kPartials);
  barrier(call);
  find_messages();
  add_partials(call.launch(), call.batch, work.plan, push, out);
  tables.requests = requests;
  tables.partials = partials;
}

std::tuple<Tensor, Tensor, int64_t, int64_t> forward(Tables& tables, const Lookup& x,
                                                     const Tensor& lengths, bool collective,
                                                     std::shared_ptr<Prepared> prepared) {
  const cudaStream_t stream = stream_of(*tables.like);
  stop_at_errors(tables, collective);
  if (!prepared || !prepared->fits(stream))
    prepared = prepare(tables, x, make_bounds_of(tables, lengths, x.ids.numel(), stream), stream);
  Call call = call_of(tables, x, *prepared, stream);
  const UnderWay under_way(call);
  const int64_t columns = x.pooled ? call.context.output_columns : call.context.unpooled_columns;
  const Tensor out =
      torch::stable::new_empty(*tables.like, {output_rows(call, x), columns}, ScalarType::Float);
  const Output output{static_cast<float*>(out.data_ptr()), columns, out.size(0)};
  // The batch's plan is needed for staging, and in every kMeasuredEvery-th step for measuring how
  // often rows repeat.
  if (prepared->by_pair || tables.counts ||
      (call.context.view.world_size > 1 && tables.num_forward % kMeasuredEvery == 0))
    plan(call);
  ++tables.num_forward;
  const bool pushes = collective && call.context.has_push && x.pooled;
  if (!x.pooled && !prepared->is_planned)
    lay_out_features(call.launch(), call.batch, call.work.plan);
  std::optional<Tensor> memory;
  const Staging staging = stage_rows(call, pushes ? Point::kPulledRows : Point::kRows, &memory);
  {
    const Range range("oper pooling");
    pool(call.launch(), call.batch, call.work.plan, output, staging, pushes);
  }
  if (pushes) forward_push(call, output);
  if (collective) tables.kept = prepared;
  return {out, prepared->bounds, 0, 0};
}

// `oper::fault_of` for tables of this back end. Torch chooses the back end by the device of the
// batch, so that `handle` may belong to another one.
Fault fault_of(int64_t handle, const Tensor& ids, const Tensor& lengths,
               const std::optional<Tensor>& weights, const Tensor& key_of, int64_t batch_size) {
  if (!tables_of_device().is_one(handle)) return kElsewhere;
  return oper::fault_of(tables_of(handle)->like->device(), ids, lengths, weights, key_of,
                        batch_size);
}

// An empty tensor, returned in place of the results of a refused batch.
Tensor nothing(const Tensor& like) { return torch::stable::new_empty(like, {0}, ScalarType::Long); }

std::tuple<Tensor, Tensor, int64_t, int64_t> lookup_forward(
    int64_t handle, Tensor ids, Tensor lengths, std::optional<Tensor> weights, Tensor key_of,
    int64_t batch_size, bool pooled, bool collective, std::optional<Tensor> offsets,
    std::optional<Tensor> addresses, std::optional<Tensor> bags, std::optional<Tensor> samples) {
  (void)offsets;  // the addresses contain them
  STD_TORCH_CHECK(!bags && !samples, "internal: tables in device memory do not share bags");
  if (const Fault fault = fault_of(handle, ids, lengths, weights, key_of, batch_size))
    return {nothing(ids), nothing(ids), kBadBatch, fault};
  const OnTables tables(handle);
  try {
    return forward(*tables, {ids, weights, key_of, batch_size, pooled}, lengths, collective,
                   made_ahead(addresses));
  } catch (const Status& status) {
    return {nothing(ids), nothing(ids), status.code, status.detail};
  }
}

// ---- batches that are resolved before, and the gradient of weights ------------------------------

std::tuple<Tensor, Tensor, Tensor, int64_t, int64_t> lookup_resolve(
    int64_t handle, Tensor ids, Tensor lengths, std::optional<Tensor> weights, Tensor key_of,
    int64_t batch_size, bool pooled, bool with_order) {
  if (const Fault fault = fault_of(handle, ids, lengths, weights, key_of, batch_size))
    return {nothing(ids), nothing(ids), nothing(ids), kBadBatch, fault};
  const OnTables tables(handle);
  try {
    stop_at_errors(*tables);
    const Lookup x{ids, weights, key_of, batch_size, pooled};
    const cudaStream_t stream = tables.stream();
    auto prepared =
        prepare(*tables, x, make_bounds_of(*tables, lengths, ids.numel(), stream), stream, true);
    if (with_order) {
      Call call = call_of(*tables, x, *prepared, stream);
      plan(call);
    }
    check(cudaEventCreateWithFlags(&prepared->ready, cudaEventDisableTiming),
          "cannot create an event");
    check(cudaEventRecord(prepared->ready, stream), "cannot record an event");
    prepared->in_graph = is_captured(stream);
    using Held = std::shared_ptr<Prepared>;
    const Tensor bounds = prepared->bounds;
    const Tensor held = tensor_at(new Held(std::move(prepared)), {sizeof(Held)}, ScalarType::Byte,
                                  kHostMemory, [](void* data) { delete static_cast<Held*>(data); });
    return {bounds, held, held, 0, 0};
  } catch (const Status& status) {
    return {nothing(ids), nothing(ids), nothing(ids), status.code, status.detail};
  }
}

// The batch's Prepared: that of `lookup_resolve`, or of the forward pass, or a new one.
std::shared_ptr<Prepared> known_or_new(Tables& tables, const Lookup& x, const Tensor& offsets,
                                       const std::optional<Tensor>& addresses,
                                       cudaStream_t stream) {
  if (auto ahead = made_ahead(addresses); ahead && ahead->fits(stream)) return ahead;
  const auto& kept = tables.kept;
  if (kept && kept->fits(stream) && kept->bounds.data_ptr() == offsets.data_ptr() &&
      kept->ids == x.ids.data_ptr() &&
      kept->weights == (x.weights ? x.weights->data_ptr() : nullptr))
    return kept;
  return prepare(tables, x, offsets, stream);
}

std::tuple<Tensor, int64_t, int64_t> lookup_weight_gradient(int64_t handle, Tensor grad, Tensor ids,
                                                            Tensor offsets, Tensor weights,
                                                            Tensor key_of, int64_t batch_size) {
  const OnTables tables(handle);
  const Tensor out = tables->empty(ids.numel(), ScalarType::Float);
  try {
    const cudaStream_t stream = tables.stream();
    const std::optional<Tensor> some = weights;
    const Lookup x{ids, some, key_of, batch_size, true};
    const auto prepared = known_or_new(*tables, x, offsets, std::nullopt, stream);
    Call call = call_of(*tables, x, *prepared, stream);
    const UnderWay under_way(call);
    if (prepared->by_pair || tables->counts) plan(call);
    std::optional<Tensor> memory;
    const Staging staging = stage_rows(call, Point::kWeightRows, &memory);
    weight_gradient(call.launch(), call.batch, call.work.plan,
                    {float_data(grad), grad.stride(0), 1.0f}, float_data(out), staging);
    return {out, 0, 0};
  } catch (const Status& status) {
    return {out, status.code, status.detail};
  }
}

// ---- backward -----------------------------------------------------------------------------------

// Copies the optimizers' arguments to the device if they have changed.
void stage_optimizers(Tables& tables, const Tensor& optimizers, cudaStream_t stream) {
  const Context& context = *tables.context;
  const std::vector<int32_t>& order = context.order;
  STD_TORCH_CHECK(optimizers.scalar_type() == ScalarType::Double &&
                      optimizers.numel() == static_cast<int64_t>(order.size()) * kOptimizerWidth,
                  "internal: optimizers must be float64 [T, ", int64_t{kOptimizerWidth}, "]");
  const double* from = static_cast<const double*>(optimizers.data_ptr());
  std::vector<double> wanted;
  std::vector<UpdateArgs> arguments;
  for (size_t t = 0; t < order.size(); ++t) {
    const double* x = from + order[t] * kOptimizerWidth;
    wanted.insert(wanted.end(), x, x + kOptimizerWidth);
    // Only the rounding of 16-bit rows depends on the step's number.
    if (context.message_tables[t].row_type == RowType::kFloat32) wanted.back() = 0.0;
    const double* kept = wanted.data() + t * kOptimizerWidth;
    arguments.push_back({optimizer_args(kept), rounding_key(kept)});
  }
  if (wanted == tables.staged) return;
  if (is_captured(stream)) throw Status{kNewArguments, 0};
  const uint32_t settings = settings_of(from, order.size());
  const char* what = "cannot copy the optimizer's arguments";
  copy_to_device(context.optimizers, arguments, stream, what);
  copy_to_device(context.settings, std::vector{settings}, stream, what);
  if (tables.messages) tables.messages->settings = settings;
  tables.staged = std::move(wanted);
  tables.all_row_wise_adagrad = std::ranges::all_of(arguments, [](const UpdateArgs& x) {
    return x.optimizer.kind == Optimizer::kRowWiseAdagrad;
  });
}

// Exchanges gradients; updates rows, replicas and directories of keys.
void exchange_gradients(Call& call, float scale, const std::optional<KeyUpdate>& keys) {
  const Range range("oper exchange and update");
  Tables& tables = call.tables;
  STD_TORCH_CHECK(tables.lists, "internal: tables that are not trained got gradients");
  call.lists = lay_out_receive_lists(call.context, tables.lists->data_ptr());
  const ReceiveLists& lists = *call.lists;
  if (tables.has_chains) clear_receive_lists(call.context, lists, call.stream);
  tables.has_chains = true;  // unless this step succeeds
  at(tables, Point::kGradients);
  barrier(call);
  if (keys) update_keys(call, *keys);
  collect(call.launch(), lists);
  at(tables, Point::kCollected);
  for (int64_t round = 0; round < tables.num_squares; ++round) {
    merge_squares(call.launch(), lists, scale, static_cast<int32_t>(round));
    barrier(call);
    // In a single domain, kernels add up the sums of all ranks where they need a row's total.
    if (call.context.view.local == nullptr) continue;
    at(tables, Point::kSquares, round);
    barrier(call);
  }
  merge_and_update(call.launch(), lists, scale);
  if (call.context.view.changed != nullptr) mark_merged(call.launch(), lists);
  barrier(call);
  at(tables, Point::kUpdated);
  refresh(call.launch());
  if (keys) begin_rows(call.launch(), keys->keys->view);
  if (tables.shares || keys) barrier(call);
  tables.has_chains = false;
}

std::tuple<int64_t, int64_t> lookup_backward(int64_t handle, std::vector<Tensor> grads, Tensor ids,
                                             Tensor offsets, std::optional<Tensor> weights,
                                             Tensor key_of, int64_t batch_size, bool pooled,
                                             Tensor optimizers, double gradient_scale,
                                             std::optional<Tensor> addresses,
                                             std::optional<Tensor> order, int64_t updates,
                                             std::optional<Tensor> bags,
                                             std::optional<Tensor> samples) {
  (void)order;  // the addresses contain it
  STD_TORCH_CHECK(!bags && !samples, "internal: tables in device memory do not share bags");
  STD_TORCH_CHECK(updates % 2 == 1,
                  "internal: tables in device memory do not keep gradients for a later update");
  STD_TORCH_CHECK(grads.size() == 1, "internal: expected one gradient");
  const OnTables tables(handle);
  try {
    const cudaStream_t stream = tables.stream();
    // It is only for this pass, even if that ends with an error.
    const std::optional<KeyUpdate> keys = std::exchange(tables->key_update, std::nullopt);
    stop_at_errors(*tables, true);
    const Lookup x{ids, weights, key_of, batch_size, pooled};
    const auto prepared = known_or_new(*tables, x, offsets, addresses, stream);
    tables->kept = nullptr;
    Call call = call_of(*tables, x, *prepared, stream);
    const UnderWay under_way(call);
    plan(call);
    stage_optimizers(*tables, optimizers, stream);
    if (keys) leave_keys(call, *keys);
    const bool at_once = call.context.updates_at_once;
    const bool marks = call.context.view.changed != nullptr;
    if (!marks && is_captured(stream)) tables->is_unmarked = true;
    if (at_once && marks) mark_runs(call.launch(), call.batch, call.work.plan);
    if (at_once) at(*tables, Point::kCollected);
    const float scale = static_cast<float>(gradient_scale);
    {
      const Range range("oper reduction");
      reduce(call.launch(), call.batch, call.work.plan,
             {float_data(grads[0]), grads[0].stride(0), scale}, call.work.long_runs, at_once);
    }
    if (!at_once) {
      exchange_gradients(call, scale, keys);
    } else if (keys) {
      update_keys(call, *keys);
      begin_rows(call.launch(), keys->keys->view);
    }
    return {0, 0};
  } catch (const Status& status) {
    return {status.code, status.detail};
  }
}

}  // namespace
}  // namespace oper::device

// In tests without a GPU, tensors are in host memory: the dispatcher could not tell the back ends
// apart, so that the operators have other names.
#if defined(OPER_EMULATED)
STABLE_TORCH_LIBRARY(oper_emulated, m) {
  m.def(oper::kLookupForward);
  m.def(oper::kLookupResolve);
  m.def(oper::kLookupWeightGradient);
  m.def(oper::kLookupBackward);
}
STABLE_TORCH_LIBRARY_IMPL(oper_emulated, CompositeExplicitAutograd, m) {
#else
// See the end of csrc/bindings/lookup.cpp.
STABLE_TORCH_LIBRARY_IMPL(oper, AutogradCUDA, m) {
  m.impl("lookup_forward", TORCH_BOX(&oper::device::lookup_forward));
  m.impl("lookup_backward", TORCH_BOX(&oper::device::lookup_backward));
}
STABLE_TORCH_LIBRARY_IMPL(oper, CUDA, m) {
#endif
  m.impl("lookup_forward", TORCH_BOX(&oper::device::lookup_forward));
  m.impl("lookup_resolve", TORCH_BOX(&oper::device::lookup_resolve));
  m.impl("lookup_weight_gradient", TORCH_BOX(&oper::device::lookup_weight_gradient));
  m.impl("lookup_backward", TORCH_BOX(&oper::device::lookup_backward));
}
