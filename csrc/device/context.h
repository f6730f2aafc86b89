// State of one rank's operators between calls.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/description.h"
#include "common/exchange.h"
#include "device/device.h"

namespace oper::device {

// Addresses that only device memory has: all ranks' signal pads [W], this rank's arena, and which
// ranks' memory can be addressed [W].
struct Shared {
  const int64_t* pads;
  int64_t arena_begin, arena_bytes;
  std::vector<bool> near;
};

// Host memory that kernels write.
struct HostWords {
  ErrorWord error, peers;  // as in View
  int64_t duplication[2];  // pairs and runs of the last batch that was planned
};

// An allocator of zeroed device memory, all of which is freed with it.
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
  // Copies of pageable memory and memset may return before they have ended, and torch's streams do
  // not wait for the default one.
  static void wait() { check(cudaDeviceSynchronize(), "cannot write to device memory"); }
  std::vector<char*> blocks_;
  size_t left_ = 0;  // bytes of the last block
  char* next_ = nullptr;
};

struct Context {
  // `order`, `message_tables`: by table in the order of keys; other numbers of tables are those of the
  // plan.
  Context(const Description& description, const Shared& shared, int64_t deadline_ms);

  View view{};
  std::vector<RowClass> classes;
  std::vector<int32_t> order;                      // the plan's number
  std::vector<Messages::Table> message_tables;
  UpdateArgs* optimizers;                          // device memory, in the order of keys
  uint32_t* settings;                              // device memory: hash of the optimizers' arguments
  std::vector<int32_t> logical;  // the collection's number of every feature (of a column piece)
  std::vector<bool> near;        // [W] whether this rank can address a rank's memory
  int64_t num_keys, own_rows;    // rows of all ranks, and of this one
  int64_t inbox_capacity;        // entries of one rank in the inbox
  int64_t output_columns = 0, unpooled_columns = 0;
  int64_t max_row_bytes = 0;
  int32_t max_dim = 0;
  bool updates_at_once, has_push = false;
  // Data received from ranks of other domains, in device memory, where kernels read it: headers of
  // their outboxes in rank order; sums of squares of their rows for column pieces (two rounds), [T,
  // W]; and FarMasters [T, W].
  char* mirrors;
  std::vector<float*> far_squares;
  FarMasters* far_masters;

  ErrorWord error() const { return words_->error.code != 0 ? words_->error : words_->peers; }
  // Clears the error of one batch, so that errors of later batches are reported. A lost peer stays
  // lost.
  void forget_error(cudaStream_t stream);
  const int64_t* duplication() const { return words_->duplication; }
  // Whether the last planned batch had at least 1.5 ids per distinct row. If so, rows of peers are
  // fetched once (a row is then written and read once more in local memory, at ten times the speed
  // of a link; the threshold has not been measured between devices), and kernels expect several
  // gradients per row.
  bool rows_repeat() const {
    return static_cast<double>(words_->duplication[0]) >
           1.5 * static_cast<double>(words_->duplication[1]);
  }
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
  uint32_t* epoch_;
  uint32_t** pads_;
  int64_t deadline_ms_;
};

// Allocates consecutive parts of one block; if the block is null, it only counts bytes.
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

// Device memory of one batch plan and its work buffers, allocated within `block`.
struct Workspace {
  BatchPlan plan;
  LongRuns long_runs;
  PushPlan push;
  int64_t bytes;
};
Workspace lay_out(const Context& context, const Batch& batch, void* block);
// Memory that an owner retains between steps, allocated within `block`.
Inbox lay_out_inbox(const Context& context, void* block);

}  // namespace oper::device
