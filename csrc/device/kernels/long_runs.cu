// Sums of the runs of more than kLongRun pairs, which the kernels of reduce.cu have listed.
#include "device/reduce.cuh"

namespace oper::device {
namespace {

// Loads the table's row of a run and the data that its update needs, unless sums go to the send
// buffer.
template <class Shape, To kTo>
OPER_DEVICE RowFacts load_row(const ReduceArgs& a, int64_t key, const Table& table, int32_t t,
                              int lane, Row<Shape>& row) {
  if constexpr (kTo == To::kSendBuffer) return {};
  using T = typename Shape::T;
  const int64_t slot = key - table.key_begin;
  row.load(reinterpret_cast<const T*>(table.rows) + slot * table.dim, table.dim, lane,
           Shape::E > 1);
  return facts_of<T>(table, a.optimizers[t].optimizer.kind, slot);
}

// Blocks that a multiprocessor must hold (__launch_bounds__): fewer if gradients in flight take
// many registers.
template <class Shape>
constexpr int kChunkBlocks = Shape::V * Shape::E <= 8 ? 2 : 1;

// Sums chunks, and finishes runs of a single chunk.
template <class Shape, To kTo>
__global__ void __launch_bounds__(256, kChunkBlocks<Shape>) reduce_chunks(const ReduceArgs a) {
  constexpr bool kUpdate = kTo != To::kSendBuffer;
  alignas(16) __shared__ float buffers[kUpdate ? kBufferFloats<Shape> : 1];
  float* buffer = kUpdate ? group_buffer<Shape>(buffers) : nullptr;
  const Group<Shape::G> group(kTo != To::kOptimizer);
  if (kUpdate ? *a.plan.refused != 0 : send_buffer_is_closed(a.view)) return;
  const Reducer<Shape, To::kSendBuffer> sums(a, group, nullptr);
  const int64_t W = a.view.world_size;
  const int64_t first_run = a.plan.segments[a.table_begin * W];
  const int64_t last_run = a.plan.segments[a.table_end * W];
  const int64_t count = a.long_runs.counts[0];
  for (int64_t k = group.index(); group.any(k < count); k += group.count()) {
    Chunk chunk{};
    if (k < count) chunk = a.long_runs.chunks[k];
    // False if the chunk is of another class of rows.
    const bool is_there = k < count && chunk.run >= first_run && chunk.run < last_run;
    int64_t begin = 0, end = 0;
    bool is_cut = false;  // the run has several chunks
    if (is_there) {
      const int64_t first = a.plan.run_begin[chunk.run], last = a.plan.run_begin[chunk.run + 1];
      begin = first + chunk.number * static_cast<int64_t>(kChunk);
      end = begin + kChunk < last ? begin + kChunk : last;
      is_cut = last - first > kChunk;
    }
    Row<Shape> sum, row;
    const int dim = sums.sum_row(begin, end, sum);
    if (is_cut)
      sum.store(a.long_runs.partials + chunk.partial * a.long_runs.stride, dim, group.lane,
                Shape::E > 1);
    const bool ends = is_there && !is_cut;
    if (!group.any(ends)) continue;
    const int64_t key = ends ? a.plan.keys.at(begin) : a.view.table_keys[a.table_begin];
    const int32_t t = static_cast<int32_t>(last_at_most(a.view.table_keys, a.view.num_tables, key));
    RowFacts facts{};
    if (ends) facts = load_row<Shape, kTo>(a, key, a.view.tables[t], t, group.lane, row);
    finish_run<Shape, kTo>(a, ends, t, chunk.run, group, buffer, sum, row, facts);
  }
}

// Partial sums that a group loads before it adds the first of them.
template <class Shape>
constexpr int kInFlight = Shape::V * Shape::E >= 32 || Shape::V > 4 ? 1 : 4 / Shape::V;

// Adds the sums of the chunks of runs that have several, and finishes these runs.
template <class Shape, To kTo>
__global__ void __launch_bounds__(256, kBlocks<Shape>) reduce_cut_runs(const ReduceArgs a) {
  constexpr bool kUpdate = kTo != To::kSendBuffer;
  alignas(16) __shared__ float buffers[kUpdate ? kBufferFloats<Shape> : 1];
  float* buffer = kUpdate ? group_buffer<Shape>(buffers) : nullptr;
  const Group<Shape::G> group;
  const int64_t W = a.view.world_size;
  if (kUpdate ? *a.plan.refused != 0 : send_buffer_is_closed(a.view)) return;
  const int64_t first_run = a.plan.segments[a.table_begin * W];
  const int64_t last_run = a.plan.segments[a.table_end * W];
  const int64_t count = a.long_runs.counts[1];
  for (int64_t at = group.index(); at < count; at += group.count()) {
    const int64_t run = a.long_runs.runs[at];
    if (run < first_run || run >= last_run) continue;
    const int64_t begin = a.plan.run_begin[run], end = a.plan.run_begin[run + 1];
    const int64_t key = a.plan.keys.at(begin);
    const int32_t t = static_cast<int32_t>(last_at_most(a.view.table_keys, a.view.num_tables, key));
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
          rows[u].load(partial + (c + u) * a.long_runs.stride, table.dim, group.lane, Shape::E > 1);
#pragma unroll
      for (int u = 0; u < kInFlight<Shape>; ++u) {
        if (c + u >= chunks) continue;
        Row<Shape> next;
        rows[u].unpack(next);
        sum.add(next);
      }
    }
    Row<Shape> row;
    const RowFacts facts = load_row<Shape, kTo>(a, key, table, t, group.lane, row);
    finish_run<Shape, kTo>(a, true, t, run, group, buffer, sum, row, facts);
  }
}

}  // namespace

void reduce_long_runs(const Launch& on, const ReduceArgs& args, bool update_at_once) {
  const LongRuns& long_runs = args.long_runs;
  for_row_classes(on, args, update_at_once, [&](auto shape, auto sink, const ReduceArgs& a) {
    using S = decltype(shape);
    constexpr To kTo = decltype(sink)::value;
    OPER_LAUNCH((reduce_chunks<S, kTo>), blocks_for(long_runs.max_chunks, 256 / S::G), 256,
                on.stream, a);
    if (args.batch.max_pairs > kChunk)
      OPER_LAUNCH((reduce_cut_runs<S, kTo>), blocks_for(long_runs.max_partials, 256 / S::G), 256,
                  on.stream, a);
  });
}

}  // namespace oper::device
