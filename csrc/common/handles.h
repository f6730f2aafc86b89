// Code shared by the bindings of both back ends: objects behind integer handles, access to tensors,
// and checks of batches.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <vector>

#include "common/description.h"
#include "common/fork_mutex.h"

namespace oper {

using torch::headeronly::ScalarType;
using torch::stable::Device;
using torch::stable::Tensor;

// Objects that Python refers to by integer handles. Any thread may call any member: a mutex
// protects the map, not the objects.
template <class Object>
class Handles {
 public:
  // `first`: the lowest handle; its upper 32 bits distinguish the back ends.
  explicit Handles(int64_t first) : first_(first), next_(first) {}
  int64_t add(std::shared_ptr<Object> object) {
    std::lock_guard<ForkMutex> lock(mutex_);
    objects_[next_] = std::move(object);
    return next_++;
  }
  // Shared ownership: the object stays valid even if another thread closes the handle meanwhile.
  std::shared_ptr<Object> share(int64_t handle) {
    std::lock_guard<ForkMutex> lock(mutex_);
    auto found = objects_.find(handle);
    STD_TORCH_CHECK(found != objects_.end(), "sharded tables used after they were closed");
    return found->second;
  }
  // Returns the object, null if the handle is closed already.
  std::shared_ptr<Object> close(int64_t handle) {
    std::lock_guard<ForkMutex> lock(mutex_);
    auto found = objects_.extract(handle);
    return found ? std::move(found.mapped()) : nullptr;
  }
  // Whether a handle, open or closed, belongs to this back end.
  bool is_one(int64_t handle) const { return handle >> 32 == first_ >> 32; }

 private:
  ForkMutex mutex_;
  std::map<int64_t, std::shared_ptr<Object>> objects_;
  const int64_t first_;
  int64_t next_;
};

// A process's handles to objects of one type, numbered from `first` on. Never destroyed: other
// threads may still be in an operator when the process ends.
template <class Object, int64_t first = 1>
Handles<Object>& all_handles() {
  static auto* instance = new Handles<Object>(first);
  return *instance;
}

inline const int64_t* int64_data(const Tensor& tensor) {
  STD_TORCH_CHECK(
      tensor.scalar_type() == ScalarType::Long && tensor.is_contiguous(),
      "internal: expected a contiguous int64 tensor");
  return static_cast<const int64_t*>(tensor.data_ptr());
}

inline float* float_data(const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Float, "internal: expected float32");
  return static_cast<float*>(tensor.data_ptr());
}

// A contiguous tensor over existing memory, which `deleter` frees; without one, the caller must
// keep the memory alive.
template <class... Deleter>
Tensor tensor_at(void* data, const std::vector<int64_t>& sizes, ScalarType type, Device device,
                 Deleter... deleter) {
  std::vector<int64_t> strides(sizes.size());
  std::exclusive_scan(sizes.rbegin(), sizes.rend(), strides.rbegin(), int64_t{1},
                      std::multiplies<>{});
  return torch::stable::from_blob(data, {sizes.data(), sizes.size()},
                                  {strides.data(), strides.size()}, device, type, deleter...);
}
inline const Device kHostMemory(torch::headeronly::DeviceType::CPU);

// Python's description of a rank's tables. `arrays`, `heads`: see `context_arguments` in
// oper/shmem/placement/layout.py; the caller keeps them alive.
inline Description description_of(int64_t rank, int64_t world_size,
                                  const std::vector<Tensor>& arrays, int64_t send_buffer_bytes,
                                  const std::vector<Tensor>& heads) {
  Description d{};
  const int64_t** const places[] = {&d.tables,  &d.owner_begin, &d.tiers,
                                    &d.maps,    &d.features,    &d.refreshes,
                                    &d.touched, &d.squares,     &d.send_buffers};
  STD_TORCH_CHECK(arrays.size() == std::size(places),
                  "internal: other arrays than those of context_arguments");
  for (size_t k = 0; k < arrays.size(); ++k) *places[k] = int64_data(arrays[k]);
  d.num_tables = arrays[0].size(0);
  d.num_maps = arrays[3].numel() / 2;
  d.num_features = arrays[4].size(0);
  d.num_refreshes = arrays[5].size(0);
  for (const Tensor& head : heads) {
    d.heads.push_back(head.data_ptr());
    d.head_sizes.push_back(head.numel());
  }
  d.send_buffer_bytes = send_buffer_bytes;
  d.rank = static_cast<int32_t>(rank);
  d.world_size = static_cast<int32_t>(world_size);
  return d;
}

// Status codes that the bindings add to those of `Status` in exchange.h.
constexpr int64_t kBadLengths = 5;   // a length is negative, or their sum is not the number of ids
constexpr int64_t kBadBatch = 10;    // a tensor is not as kernels assume it; the detail is a Fault
constexpr int64_t kBadSamples = 14;  // a sample's bag is out of range; the detail is the feature

inline bool is_vector(const Tensor& value) {
  return value.dim() == 1 && value.is_contiguous();
}

inline bool is_integers(const Tensor& value) {
  const ScalarType type = value.scalar_type();
  return (type == ScalarType::Long || type == ScalarType::Int) && is_vector(value);
}

// Defects of a batch's tensors; `_fault` in oper/shmem/batch.py describes them.
enum Fault : int64_t {
  kFit,         // nothing
  kElsewhere,   // a tensor is on another device than the tables
  kIds,         // dtype or shape of the ids
  kLengths,     // dtype or shape of the lengths
  kNumLengths,  // the number of lengths, or a key that has none
  kKeyOf,       // the keys of the features
  kWeights      // dtype or shape of the per-sample weights
};

// Every operator on a batch calls this first. `device`: that of the tables.
inline Fault fault_of(const Device& device, const Tensor& ids, const Tensor& lengths,
                      const std::optional<Tensor>& weights, const Tensor& key_of,
                      int64_t batch_size) {
  if (ids.device() != device || lengths.device() != device ||
      (weights && weights->device() != device))
    return kElsewhere;
  if (!is_integers(ids)) return kIds;
  if (!is_integers(lengths)) return kLengths;
  if (!key_of.is_cpu() || key_of.scalar_type() != ScalarType::Long || !is_vector(key_of))
    return kKeyOf;
  const int64_t num_bags = std::max<int64_t>(1, batch_size);
  const int64_t num_keys = lengths.numel() / num_bags;
  if (lengths.numel() % num_bags != 0 || batch_size < 0 || (batch_size == 0 && num_keys > 0))
    return kNumLengths;
  const int64_t* keys = int64_data(key_of);
  for (int64_t f = 0; f < key_of.numel(); ++f) {
    if (keys[f] < 0) return kKeyOf;
    if (batch_size > 0 && keys[f] >= num_keys) return kNumLengths;
  }
  const bool are_weights = !weights || (weights->scalar_type() == ScalarType::Float &&
                                        is_vector(*weights) && weights->numel() == ids.numel());
  return are_weights ? kFit : kWeights;
}

}  // namespace oper
