// Backward: sums this rank's gradients by row.
//
// A run is summed in the order of the input, as on the host. Runs of more than kChunk pairs are
// divided into chunks of that many, which are each summed in order, and then their sums in order:
// the order depends neither on the grid nor on other rows. Runs of more than kLongRun pairs are
// left to the kernels of long_runs.cu, since here a group does other work between the additions of
// a run.
#include "device/reduce.cuh"

namespace oper::device {
namespace {

// Lists a long run for the kernels of long_runs.cu. The order of the list has no effect.
OPER_DEVICE void list_long_run(const LongRuns& long_runs, uint32_t run, uint32_t pairs) {
  const uint32_t count = (pairs + kChunk - 1) / kChunk;
  uint32_t first = 0;
  if (count > 1) {
    const uint32_t at = atomicAdd(long_runs.counts + 1, 1u);
    first = atomicAdd(long_runs.counts + 2, count);
    long_runs.runs[at] = run;
    long_runs.first[at] = first;
  }
  Chunk* chunks = long_runs.chunks + atomicAdd(long_runs.counts, count);
  for (uint32_t k = 0; k < count; ++k) chunks[k] = {run, k, first + k};
}

// Divides `n` <= 32 runs among the groups of a warp, with about equal numbers of pairs; `pairs`: of
// the run of this lane. Returns the runs of group `number`.
struct RunRange {
  int first, end;
};
template <int G>
OPER_DEVICE RunRange share_runs(const Group<32>& warp, int n, int pairs, int number) {
  constexpr int kGroups = 32 / G;
  RunRange range{0, n};
  if constexpr (kGroups == 1) return range;
  int up_to = pairs;  // number of pairs in this run and those before it
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int more = warp.shuffle(up_to, (warp.lane - distance) & 31);
    if (warp.lane >= distance) up_to += more;
  }
  const int all = warp.shuffle(up_to, 31);
#pragma unroll
  for (int k = 1; k < kGroups; ++k) {
    const int before =
        popcount32(warp.ballot(warp.lane < n && (up_to - pairs) * kGroups < k * all));
    if (k == number) range.first = before;
    if (k == number + 1) range.end = before;
  }
  return range;
}

// Blocks that a multiprocessor must hold (__launch_bounds__): fewer if the kernel contains all
// optimizers, or a warp has many groups, which take more registers.
template <class Shape, To kTo>
constexpr int kReduceBlocks =
    Shape::V * Shape::E > 8                                             ? 1
    : Shape::V * Shape::E > 4 || kTo == To::kOptimizer || Shape::G < 16 ? 2
                                                                        : 3;

template <class Shape, To kTo>
__global__ void __launch_bounds__(256, kReduceBlocks<Shape, kTo>) reduce_runs(const ReduceArgs a) {
  constexpr bool kUpdate = kTo != To::kSendBuffer;
  using Sums = Reducer<Shape, kTo>;
  static_assert(Sums::kBytes + kBufferBytes<Shape, kUpdate> <= kMostSharedBytes);
  alignas(16) __shared__ float buffers[kUpdate ? kBufferFloats<Shape> : 1];
  alignas(16) __shared__ char rings[kArrayBytes<Sums::kBytes>];
  float* buffer = kUpdate ? group_buffer<Shape>(buffers) : nullptr;
  // If tables differ in their optimizers, the groups of a warp diverge.
  const Group<Shape::G> group(kTo != To::kOptimizer);
  const Group<32> warp;
  const int64_t W = a.view.world_size;
  if (kUpdate ? *a.plan.refused != 0 : send_buffer_is_closed(a.view)) return;
  Sums sums(a, group, rings);
  const int64_t last = a.plan.segments[a.table_end * W];
  const int64_t step = a.runs_per_warp;
  for (int64_t tile = a.plan.segments[a.table_begin * W] + warp.index() * step; tile < last;
       tile += warp.count() * step) {
    const int n = static_cast<int>(last - tile < step ? last - tile : step);
    const uint32_t* begin = a.plan.run_begin + tile;
    const int pairs = warp.lane < n ? static_cast<int>(begin[warp.lane + 1] - begin[warp.lane]) : 0;
    const bool is_long = pairs > kLongRun;
    const unsigned are_long = warp.ballot(is_long);
    if (is_long) list_long_run(a.long_runs, static_cast<uint32_t>(tile + warp.lane), pairs);
    const RunRange own = share_runs<Shape::G>(warp, n, is_long ? 0 : pairs, warp.lane / Shape::G);
    int k = own.first;
    do {
      // Takes consecutive short runs.
      while (k < own.end && is_set(are_long, k)) ++k;
      const int first = k;
      while (k < own.end && !is_set(are_long, k)) ++k;
      int64_t run = tile + first;
      sums.sum_runs(
          begin[first], begin[k],
          [&](bool is_there, int32_t t, Row<Shape>& sum, Row<Shape>& row, const RowFacts& facts) {
            finish_run<Shape, kTo>(a, is_there, t, run, group, buffer, sum, row, facts);
            if (is_there) ++run;
          });
    } while (group.any(k < own.end));
  }
}

// One block writes the header of this rank's send buffer. The send buffer is closed (num_runs = -1)
// if the batch is refused, if its gradients do not fit, or if a peer is lost. `has_bags`: false for
// the empty batch that stands for one that Python has refused.
__global__ void __launch_bounds__(256)
    open_send_buffer_kernel(View view, BatchPlan plan, bool has_bags) {
  const int64_t W = view.world_size, T = view.num_tables;
  char* buffer = view.send_buffers[view.rank];
  int64_t* offsets = send_buffer_offsets(buffer, view);
  const auto floats_of = [&](int64_t t) {
    const int64_t rows = static_cast<int64_t>(plan.segments[(t + 1) * W]) - plan.segments[t * W];
    return (rows * view.tables[t].dim + 3) / 4 * 4;
  };
  block_sums(T, floats_of, [&](int64_t t, int64_t floats) {
    if (t < T) {
      offsets[t] = floats;
      return;
    }
    SendBufferHeader* header = reinterpret_cast<SendBufferHeader*>(buffer);
    header->num_runs = plan.segments[T * W];
    header->slots_offset = send_buffer_header_bytes(view);
    header->rows_offset = (header->slots_offset + header->num_runs * 4 + 15) / 16 * 16;
    header->settings = *view.settings;
    const bool fits = header->rows_offset + floats * 4 <= view.send_buffer_bytes;
    if (!fits) report(view.error, 3, view.rank, header->rows_offset + floats * 4);
    if (*plan.refused && has_bags) report(view.error, 16, view.rank, 0);
    if (!fits || *plan.refused || *view.error.claimed == kLost) header->num_runs = -1;
  });
}

__global__ void __launch_bounds__(256) fill_send_buffer_kernel(View view, BatchPlan plan) {
  const int64_t W = view.world_size, T = view.num_tables;
  char* buffer = view.send_buffers[view.rank];
  const SendBufferHeader* header = reinterpret_cast<const SendBufferHeader*>(buffer);
  uint32_t* segments = send_buffer_segments(buffer);
  const bool is_closed = send_buffer_is_closed(view);
  const int64_t thread = thread_index(), step = num_threads();
  for (int64_t k = thread; k <= T * W; k += step) segments[k] = is_closed ? 0 : plan.segments[k];
  if (is_closed) return;
  uint32_t* slots = reinterpret_cast<uint32_t*>(buffer + header->slots_offset);
  for (int64_t run = thread; run < header->num_runs; run += step) {
    const int64_t key = plan.keys.at(plan.run_begin[run]);
    const Table& table = view.tables[last_at_most(view.table_keys, T, key)];
    const int64_t owner = last_at_most(table.owner_begin, W + 1, key - table.key_begin);
    slots[run] = static_cast<uint32_t>(key - table.key_begin - table.owner_begin[owner]);
  }
}

// The number of runs that a warp takes at a time: at most one per lane, and so few that each warp
// takes some several times.
int32_t runs_per_warp(const Batch& batch) {
  const int64_t warps = std::max<int64_t>(1, 6 * resident_threads() / 32);
  return static_cast<int32_t>(std::clamp<int64_t>(batch.max_pairs / warps, 1, 32));
}

}  // namespace

void reduce(const Launch& on, const Batch& batch, const BatchPlan& plan, const Gradient& grad,
            const LongRuns& long_runs, bool update_at_once) {
  if (!update_at_once) {
    OPER_LAUNCH(open_send_buffer_kernel, 1, 256, on.stream, on.view, plan, batch.batch_size > 0);
    OPER_LAUNCH(fill_send_buffer_kernel, blocks_for(batch.max_pairs, 256), 256, on.stream, on.view,
                plan);
  }
  const ReduceArgs args{on.view,
                        batch,
                        plan,
                        grad,
                        long_runs,
                        on.optimizers,
                        0,
                        0,
                        0,
                        is_wide(grad.data, grad.stride),
                        runs_per_warp(batch)};
  clear(long_runs.counts, 0, 12, on.stream);
  for_row_classes(on, args, update_at_once, [&](auto shape, auto sink, const ReduceArgs& a) {
    constexpr To kTo = decltype(sink)::value;
    const auto reduce_in = [&](auto chosen) {
      using S = decltype(chosen);
      OPER_LAUNCH((reduce_runs<S, kTo>), blocks_for(batch.max_pairs, 256 / S::G), 256, on.stream,
                  a);
    };
    // Not if rows repeat: then the groups of a warp end their runs at different times.
    if constexpr (kTo == To::kRowWiseAdagrad) {
      if (!on.rows_repeat) return reduce_in(HalvedIf32<decltype(shape)>{});
    }
    reduce_in(shape);
  });
  // After the short runs of all classes, which list the long ones.
  if (batch.max_pairs > kLongRun) reduce_long_runs(on, args, update_at_once);
}

}  // namespace oper::device
