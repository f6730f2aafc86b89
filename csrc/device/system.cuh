// What a barrier between devices is made of.
#pragma once

#include "device/platform.cuh"

#if !defined(OPER_EMULATED)

namespace oper::device {

__device__ __forceinline__ void store_release_system(uint32_t* at, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
__device__ __forceinline__ void pause_shortly() { __nanosleep(100); }

}  // namespace oper::device

#endif
