// Kernels for one instruction set; see kernels.h.
#include "host/kernels/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c,bmi,bmi2,popcnt,lzcnt")
#define OPER_KERNELS kavx512
#define OPER_KERNELS_TABLE kKernelsAvx512
#define OPER_KERNELS_NAME "avx512"
#define OPER_KERNELS_AVX512
#include "host/kernels/kernels.inl"
#endif
