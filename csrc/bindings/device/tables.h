// The state of tables in device memory between calls of operators.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "common/description.h"
#include "common/exchange.h"
#include "common/handles.h"
#include "device/context.h"
#include "device/keys.h"

namespace oper::device {

// Codes of the Status that a failed step throws, in addition to those of ErrorWord; see
// `raise_found` in oper/shmem/device/steps.py.
enum Code : int64_t {
  kPointFailed = 21,   // the hook has failed; Python keeps the exception
  kNotInGraphs = 22,   // the step would wait for the device, but is captured; detail: a Wait
  kNewArguments = 23,  // the optimizers' arguments have changed, but the step is captured, too
  kTooManyIds = 24,
  kIdsWithoutBags = 25
};

// Why a step would wait for the device.
enum Wait : int64_t {
  kForOthers,  // exchanges between memory domains, and counters
  kForRows,    // the number of output rows, which only the device knows
  kForKeys     // the copy of a KeyMap, which the first lookup with these keys makes
};

// The points of a step at which it calls the hook, a Python function; oper/shmem/device/steps.py
// has the same numbers.
enum class Point : int64_t {
  kBarrier,     // instead of a barrier, see Tables::barrier_in_hook
  kRows,        // before a forward pass reads rows
  kPulledRows,  // before it reads pulled rows only, since owners pool pushed ones
  kWeightRows,  // before rows are read for the gradient of weights
  kRequests,    // push: this rank's request has been written
  kPartials,    // push: the partial sums for all readers have been written
  kGradients,   // this rank's send buffer has been written
  kCollected,   // the gradients of all ranks have been listed; on a single rank, before the update
  kSquares,     // sums of squares have been written by all ranks of this domain
  kUpdated      // rows have been updated on all ranks
};
// `value`: at kRows, kPulledRows and kWeightRows the bytes of staging memory before the rows of
// other domains; at kSquares the round. Returns 0, or another number after an error, which Python
// keeps.
using Hook = int64_t (*)(int64_t point, int64_t value);

// From which key of a batch each feature takes its ids.
struct KeyMap {
  std::vector<int64_t> keys;  // [F of the collection]
  Tensor on_device;           // int32: `keys`, then Batch::users_begin, then Batch::users
  int64_t num_used;           // the largest key + 1
  // [num_used] number of features of each key, column pieces included.
  std::vector<int64_t> num_users;
  int64_t most;               // the largest of these
  bool is_whole;              // every key has exactly one feature
};

// Data computed from a batch's ids: its batch plan and the plan's memory. If `lookup_resolve` has
// computed it, Python holds the shared_ptr as the bytes of a tensor.
struct Prepared {
  Tensor bounds;     // int64 [num_keys * B + 1]
  Tensor workspace;  // memory of the batch plan
  const KeyMap* keys;
  const void *ids, *weights;  // addresses of the batch's tensors, by which it is recognised
  int64_t max_pairs;          // see Batch
  bool stages_local;          // whether rows of peers (ranks of this memory domain) are staged
  bool by_pair;               // whether any rows are staged
  bool is_planned = false;    // whether the plan has been launched
  bool is_swapped = false;    // see SortedPairs
  cudaStream_t made_on = nullptr, last_on = nullptr;  // the streams that made it and used it last
  // Of `lookup_resolve`, else null: another stream that uses it waits for this event, which is recorded
  // again once it was used, since a use may write to the plan and to the places of staged rows.
  cudaEvent_t ready = nullptr;
  bool is_used = false;
  bool in_graph = false;        // whether `lookup_resolve` was captured

  Prepared() = default;
  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;
  ~Prepared();
  // Whether a step on `stream` may use it. A step that is captured resolves a batch anew that was
  // resolved ahead outside of the graph: a graph cannot wait for earlier work, and its replays find
  // other ids in the batch's memory.
  bool fits(cudaStream_t stream) const;
  // Called before it is used on `stream`: makes that wait for the stream that used it before. When it
  // is destroyed, `made_on` waits for the last one before it reuses the memory.
  void use_on(cudaStream_t stream);
};

// Rows that other domains have sent for the current step, see RemoteRows.
struct ReceivedRows {
  std::optional<Tensor> ranges, rows;
  int64_t num_rows = 0, num_bytes = 0;
};

// The update of the directories of dynamic tables during the next backward pass.
struct KeyUpdate {
  std::shared_ptr<KeyTables> keys;
  std::vector<ListedIds> lookups;
  std::vector<std::vector<Tensor>> keep_alive;
  bool found_varies;
};

struct Call;

struct Tables {
  std::vector<Tensor> keep_alive;  // head maps
  std::unique_ptr<Context> context;
  std::optional<Tensor> like;      // on the tables' device
  std::unique_ptr<Messages> messages;  // exchanged with other memory domains; null: there are none
  Hook hook = nullptr;
  // Ranks are threads of one process, which wait for each other in the hook.
  bool barrier_in_hook = false;
  bool exchanges = false;                    // steps exchange data with other memory domains
  bool tells = false;                        // exchanges send errors of kernels to all ranks
  bool gathers = false;                      // lookups read rows of other domains
  bool shares = false;                       // other ranks of this domain read this rank's replicas
  bool counts = false;                       // Python counts transfers in the hook
  bool is_unmarked = false;                  // a step was captured while changed rows were not marked
  int64_t num_squares = 0;                   // exchanges of sums of squares in a step
  std::optional<Tensor> requests, partials;  // int64 [W], addresses, see PushPlan
  int64_t partial_bytes = 0;                 // bytes of each of the `partials`
  // Whether rows of peers are staged: 1 = yes, 0 = no, -1 = if rows repeat.
  int64_t pull = -1;
  int64_t most_staging_bytes = int64_t{1} << 30;
  int64_t num_staged = 0;             // passes that have staged rows of peers
  int64_t num_forward = 0;            // forward passes
  std::vector<double> staged;         // the optimizers' arguments that are on the device
  bool all_row_wise_adagrad = false;  // see Launch
  // Memory of the ReceiveLists, if gradients are exchanged; and whether a step that has failed may have
  // left chains in it.
  std::optional<Tensor> lists;
  bool has_chains = false;
  std::shared_ptr<Prepared>
      kept;  // from the last collective forward pass
  std::optional<KeyUpdate> key_update;
  // State of the current step.
  ReceivedRows received;
  const Call* current = nullptr;
#if defined(OPER_EMULATED)
  int rank = 0;             // number of the emulated device
  uint64_t neighbours = 0;  // bit r: it can address the arena of device r
#endif

  // A KeyMap, which is kept. `key_of`: int64 [F of the collection]. Throws a Status if `stream` is
  // captured and the map is new.
  const KeyMap& key_map(const Tensor& key_of, cudaStream_t stream);
  // An uninitialised tensor [count] on the tables' device.
  Tensor empty(int64_t count, ScalarType type) const;

 private:
  std::mutex keys_lock_;  // a batch may be resolved on another thread while one is trained
  std::deque<KeyMap> keys_;
};

// Everything that kernels need of a batch in a step.
struct Call {
  Tables& tables;
  const Context& context;
  Prepared& prepared;
  Batch batch;
  Workspace work;
  cudaStream_t stream;
  std::optional<ReceiveLists> lists = std::nullopt;  // within an update

  Launch launch() const {
    return {context.view,
            context.classes,
            context.optimizers,
            stream,
            tables.all_row_wise_adagrad,
            context.rows_repeat()};
  }
};

// Lists the keys of a batch, whose plan exists, for the owners of their buckets.
void leave_keys(const Call& call, const KeyUpdate& update);
// Updates this rank's buckets by the keys that all ranks have listed.
void update_keys(const Call& call, const KeyUpdate& update);

// Handles begin with 2^32, so that they differ from those of the host back end.
inline Handles<Tables>& tables_of_device() { return all_handles<Tables, int64_t{1} << 32>(); }
inline std::shared_ptr<Tables> tables_of(int64_t handle) {
  return tables_of_device().share(handle);
}

// The current stream of a tensor's device.
cudaStream_t stream_of(const Tensor& tensor);
// Copies to device memory. `from` may change after the call, since it is pageable memory.
template <class T>
void copy_to_device(void* to, const std::vector<T>& from, cudaStream_t stream, const char* what) {
  check(cudaMemcpyAsync(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice, stream),
        what);
}
// Whether a CUDA graph is being captured.
bool is_captured(cudaStream_t stream);

// Fewer than 2^31, as kernels compute indices up to two groups of lanes beyond the last id in 32
// bits.
constexpr int64_t kMostIds = (int64_t{1} << 31) - 64;
// Bounds of bags from their lengths. Throws a Status if there are ids but no lengths.
Tensor make_bounds_of(const Tables& tables, const Tensor& lengths, int64_t num_ids,
                      cudaStream_t stream);

// Makes a device the current one, until it is destroyed.
class OnDevice {
 public:
  explicit OnDevice([[maybe_unused]] int64_t index)
#if !defined(OPER_EMULATED)
      : guard_(static_cast<int32_t>(index))
#endif
  {
  }
  explicit OnDevice(const Tables& tables);
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

#if defined(OPER_EMULATED)
  ~OnDevice() { emulation::device = before_; }

 private:
  const emulation::Device before_ = emulation::device;
#else
 private:
  // torch's: to go back to a device on which this process has no context does not create one, which
  // would take memory on the first GPU for every process of a machine.
  const torch::stable::accelerator::DeviceGuard guard_;
#endif
};

// The tables of an operator, whose device is the current one while it runs.
class OnTables {
 public:
  explicit OnTables(int64_t handle) : tables_(tables_of(handle)), on_(*tables_) {}
  Tables& operator*() const { return *tables_; }
  Tables* operator->() const { return tables_.get(); }
  cudaStream_t stream() const { return stream_of(*tables_->like); }

 private:
  const std::shared_ptr<Tables> tables_;
  const OnDevice on_;
};

}  // namespace oper::device
