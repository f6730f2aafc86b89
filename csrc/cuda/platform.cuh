// What the device code is written in: CUDA, or, in tests on machines without a GPU, an emulation of
// the few parts of CUDA that it uses (tests/cuda/emulation.h).
#pragma once

#include <cstdint>

#if defined(OPER_EMULATED)
#include "emulation.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
// `kernel` is a function or a pointer to one.
#define OPER_LAUNCH(kernel, grid, block, stream, ...) \
  (kernel)<<<(grid), (block), 0, (stream)>>>(__VA_ARGS__)
#endif

#include "oper/platform.h"

#define OPER_DEVICE __device__ __forceinline__
