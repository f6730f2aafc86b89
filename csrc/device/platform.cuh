// Platform of the device code: CUDA or, in tests on machines without a GPU, an emulation of the
// parts of CUDA that it uses (tests/cuda/emulation.h).
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
// For a kernel that may start while its predecessor on the stream still runs (programmatic
// dependent launch, sm_90 and newer). It must call `wait_for_earlier_kernel` before it reads what
// that writes, or writes what that uses; the predecessor may call `let_next_kernel_begin`. It may
// read results of still earlier kernels at once only if the predecessor did not start early.
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

// Copies 4 or 16 aligned bytes into shared memory asynchronously. Copies belong to the next
// `commit_copies`; wait_for_copies<n>: all but the last n commits are done, as the same lane sees it.
template <int kNumBytes>
OPER_DEVICE void copy_async(void* shared, const void* from) {
#if defined(OPER_EMULATED)
  __builtin_memcpy(shared, from, kNumBytes);
#else
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (kNumBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
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
