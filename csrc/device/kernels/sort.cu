// Sorting and scanning through CUB; in a file of its own, since it takes long to compile.
#include "device/batch.cuh"

#if !defined(OPER_EMULATED)
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#include <cub/device/device_select.cuh>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/tabulate_output_iterator.h>
#include <thrust/iterator/transform_iterator.h>
#endif

namespace oper::device {
namespace {

struct LengthAt {
  Lengths lengths;
  ErrorSink error;
  OPER_DEVICE int64_t operator()(int64_t i) const {
    const int64_t length = lengths.are_32_bit ? static_cast<const int32_t*>(lengths.data)[i]
                                              : static_cast<const int64_t*>(lengths.data)[i];
    if (length >= 0) return length;
    report(error, 5, -1, length);
    return 0;
  }
};

struct WriteBound {
  Lengths lengths;
  int64_t* bounds;
  ErrorSink error;
  OPER_DEVICE void operator()(int64_t i, int64_t sum) const {
    if (i == 0) bounds[0] = 0;
    if (i + 1 == lengths.count && sum != lengths.num_ids) report(error, 5, -1, sum);
    bounds[i + 1] = sum < lengths.num_ids ? sum : lengths.num_ids;
  }
};

}  // namespace

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

cudaError_t sum_lengths(const Lengths& lengths, int64_t* bounds, void* scratch,
                        int64_t scratch_bytes, const ErrorSink& error, cudaStream_t stream) {
  size_t bytes = static_cast<size_t>(scratch_bytes);
  const auto in = thrust::make_transform_iterator(thrust::counting_iterator<int64_t>(0),
                                                  LengthAt{lengths, error});
  const auto out = thrust::make_tabulate_output_iterator(WriteBound{lengths, bounds, error});
  return cub::DeviceScan::InclusiveSum(scratch, bytes, in, out, lengths.count, stream);
}

// Asked for by every operator with few different sizes; finding it out takes microseconds.
int64_t sort_scratch_bytes(int64_t count) {
  struct Known {
    int64_t count = -1, bytes = 0;
  };
  thread_local Known known[4];
  thread_local int next = 0;
  for (const Known& k : known)
    if (k.count == count) return k.bytes;
  size_t sort = 0, select = 0, scan = 0;
  cub::DoubleBuffer<uint64_t> keys(nullptr, nullptr);
  cub::DoubleBuffer<uint32_t> payloads(nullptr, nullptr);
  cub::DeviceRadixSort::SortPairs(nullptr, sort, keys, payloads, count);
  cub::DeviceSelect::If(nullptr, select, thrust::counting_iterator<uint32_t>(0),
                        static_cast<uint32_t*>(nullptr), static_cast<int64_t*>(nullptr), count,
                        BeginsRun{});
  cub::DeviceScan::InclusiveSum(
      nullptr, scan,
      thrust::make_transform_iterator(thrust::counting_iterator<int64_t>(0), LengthAt{}),
      thrust::make_tabulate_output_iterator(WriteBound{}), count);
  const size_t most = std::max({sort, select, scan});
  known[next] = {count, static_cast<int64_t>(most)};
  next = (next + 1) % 4;
  return static_cast<int64_t>(most);
}

int64_t resident_threads() {
  static int threads = [] {
    int device = 0, count = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return (count > 0 ? count : 1) * 512;
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

cudaError_t sum_lengths(const Lengths& lengths, int64_t* bounds, void*, int64_t,
                        const ErrorSink& error, cudaStream_t) {
  const LengthAt length_at{lengths, error};
  const WriteBound write_bound{lengths, bounds, error};
  int64_t sum = 0;
  for (int64_t i = 0; i < lengths.count; ++i) write_bound(i, sum += length_at(i));
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
