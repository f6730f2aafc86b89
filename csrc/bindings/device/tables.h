// State of the operators of tables in device memory between calls.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
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
  kPointFailed = 21,   // Python code at a point failed and has stored its exception
  kNotInGraphs = 22,   // the step waits for the device, which is impossible in a CUDA graph
  kNewArguments = 23,  // an update whose optimizers have changed, in a graph
  kTooManyIds = 24,
  kIdsWithoutBags = 25
};

// Where a step calls Python: as oper/shmem/device/steps.py numbers them. `value` is the number of
// bytes that are staged before other domains' rows, or the round of squares.
enum class Point : int64_t {
  kBarrier,  // order this rank's later kernels after all ranks' earlier ones
  kRows, kPulledRows, kWeightRows,  // before rows are read; kPulledRows: owners pool pushed ones
  kRequests, kPartials,             // push: after requests, and sums, are there
  kGradients, kCollected, kSquares, kUpdated
};
using Hook = int64_t (*)(int64_t point, int64_t value);  // not 0 after an error, which is kept

// Which key carries each feature, as kernels take it.
struct KeyMap {
  std::vector<int64_t> keys;  // [F of the collection]
  Tensor on_device;           // int32: `keys`, then where each key's features begin, then these
  int64_t num_used;           // keys that may have features: the first ones
  std::vector<int64_t> num_users;  // of each key: features, with those of column pieces
  int64_t most;               // the largest of these
  bool is_whole;              // every key has one feature
};

// A batch's id-only work: its memory and its progress. If it is done ahead, Python holds it as a
// tensor of these bytes.
struct Prepared {
  Tensor bounds;     // int64 [num_keys * B + 1]
  Tensor workspace;  // of the batch plan
  const KeyMap* keys;
  const void *ids, *weights;  // of the batch
  int64_t max_pairs;  // bound on the ids of all features together
  bool stages_near;   // rows of peers are to be staged
  bool by_pair;       // rows are staged at all
  bool is_planned = false, is_swapped = false;  // see SortedPairs
  cudaStream_t made_on = nullptr, used_on = nullptr;
  cudaEvent_t ready = nullptr;  // if done ahead: other streams wait for it

  Prepared() = default;
  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;
  ~Prepared();
  // Memory of work made ahead may be reused on its own stream only after all uses on other streams.
  void use_on(cudaStream_t stream);
};

// Rows that other domains have sent for the step under way.
struct ReceivedRows {
  std::optional<Tensor> ranges, rows;
  int64_t num_rows = 0, num_bytes = 0;
};

// The update of the directories of dynamic tables that the next backward pass makes.
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
  std::unique_ptr<Messages> messages;  // with other memory domains; null: there are none
  Hook hook = nullptr;
  bool barrier_in_hook = false;  // ranks are threads of one process; the hook orders them
  bool exchanges = false;     // other domains take part in steps
  bool tells = false;         // and errors are reported to them in exchanges
  bool gathers = false;       // rows of other domains are read
  bool shares = false;        // neighbours read this rank's replicas
  bool counts = false;
  bool is_unmarked = false;   // a step was captured while changed rows were not marked
  int64_t num_squares = 0;    // rounds of sums of squares in a step
  std::optional<Tensor> requests, partials;  // int64 [W], addresses
  int64_t partial_bytes = 0;
  // Whether rows of peers are fetched once per batch: 1 = yes, 0 = no, -1 = if that pays off.
  int64_t pull = -1, most_staging_bytes = int64_t{1} << 30, num_staged = 0;
  int64_t num_forward = 0;
  std::vector<double> staged;       // the optimizers' arguments on the device
  bool all_row_wise_adagrad = false;  // whether all tables have this one
  std::optional<Tensor> inbox;      // its memory
  std::shared_ptr<Prepared> kept;   // of the last forward pass that was collective
  std::optional<KeyUpdate> key_update;
  // State of the step under way.
  ReceivedRows received;
  const Call* current = nullptr;
#if defined(OPER_EMULATED)
  int rank = 0;             // number of the emulated device
  uint64_t neighbours = 0;  // bit r: it can address the arena of device r
#endif

  const KeyMap& key_map(const Tensor& key_of);
  Tensor empty(int64_t count, ScalarType type) const;

 private:
  std::mutex keys_lock_;  // batches may be resolved while another is trained
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
  std::optional<Inbox> inbox = std::nullopt;  // within an update

  Launch launch() const {
    return {context.view,
            context.classes,
            context.optimizers,
            stream,
            tables.all_row_wise_adagrad,
            context.rows_repeat()};
  }
};

// Leaves the keys of a batch, whose plan exists, for the owners of their buckets.
void leave_keys(const Call& call, const KeyUpdate& update);
// Updates this rank's buckets; all ranks must have left their keys.
void update_keys(const Call& call, const KeyUpdate& update);

// Their handles differ from those of the host back end.
inline Handles<Tables>& tables_of_device() { return all_handles<Tables, int64_t{1} << 32>(); }
inline std::shared_ptr<Tables> tables_of(int64_t handle) {
  return tables_of_device().share(handle);
}

cudaStream_t stream_of(const Tensor& tensor);
// Copies from pageable memory, which the driver has read when the call returns.
template <class T>
void copy_to_device(void* to, const std::vector<T>& from, cudaStream_t stream, const char* what) {
  check(cudaMemcpyAsync(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice, stream),
        what);
}
bool is_captured(cudaStream_t stream);

constexpr int64_t kMostIds = (int64_t{1} << 31) - 64;  // kernels look a group of lanes ahead
// Offsets of bags from their lengths.
Tensor make_bounds_of(const Tables& tables, const Tensor& lengths, int64_t num_ids,
                      cudaStream_t stream);

// Directs launches to a device during its lifetime.
class OnDevice {
 public:
  explicit OnDevice(int64_t index);
  explicit OnDevice(const Tables& tables);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = -1;
};

}  // namespace oper::device
