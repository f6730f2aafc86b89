// Mapping of shared memory, buffers that are reused, and huge pages for both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

#include "common/fork_mutex.h"

namespace oper::host {

constexpr size_t kHugePage = size_t{2} << 20;

template <class T>
constexpr T round_up(T value, std::type_identity_t<T> unit) {
  return (value + unit - 1) / unit * unit;
}

// Maps `bytes` of descriptor `fd` at a 2 MiB boundary. Returns null and sets errno on failure.
void* map_shared(int fd, size_t bytes, bool writable);
void unmap(void* data, size_t bytes);
// Replaces mapped pages by pages of descriptor `fd` from `offset` on, which never become huge
// pages. Whole pages only. Returns false and sets errno on failure.
bool map_over(void* data, int fd, size_t offset, size_t bytes, bool writable);

// Turns the pages of a range that has been written or read into huge pages where possible, and
// returns the bytes of these. MADV_COLLAPSE also works for shared memory where huge pages are
// disabled for it.
size_t collapse_huge(void* data, size_t bytes);

// Advises the kernel to use huge pages at the first access to private memory, where they fit.
void want_huge(void* data, size_t bytes);

// Bytes of the last-level cache that this machine's processes may expect to have: its size, but at
// most 4 MiB per online core. A virtual machine with few cores reports the whole processor's cache,
// which other machines use, too.
int64_t last_level_cache_bytes();

// Memory that is reused instead of returned to the kernel: a new 13 MB output would cost thousands
// of page faults in every step. At most a multiple of the most bytes in use so far is kept for
// reuse. `pool_give` takes the same number of bytes as `pool_take`, which throws std::bad_alloc.
void* pool_take(size_t bytes);
void pool_give(void* data, size_t bytes);

// A block of memory, aligned to cache lines, that only grows. Growing discards the contents. Not
// thread-safe.
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

// Reusable objects, each used by one thread at a time.
template <class Object>
class Spares {
 public:
  // Returns a free object, or constructs one; it becomes free again when the result is destroyed.
  template <class... Arguments>
  auto borrow(const Arguments&... arguments) {
    const auto give_back = [this](Object* one) {
      const std::lock_guard<ForkMutex> lock(mutex_);
      free_.push_back(one);
    };
    const std::lock_guard<ForkMutex> lock(mutex_);
    if (free_.empty()) free_.push_back(&all_.emplace_back(arguments...));
    Object* const one = free_.back();
    free_.pop_back();
    return std::unique_ptr<Object, decltype(give_back)>(one, give_back);
  }
  template <class Body>
  void for_all(Body body) {
    const std::lock_guard<ForkMutex> lock(mutex_);
    for (Object& one : all_) body(one);
  }

 private:
  ForkMutex mutex_;
  std::deque<Object> all_;
  std::vector<Object*> free_;
};

}  // namespace oper::host
