// The barrier of a memory domain, see `arrive_and_wait`. Counts of arrivals only grow, so that
// nothing is reset; a deadline ends the wait for a lost rank.
#include "device/batch.cuh"

namespace oper::device {
namespace {

#if !defined(OPER_EMULATED)
OPER_DEVICE void store_release_system(uint32_t* at, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
OPER_DEVICE uint32_t load_acquire_system(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
OPER_DEVICE uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
OPER_DEVICE void pause_shortly() { __nanosleep(100); }
#endif

constexpr int kMostThreads = 256;

// One block, whose threads share the other ranks of the domain, and wait for each. The kernel itself
// increments the count of arrivals in device memory, so that a CUDA graph can be replayed. Once a
// peer was late, a rank no longer waits: the step ends, and the host raises the error.
__global__ void arrive_kernel(uint32_t* const* pads, uint32_t* epoch, int32_t rank,
                              int32_t world_size, int64_t deadline_ns, ErrorSink error) {
  __shared__ uint32_t turn;
  if (threadIdx.x == 0) turn = ++*epoch;
  // Makes what earlier kernels of this stream have written visible to peers before the count.
  __threadfence_system();
  __syncthreads();
  const auto is_waited_for = [&](int32_t peer) { return peer != rank && pads[peer] != nullptr; };
  const int32_t first = static_cast<int32_t>(threadIdx.x), step = static_cast<int32_t>(blockDim.x);
  for (int32_t peer = first; peer < world_size; peer += step)
    if (is_waited_for(peer)) store_release_system(pads[peer] + rank, turn);
  volatile int* claimed = error.claimed;
  if (*claimed == kLost) return;
  const uint64_t begin = nanoseconds();
  for (int32_t peer = first; peer < world_size; peer += step) {
    if (!is_waited_for(peer)) continue;
    while (static_cast<int32_t>(load_acquire_system(pads[rank] + peer) - turn) < 0) {
      if (static_cast<int64_t>(nanoseconds() - begin) > deadline_ns) {
        // Replaces the error of a batch, which is forgotten before the next batch.
        if (atomicExch(error.claimed, kLost) != kLost) store_error(error, 2, peer, turn);
        return;
      }
      pause_shortly();
    }
  }
}

}  // namespace

void arrive_and_wait(uint32_t* const* pads, uint32_t* epoch, int32_t rank, int32_t world_size,
                     int64_t deadline_ms, const ErrorSink& error, cudaStream_t stream) {
  const int threads = world_size < kMostThreads ? (world_size + 31) / 32 * 32 : kMostThreads;
  OPER_LAUNCH(arrive_kernel, 1, threads, stream, pads, epoch, rank, world_size,
              deadline_ms * 1000000, error);
}

}  // namespace oper::device
