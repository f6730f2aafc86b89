// How kernels read a batch, and functions that several kernels use.
#pragma once

#include <algorithm>

#include "device/device.h"
#include "device/group.cuh"
#include "device/platform.cuh"

namespace oper::device {

constexpr int kTile = 32;  // bags or ids of a tile, which a warp processes

OPER_DEVICE int64_t id_at(const Batch& batch, int64_t i) {
  return batch.ids_are_32_bit ? static_cast<const int32_t*>(batch.ids)[i]
                              : static_cast<const int64_t*>(batch.ids)[i];
}

OPER_DEVICE float element(const void* data, RowType type, int64_t i) {
  switch (type) {
    case RowType::kFloat16: return to_float(static_cast<const Float16*>(data)[i]);
    case RowType::kBFloat16: return to_float(static_cast<const BFloat16*>(data)[i]);
    default: return static_cast<const float*>(data)[i];
  }
}

// Writes an error for the host, whose word the caller has claimed; the code last, which it reads first.
OPER_DEVICE void store_error(const ErrorSink& error, int code, int rank, int64_t detail) {
  volatile ErrorWord* word = error.word;
  word->rank = rank;
  word->detail = detail;
  __threadfence_system();
  word->code = code;
}

// Stores an error unless one is stored already. The host reads it in the next call.
OPER_DEVICE void report(const ErrorSink& error, int code, int rank, int64_t detail) {
  if (atomicCAS(error.claimed, 0, 1) == 0) store_error(error, code, rank, detail);
}

// Largest k in [low, high) with holds(k), which must be true for `low` and for all up to the
// result.
template <class Holds>
OPER_DEVICE int64_t last_that(int64_t low, int64_t high, Holds holds) {
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (holds(middle)) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Largest k in [0, n) with values[k] <= value, for ascending values with values[0] <= value.
template <class T>
OPER_DEVICE int64_t last_at_most(const T* values, int64_t n, T value) {
  return last_that(0, n, [&](int64_t k) { return values[k] <= value; });
}

// See View::changed.
OPER_DEVICE void mark_changed(const View& view, int64_t t, int64_t slot) {
  atomicOr(view.changed + view.own_begin[t] / 32 + t + slot / 32, 1u << slot % 32);
}

// First k in [0, n) with key_at(k) >= key, or n; found by the lanes of a warp together.
template <class KeyAt>
OPER_DEVICE int64_t lower_bound(const Group<32>& warp, int64_t n, int64_t key, KeyAt key_at) {
  int64_t low = 0, high = n;
  while (low < high) {
    const int64_t step = (high - low + 31) / 32;
    const int64_t at = low + (warp.lane + 1) * step - 1;
    const int64_t passed = step * popcount32(warp.ballot(at < high && key_at(at) < key));
    high = low + passed + step - 1 < high ? low + passed + step - 1 : high;
    low += passed;
  }
  return low;
}

// First k in [0, n) with key_at(k) >= key, or n.
template <class KeyAt>
OPER_DEVICE int64_t lower_bound(int64_t n, int64_t key, KeyAt key_at) {
  return last_that(-1, n, [&](int64_t k) { return key_at(k) < key; }) + 1;
}

// For blocks of 256 threads: calls store(k, sum of value(j) over j < k) for every k in [0, n], for
// k = n on thread 0. Returns the last sum to every thread.
template <class Value, class Store>
OPER_DEVICE int64_t block_sums(int64_t n, Value value, Store store) {
  __shared__ int64_t of_warps[8];
  const Group<32> warp;
  const int me = static_cast<int>(threadIdx.x);
  int64_t before = 0;
  for (int64_t start = 0; start < n; start += 256) {
    const int64_t k = start + me, own = k < n ? value(k) : 0;
    int64_t sum = own;  // inclusive prefix sum over the lanes of the warp
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int64_t more = warp.shuffle(sum, (warp.lane - distance) & 31);
      if (warp.lane >= distance) sum += more;
    }
    if (warp.lane == 31) of_warps[me / 32] = sum;
    __syncthreads();
    int64_t lower = before;
    for (int w = 0; w < 8; ++w) {
      if (w < me / 32) lower += of_warps[w];
      before += of_warps[w];
    }
    if (k < n) store(k, lower + sum - own);
    __syncthreads();
  }
  if (me == 0) store(n, before);
  __syncthreads();
  return before;
}

// ---- pairs --------------------------------------------------------------------------------------

// Calls body(feature, index of the id in the batch, bag, number of the pair) for every pair. A warp
// takes a tile at a time. If the lookup is not pooled, the bag has no meaning.
template <class Body>
OPER_DEVICE void for_pairs(const View& view, const Batch& batch, const BatchPlan& plan, Body body) {
  const Group<32> group;
  const int64_t B = batch.batch_size;
  const int32_t num_tiles = plan.tile_begin[view.num_features];
  for (int64_t w = group.index(); w < num_tiles; w += group.count()) {
    const int32_t f = static_cast<int32_t>(
        last_at_most(plan.tile_begin, view.num_features, static_cast<int32_t>(w)));
    const int64_t* bounds = batch.bounds + batch.key_of[view.features[f].logical] * B;
    const int64_t tile = (w - plan.tile_begin[f]) * kTile;
    const int64_t pair_shift = plan.feature_begin[f] - bounds[0];
    int64_t i, stop, end_of_bag = 0;
    if (batch.pooled) {
      const int64_t last = tile + kTile < B ? tile + kTile : B;
      i = bounds[tile];
      stop = bounds[last];
      end_of_bag = bounds[tile + group.lane + 1 < last ? tile + group.lane + 1 : last];
    } else {
      i = bounds[0] + tile;
      stop = i + kTile < bounds[B] ? i + kTile : bounds[B];
    }
    for (; i < stop; i += 32) {
      const int64_t at = i + group.lane;
      int32_t bag = 0;
      if (batch.pooled) {
        // Number of bags of the tile that end at or before `at`.
#pragma unroll
        for (int step = 16; step > 0; step /= 2)
          if (group.shuffle(end_of_bag, bag + step - 1) <= at) bag += step;
      }
      if (at < stop) body(f, at, tile + bag, at + pair_shift);
    }
  }
}

// ---- send buffer --------------------------------------------------------------------------------

OPER_DEVICE uint32_t* send_buffer_segments(char* buffer) {
  return reinterpret_cast<uint32_t*>(buffer + sizeof(SendBufferHeader));
}
OPER_DEVICE int64_t send_buffer_segment_bytes(const View& view) {
  return segment_bytes(view.num_tables, view.world_size);
}
OPER_DEVICE int64_t* send_buffer_offsets(char* buffer, const View& view) {
  return reinterpret_cast<int64_t*>(buffer + sizeof(SendBufferHeader) +
                                    send_buffer_segment_bytes(view));
}
OPER_DEVICE int64_t send_buffer_header_bytes(const View& view) {
  return send_buffer_header_bytes(view.num_tables, view.world_size);
}
OPER_DEVICE bool send_buffer_is_closed(const View& view) {
  return reinterpret_cast<const SendBufferHeader*>(view.send_buffers[view.rank])->num_runs < 0;
}

// Whether a rank refuses its batch or updates with other settings than this one, or a peer is lost.
// All ranks get the same result, and report the lowest such rank. For one block.
OPER_DEVICE bool is_refused(const View& view) {
  const auto header = [&](int64_t rank) {
    return reinterpret_cast<const SendBufferHeader*>(view.send_buffers[rank]);
  };
  // Numbers 1 and 0, which `block_sums` counts.
  const auto refuses = [&](int64_t rank) { return header(rank)->num_runs < 0 ? 1 : 0; };
  const auto differs = [&](int64_t rank) {
    return header(rank)->settings != static_cast<int64_t>(*view.settings) ? 1 : 0;
  };
  const bool reports = blockIdx.x == 0 && !refuses(view.rank);
  const auto any = [&](auto holds, int code) {
    return block_sums(view.world_size, holds, [&](int64_t rank, int64_t lower) {
      if (reports && lower == 0 && rank < view.world_size && holds(rank))
        report(view.peers, code, static_cast<int>(rank), 0);
    });
  };
  if (any(refuses, 13) > 0 || any(differs, 15) > 0) return true;
  return *view.error.claimed == kLost;
}

// Fills a range of device memory with a byte.
inline void clear(void* data, int value, int64_t num_bytes, cudaStream_t stream) {
  check(cudaMemsetAsync(data, value, static_cast<size_t>(num_bytes), stream),
        "cannot clear device memory");
}

// Whether all rows of a matrix begin at multiples of 16 bytes.
inline bool is_wide(const float* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 4 == 0;
}

}  // namespace oper::device
