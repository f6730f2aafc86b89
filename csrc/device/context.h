// What the operators of one rank keep between calls.
#pragma once

#include <string>
#include <vector>

#include "common/description.h"
#include "common/exchange.h"
#include "device/device.h"

namespace oper::device {

// What only device memory has: addresses of all ranks' signal pads [W], this rank's arena, and which
// ranks' memory can be addressed [W].
struct Shared {
  const int64_t* pads;
  int64_t arena_begin, arena_bytes;
  std::vector<bool> near;
};

// Host memory that kernels write.
struct HostWords {
  ErrorWord error;
  int64_t duplication[2];  // pairs and runs of the last batch that was planned
};

class Context {
 public:
  Context(const Description& description, const Shared& shared, int64_t deadline_ms);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const View& view() const { return view_; }
  const std::vector<RowClass>& classes() const { return classes_; }
  // Optimizer arguments of the tables, in the order of keys; device memory.
  UpdateArgs* optimizers() const { return optimizers_; }
  const std::vector<int32_t>& order() const { return order_; }  // plan's table of each in key order
  // Likewise in the order of keys.
  const std::vector<Messages::Table>& message_tables() const { return message_tables_; }
  int64_t num_keys() const { return num_keys_; }
  int32_t max_dim() const { return max_dim_; }
  int32_t min_dim() const { return min_dim_; }
  bool updates_at_once() const { return updates_at_once_; }
  bool has_push() const { return has_push_; }
  int64_t output_columns() const { return output_columns_; }      // pooled
  int64_t unpooled_columns() const { return unpooled_columns_; }
  // Number of the collection's feature of every feature (of a column piece).
  const std::vector<int32_t>& logical() const { return logical_; }
  // Which tables have rows of fp32, in the order of keys.
  const std::vector<bool>& are_fp32() const { return are_fp32_; }
  // Entries of one rank in the inbox, and rows of this rank.
  int64_t inbox_capacity() const { return inbox_capacity_; }
  int64_t own_rows() const { return own_rows_; }
  int64_t max_row_bytes() const { return max_row_bytes_; }
  ErrorWord error() const { return shared_->error; }
  // Forgets an error of one batch, so that the next ones' are found. A lost peer stays lost.
  void forget_error(cudaStream_t stream);
  const int64_t* duplication() const { return shared_->duplication; }
  void barrier(cudaStream_t stream) const;
  const std::vector<bool>& near() const { return near_; }  // [W] whose memory can be addressed
  // Where kernels look for what ranks of other domains have for this one, in device memory: the headers
  // of their outboxes, one rank's after the other's; sums of squares of rows of theirs, for column
  // pieces (two rounds); and FarMasters [T, W].
  char* mirrors() const { return mirrors_; }
  float* far_squares(int32_t rank, int64_t table) const {
    return far_squares_[static_cast<size_t>(table * view_.world_size + rank)];
  }
  FarMasters* far_masters() const { return far_masters_; }

 private:
  class Builder;
  View view_{};
  std::vector<RowClass> classes_;
  std::vector<int32_t> order_;
  std::vector<Messages::Table> message_tables_;
  UpdateArgs* optimizers_ = nullptr;
  uint32_t* epoch_ = nullptr;
  int* claimed_ = nullptr;
  uint32_t** pads_ = nullptr;
  char* mirrors_ = nullptr;
  std::vector<float*> far_squares_;  // [T, W]
  std::vector<bool> near_;
  FarMasters* far_masters_ = nullptr;
  char* memory_ = nullptr;        // device
  HostWords* shared_ = nullptr;   // host, mapped
  std::vector<int32_t> logical_;
  std::vector<bool> are_fp32_;
  int64_t num_keys_ = 0, inbox_capacity_ = 0, own_rows_ = 0, max_row_bytes_ = 0,
          deadline_ms_ = 0;
  int64_t output_columns_ = 0, unpooled_columns_ = 0;
  int32_t max_dim_ = 0, min_dim_ = 0;
  bool updates_at_once_ = false, has_push_ = false, has_squares_ = false;
};

// Gives out parts of one block, one after another; with a null block it only counts.
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

// Device memory of one batch plan and of what works on it, out of `block`.
struct Workspace {
  BatchPlan plan;
  LongRuns long_runs;
  PushPlan push;
  int64_t bytes;
};
Workspace lay_out(const Context& context, const Batch& batch, void* block);
// What an owner needs between steps, out of `block`; `bytes`: what it takes.
Inbox lay_out_inbox(const Context& context, void* block, int64_t* bytes);

}  // namespace oper::device
