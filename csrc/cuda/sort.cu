// Sorting and scanning through CUB; in a file of its own, since it takes long to compile.
#include "cuda/device.h"
#include "cuda/platform.cuh"

#if !defined(OPER_EMULATED)
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#include <cub/device/device_select.cuh>
#include <thrust/iterator/counting_iterator.h>
#endif

namespace oper::device {

#if !defined(OPER_EMULATED)
namespace {

struct BeginsRun {
  Keys keys;
  __device__ bool operator()(uint32_t i) const {
    return i == 0 || keys.at(i) != keys.at(static_cast<int64_t>(i) - 1);
  }
};

template <class Key>
cudaError_t sort_typed(const Keys& keys, const Keys& spare_keys, uint32_t* payloads,
                       uint32_t* spare_payloads, int64_t count, int first_bit, int last_bit,
                       void* scratch, int64_t scratch_bytes, cudaStream_t stream) {
  cub::DoubleBuffer<Key> k(static_cast<Key*>(keys.data), static_cast<Key*>(spare_keys.data));
  cub::DoubleBuffer<uint32_t> p(payloads, spare_payloads);
  size_t bytes = static_cast<size_t>(scratch_bytes);
  cudaError_t status =
      cub::DeviceRadixSort::SortPairs(scratch, bytes, k, p, count, first_bit, last_bit, stream);
  if (status != cudaSuccess) return status;
  if (k.Current() != keys.data) {
    status = cudaMemcpyAsync(keys.data, k.Current(), static_cast<size_t>(count) * sizeof(Key),
                             cudaMemcpyDeviceToDevice, stream);
    if (status != cudaSuccess) return status;
  }
  if (p.Current() != payloads)
    status = cudaMemcpyAsync(payloads, p.Current(), static_cast<size_t>(count) * 4,
                             cudaMemcpyDeviceToDevice, stream);
  return status;
}

}  // namespace

cudaError_t sort_pairs(const Keys& keys, const Keys& spare_keys, uint32_t* payloads,
                       uint32_t* spare_payloads, int64_t count, int first_bit, int last_bit,
                       void* scratch, int64_t scratch_bytes, cudaStream_t stream) {
  const auto sort = keys.wide ? sort_typed<uint64_t> : sort_typed<uint32_t>;
  return sort(keys, spare_keys, payloads, spare_payloads, count, first_bit, last_bit, scratch,
              scratch_bytes, stream);
}

cudaError_t find_runs(const Keys& keys, int64_t count, uint32_t* run_begin, int64_t* num_runs,
                      void* scratch, int64_t scratch_bytes, cudaStream_t stream) {
  size_t bytes = static_cast<size_t>(scratch_bytes);
  return cub::DeviceSelect::If(scratch, bytes, thrust::counting_iterator<uint32_t>(0), run_begin,
                               num_runs, count, BeginsRun{keys}, stream);
}

cudaError_t inclusive_sums(const int64_t* values, int64_t* sums, int64_t count, void* scratch,
                           int64_t scratch_bytes, cudaStream_t stream) {
  size_t bytes = static_cast<size_t>(scratch_bytes);
  return cub::DeviceScan::InclusiveSum(scratch, bytes, values, sums, count, stream);
}

int64_t sort_scratch_bytes(int64_t count) {
  size_t sort = 0, select = 0, scan = 0;
  cub::DoubleBuffer<uint64_t> keys(nullptr, nullptr);
  cub::DoubleBuffer<uint32_t> payloads(nullptr, nullptr);
  cub::DeviceRadixSort::SortPairs(nullptr, sort, keys, payloads, count);
  cub::DeviceSelect::If(nullptr, select, thrust::counting_iterator<uint32_t>(0),
                        static_cast<uint32_t*>(nullptr), static_cast<int64_t*>(nullptr), count,
                        BeginsRun{});
  cub::DeviceScan::InclusiveSum(nullptr, scan, static_cast<const int64_t*>(nullptr),
                                static_cast<int64_t*>(nullptr), count);
  size_t most = sort > select ? sort : select;
  return static_cast<int64_t>(most > scan ? most : scan);
}

int64_t resident_threads() {
  static int threads = [] {
    int device = 0, count = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return (count > 0 ? count : 1) * 1024;
  }();
  return threads;
}

#else  // the emulation: the same results by the standard library

cudaError_t sort_pairs(const Keys& keys, const Keys&, uint32_t* payloads, uint32_t*, int64_t count,
                       int first_bit, int last_bit, void*, int64_t, cudaStream_t) {
  emulation::sort_pairs(keys, payloads, count, first_bit, last_bit);
  return cudaSuccess;
}

cudaError_t find_runs(const Keys& keys, int64_t count, uint32_t* run_begin, int64_t* num_runs,
                      void*, int64_t, cudaStream_t) {
  *num_runs = 0;
  for (int64_t i = 0; i < count; ++i)
    if (i == 0 || keys.at(i) != keys.at(i - 1))
      run_begin[(*num_runs)++] = static_cast<uint32_t>(i);
  return cudaSuccess;
}

cudaError_t inclusive_sums(const int64_t* values, int64_t* sums, int64_t count, void*, int64_t,
                           cudaStream_t) {
  int64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sums[i] = sum += values[i];
  return cudaSuccess;
}

int64_t sort_scratch_bytes(int64_t) { return 1; }
int64_t resident_threads() { return emulation::resident_threads(); }

#endif

int blocks_for(int64_t groups, int64_t per_block) {
  // Results do not depend on the grid; tests set another one to show it.
  const char* chosen = std::getenv("OPER_DEVICE_THREADS");
  const int64_t threads = chosen ? std::strtoll(chosen, nullptr, 10) : resident_threads();
  const int64_t most = 8 * threads / 256;
  const int64_t wanted = (groups + per_block - 1) / per_block;
  return static_cast<int>(wanted < 1 ? 1 : wanted < most ? wanted : most);
}

}  // namespace oper::device
