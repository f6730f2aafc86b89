// What the bindings of both back ends share: objects behind integer handles, and tensors of integers.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace oper {

// Objects that Python holds by number.
template <class Object>
class Handles {
 public:
  int64_t add(std::unique_ptr<Object> object) {
    std::lock_guard<std::mutex> lock(mutex_);
    objects_[next_] = std::move(object);
    return next_++;
  }
  Object& at(int64_t handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = objects_.find(handle);
    STD_TORCH_CHECK(found != objects_.end(), "sharded tables used after they were closed");
    return *found->second;
  }
  void close(int64_t handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    objects_.erase(handle);
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, std::unique_ptr<Object>> objects_;
  int64_t next_ = 1;
};

inline const int64_t* int64_data(const torch::stable::Tensor& tensor) {
  STD_TORCH_CHECK(
      tensor.scalar_type() == torch::headeronly::ScalarType::Long && tensor.is_contiguous(),
      "internal: expected a contiguous int64 tensor");
  return static_cast<const int64_t*>(tensor.data_ptr());
}

}  // namespace oper
