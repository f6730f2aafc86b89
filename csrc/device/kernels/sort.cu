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

void sum_lengths(const Lengths& lengths, int64_t* bounds, void* scratch, int64_t scratch_bytes,
                 const ErrorSink& error, cudaStream_t stream) {
  size_t bytes = static_cast<size_t>(scratch_bytes);
  const auto in = thrust::make_transform_iterator(thrust::counting_iterator<int64_t>(0),
                                                  LengthAt{lengths, error});
  const auto out = thrust::make_tabulate_output_iterator(WriteBound{lengths, bounds, error});
  check(cub::DeviceScan::InclusiveSum(scratch, bytes, in, out, lengths.count, stream),
        "cannot add up bag lengths");
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

void sort_into_runs(SortedPairs& pairs, int64_t count, int first_bit, int last_bit,
                    cudaStream_t stream) {
  // A histogram, its sums and a pass for every 8 bits, from array to array; two kernels select.
  const int passes = (last_bit - first_bit + 7) / 8;
  emulation::num_launches += 2 + passes + 2;
  const SortedPairs before = pairs;
  if (passes % 2 != 0) pairs.swap_spare();
  emulation::enqueue(stream, [=, after = pairs] {
    emulation::sort_pairs(before.keys, before.payloads, after.keys, after.payloads, count,
                          first_bit, last_bit);
    *after.num_runs = 0;
    for (int64_t i = 0; i < count; ++i)
      if (i == 0 || after.keys.at(i) != after.keys.at(i - 1))
        after.run_begin[(*after.num_runs)++] = static_cast<uint32_t>(i);
  });
}

void sum_lengths(const Lengths& lengths, int64_t* bounds, void*, int64_t, const ErrorSink& error,
                 cudaStream_t stream) {
  emulation::num_launches += 2;
  const LengthAt length_at{lengths, error};
  const WriteBound write_bound{lengths, bounds, error};
  emulation::enqueue(stream, [=] {
    int64_t sum = 0;
    for (int64_t i = 0; i < lengths.count; ++i) write_bound(i, sum += length_at(i));
  });
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
