// Macros that let one header serve the host back end (g++) and the device back end (nvcc).
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define OPER_HD __host__ __device__ __forceinline__
#else
#define OPER_HD inline __attribute__((always_inline))
#endif
