// torch operators that create, query and close tables in device memory. Python owns the memory, see
// oper/shmem/device/tables.py.
#include <algorithm>
#include <iterator>
#include <set>
#include <tuple>
#include <utility>

#include "bindings/device/tables.h"
#include "common/operators.h"

namespace oper::device {

cudaStream_t stream_of(const Tensor& tensor) {
#if defined(OPER_EMULATED)
  (void)tensor;
  return emulation::current_stream;
#else
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
#endif
}

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "cannot ask a stream for its graph");
  return status != cudaStreamCaptureStatusNone;
}

OnDevice::OnDevice(const Tables& tables) : OnDevice(tables.like->get_device_index()) {
#if defined(OPER_EMULATED)
  emulation::device = {tables.rank, tables.neighbours};
#endif
}

bool Prepared::fits(cudaStream_t stream) const {
  return ready == nullptr || is_captured(stream) == in_graph;
}

void Prepared::use_on(cudaStream_t stream) {
  if (ready == nullptr) return;
  if (stream != last_on) {
    const char* what = "cannot wait for a batch that was resolved ahead";
    if (is_used) check(cudaEventRecord(ready, last_on), what);
    check(cudaStreamWaitEvent(stream, ready, 0), what);
  }
  last_on = stream;
  is_used = true;
}

namespace {

// Memory of a Prepared that is gone, which goes back to the stream `made_on`.
struct Returned {
  Tensor bounds, workspace;
  cudaStream_t made_on, last_on;
  cudaEvent_t ready;
  bool in_graph;
};

// Makes `made_on`, whose later work may reuse the memory, wait for the last use. Returns false if
// that is not possible yet, since a graph is captured. Errors are not thrown, since this may be the
// end of the process, and not left for the next launch to report.
bool order(const Returned& x) {
  if (x.last_on == x.made_on) return true;
  try {
    // A default stream is that of the current device.
    const OnDevice on(x.bounds.get_device_index());
    if (is_captured(x.made_on) != x.in_graph || is_captured(x.last_on) != x.in_graph)
      return x.in_graph;  // no other work uses the memory of a complete graph
    if (cudaEventRecord(x.ready, x.last_on) != cudaSuccess ||
        cudaStreamWaitEvent(x.made_on, x.ready, 0) != cudaSuccess)
      static_cast<void>(cudaGetLastError());
    return true;
  } catch (...) {
    return false;
  }
}

// Frees memory once its streams are in order: what cannot be freed now, in a later call.
void give_back(Returned returned) {
  // Never destroyed: batches may be dropped at the end of the process.
  static auto& lock = *new std::mutex;
  static auto& left = *new std::vector<Returned>;
  std::vector<Returned> done;  // freed after the lock, since tensors may have deleters
  const std::lock_guard<std::mutex> guard(lock);
  left.push_back(std::move(returned));
  const auto first = std::stable_partition(left.begin(), left.end(),
                                           [](const Returned& x) { return !order(x); });
  for (auto x = first; x != left.end(); ++x) cudaEventDestroy(x->ready);
  done.assign(std::make_move_iterator(first), std::make_move_iterator(left.end()));
  left.erase(first, left.end());
}

}  // namespace

Prepared::~Prepared() {
  if (ready != nullptr) give_back({bounds, workspace, made_on, last_on, ready, in_graph});
}

Tensor Tables::empty(int64_t count, ScalarType type) const {
#if defined(OPER_EMULATED)
  char* const memory = emulation::allocate(rank, false, static_cast<size_t>(count * 8));
  const Tensor made = tensor_at(memory, {count}, type, kHostMemory, emulation::release);
  emulation::keep(made);
  return made;
#else
  return torch::stable::new_empty(*like, {count}, type);
#endif
}

const KeyMap& Tables::key_map(const Tensor& key_of, cudaStream_t stream) {
  const int64_t* data = int64_data(key_of);
  const std::vector<int64_t> keys(data, data + key_of.numel());
  const std::lock_guard<std::mutex> lock(keys_lock_);
  for (const KeyMap& known : keys_)
    if (known.keys == keys) return known;
  if (is_captured(stream)) throw Status{kNotInGraphs, kForKeys};
  std::vector<std::vector<int32_t>> users;  // features of each key, in their order
  int32_t feature = 0;
  for (int32_t logical : context->logical) {
    const size_t key = static_cast<size_t>(keys.at(static_cast<size_t>(logical)));
    users.resize(std::max(users.size(), key + 1));
    users[key].push_back(feature++);
  }
  std::vector<int32_t> words(keys.begin(), keys.end());
  std::vector<int64_t> num_users;
  int64_t most = 1;
  words.push_back(0);
  for (const auto& list : users) {
    words.push_back(words.back() + static_cast<int32_t>(list.size()));
    num_users.push_back(static_cast<int64_t>(list.size()));
    most = std::max(most, num_users.back());
  }
  for (const auto& list : users) words.insert(words.end(), list.begin(), list.end());
  const std::set<int64_t> distinct(keys.begin(), keys.end());
  const bool is_whole = distinct.size() == keys.size() &&
                        (keys.empty() || *distinct.rbegin() + 1 == key_of.numel());
  Tensor on_device = empty(static_cast<int64_t>(words.size()), ScalarType::Int);
  // Copied on the current stream, whose earlier work may still use this memory, and waited for,
  // since later lookups may run on other streams.
  const char* what = "cannot copy the features' keys";
  copy_to_device(on_device.data_ptr(), words, stream, what);
  check(cudaStreamSynchronize(stream), what);
  keys_.push_back({keys, on_device, static_cast<int64_t>(users.size()), std::move(num_users), most,
                   is_whole});
  return keys_.back();
}

namespace {

// `pads`, `arena`, `arena_bytes`: see Shared. `domain`: the ranks whose memory this one can
// address. `like`: an empty tensor on the tables' device.
int64_t device_context_create(int64_t rank, int64_t world_size, std::vector<Tensor> arrays,
                              int64_t send_buffer_bytes, std::vector<Tensor> heads, Tensor pads,
                              int64_t deadline_ms, int64_t arena, int64_t arena_bytes,
                              std::vector<int64_t> domain, Tensor like) {
  auto made = std::make_shared<Tables>();
  made->keep_alive = heads;
  made->like = like;
  std::vector<bool> local(static_cast<size_t>(world_size));
  for (int64_t r : domain) local[r] = true;
#if defined(OPER_EMULATED)
  made->rank = static_cast<int>(rank);
  for (int64_t r : domain) made->neighbours |= uint64_t{1} << r;
#endif
  const OnDevice on(*made);
  made->context =
      std::make_unique<Context>(description_of(rank, world_size, arrays, send_buffer_bytes, heads),
                                Shared{int64_data(pads), arena, arena_bytes, local}, deadline_ms);
  return tables_of_device().add(std::move(made));
}

void device_context_close(int64_t handle) {
  auto closed = tables_of_device().close(handle);
  if (closed == nullptr) return;
  // To free memory on a thread whose device has no context would create one there.
  const OnDevice on(*closed);
  closed.reset();
}

// Allocates the lists of received gradients, if ranks exchange gradients. Returns their size in bytes.
int64_t device_context_make_lists(int64_t handle) {
  const OnTables tables(handle);
  const Context& context = *tables->context;
  if (context.updates_at_once) return 0;
  const int64_t num_bytes = lay_out_receive_lists(context, nullptr).bytes;
  tables->lists = tables->empty(num_bytes, ScalarType::Byte);
  const cudaStream_t stream = tables.stream();
  clear_receive_lists(context, lay_out_receive_lists(context, tables->lists->data_ptr()), stream);
  // Steps may run on other streams.
  check(cudaStreamSynchronize(stream), "cannot clear device memory");
  return num_bytes;
}

// `hook`: address of a Hook, or 0. For the others, see Tables.
void device_context_set_points(int64_t handle, int64_t hook, bool barrier_in_hook, bool exchanges,
                               bool tells, bool gathers, bool shares, bool counts,
                               int64_t num_squares) {
  const auto tables = tables_of(handle);
  tables->hook = reinterpret_cast<Hook>(hook);
  tables->barrier_in_hook = barrier_in_hook;
  tables->exchanges = exchanges;
  tables->tells = tells;
  tables->gathers = gathers;
  tables->shares = shares;
  tables->counts = counts;
  tables->num_squares = num_squares;
}

// See Tables. If called within a step, it applies to that step only.
void device_context_set_push(int64_t handle, Tensor requests, Tensor partials, int64_t bytes) {
  const auto tables = tables_of(handle);
  tables->requests = requests;
  tables->partials = partials;
  tables->partial_bytes = bytes;
}

void device_context_set_pull(int64_t handle, int64_t pull, int64_t most_staging_bytes) {
  const auto tables = tables_of(handle);
  tables->pull = pull;
  tables->most_staging_bytes = most_staging_bytes;
}

// Called within a step, with the rows that remote ranks have sent, see RemoteRows.
void device_receive_rows(int64_t handle, Tensor ranges, Tensor rows, int64_t num_rows,
                         int64_t num_bytes) {
  tables_of(handle)->received = {ranges, rows, num_rows, num_bytes};
}

// Code, rank and detail of the first error, see ErrorWord. Reads host memory only.
std::tuple<int64_t, int64_t, int64_t> device_context_error(int64_t handle) {
  const ErrorWord error = tables_of(handle)->context->error();
  return {error.code, error.rank, error.detail};
}

void device_context_forget_error(int64_t handle) {
  const OnTables tables(handle);
  tables->context->forget_error(tables.stream());
}

// Starts or stops to mark changed rows; false if it cannot start, as a graph of steps without marks was
// captured.
bool device_context_mark_changes(int64_t handle, bool marks) {
  const OnTables tables(handle);
  if (marks && tables->is_unmarked) return false;
  tables->context->mark_changes(marks, tables.stream());
  return true;
}

// Slots of one of the plan's tables whose rows have changed since the last call, ascending, uint32 [n]
// stored as int32.
Tensor device_context_take_changes(int64_t handle, int64_t table) {
  const OnTables tables(handle);
  auto* const slots =
      new std::vector<uint32_t>(tables->context->take_changes(table, tables.stream()));
  return tensor_at(slots->data(), {static_cast<int64_t>(slots->size())}, ScalarType::Int, kHostMemory,
                   [slots](void*) { delete slots; });
}

// Numbers in the plan of the tables in the order of keys, see Context.
std::vector<int64_t> device_context_order(int64_t handle) {
  const auto tables = tables_of(handle);
  const auto& order = tables->context->order;
  return {order.begin(), order.end()};
}

// See Context::updates_at_once.
bool device_context_updates_at_once(int64_t handle) {
  return tables_of(handle)->context->updates_at_once;
}

// Pairs and distinct rows of the last batch plan that the device has made, and the number of passes
// in which rows of peers were staged. Reads host memory only.
std::tuple<int64_t, int64_t, int64_t> device_context_duplication(int64_t handle) {
  const auto tables = tables_of(handle);
  const int64_t* found = tables->context->duplication();
  return {found[0], found[1], tables->num_staged};
}

// View of memory of the tables' device.
Tensor own_view(const Tables& tables, const void* data, int64_t count, ScalarType type) {
#if defined(OPER_EMULATED)
  const auto kind = torch::headeronly::DeviceType::CPU;
#else
  const auto kind = torch::headeronly::DeviceType::CUDA;
#endif
  return tensor_at(const_cast<void*>(data), {count}, type,
                   Device(kind, static_cast<int32_t>(tables.like->get_device_index())));
}

// Arrays of the current step, for the counters of Python: keys of its batch plan's pairs (int64, or
// uint32 stored as int32), run_begin and num_runs; in an update also ReceiveLists::list_begin,
// int64 [W * (T + 1)], and ReceiveLists::rows.
std::vector<Tensor> device_arrays(int64_t handle) {
  const auto tables = tables_of(handle);
  STD_TORCH_CHECK(tables->current != nullptr, "internal: no step is under way");
  const Call& call = *tables->current;
  const BatchPlan& plan = call.work.plan;
  const int64_t pairs = call.batch.max_pairs;
  std::vector<Tensor> found = {
      own_view(*tables, plan.keys.data, pairs, plan.keys.wide ? ScalarType::Long : ScalarType::Int),
      own_view(*tables, plan.run_begin, pairs + 1, ScalarType::Int),
      own_view(*tables, plan.num_runs, 1, ScalarType::Long)};
  if (call.lists) {
    const int64_t W = call.context.view.world_size, T = call.context.view.num_tables;
    found.push_back(own_view(*tables, call.lists->list_begin, W * (T + 1), ScalarType::Long));
    found.push_back(own_view(*tables, call.lists->rows, W * call.lists->capacity, ScalarType::Int));
  }
  return found;
}

// DLPack's DLManagedTensor, which torch's stable interface does not include.
struct ManagedTensor {
  void* data;
  int32_t device_type, device_index, num_dims;
  uint8_t type, bits;
  uint16_t lanes;
  int64_t *sizes, *strides;
  uint64_t byte_offset;
  void* context;
  void (*deleter)(ManagedTensor*);
};

// Address of a new ManagedTensor [rows, columns] over memory that device `index` can address, also
// if it is memory of another device: unlike `from_blob`, DLPack does not check where memory is.
// `index` -1: host memory. `type`: a RowType. The caller keeps the mapping alive.
int64_t device_view(int64_t address, int64_t rows, int64_t columns, int64_t type, int64_t index) {
  constexpr int32_t kCpu = 1, kCuda = 2;
  constexpr uint8_t kFloat = 2, kBfloat = 4;
  struct View {
    ManagedTensor managed;
    int64_t sizes[2], strides[2];
  };
  View* view = new View{{}, {rows, columns}, {columns, 1}};
  const auto kind = static_cast<RowType>(type);
  view->managed = {reinterpret_cast<void*>(address),
                   index < 0 ? kCpu : kCuda,
                   static_cast<int32_t>(std::max<int64_t>(index, 0)),
                   2,
                   kind == RowType::kBFloat16 ? kBfloat : kFloat,
                   static_cast<uint8_t>(kind == RowType::kFloat32 ? 32 : 16),
                   1,
                   view->sizes,
                   view->strides,
                   0,
                   view,
                   [](ManagedTensor* self) { delete static_cast<View*>(self->context); }};
  return reinterpret_cast<int64_t>(&view->managed);
}

void device_barrier(int64_t handle) {
  const OnTables tables(handle);
  tables->context->barrier(tables.stream());
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oper, m) {
  OPER_OPERATOR(
      device_context_create,
      "(int rank, int world_size, Tensor[] arrays, int send_buffer_bytes, Tensor[] heads, "
      "Tensor pads, int deadline_ms, int arena, int arena_bytes, int[] domain, Tensor like) "
      "-> int");
  OPER_OPERATOR(device_context_close, "(int handle) -> ()");
  OPER_OPERATOR(device_context_make_lists, "(int handle) -> int");
  OPER_OPERATOR(
      device_context_set_points,
      "(int handle, int hook, bool barrier_in_hook, bool exchanges, bool tells, bool gathers, "
      "bool shares, bool counts, int num_squares) -> ()");
  OPER_OPERATOR(device_context_set_push,
                "(int handle, Tensor requests, Tensor partials, int bytes) -> ()");
  OPER_OPERATOR(device_context_set_pull, "(int handle, int pull, int most_staging_bytes) -> ()");
  OPER_OPERATOR(device_context_error, "(int handle) -> (int, int, int)");
  OPER_OPERATOR(device_context_forget_error, "(int handle) -> ()");
  OPER_OPERATOR(device_context_mark_changes, "(int handle, bool marks) -> bool");
  OPER_OPERATOR(device_context_take_changes, "(int handle, int table) -> Tensor");
  OPER_OPERATOR(device_context_order, "(int handle) -> int[]");
  OPER_OPERATOR(device_context_updates_at_once, "(int handle) -> bool");
  OPER_OPERATOR(device_context_duplication, "(int handle) -> (int, int, int)");
  OPER_OPERATOR(device_arrays, "(int handle) -> Tensor[]");
  OPER_OPERATOR(device_receive_rows,
                "(int handle, Tensor ranges, Tensor rows, int num_rows, int num_bytes) -> ()");
  OPER_OPERATOR(device_view, "(int address, int rows, int columns, int type, int index) -> int");
  OPER_OPERATOR(device_barrier, "(int handle) -> ()");
}

}  // namespace oper::device
