// torch operators of the device back end, on libtorch's stable ABI.
//
// Every operator launches on the current stream and returns; none waits for the device. Python
// holds the memory (arena, workspace, outputs); see oper/shmem/device_tables.py.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "common/handles.h"
#include "device/context.h"
#if !defined(OPER_EMULATED)
#include "device/memory.h"
#endif
#include "common/description.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace oper::device {
namespace {

struct Owned {
  std::vector<Tensor> keep_alive;  // head maps
  std::unique_ptr<Context> context;
};

Handles<Owned>& contexts() {
  // Never freed: other threads may still be in an operator when the process ends.
  static auto* instance = new Handles<Owned>;
  return *instance;
}

Context& context_of(int64_t handle) { return *contexts().at(handle).context; }

cudaStream_t stream_of(const Tensor& tensor) {
#if defined(OPER_EMULATED)
  (void)tensor;
  return nullptr;
#else
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
#endif
}

int64_t device_context_create(int64_t rank, int64_t world_size, Tensor tables, Tensor owner_begin,
                              Tensor tiers, Tensor maps, Tensor features, Tensor refreshes,
                              Tensor touched, Tensor squares, Tensor outboxes, int64_t outbox_bytes,
                              std::vector<Tensor> heads, Tensor pads, int64_t deadline_ms,
                              int64_t arena, int64_t arena_bytes) {
  Description d{};
  d.tables = int64_data(tables);
  d.owner_begin = int64_data(owner_begin);
  d.tiers = int64_data(tiers);
  d.maps = int64_data(maps);
  d.features = int64_data(features);
  d.refreshes = int64_data(refreshes);
  d.touched = int64_data(touched);
  d.squares = int64_data(squares);
  d.outboxes = int64_data(outboxes);
  d.pads = int64_data(pads);
  d.num_tables = tables.size(0);
  d.num_tiers = tiers.size(0);
  d.num_maps = maps.numel() / 2;
  d.num_features = features.size(0);
  d.num_refreshes = refreshes.size(0);
  for (const Tensor& head : heads) {
    d.heads.push_back(head.data_ptr());
    d.head_sizes.push_back(head.numel());
  }
  d.outbox_bytes = outbox_bytes;
  d.arena_begin = arena;
  d.arena_bytes = arena_bytes;
  d.rank = static_cast<int32_t>(rank);
  d.world_size = static_cast<int32_t>(world_size);
  auto owned = std::make_unique<Owned>();
  owned->keep_alive = heads;
  owned->context = std::make_unique<Context>(d, deadline_ms);
  return contexts().add(std::move(owned));
}

void device_context_close(int64_t handle) { contexts().close(handle); }

// Code, rank and detail of the first error since creation; reads host memory only.
std::tuple<int64_t, int64_t, int64_t> device_context_error(int64_t handle) {
  const ErrorWord error = context_of(handle).error();
  return {error.code, error.rank, error.detail};
}

// The plan's table number of every table in the order that `device_update` takes optimizers in.
std::vector<int64_t> device_context_order(int64_t handle) {
  const auto& order = context_of(handle).order();
  return {order.begin(), order.end()};
}

// Whether one rank updates while it reduces, so that it needs no exchange.
bool device_context_updates_at_once(int64_t handle) { return context_of(handle).updates_at_once(); }

// Pairs and distinct rows of the last batch whose plan the device has made; reads host memory only.
std::tuple<int64_t, int64_t> device_context_duplication(int64_t handle) {
  const int64_t* found = context_of(handle).duplication();
  return {found[0], found[1]};
}

// ---- batches ------------------------------------------------------------------------------------

// What identifies a batch: ids (int64 or int32 [N]), bounds (int64 [num_keys * B + 1]), key_of
// (int32 [F]), weights, by_pair (whether the plan tells where each id's row is staged), and
// max_pairs, a bound on the ids of all features together.
Batch make_batch(const Tensor& ids, const Tensor& bounds, const Tensor& key_of,
                 const std::optional<Tensor>& weights, int64_t batch_size, bool pooled,
                 bool by_pair, int64_t max_pairs) {
  Batch batch{};
  batch.ids = ids.data_ptr();
  batch.ids_are_32_bit = ids.scalar_type() == ScalarType::Int;
  batch.num_ids = ids.numel();
  batch.bounds = int64_data(bounds);
  batch.num_bounds = bounds.numel();
  STD_TORCH_CHECK(key_of.scalar_type() == ScalarType::Int, "internal: key_of must be int32");
  batch.key_of = static_cast<const int32_t*>(key_of.data_ptr());
  batch.weights = weights.has_value() ? static_cast<const float*>(weights->data_ptr()) : nullptr;
  batch.batch_size = batch_size;
  batch.pooled = pooled;
  batch.by_pair = by_pair || batch.weights != nullptr;
  batch.max_pairs = max_pairs;
  return batch;
}

// A batch of that size, of which only the workspace matters.
Batch sized_batch(int64_t batch_size, int64_t max_pairs, bool weighted, bool by_pair) {
  static const float some = 0.0f;
  Batch batch{};
  batch.batch_size = batch_size;
  batch.max_pairs = max_pairs;
  batch.weights = weighted ? &some : nullptr;
  batch.by_pair = by_pair || weighted;
  return batch;
}

int64_t device_workspace_bytes(int64_t handle, int64_t batch_size, int64_t max_pairs, bool weighted,
                               bool by_pair) {
  return carve(context_of(handle), sized_batch(batch_size, max_pairs, weighted, by_pair), nullptr)
      .bytes;
}

int64_t device_bounds_scratch_bytes(int64_t count) { return bounds_scratch_bytes(count); }

void device_bounds(int64_t handle, Tensor lengths, int64_t num_ids, Tensor bounds, Tensor scratch) {
  make_bounds(lengths.data_ptr(), lengths.scalar_type() == ScalarType::Int, lengths.numel(), num_ids,
              static_cast<int64_t*>(bounds.data_ptr()), scratch.data_ptr(), scratch.numel(),
              context_of(handle).view().error, stream_of(bounds));
}

// Everything that an operator on a batch needs.
struct Call {
  Context& context;
  Batch batch;
  Workspace work;
  cudaStream_t stream;
};

Call make_call(int64_t handle, const Tensor& ids, const Tensor& bounds, const Tensor& key_of,
               const std::optional<Tensor>& weights, int64_t batch_size, bool pooled, bool by_pair,
               int64_t max_pairs, const Tensor& workspace) {
  Context& context = context_of(handle);
  const Batch batch =
      make_batch(ids, bounds, key_of, weights, batch_size, pooled, by_pair, max_pairs);
  const Workspace work = carve(context, batch, workspace.data_ptr());
  STD_TORCH_CHECK(work.bytes <= workspace.numel(), "internal: the workspace is too small");
  STD_TORCH_CHECK(
      bits_for(static_cast<uint64_t>(context.view().num_features)) + work.plan.bag_bits <= 32,
      "a batch of ", batch_size, " samples with ", context.view().num_features,
      " features is too large: samples times features must stay below 2^32");
  return {context, batch, work, stream_of(bounds)};
}

PushPlan with_memory(const Call& call, const Tensor& requests, const Tensor& partials,
                     int64_t request_bytes, int64_t partial_bytes) {
  PushPlan push = call.work.push;
  push.requests = static_cast<char* const*>(requests.data_ptr());
  push.partials = static_cast<char* const*>(partials.data_ptr());
  push.request_bytes = request_bytes;
  push.partial_bytes = partial_bytes;
  return push;
}

float* float_data(const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Float, "internal: expected float32");
  return static_cast<float*>(tensor.data_ptr());
}

Output output_of(const Tensor& out) {
  return {float_data(out), out.dim() == 2 ? out.stride(0) : 0};
}

// Rows of other memory domains that were received, or none.
FarRows far_rows(const std::optional<Tensor>& stretches, const std::optional<Tensor>& rows,
                 int64_t num_rows) {
  if (!stretches.has_value() || !rows.has_value()) return {nullptr, 0, 0, nullptr};
  return {int64_data(*stretches), stretches->size(0), num_rows,
          static_cast<const char*>(rows->data_ptr())};
}

// Where rows are staged, once they are: those of peers in the first `near_bytes`.
Staging stage_rows(const Call& call, const std::optional<Tensor>& staging, int64_t near_bytes,
                   bool skip_pushed, const FarRows& far) {
  if (!staging.has_value()) return {nullptr, 0};
  const View& view = call.context.view();
  const Staging staged{static_cast<char*>(staging->data_ptr()), staging->numel()};
  STD_TORCH_CHECK(staged.bytes / kStagingUnit < static_cast<int64_t>(kNotStaged),
                  "internal: too much staging memory");
  clear_staging(call.batch, call.work.plan, call.stream);
  place_far_rows(view, call.work.plan, far, staged, call.stream);
  if (near_bytes > 0)
    stage(view, call.context.classes(), call.batch, call.work.plan, {staged.data, near_bytes},
          skip_pushed, call.stream);
  return staged;
}

void device_forward(int64_t handle, Tensor ids, Tensor bounds, Tensor key_of,
                    std::optional<Tensor> weights, int64_t batch_size, bool pooled, bool by_pair,
                    int64_t max_pairs, Tensor workspace, Tensor out, bool skip_pushed,
                    std::optional<Tensor> staging, int64_t near_bytes,
                    std::optional<Tensor> stretches, std::optional<Tensor> received,
                    int64_t num_far) {
  const Call call = make_call(handle, ids, bounds, key_of, weights, batch_size, pooled, by_pair,
                              max_pairs, workspace);
  const View& view = call.context.view();
  if (!pooled) lay_out_features(view, call.batch, call.work.plan, call.stream);
  const Staging staged =
      stage_rows(call, staging, near_bytes, skip_pushed, far_rows(stretches, received, num_far));
  pool(view, call.context.classes(), call.batch, call.work.plan, output_of(out), staged, skip_pushed,
       call.stream);
}

// Steps of push mode: 0 publish requests, 1 pool for the readers, 2 add the owners' sums.
void device_push(int64_t handle, int64_t step, Tensor ids, Tensor bounds, Tensor key_of,
                 std::optional<Tensor> weights, int64_t batch_size, int64_t max_pairs,
                 Tensor workspace, Tensor out, Tensor requests, Tensor partials,
                 int64_t request_bytes, int64_t partial_bytes) {
  const Call call = make_call(handle, ids, bounds, key_of, weights, batch_size, true, false,
                              max_pairs, workspace);
  const PushPlan push = with_memory(call, requests, partials, request_bytes, partial_bytes);
  const View& view = call.context.view();
  const auto& classes = call.context.classes();
  if (step == 0) publish_requests(view, call.batch, call.work.plan, push, call.stream);
  if (step == 1) pool_for_readers(view, classes, push, call.stream);
  if (step == 2)
    add_partials(view, classes, call.batch, call.work.plan, push, output_of(out), call.stream);
}

void device_weight_gradient(int64_t handle, Tensor ids, Tensor bounds, Tensor key_of,
                            std::optional<Tensor> weights, int64_t batch_size, bool pooled,
                            bool by_pair, int64_t max_pairs, Tensor workspace, Tensor grad,
                            Tensor out, std::optional<Tensor> staging,
                            std::optional<Tensor> stretches, std::optional<Tensor> received,
                            int64_t num_far) {
  const Call call = make_call(handle, ids, bounds, key_of, weights, batch_size, pooled, by_pair,
                              max_pairs, workspace);
  const Staging staged = stage_rows(call, staging, 0, false, far_rows(stretches, received, num_far));
  weight_gradient(call.context.view(), call.batch, call.work.plan,
                  {float_data(grad), grad.stride(0), 1.0f}, float_data(out), staged, call.stream);
}

// Where in a workspace a planned batch, and the owner's lists of an update, are: bytes, in the order
// of PLAN_PARTS in oper/shmem/device_batch.py; keys_are_wide and the lists' capacity are numbers.
std::vector<int64_t> device_plan_parts(int64_t handle, int64_t batch_size, int64_t max_pairs,
                                       bool weighted, bool by_pair) {
  const Workspace work =
      carve(context_of(handle), sized_batch(batch_size, max_pairs, weighted, by_pair), nullptr);
  return work.parts;
}

// Rows of this rank for ranks of other domains, see AskedRows.
void device_pack_rows(int64_t handle, Tensor stretches, Tensor slots, Tensor out) {
  pack_rows(context_of(handle).view(),
            {int64_data(stretches), stretches.size(0), slots.numel(),
             static_cast<const uint32_t*>(slots.data_ptr()), static_cast<char*>(out.data_ptr())},
            stream_of(out));
}

void device_plan(int64_t handle, Tensor ids, Tensor bounds, Tensor key_of,
                 std::optional<Tensor> weights, int64_t batch_size, bool pooled, bool by_pair,
                 int64_t max_pairs, Tensor workspace) {
  const Call call = make_call(handle, ids, bounds, key_of, weights, batch_size, pooled, by_pair,
                              max_pairs, workspace);
  make_plan(call.context.view(), call.context.num_keys(), call.batch, call.work.plan, call.stream);
}

// float64 [T, 13] in the order of keys, host memory -> what the kernels read.
void device_set_optimizers(int64_t handle, Tensor arguments, Tensor staging) {
  Context& context = context_of(handle);
  const double* data = static_cast<const double*>(arguments.data_ptr());
  UpdateArgs* to = static_cast<UpdateArgs*>(staging.data_ptr());
  const int64_t count = context.view().num_tables;
  STD_TORCH_CHECK(staging.numel() >= count * static_cast<int64_t>(sizeof(UpdateArgs)),
                  "internal: the staging buffer is too small");
  for (int64_t t = 0; t < count; ++t) {
    const double* x = data + t * kOptimizerWidth;
    to[t] = {optimizer_args(x), rounding_key(x)};
  }
}

// Copies staged optimizer arguments; `like` names the device.
void device_copy_optimizers(int64_t handle, Tensor staging, Tensor like) {
  Context& context = context_of(handle);
  check(cudaMemcpyAsync(context.optimizers(), staging.data_ptr(),
                        static_cast<size_t>(context.view().num_tables) * sizeof(UpdateArgs),
                        cudaMemcpyHostToDevice, stream_of(like)),
        "cannot copy the optimizer's arguments");
}

void device_reduce(int64_t handle, Tensor ids, Tensor bounds, Tensor key_of,
                   std::optional<Tensor> weights, int64_t batch_size, bool pooled, bool by_pair,
                   int64_t max_pairs, Tensor workspace, Tensor grad, double scale) {
  const Call call = make_call(handle, ids, bounds, key_of, weights, batch_size, pooled, by_pair,
                              max_pairs, workspace);
  reduce(call.context.view(), call.context.classes(), call.batch, call.work.plan,
         {float_data(grad), grad.stride(0), static_cast<float>(scale)}, call.work.long_runs,
         call.context.optimizers(), call.context.updates_at_once(), call.stream);
}

// Steps at the owner: 0 collect what all ranks left, 1 and 2 sums of squares (rounds 0 and 1),
// 3 update, 4 refresh replicas.
void device_update(int64_t handle, int64_t step, Tensor bounds, int64_t batch_size,
                   int64_t max_pairs, bool weighted, bool by_pair, Tensor workspace, double scale) {
  Context& context = context_of(handle);
  const Batch batch = sized_batch(batch_size, max_pairs, weighted, by_pair);
  const Workspace work = carve(context, batch, workspace.data_ptr());
  const cudaStream_t stream = stream_of(bounds);
  const float factor = static_cast<float>(scale);
  if (step == 0) collect(context.view(), work.inbox, stream);
  if (step == 1 || step == 2)
    merge_squares(context.view(), context.classes(), work.inbox, factor, context.optimizers(),
                  static_cast<int32_t>(step - 1), stream);
  if (step == 3)
    merge_and_update(context.view(), context.classes(), work.inbox, factor, context.optimizers(),
                     stream);
  if (step == 4) refresh(context.view(), stream);
}

// View [rows, columns] of device memory; the caller keeps the mapping alive. Index -1: host memory.
Tensor device_view(int64_t address, int64_t rows, int64_t columns, int64_t type, int64_t index) {
  const int64_t sizes[] = {rows, columns}, strides[] = {columns, 1};
  const ScalarType types[] = {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16};
  const auto kind =
      index < 0 ? torch::headeronly::DeviceType::CPU : torch::headeronly::DeviceType::CUDA;
  return torch::stable::from_blob(reinterpret_cast<void*>(address), {sizes, 2}, {strides, 2},
                                  torch::stable::Device(kind, static_cast<int32_t>(index)),
                                  types[type]);
}

#if !defined(OPER_EMULATED)
// Address of new memory, then the descriptors by which other processes attach it.
std::vector<int64_t> device_memory_create(int64_t bytes, std::vector<int64_t> host_ranges,
                                          int64_t device) {
  SharedMemory memory = create_shared({bytes, std::move(host_ranges)}, static_cast<int>(device));
  memory.fds.insert(memory.fds.begin(), memory.address);
  return memory.fds;
}
int64_t device_memory_attach(std::vector<int64_t> fds, int64_t bytes,
                             std::vector<int64_t> host_ranges, int64_t device) {
  return attach_shared(fds, {bytes, std::move(host_ranges)}, static_cast<int>(device));
}
void device_memory_release(int64_t address, int64_t bytes, std::vector<int64_t> host_ranges) {
  release_shared(address, {bytes, std::move(host_ranges)});
}
#endif

void device_barrier(int64_t handle, Tensor like) { context_of(handle).barrier(stream_of(like)); }

}  // namespace
}  // namespace oper::device

STABLE_TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def(
      "device_context_create(int rank, int world_size, Tensor tables, Tensor owner_begin, "
      "Tensor tiers, Tensor maps, Tensor features, Tensor refreshes, Tensor touched, "
      "Tensor squares, Tensor outboxes, int outbox_bytes, Tensor[] heads, Tensor pads, "
      "int deadline_ms, int arena, int arena_bytes) -> int");
  m.def("device_context_close(int handle) -> ()");
  m.def("device_context_error(int handle) -> (int, int, int)");
  m.def("device_context_order(int handle) -> int[]");
  m.def("device_context_updates_at_once(int handle) -> bool");
  m.def("device_context_duplication(int handle) -> (int, int)");
  m.def(
      "device_workspace_bytes(int handle, int batch_size, int max_pairs, bool weighted, "
      "bool by_pair) -> int");
  m.def("device_bounds_scratch_bytes(int count) -> int");
  m.def(
      "device_bounds(int handle, Tensor lengths, int num_ids, Tensor(a!) bounds, "
      "Tensor(b!) scratch) -> ()");
  m.def(
      "device_forward(int handle, Tensor ids, Tensor bounds, Tensor key_of, Tensor? weights, "
      "int batch_size, bool pooled, bool by_pair, int max_pairs, Tensor(a!) workspace, "
      "Tensor(b!) out, bool skip_pushed, Tensor(c!)? staging, int near_bytes, "
      "Tensor? stretches, Tensor? received, int num_far) -> ()");
  m.def(
      "device_push(int handle, int step, Tensor ids, Tensor bounds, Tensor key_of, "
      "Tensor? weights, int batch_size, int max_pairs, Tensor(a!) workspace, Tensor(b!) out, "
      "Tensor requests, Tensor partials, int request_bytes, int partial_bytes) -> ()");
  m.def(
      "device_weight_gradient(int handle, Tensor ids, Tensor bounds, Tensor key_of, "
      "Tensor? weights, int batch_size, bool pooled, bool by_pair, int max_pairs, "
      "Tensor(a!) workspace, Tensor grad, Tensor(b!) out, Tensor(c!)? staging, "
      "Tensor? stretches, Tensor? received, int num_far) -> ()");
  m.def(
      "device_plan_parts(int handle, int batch_size, int max_pairs, bool weighted, bool by_pair) "
      "-> int[]");
  m.def(
      "device_pack_rows(int handle, Tensor stretches, Tensor slots, Tensor(a!) out) -> ()");
  m.def(
      "device_plan(int handle, Tensor ids, Tensor bounds, Tensor key_of, Tensor? weights, "
      "int batch_size, bool pooled, bool by_pair, int max_pairs, Tensor(a!) workspace) -> ()");
  m.def("device_set_optimizers(int handle, Tensor arguments, Tensor(a!) staging) -> ()");
  m.def("device_copy_optimizers(int handle, Tensor staging, Tensor like) -> ()");
  m.def(
      "device_reduce(int handle, Tensor ids, Tensor bounds, Tensor key_of, Tensor? weights, "
      "int batch_size, bool pooled, bool by_pair, int max_pairs, Tensor(a!) workspace, "
      "Tensor grad, float scale) -> ()");
  m.def(
      "device_update(int handle, int step, Tensor bounds, int batch_size, int max_pairs, "
      "bool weighted, bool by_pair, Tensor(a!) workspace, float scale) -> ()");
#if !defined(OPER_EMULATED)
  m.def("device_memory_create(int bytes, int[] host_ranges, int device) -> int[]");
  m.def("device_memory_attach(int[] fds, int bytes, int[] host_ranges, int device) -> int");
  m.def("device_memory_release(int address, int bytes, int[] host_ranges) -> ()");
#endif
  m.def("device_view(int address, int rows, int columns, int type, int index) -> Tensor");
  m.def("device_barrier(int handle, Tensor like) -> ()");
}

// The same for every device type: what the memory behind the tensors is decides.
STABLE_TORCH_LIBRARY_IMPL(oper, CompositeExplicitAutograd, m) {
  m.impl("device_context_create", TORCH_BOX(&oper::device::device_context_create));
  m.impl("device_context_close", TORCH_BOX(&oper::device::device_context_close));
  m.impl("device_context_error", TORCH_BOX(&oper::device::device_context_error));
  m.impl("device_context_order", TORCH_BOX(&oper::device::device_context_order));
  m.impl("device_context_updates_at_once",
         TORCH_BOX(&oper::device::device_context_updates_at_once));
  m.impl("device_context_duplication", TORCH_BOX(&oper::device::device_context_duplication));
  m.impl("device_workspace_bytes", TORCH_BOX(&oper::device::device_workspace_bytes));
  m.impl("device_bounds_scratch_bytes", TORCH_BOX(&oper::device::device_bounds_scratch_bytes));
  m.impl("device_bounds", TORCH_BOX(&oper::device::device_bounds));
  m.impl("device_forward", TORCH_BOX(&oper::device::device_forward));
  m.impl("device_push", TORCH_BOX(&oper::device::device_push));
  m.impl("device_weight_gradient", TORCH_BOX(&oper::device::device_weight_gradient));
  m.impl("device_plan", TORCH_BOX(&oper::device::device_plan));
  m.impl("device_plan_parts", TORCH_BOX(&oper::device::device_plan_parts));
  m.impl("device_pack_rows", TORCH_BOX(&oper::device::device_pack_rows));
  m.impl("device_set_optimizers", TORCH_BOX(&oper::device::device_set_optimizers));
  m.impl("device_copy_optimizers", TORCH_BOX(&oper::device::device_copy_optimizers));
  m.impl("device_reduce", TORCH_BOX(&oper::device::device_reduce));
  m.impl("device_update", TORCH_BOX(&oper::device::device_update));
#if !defined(OPER_EMULATED)
  m.impl("device_memory_create", TORCH_BOX(&oper::device::device_memory_create));
  m.impl("device_memory_attach", TORCH_BOX(&oper::device::device_memory_attach));
  m.impl("device_memory_release", TORCH_BOX(&oper::device::device_memory_release));
#endif
  m.impl("device_view", TORCH_BOX(&oper::device::device_view));
  m.impl("device_barrier", TORCH_BOX(&oper::device::device_barrier));
}
