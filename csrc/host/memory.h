// Mapping of shared segments and recycled, huge-page-backed buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

namespace oper::host {

constexpr size_t kHugePage = size_t{2} << 20;

template <class T>
constexpr T round_up(T value, std::type_identity_t<T> unit) {
  return (value + unit - 1) / unit * unit;
}

// Map `bytes` of descriptor `fd` at a 2 MiB boundary. Returns null and sets errno on failure.
void* map_shared(int fd, size_t bytes, bool writable);
void unmap(void* data, size_t bytes);
// Replace mapped pages by pages of descriptor `fd` from `offset` on, which stay small pages. Whole
// pages only. False and errno on failure.
bool map_over(void* data, int fd, size_t offset, size_t bytes, bool writable);

// Ask for huge pages behind an already touched range; returns the bytes that were collapsed.
// MADV_COLLAPSE works for shared memory even where its huge pages are switched off by policy.
size_t collapse_huge(void* data, size_t bytes);

// Advise the kernel to use huge pages on first touch, wherever one fits entirely into a private
// range.
void want_huge(void* data, size_t bytes);

// Effective bytes of the last-level cache for all processes of this machine: its size, limited to
// the processor's share per core times the online cores. A virtual machine with few cores reports
// the entire processor's cache, which other machines use, too.
int64_t last_level_cache_bytes();

// Large buffers that are reused instead of returned to the kernel: a fresh 13 MB output costs
// thousands of page faults per step otherwise. Those of at most half a huge page are rounded up to a
// power of two.
void* pool_take(size_t bytes);
void pool_give(void* data, size_t bytes);

// A cache-line aligned block that only grows; growing discards the contents. Not thread-safe.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();
  char* get(int64_t bytes) {
    if (bytes > size_ || data_ == nullptr) grow(bytes);
    return data_;
  }

 private:
  void grow(int64_t bytes);
  char* data_ = nullptr;
  int64_t size_ = 0;
};

// Objects that a thread has to itself for a while.
template <class Object>
class Spares {
 public:
  // A free object, or a new one; it becomes free again when the result is destroyed.
  template <class... Arguments>
  auto borrow(const Arguments&... arguments) {
    const auto give_back = [this](Object* one) {
      const std::lock_guard<std::mutex> lock(mutex_);
      free_.push_back(one);
    };
    const std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) free_.push_back(&all_.emplace_back(arguments...));
    Object* const one = free_.back();
    free_.pop_back();
    return std::unique_ptr<Object, decltype(give_back)>(one, give_back);
  }
  template <class Body>
  void for_all(Body body) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Object& one : all_) body(one);
  }

 private:
  std::mutex mutex_;
  std::deque<Object> all_;
  std::vector<Object*> free_;
};

}  // namespace oper::host
