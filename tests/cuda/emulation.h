// The parts of CUDA that csrc/device uses, on one CPU core: every thread of a block is a fiber, and
// warp and block operations wait for the lanes they name. It computes the results that a race-free
// GPU run would compute, aborts on what would be undefined there (a lane that has ended while
// others wait for it), and runs blocks and lanes in an order drawn from OPER_EMULATION_SEED, so
// that a result that depends on that order shows. Streams are ordered by events only and do their
// work as late as they can, so that a missing wait shows. A stream that is captured collects its work,
// and what CUDA forbids meanwhile fails and is counted. The memory of each device has addresses
// of its own, and whatever accesses memory that it could not address on hardware, or misaligned,
// aborts.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#include "emulation_memory.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static thread_local

// ---- streams ------------------------------------------------------------------------------------

namespace oper::emulation {

// Its work is done when the host waits for it, or when another stream that has to wait for it comes
// to that point; by whichever thread that is. The null stream works at once.
struct Stream {
  std::deque<std::function<void()>> work;
  int64_t given = 0, done = 0;
  bool is_captured = false;
  std::vector<std::function<void()>> graph;  // what it has captured
};
struct Event {
  Stream* stream = nullptr;
  int64_t given = 0;  // work of the stream that is before it
  bool is_captured = false;
};

inline std::recursive_mutex work_lock;
inline thread_local Stream* current_stream = nullptr;
inline bool ignores_waits = false;  // as if csrc had none
// How many streams are captured, and how many calls have failed since they are not allowed then.
inline int num_captured = 0;
inline int64_t num_forbidden = 0;
inline int num_failing = 0;  // so many of the next calls of cudaMalloc fail

template <class Work>
void enqueue(Stream* stream, Work work) {
  if (stream == nullptr) return work();
  const std::lock_guard<std::recursive_mutex> lock(work_lock);
  if (stream->is_captured) {
    stream->graph.emplace_back(std::move(work));
    return;
  }
  stream->work.emplace_back(std::move(work));
  ++stream->given;
}

// Work of a kernel.
template <class Work>
void enqueue_kernel(Stream* stream, Work work) {
  enqueue(stream, [=, on = device] {
    const As kernel(Side::kKernel, on);
    work();
  });
}

// Work of the driver, such as a copy.
template <class Work>
void enqueue_copy(Stream* stream, Work work) {
  enqueue(stream, [=] {
    const As driver(Side::kDriver);
    work();
  });
}

inline void finish(const Event& event) {
  const std::lock_guard<std::recursive_mutex> lock(work_lock);
  Stream* stream = event.stream;
  while (stream != nullptr && stream->done < event.given) {
    const std::function<void()> work = std::move(stream->work.front());
    stream->work.pop_front();
    ++stream->done;
    work();
  }
}

// Memory that a kernel works on later: torch's allocator would give it to another tensor before, which
// on a device comes after it on the same stream. It is zero, so that who reads it too early gets wrong
// numbers and no wild address.
inline std::vector<std::function<void()>> kept;
template <class Tensor>
void keep(const Tensor& tensor) {
  if (current_stream == nullptr) return;
  const As driver(Side::kDriver);
  std::memset(tensor.data_ptr(), 0, static_cast<size_t>(tensor.numel() * tensor.element_size()));
  const std::lock_guard<std::recursive_mutex> lock(work_lock);
  kept.emplace_back([tensor] {});
}

inline Event record(Stream* stream) {
  if (stream == nullptr) return {};
  return {stream, stream->given, stream->is_captured};
}
inline void wait(Stream* stream, const Event& event) {
  enqueue(stream, [event] { finish(event); });
}

inline thread_local int64_t num_waits = 0;  // of the host for a stream
inline thread_local std::vector<const char*> ranges;

}  // namespace oper::emulation

// ---- runtime ------------------------------------------------------------------------------------

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorMemoryAllocation = 2,
  cudaErrorStreamCaptureUnsupported = 900
};
using cudaStream_t = oper::emulation::Stream*;
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct EmulatedIndex {
  uint32_t x = 0, y = 0, z = 0;
};

namespace oper::emulation {
// The status of a call that CUDA forbids if `is_forbidden`.
inline cudaError_t unless(bool is_forbidden) {
  num_forbidden += is_forbidden ? 1 : 0;
  return is_forbidden ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}
}  // namespace oper::emulation

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t stream) {
  oper::emulation::enqueue_copy(stream, [=] { std::memset(data, value, bytes); });
  return cudaSuccess;
}
inline cudaError_t cudaMemset(void* data, int value, size_t bytes) {
  if (oper::emulation::num_captured > 0) return oper::emulation::unless(true);
  const oper::emulation::As driver(oper::emulation::Side::kDriver);
  std::memset(data, value, bytes);
  return cudaSuccess;
}
constexpr int cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2,
              cudaMemcpyDeviceToDevice = 3, cudaHostAllocMapped = 2;
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, int) {
  if (oper::emulation::num_captured > 0) return oper::emulation::unless(true);
  const oper::emulation::As driver(oper::emulation::Side::kDriver);
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
// From the host: pageable memory, which is read before the call returns.
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind,
                                   cudaStream_t stream) {
  std::vector<char> read;
  if (kind == cudaMemcpyHostToDevice && stream != nullptr && stream->is_captured)
    return oper::emulation::unless(true);  // replays would read it
  if (kind == cudaMemcpyHostToDevice)
    read.assign(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
  oper::emulation::enqueue_copy(
      stream, [=] { std::memcpy(to, read.empty() ? from : read.data(), bytes); });
  return cudaSuccess;
}
inline cudaError_t cudaMalloc(void** data, size_t bytes) {
  if (oper::emulation::num_captured > 0) return oper::emulation::unless(true);
  if (oper::emulation::num_failing > 0) {
    --oper::emulation::num_failing;
    return cudaErrorMemoryAllocation;
  }
  *data = oper::emulation::allocate(oper::emulation::device.rank, false, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* data) {
  oper::emulation::release(data);
  return cudaSuccess;
}
inline cudaError_t cudaHostAlloc(void** data, size_t bytes, int) {
  *data = std::malloc(bytes);
  return *data ? cudaSuccess : cudaErrorMemoryAllocation;
}
inline cudaError_t cudaFreeHost(void* data) {
  std::free(data);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                     size_t width, size_t height, int, cudaStream_t stream) {
  oper::emulation::enqueue_copy(stream, [=] {
    for (size_t k = 0; k < height; ++k)
      std::memcpy(static_cast<char*>(to) + k * to_pitch,
                  static_cast<const char*>(from) + k * from_pitch, width);
  });
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (stream != nullptr && stream->is_captured) return oper::emulation::unless(true);
  ++oper::emulation::num_waits;
  oper::emulation::finish(oper::emulation::record(stream));
  return cudaSuccess;
}
// Waits only for `cudaMemcpy` and `cudaMemset`, which are synchronous here.
inline cudaError_t cudaDeviceSynchronize() {
  return oper::emulation::unless(oper::emulation::num_captured > 0);
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
using cudaEvent_t = oper::emulation::Event*;
constexpr int cudaEventDisableTiming = 2;
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, int) {
  *event = new oper::emulation::Event;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  *event = oper::emulation::record(stream);
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
// A stream that is captured cannot wait for others, which could not wait for it in replays, either.
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const bool is_captured = stream != nullptr && stream->is_captured;
  if (is_captured != event->is_captured) return oper::emulation::unless(true);
  if (!oper::emulation::ignores_waits) oper::emulation::wait(stream, *event);
  return cudaSuccess;
}
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = stream != nullptr && stream->is_captured ? cudaStreamCaptureStatusActive
                                                     : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t) { return "an emulated error"; }

namespace oper::emulation {

constexpr int kMaxThreads = 256;

inline thread_local EmulatedIndex thread_index, block_index, block_size, grid_size;

inline thread_local int64_t num_launches = 0;

[[noreturn]] void fail(const char* what);

// Lets other threads of the block run.
void give_way();

void sync_block();

// One operation among the lanes of `mask` of this warp; returns the values by lane, which are valid
// until the next operation.
const uint64_t* sync_warp(unsigned mask, uint64_t value);

// The lane of the thread that runs.
int lane_of_warp();

// An access of `size` bytes, which on a GPU must be at a multiple of that.
inline void check_aligned(const void* at, size_t size) {
  if (reinterpret_cast<uintptr_t>(at) % size != 0) fail("a misaligned access");
}

void run_grid(const std::function<void()>& body, int64_t grid, int block);

template <class T>
T exchange(unsigned mask, T value, int source_lane) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  const uint64_t* values = sync_warp(mask, bits);
  if (!(mask >> source_lane & 1)) fail("a shuffle reads a lane outside of its mask");
  T out;
  std::memcpy(&out, values + source_lane, sizeof(T));
  return out;
}

template <class Kernel, class... Args>
void launch(Kernel kernel, int64_t grid, int block, Stream* stream, Args... args) {
  if (grid < 1 || block < 1 || block > kMaxThreads) fail("a launch without blocks or threads");
  ++num_launches;
  enqueue_kernel(stream, [=] { run_grid([&] { kernel(args...); }, grid, block); });
}

template <class Keys>
void sort_pairs(const Keys& keys, const uint32_t* payloads, const Keys& sorted,
                uint32_t* sorted_payloads, int64_t count, int first_bit, int last_bit) {
  std::vector<std::pair<uint64_t, uint32_t>> pairs(static_cast<size_t>(count));
  const uint64_t mask =
      (last_bit >= 64 ? ~uint64_t{0} : (uint64_t{1} << last_bit) - 1) >> first_bit << first_bit;
  for (int64_t i = 0; i < count; ++i)
    pairs[static_cast<size_t>(i)] = {static_cast<uint64_t>(keys.at(i)), payloads[i]};
  std::stable_sort(pairs.begin(), pairs.end(), [=](const auto& a, const auto& b) {
    return (a.first & mask) < (b.first & mask);
  });
  for (int64_t i = 0; i < count; ++i) {
    sorted.set(i, static_cast<int64_t>(pairs[static_cast<size_t>(i)].first));
    sorted_payloads[i] = pairs[static_cast<size_t>(i)].second;
  }
}

// Few, so that loops over the grid turn.
inline int64_t resident_threads() { return 256; }

}  // namespace oper::emulation

#define OPER_LAUNCH_EARLY OPER_LAUNCH
#define OPER_LAUNCH(kernel, grid, block, stream, ...) \
  oper::emulation::launch((kernel), (grid), (block), (stream), __VA_ARGS__)

// ---- device functions -----------------------------------------------------------------------------

#define threadIdx oper::emulation::thread_index
#define blockIdx oper::emulation::block_index
#define blockDim oper::emulation::block_size
#define gridDim oper::emulation::grid_size

inline void __syncthreads() { oper::emulation::sync_block(); }
inline void __syncwarp(unsigned mask) { oper::emulation::sync_warp(mask, 0); }
inline void __threadfence_system() {}

inline unsigned __ballot_sync(unsigned mask, bool value) {
  const uint64_t* values = oper::emulation::sync_warp(mask, value);
  unsigned bits = 0;
  for (unsigned lanes = mask; lanes != 0; lanes &= lanes - 1) {
    const int lane = __builtin_ctz(lanes);
    bits |= static_cast<unsigned>(values[lane]) << lane;
  }
  return bits;
}
inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }
template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width) {
  const int lane = oper::emulation::lane_of_warp();
  return oper::emulation::exchange(mask, value, lane / width * width + from % width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance, int width) {
  const int lane = oper::emulation::lane_of_warp();
  (void)width;
  return oper::emulation::exchange(mask, value, lane ^ distance);
}
template <class T>
T __ldg(const T* at) {
  oper::emulation::check_aligned(at, sizeof(T));
  return *at;
}
template <class T>
T atomicAdd(T* at, T value) {
  const T before = *at;
  *at += value;
  return before;
}
template <class T>
T atomicOr(T* at, T value) {
  const T before = *at;
  *at |= value;
  return before;
}
template <class T>
T atomicExch(T* at, T value) {
  const T before = *at;
  *at = value;
  return before;
}
inline int atomicCAS(int* at, int expected, int value) {
  const int before = *at;
  if (before == expected) *at = value;
  return before;
}

namespace oper::device {
inline void store_release_system(uint32_t* at, uint32_t value) {
  __atomic_store_n(at, value, __ATOMIC_RELEASE);
}
inline uint32_t load_acquire_system(const uint32_t* at) {
  return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}
inline uint64_t nanoseconds() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}
inline void pause_shortly() { oper::emulation::give_way(); }
}  // namespace oper::device
