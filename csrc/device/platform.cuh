// What the device code is written in: CUDA, or, in tests on machines without a GPU, an emulation of
// the few parts of CUDA that it uses (tests/cuda/emulation.h).
#pragma once

#include <cstdint>

#if defined(OPER_EMULATED)
#include "emulation.h"
#else
#include <cuda_runtime.h>
// `kernel`: in parentheses where its name has a comma. Throws what the launch has met.
#define OPER_LAUNCH(kernel, grid, block, stream, ...)                \
  do {                                                               \
    (kernel)<<<(grid), (block), 0, (stream)>>>(__VA_ARGS__);         \
    check(cudaGetLastError(), "cannot launch " #kernel);             \
  } while (false)
#endif

#include "common/platform.h"

#define OPER_DEVICE __device__ __forceinline__

namespace oper::device {

// Has the lines that hold [from, from + num_bytes) fetched into the second-level cache.
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

}  // namespace oper::device
