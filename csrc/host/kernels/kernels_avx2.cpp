// Kernels for one instruction set; see kernels.h.
#include "host/kernels/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC target("avx2,fma,f16c,bmi,bmi2,popcnt,lzcnt")
#define OPER_KERNELS kavx2
#define OPER_KERNELS_TABLE kKernelsAvx2
#define OPER_KERNELS_NAME "avx2"
#define OPER_KERNELS_AVX2
#include "host/kernels/kernels.inl"
#endif
