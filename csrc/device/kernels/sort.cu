// Bounds of bags, and sorting by CUB, which takes long to compile and is therefore only used here.
#include "device/batch.cuh"

#if !defined(OPER_EMULATED)
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_select.cuh>
#include <thrust/iterator/counting_iterator.h>

#include <cstdlib>
#include <cstring>
#endif

namespace oper::device {
namespace {

constexpr int kPerThread = 8, kPerBlock = 256 * kPerThread;
int64_t num_blocks(int64_t count) { return (count + kPerBlock - 1) / kPerBlock; }

// Reads a thread's lengths, at `first`, `first + step`, ..., and returns their sum. Negative ones count as
// 2^31, so that the sum cannot be the number of ids.
OPER_DEVICE int64_t read_lengths(const Lengths& lengths, int64_t first, int64_t step,
                                 const ErrorSink& error, int64_t (&own)[kPerThread]) {
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int64_t i = first + k * step;
    own[k] = i >= lengths.count   ? 0
             : lengths.are_32_bit ? static_cast<const int32_t*>(lengths.data)[i]
                                  : static_cast<const int64_t*>(lengths.data)[i];
  }
  // Checked in a second loop, so that all loads are issued first.
  int64_t least = 0, sum = 0;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    least = own[k] < least ? own[k] : least;
    // Sums of fewer than 2^32 such lengths do not overflow.
    constexpr int64_t kMost = int64_t{1} << 31;
    own[k] = own[k] >= 0 && own[k] < kMost ? own[k] : kMost;
    sum += own[k];
  }
  if (least < 0) report(error, 5, -1, least);
  return sum;
}

__global__ void __launch_bounds__(256)
    sum_blocks_kernel(Lengths lengths, int64_t* totals, ErrorSink error) {
  let_next_kernel_begin();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kPerBlock;
  int64_t own[kPerThread];
  const int64_t sum = read_lengths(lengths, first + threadIdx.x, 256, error, own);
  const int64_t total = block_sums(256, [&](int64_t) { return sum; }, [](int64_t, int64_t) {});
  if (threadIdx.x == 0) totals[blockIdx.x] = total;
}

__global__ void __launch_bounds__(256)
    write_bounds_kernel(Lengths lengths, const int64_t* totals, int64_t* bounds, ErrorSink error) {
  let_next_kernel_begin();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kPerBlock + threadIdx.x * kPerThread;
  int64_t own[kPerThread];
  const int64_t sum = read_lengths(lengths, first, 1, error, own);
  int64_t bound = 0;  // of the thread's first length
  int64_t total = block_sums(
      256, [&](int64_t) { return sum; },
      [&](int64_t thread, int64_t lower) {
        if (thread < 256) bound = lower;
      });
  wait_for_earlier_kernel();  // for the totals
  if (gridDim.x > 1) {
    __shared__ int64_t before;
    total = block_sums(
        gridDim.x, [&](int64_t block) { return totals[block]; },
        [&](int64_t block, int64_t lower) {
          if (block == blockIdx.x) before = lower;
        });
    bound += before;
  }
  const bool fits = total == lengths.num_ids;
  if (first == 0) {
    // A negative length has been reported already.
    if (!fits) report(error, 5, -1, total);
    bounds[0] = fits ? 0 : kRefusedBound;
  }
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    bound += own[k];
    if (first + k < lengths.count) bounds[first + k + 1] = fits ? bound : kRefusedBound;
  }
}

}  // namespace

int64_t sum_scratch_bytes(int64_t count) { return 8 * num_blocks(count); }

void sum_lengths(const Lengths& lengths, int64_t* bounds, void* scratch, const ErrorSink& error,
                 cudaStream_t stream) {
  int64_t* totals = static_cast<int64_t*>(scratch);
  const int blocks = static_cast<int>(num_blocks(lengths.count));
  if (blocks == 1) {
    OPER_LAUNCH(write_bounds_kernel, 1, 256, stream, lengths, totals, bounds, error);
    return;
  }
  OPER_LAUNCH(sum_blocks_kernel, blocks, 256, stream, lengths, totals, error);
  OPER_LAUNCH_EARLY(write_bounds_kernel, blocks, 256, stream, lengths, totals, bounds, error);
}

#if !defined(OPER_EMULATED)
namespace {

struct BeginsRun {
  Keys keys;
  __device__ bool operator()(uint32_t i) const {
    return i == 0 || keys.at(i) != keys.at(static_cast<int64_t>(i) - 1);
  }
};

template <class Key>
void sort_typed(SortedPairs& pairs, int64_t count, int first_bit, int last_bit,
                cudaStream_t stream) {
  cub::DoubleBuffer<Key> k(static_cast<Key*>(pairs.keys.data),
                           static_cast<Key*>(pairs.spare_keys.data));
  cub::DoubleBuffer<uint32_t> p(pairs.payloads, pairs.spare_payloads);
  size_t bytes = static_cast<size_t>(pairs.sort_scratch_bytes);
  check(cub::DeviceRadixSort::SortPairs(pairs.sort_scratch, bytes, k, p, count, first_bit, last_bit,
                                        stream),
        "cannot sort ids");
  if (k.Current() != pairs.keys.data) pairs.swap_spare();
}

}  // namespace

void sort_into_runs(SortedPairs& pairs, int64_t count, int first_bit, int last_bit,
                    cudaStream_t stream) {
  if (count == 0) return clear(pairs.num_runs, 0, 8, stream);
  const auto sort = pairs.keys.wide ? sort_typed<uint64_t> : sort_typed<uint32_t>;
  sort(pairs, count, first_bit, last_bit, stream);
  size_t bytes = static_cast<size_t>(pairs.sort_scratch_bytes);
  check(cub::DeviceSelect::If(pairs.sort_scratch, bytes, thrust::counting_iterator<uint32_t>(0),
                              pairs.run_begin, pairs.num_runs, count, BeginsRun{pairs.keys},
                              stream),
        "cannot find the runs of equal ids");
}

// Remembers the last results: operators ask for few different sizes, and CUB takes microseconds.
int64_t sort_scratch_bytes(int64_t count) {
  struct Known {
    int64_t count = -1, bytes = 0;
  };
  thread_local Known known[4];
  thread_local int next = 0;
  for (const Known& k : known)
    if (k.count == count) return k.bytes;
  size_t sort = 0, select = 0;
  cub::DoubleBuffer<uint64_t> keys(nullptr, nullptr);
  cub::DoubleBuffer<uint32_t> payloads(nullptr, nullptr);
  const char* what = "cannot ask for the memory that sorting needs";
  check(cub::DeviceRadixSort::SortPairs(nullptr, sort, keys, payloads, count), what);
  check(cub::DeviceSelect::If(nullptr, select, thrust::counting_iterator<uint32_t>(0),
                              static_cast<uint32_t*>(nullptr), static_cast<int64_t*>(nullptr),
                              count, BeginsRun{}),
        what);
  const size_t most = std::max(sort, select);
  known[next] = {count, static_cast<int64_t>(most)};
  next = (next + 1) % 4;
  return static_cast<int64_t>(most);
}

bool kernels_overlap() {
  static const bool overlap = [] {
    int device = 0, major = 0;
    const char* what = "cannot ask for the device's properties";
    check(cudaGetDevice(&device), what);
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), what);
    // Code that was compiled for older devices does not wait for the earlier kernel, see
    // platform.cuh.
    cudaFuncAttributes code{};
    // For compute-sanitizer's racecheck, which does not track launches that overlap.
    const char* chosen = std::getenv("OPER_DEVICE_OVERLAP");
    if (chosen && std::strcmp(chosen, "0") == 0) return false;
    if (major < 9) return false;
    check(cudaFuncGetAttributes(&code, write_bounds_kernel), what);
    return code.ptxVersion >= 90;
  }();
  return overlap;
}

int64_t resident_threads() {
  static int threads = [] {
    int device = 0, count = 0;
    const char* what = "cannot ask for the device's properties";
    check(cudaGetDevice(&device), what);
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), what);
    return count * 512;
  }();
  return threads;
}

#else  // in the emulation, with the standard library

void sort_into_runs(SortedPairs& pairs, int64_t count, int first_bit, int last_bit,
                    cudaStream_t stream) {
  // CUB's launches: a histogram, its sums, a pass for every 8 bits; and two kernels that select.
  const int passes = (last_bit - first_bit + 7) / 8;
  emulation::num_launches += 2 + passes + 2;
  const SortedPairs before = pairs;
  if (passes % 2 != 0) pairs.swap_spare();
  emulation::enqueue_kernel(stream, [=, after = pairs] {
    emulation::sort_pairs(before.keys, before.payloads, after.keys, after.payloads, count,
                          first_bit, last_bit);
    *after.num_runs = 0;
    for (int64_t i = 0; i < count; ++i)
      if (i == 0 || after.keys.at(i) != after.keys.at(i - 1))
        after.run_begin[(*after.num_runs)++] = static_cast<uint32_t>(i);
  });
}

int64_t sort_scratch_bytes(int64_t) { return 1; }
bool kernels_overlap() { return false; }
int64_t resident_threads() { return emulation::resident_threads(); }

#endif

int blocks_for(int64_t groups, int64_t per_block) {
  // Tests change the grid to verify that results do not depend on it.
  const char* chosen = std::getenv("OPER_DEVICE_THREADS");
  const int64_t threads = chosen ? std::strtoll(chosen, nullptr, 10) : resident_threads();
  const int64_t most = std::max<int64_t>(1, 8 * threads / 256);
  const int64_t wanted = (groups + per_block - 1) / per_block;
  return static_cast<int>(wanted < 1 ? 1 : wanted < most ? wanted : most);
}

}  // namespace oper::device
