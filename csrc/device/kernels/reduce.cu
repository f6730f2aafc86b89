// Backward on one rank: from bag gradients to one gradient per row.
//
// A run is summed in the order of the input, as on the host. Runs of more than kChunk pairs are cut
// into chunks of that many, each summed in order, then the chunks' sums in order: the same tree
// whatever the grid, and whatever else is in the batch.
#include "device/batch.cuh"
#include "device/optimizer.cuh"

namespace oper::device {
namespace {

struct ReduceArgs {
  View view;
  Batch batch;
  BatchPlan plan;
  Gradient grad;
  LongRuns long_runs;
  const UpdateArgs* optimizers;  // [T]
  int32_t table_begin, table_end;
  bool wide_grad;  // of columns that are multiples of four
  int32_t runs_per_group;  // at most the group's lanes
};

// Rows of fp32 numbers that a group loads before it adds the first of them.
template <class Shape>
constexpr int kInFlight = Shape::V * Shape::E >= 32 || Shape::V > 4 ? 1 : 4 / Shape::V;

// Sum of the gradients of the sorted pairs [begin, end) of one table.
template <class Shape>
OPER_DEVICE void sum_pairs(const ReduceArgs& a, const Table& table, int64_t begin, int64_t end,
                           const Group<Shape::G>& group, Row<Shape>& sum) {
  const uint32_t bag_mask = (1u << a.plan.bag_bits) - 1u;
  const int dim = table.dim;
  bool first = true;
  for (int64_t p = begin; p < end; p += Shape::G) {
    const int n = static_cast<int>(end - p < Shape::G ? end - p : Shape::G);
    int64_t at = 0;
    float weight = 1.0f, divisor = 1.0f;
    if (group.lane < n) {
      uint32_t where = a.plan.payloads[p + group.lane];
      if (a.batch.by_pair) {
        if (a.batch.weights) weight = a.plan.pair_weights[where];
        where = a.plan.pair_bags[where];
      }
      if (a.batch.pooled) {
        const Feature& feature = a.view.features[where >> a.plan.bag_bits];
        const int64_t bag = where & bag_mask;
        at = bag * a.grad.stride + feature.column;
        if (table.mean) {
          const int64_t* bound =
              a.batch.bounds + a.batch.key_of[feature.logical] * a.batch.batch_size + bag;
          divisor = static_cast<float>(bound[1] - bound[0]);
        }
      } else {
        at = static_cast<int64_t>(where) * a.grad.stride + table.piece_start;
      }
    }
    for (int j = 0; j < n; j += kInFlight<Shape>) {
      RawRow<Shape, float> rows[kInFlight<Shape>];
#pragma unroll
      for (int u = 0; u < kInFlight<Shape>; ++u) {
        const int64_t from = group.shuffle(at, (j + u) % Shape::G);
        if (j + u < n) rows[u].load(a.grad.data + from, dim, group.lane, a.wide_grad && from % 4 == 0);
      }
#pragma unroll
      for (int u = 0; u < kInFlight<Shape>; ++u) {
        const float length = table.mean ? group.shuffle(divisor, (j + u) % Shape::G) : 1.0f;
        const float w = a.batch.weights ? group.shuffle(weight, (j + u) % Shape::G) : 1.0f;
        if (j + u >= n) continue;
        Row<Shape> row;
        rows[u].unpack(row);
        if (length > 1.0f) row.divide(length);
        if (a.batch.weights) row.scale(w);
        if (first) {
          sum = row;
        } else {
          sum.add(row);
        }
        first = false;
      }
    }
  }
}

// Where the sum of a run goes: to the optimizer, or to the outbox.
template <class Shape, bool kUpdate>
OPER_DEVICE void finish_run(const ReduceArgs& a, int32_t t, int64_t run, int64_t key,
                            const Group<Shape::G>& group, float* buffer, Row<Shape>& sum) {
  const Table& table = a.view.tables[t];
  if constexpr (kUpdate) {
    const int64_t slot = key - table.key_begin;
    const RowOptimizer<Shape> optimizer(a.view, table, a.optimizers[t], group, buffer);
    if (a.grad.scale != 1.0f) sum.scale(a.grad.scale);
    const float norm = optimizer.clips() ? optimizer.sum_of_squares(sum) : 0.0f;
    optimizer.clip_and_decay(slot, sum, norm);
    const float squares =
        is_row_wise(a.optimizers[t].optimizer.kind) ? optimizer.sum_of_squares(sum) : 0.0f;
    optimizer.apply(slot, sum, squares);
  } else {
    char* box = a.view.outboxes[a.view.rank];
    const OutboxHeader* header = reinterpret_cast<const OutboxHeader*>(box);
    const uint32_t* segments = outbox_segments(box);
    const int64_t* offsets = outbox_offsets(box, a.view);
    const int64_t row = run - segments[static_cast<int64_t>(t) * a.view.world_size];
    float* out = reinterpret_cast<float*>(box + header->rows_offset) + offsets[t] +
                 row * table.dim;
    sum.store(out, table.dim, group.lane, Shape::E > 1);
  }
}

// Has what a run needs first fetched: its first gradient and, where it is updated here, its row and
// state. A group works on its runs one after the other, each a chain of loads that wait for another;
// a lane per run starts all of them at once.
template <class Shape, bool kUpdate>
OPER_DEVICE void fetch_ahead(const ReduceArgs& a, const Table& table, int64_t begin, int64_t key) {
  uint32_t where = a.plan.payloads[begin];
  if (a.batch.by_pair) where = a.plan.pair_bags[where];
  int64_t at = static_cast<int64_t>(where) * a.grad.stride + table.piece_start;
  if (a.batch.pooled)
    at = (where & ((1u << a.plan.bag_bits) - 1u)) * a.grad.stride +
         a.view.features[where >> a.plan.bag_bits].column;
  prefetch(a.grad.data + at, 4 * table.dim);
  if constexpr (kUpdate) {
    using T = typename Shape::T;
    const int64_t slot = key - table.key_begin;
    prefetch(reinterpret_cast<const T*>(table.rows) + slot * table.dim, table.dim * sizeof(T));
    const OptimizerArgs& optimizer = a.optimizers[&table - a.view.tables].optimizer;
    const bool per_row = optimizer.kind == Optimizer::kRowWiseAdagrad;
    if (table.momentum1 != nullptr)
      prefetch(table.momentum1 + slot * (per_row ? 1 : table.dim), per_row ? 4 : 4 * table.dim);
  }
}

// Blocks that a multiprocessor must hold: one where looking ahead beside two or more parts of a row
// would spill.
template <class Shape>
constexpr int kReduceBlocks = Shape::V * Shape::E <= 8 ? 2 : 1;

template <class Shape, bool kUpdate>
__global__ void __launch_bounds__(256, kReduceBlocks<Shape>) reduce_runs(const ReduceArgs a) {
  __shared__ float buffers[kUpdate ? kBufferFloats<Shape> : 1];
  float* buffer = kUpdate ? group_buffer<Shape>(buffers) : nullptr;
  const Group<Shape::G> group;
  const int64_t W = a.view.world_size;
  if (!kUpdate && outbox_is_full(a.view)) return;
  const int64_t last = a.plan.segments[a.table_end * W];
  const int64_t step = a.runs_per_group;
  for (int64_t tile = a.plan.segments[a.table_begin * W] + group.index() * step; tile < last;
       tile += group.count() * step) {
    const int n = static_cast<int>(last - tile < step ? last - tile : step);
    uint32_t own_begin = 0;
    int32_t own_table = 0;
    if (group.lane < n) {
      own_begin = a.plan.run_begin[tile + group.lane];
      const int64_t key = a.plan.keys.at(own_begin);
      own_table = static_cast<int32_t>(last_at_most(a.view.table_keys, a.view.num_tables, key));
      fetch_ahead<Shape, kUpdate>(a, a.view.tables[own_table], own_begin, key);
    }
    for (int j = 0; j < n; ++j) {
      // What lanes have read already comes from the cache: it need not stay in registers.
      const int64_t run = tile + j, begin = group.shuffle(own_begin, j);
      const int64_t end = a.plan.run_begin[run + 1], key = a.plan.keys.at(begin);
      const int32_t t = group.shuffle(own_table, j);
      if (end - begin > kChunk) {
        // Left for the next kernels. The order of this list does not matter.
        if (group.lane == 0) {
          const uint32_t chunks = static_cast<uint32_t>((end - begin + kChunk - 1) / kChunk);
          const uint32_t at = atomicAdd(a.long_runs.counts, 1u);
          const uint32_t first = atomicAdd(a.long_runs.counts + 1, chunks);
          a.long_runs.runs[at] = static_cast<uint32_t>(run);
          a.long_runs.first[at] = first;
          for (uint32_t k = 0; k < chunks; ++k) a.long_runs.chunk_run[first + k] = at;
        }
        continue;
      }
      Row<Shape> sum;
      sum_pairs<Shape>(a, a.view.tables[t], begin, end, group, sum);
      finish_run<Shape, kUpdate>(a, t, run, key, group, buffer, sum);
    }
  }
}

template <class Shape>
__global__ void __launch_bounds__(256, kBlocks<Shape>) reduce_chunks(const ReduceArgs a) {
  const Group<Shape::G> group;
  const int64_t W = a.view.world_size;
  const int64_t first_run = a.plan.segments[a.table_begin * W];
  const int64_t last_run = a.plan.segments[a.table_end * W];
  const int64_t num_chunks = a.long_runs.counts[1];
  for (int64_t chunk = group.index(); chunk < num_chunks; chunk += group.count()) {
    const uint32_t at = a.long_runs.chunk_run[chunk];
    const int64_t run = a.long_runs.runs[at];
    if (run < first_run || run >= last_run) continue;
    const int64_t begin =
        a.plan.run_begin[run] + (chunk - a.long_runs.first[at]) * static_cast<int64_t>(kChunk);
    const int64_t end = begin + kChunk < a.plan.run_begin[run + 1] ? begin + kChunk
                                                                   : a.plan.run_begin[run + 1];
    const int32_t t = static_cast<int32_t>(
        last_at_most(a.view.table_keys, a.view.num_tables, a.plan.keys.at(begin)));
    Row<Shape> sum;
    sum_pairs<Shape>(a, a.view.tables[t], begin, end, group, sum);
    sum.store(a.long_runs.partials + chunk * a.long_runs.stride, a.view.tables[t].dim, group.lane,
              Shape::E > 1);
  }
}

template <class Shape, bool kUpdate>
__global__ void __launch_bounds__(256, kBlocks<Shape>) reduce_long_runs(const ReduceArgs a) {
  __shared__ float buffers[kUpdate ? kBufferFloats<Shape> : 1];
  float* buffer = kUpdate ? group_buffer<Shape>(buffers) : nullptr;
  const Group<Shape::G> group;
  const int64_t W = a.view.world_size;
  if (!kUpdate && outbox_is_full(a.view)) return;
  const int64_t first_run = a.plan.segments[a.table_begin * W];
  const int64_t last_run = a.plan.segments[a.table_end * W];
  const int64_t count = a.long_runs.counts[0];
  for (int64_t at = group.index(); at < count; at += group.count()) {
    const int64_t run = a.long_runs.runs[at];
    if (run < first_run || run >= last_run) continue;
    const int64_t begin = a.plan.run_begin[run], end = a.plan.run_begin[run + 1];
    const int64_t key = a.plan.keys.at(begin);
    const int32_t t = static_cast<int32_t>(
        last_at_most(a.view.table_keys, a.view.num_tables, key));
    const Table& table = a.view.tables[t];
    const float* partial =
        a.long_runs.partials + static_cast<int64_t>(a.long_runs.first[at]) * a.long_runs.stride;
    const int64_t chunks = (end - begin + kChunk - 1) / kChunk;
    Row<Shape> sum;
    sum.load(partial, table.dim, group.lane, Shape::E > 1);
    for (int64_t c = 1; c < chunks; c += kInFlight<Shape>) {
      RawRow<Shape, float> rows[kInFlight<Shape>];
#pragma unroll
      for (int u = 0; u < kInFlight<Shape>; ++u)
        if (c + u < chunks)
          rows[u].load(partial + (c + u) * a.long_runs.stride, table.dim, group.lane,
                       Shape::E > 1);
#pragma unroll
      for (int u = 0; u < kInFlight<Shape>; ++u) {
        if (c + u >= chunks) continue;
        Row<Shape> next;
        rows[u].unpack(next);
        sum.add(next);
      }
    }
    finish_run<Shape, kUpdate>(a, t, run, key, group, buffer, sum);
  }
}

// One block: the header of this rank's outbox, or an error when the batch does not fit.
__global__ void __launch_bounds__(256) open_outbox_kernel(View view, BatchPlan plan) {
  const int64_t W = view.world_size, T = view.num_tables;
  char* box = view.outboxes[view.rank];
  int64_t* offsets = outbox_offsets(box, view);
  const auto floats_of = [&](int64_t t) {
    const int64_t rows = static_cast<int64_t>(plan.segments[(t + 1) * W]) - plan.segments[t * W];
    return (rows * view.tables[t].dim + 3) / 4 * 4;
  };
  block_sums(T, floats_of, [&](int64_t t, int64_t floats) {
    if (t < T) {
      offsets[t] = floats;
      return;
    }
    OutboxHeader* header = reinterpret_cast<OutboxHeader*>(box);
    header->num_runs = plan.segments[T * W];
    header->slots_offset = outbox_header_bytes(view);
    header->rows_offset = (header->slots_offset + header->num_runs * 4 + 15) / 16 * 16;
    if (header->rows_offset + floats * 4 > view.outbox_bytes) {
      header->num_runs = -1;
      report(view.error, 3, view.rank, header->rows_offset + floats * 4);
    }
  });
}

__global__ void __launch_bounds__(256) fill_outbox_kernel(View view, BatchPlan plan) {
  const int64_t W = view.world_size, T = view.num_tables;
  char* box = view.outboxes[view.rank];
  const OutboxHeader* header = reinterpret_cast<const OutboxHeader*>(box);
  uint32_t* segments = outbox_segments(box);
  const bool full = outbox_is_full(view);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t k = thread; k <= T * W; k += step) segments[k] = full ? 0 : plan.segments[k];
  if (full) return;
  uint32_t* slots = reinterpret_cast<uint32_t*>(box + header->slots_offset);
  for (int64_t run = thread; run < header->num_runs; run += step) {
    const int64_t key = plan.keys.at(plan.run_begin[run]);
    const Table& table = view.tables[last_at_most(view.table_keys, T, key)];
    const int64_t owner = last_at_most(table.owner_begin, W + 1, key - table.key_begin);
    slots[run] = static_cast<uint32_t>(key - table.key_begin - table.owner_begin[owner]);
  }
}

// As many as lanes can look at together, but no more than keep all groups busy for some turns.
int32_t runs_per_group(const RowClass& row_class, const Batch& batch) {
  const int64_t groups = std::max<int64_t>(1, 6 * resident_threads() / row_class.group_lanes());
  return static_cast<int32_t>(
      std::clamp<int64_t>(batch.max_pairs / groups, 1, row_class.group_lanes()));
}

}  // namespace

void reduce(const Launch& on, const Batch& batch, const BatchPlan& plan, const Gradient& grad,
            const LongRuns& long_runs, bool update_at_once) {
  if (!update_at_once) {
    OPER_LAUNCH(open_outbox_kernel, 1, 256, on.stream, on.view, plan);
    OPER_LAUNCH(fill_outbox_kernel, blocks_for(batch.max_pairs, 256), 256, on.stream, on.view, plan);
  }
  // Calls launch(shape, whether to update, arguments) for each class of rows.
  const auto for_classes = [&](auto launch) {
    for (const RowClass& row_class : on.classes) {
      const ReduceArgs args{on.view,
                            batch,
                            plan,
                            grad,
                            long_runs,
                            on.optimizers,
                            row_class.table_begin,
                            row_class.table_end,
                            is_wide(grad.data, grad.stride),
                            runs_per_group(row_class, batch)};
      with_shape(row_class, [&](auto shape) {
        update_at_once ? launch(shape, std::true_type{}, args)
                       : launch(shape, std::false_type{}, args);
      });
    }
  };
  clear(long_runs.counts, 0, 8, on.stream);
  for_classes([&](auto shape, auto update, const ReduceArgs& args) {
    using S = decltype(shape);
    OPER_LAUNCH((reduce_runs<S, decltype(update)::value>), blocks_for(batch.max_pairs, 256 / S::G),
                256, on.stream, args);
  });
  if (batch.max_pairs <= kChunk) return;
  // Once all short runs are summed: the list of long ones is of all classes.
  for_classes([&](auto shape, auto update, const ReduceArgs& args) {
    using S = decltype(shape);
    const int blocks = blocks_for(long_runs.capacity, 256 / S::G);
    OPER_LAUNCH(reduce_chunks<S>, blocks, 256, on.stream, args);
    OPER_LAUNCH((reduce_long_runs<S, decltype(update)::value>), blocks, 256, on.stream, args);
  });
}

}  // namespace oper::device
