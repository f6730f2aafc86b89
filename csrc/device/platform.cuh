// The parts of CUDA that device code uses; in tests on machines without a GPU, those of its
// emulation (tests/cuda/emulation.h).
#pragma once

#include <cstdint>

#if defined(OPER_EMULATED)
#include "emulation.h"
#else
#include <cuda_runtime.h>
// `kernel` must be in parentheses if it contains a comma. Throws if the launch fails.
#define OPER_LAUNCH(kernel, grid, block, stream, ...)                \
  do {                                                               \
    (kernel)<<<(grid), (block), 0, (stream)>>>(__VA_ARGS__);         \
    check(cudaGetLastError(), "cannot launch " #kernel);             \
  } while (false)
// Launches a kernel that may start while its predecessor on the stream still runs (programmatic
// dependent launch, sm_90 and newer). The kernel must call `wait_for_earlier_kernel` before it
// reads memory that the predecessor writes, or writes memory that the predecessor uses. It may read
// results of earlier kernels before that call only if the predecessor was not launched this way.
// The predecessor may call `let_next_kernel_begin`.
#define OPER_LAUNCH_EARLY(kernel, grid, block, launched_on, ...)                       \
  do {                                                                                 \
    cudaLaunchAttribute attribute{};                                                   \
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;                 \
    attribute.val.programmaticStreamSerializationAllowed = 1;                          \
    cudaLaunchConfig_t config{};                                                       \
    config.gridDim = static_cast<unsigned>(grid);                                      \
    config.blockDim = static_cast<unsigned>(block);                                    \
    config.stream = launched_on;                                                       \
    config.attrs = &attribute;                                                         \
    config.numAttrs = kernels_overlap() ? 1 : 0;                                       \
    check(cudaLaunchKernelEx(&config, kernel, __VA_ARGS__), "cannot launch " #kernel); \
  } while (false)
#endif

#include "common/platform.h"

#define OPER_DEVICE __device__ __forceinline__

namespace oper::device {

// Number of this thread in the grid, and the number of threads.
OPER_DEVICE int64_t thread_index() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
OPER_DEVICE int64_t num_threads() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

OPER_DEVICE void wait_for_earlier_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
OPER_DEVICE void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Prefetches the lines that hold [from, from + num_bytes) into the second-level cache.
OPER_DEVICE void prefetch(const void* from, int64_t num_bytes) {
#if defined(OPER_EMULATED)
  (void)from;
  (void)num_bytes;
#else
  const char* at = static_cast<const char*>(from);
  for (int64_t k = 0; k < num_bytes; k += 128)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at + k));
#endif
}

// SharedAddress: an address in the block's shared memory.
#if defined(OPER_EMULATED)
using SharedAddress = char*;
OPER_DEVICE SharedAddress shared_address(void* shared) { return static_cast<char*>(shared); }
#else
using SharedAddress = uint32_t;
// Volatile, so that the compiler keeps the address. Otherwise it would derive it from a special
// register again for every access, which takes longer than the access itself.
OPER_DEVICE SharedAddress shared_address(void* shared) {
  SharedAddress address;
  asm volatile("{ .reg .u64 at; cvta.to.shared.u64 at, %1; cvt.u32.u64 %0, at; }"
               : "=r"(address)
               : "l"(shared));
  return address;
}
#endif

// Reads 2, 4 or 16 aligned bytes of shared memory.
template <class Word>
OPER_DEVICE Word read_shared(SharedAddress from) {
  static_assert(sizeof(Word) == 2 || sizeof(Word) == 4 || sizeof(Word) == 16);
  Word word;
#if defined(OPER_EMULATED)
  emulation::check_aligned(from, sizeof(word));
  __builtin_memcpy(&word, from, sizeof(word));
#else
  if constexpr (sizeof(Word) == 16) {
    uint4 raw;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
                 : "r"(from));
    __builtin_memcpy(&word, &raw, sizeof(word));
  } else if constexpr (sizeof(Word) == 4) {
    uint32_t raw;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(raw) : "r"(from));
    __builtin_memcpy(&word, &raw, sizeof(word));
  } else {
    uint16_t raw;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(raw) : "r"(from));
    __builtin_memcpy(&word, &raw, sizeof(word));
  }
#endif
  return word;
}

// Copies 2, 4 or 16 aligned bytes into shared memory; 4 or 16 bytes asynchronously. `commit_copies`
// makes a group of a lane's copies since the last one; wait_for_copies<n> waits until all but the
// lane's last n groups are complete.
template <int kNumBytes>
OPER_DEVICE void copy_async(SharedAddress to, const void* from) {
#if defined(OPER_EMULATED)
  emulation::check_aligned(from, kNumBytes);
  emulation::check_aligned(to, kNumBytes);
  __builtin_memcpy(to, from, kNumBytes);
#else
  if constexpr (kNumBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else if constexpr (kNumBytes == 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
  } else {
    const uint16_t raw = *static_cast<const uint16_t*>(from);
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(raw) : "memory");
  }
#endif
}
OPER_DEVICE void commit_copies() {
#if !defined(OPER_EMULATED)
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int kLast>
OPER_DEVICE void wait_for_copies() {
#if !defined(OPER_EMULATED)
  asm volatile("cp.async.wait_group %0;" ::"n"(kLast) : "memory");
#endif
}

}  // namespace oper::device
