// The state of one rank in the device back end between calls of operators.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/description.h"
#include "common/exchange.h"
#include "device/device.h"

namespace oper::device {

// Data in addition to a Description.
struct Shared {
  const int64_t* pads;  // [W] addresses of the ranks' signal pads, see `arrive_and_wait`
  int64_t arena_begin, arena_bytes;  // of this rank
  std::vector<bool> local;           // [W] ranks whose memory this rank can address
};

// Host memory that kernels write.
struct HostWords {
  ErrorWord error, peers;  // see View
  int64_t duplication[2];  // see View
};

// Allocates zeroed device memory, and frees all of it when it is destroyed.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory();
  template <class T>
  T* take(int64_t count) {
    return reinterpret_cast<T*>(take_bytes(static_cast<size_t>(count) * sizeof(T)));
  }
  template <class T>
  T* copy(const T* from, int64_t count) {
    T* to = take<T>(count);
    if (count > 0) {
      check(cudaMemcpy(to, from, static_cast<size_t>(count) * sizeof(T), cudaMemcpyHostToDevice),
            "cannot copy the directory");
      wait();
    }
    return to;
  }
  template <class T>
  T* copy(const std::vector<T>& from) {
    return copy(from.data(), static_cast<int64_t>(from.size()));
  }

 private:
  char* take_bytes(size_t bytes);
  // Copies from pageable memory and cudaMemset may return before they have ended, and torch's
  // streams do not wait for the default stream, on which they run.
  static void wait() { check(cudaDeviceSynchronize(), "cannot write to device memory"); }
  std::vector<char*> blocks_;
  size_t left_ = 0;  // bytes of the last block
  char* next_ = nullptr;
};

// The tables (and column pieces) of the plan are sorted by their class of rows; this is the order
// of keys, see Table.
struct Context {
  Context(const Description& description, const Shared& shared, int64_t deadline_ms);

  View view{};
  std::vector<RowClass> classes;
  std::vector<int32_t> order;                   // [T] in the order of keys: number in the plan
  std::vector<Messages::Table> message_tables;  // [T] in the order of keys
  UpdateArgs* optimizers;                       // [T] in the order of keys, in device memory
  uint32_t* settings;                           // in device memory, see View
  std::vector<int32_t> logical;                 // [F] of each feature: its number in the collection
  std::vector<bool> local;                      // [W] ranks whose memory this rank can address
  int64_t num_keys, own_rows;    // rows of all ranks, and of this one
  int64_t receive_capacity;      // see ReceiveLists
  int64_t output_columns = 0, unpooled_columns = 0;
  int64_t max_row_bytes = 0;
  int32_t max_dim = 0;
  bool updates_at_once;   // a single rank without replicas or column pieces, see `reduce`
  bool has_push = false;  // a table has pushed tiers
  // Data of remote ranks (those of other memory domains) that kernels read once it has been
  // received into device memory: headers of their send buffers, in rank order; and [T, W]
  // RemoteMasters.
  char* shadow_headers;
  RemoteMasters* remote_masters;

  ErrorWord error() const;
  // Clears the error of a batch, so that errors of later batches are reported; not that of a lost
  // peer.
  void forget_error(cudaStream_t stream);
  const int64_t* duplication() const { return words_->duplication; }
  // Whether the last planned batch had at least 1.5 ids per distinct row. If so, each row of a peer
  // is fetched once, see `stage` (it is then written to and read from this device's memory once
  // more, which is ten times as fast as a link; the threshold has not been measured between
  // devices), and kernels expect several gradients per row.
  bool rows_repeat() const {
    return static_cast<double>(words_->duplication[0]) >
           1.5 * static_cast<double>(words_->duplication[1]);
  }
  // Waits for all ranks of this memory domain, see `arrive_and_wait`.
  void barrier(cudaStream_t stream) const;
  // Starts to mark changed rows, with none marked, or stops, see View::changed.
  void mark_changes(bool on, cudaStream_t stream);
  // The marked slots of one of the plan's tables, ascending; clears their marks. Waits for the stream.
  std::vector<uint32_t> take_changes(int64_t table, cudaStream_t stream);

 private:
  class Builder;
  struct FreeHost {
    void operator()(HostWords* words) const { cudaFreeHost(words); }
  };
  std::unique_ptr<HostWords, FreeHost> words_;
  DeviceMemory memory_;
  uint32_t* changed_ = nullptr;  // never freed before, as captured graphs keep on marking
  uint32_t* epoch_;  // arguments of `arrive_and_wait`
  uint32_t** pads_;
  int64_t deadline_ms_;
};

// Allocates consecutive parts of a block; if the block is null, only counts the bytes.
class BumpAllocator {
 public:
  explicit BumpAllocator(void* block) : block_(static_cast<char*>(block)) {}
  template <class T>
  T* take(int64_t count) {
    T* out = block_ ? reinterpret_cast<T*>(block_ + used_) : nullptr;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return out;
  }
  int64_t used() const { return used_; }

 private:
  char* block_;
  int64_t used_ = 0;
};

// Device memory of one batch plan and its work buffers. With a null `block`, only `bytes` is set.
struct Workspace {
  BatchPlan plan;
  LongRuns long_runs;
  PushPlan push;
  int64_t bytes;
};
Workspace lay_out(const Context& context, const Batch& batch, void* block);
// An owner's receive lists within `block`, which it keeps between steps; if that is null, only its
// `bytes`.
ReceiveLists lay_out_receive_lists(const Context& context, void* block);
// Ends all chains.
void clear_receive_lists(const Context& context, const ReceiveLists& lists, cudaStream_t stream);

}  // namespace oper::device
