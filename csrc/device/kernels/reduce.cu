// Backward on one rank: from bag gradients to one gradient per row.
//
// A run is summed in the order of the input, as on the host. Runs of more than kChunk pairs are cut
// into chunks of that many, each summed in order, then the chunks' sums in order: the same tree
// for every grid, and whatever else is in the batch. Runs of more than kLongRun pairs, which a group
// takes long to sum with all other work in between, are left to kernels of their own.
#include "device/batch.cuh"
#include "device/optimizer.cuh"
#include "device/ring.cuh"

namespace oper::device {
namespace {

struct ReduceArgs {
  View view;
  Batch batch;
  BatchPlan plan;
  Gradient grad;
  LongRuns long_runs;
  const UpdateArgs* optimizers;         // [T]
  int32_t table_begin, table_end, dim;  // as in RowClass
  bool wide_grad;                       // of columns that are multiples of four
  int32_t runs_per_warp;                // at most 32
};

// Where the sum of a run goes: to the outbox, or to the optimizer.
enum class To { kOutbox, kOptimizer, kRowWiseAdagrad };
template <To kTo>
using Sink = std::integral_constant<To, kTo>;
template <To kTo>
constexpr Optimizer kKindOf =
    kTo == To::kRowWiseAdagrad ? Optimizer::kRowWiseAdagrad : Optimizer::kNone;

// Bytes of shared memory for the optimizer's sums.
template <class Shape, bool kUpdate>
constexpr int kBufferBytes = kUpdate ? 4 * kBufferFloats<Shape> : 16;

// Rows of gradients, and of the table if it is updated, in flight at once: up to four, but no more
// than lanes or than fit a block's shared memory next to the optimizer's buffer.
template <class Shape, bool kUpdate>
constexpr int slots_of() {
  const int row = kRingBytes<Shape, float> + (kUpdate ? kRingBytes<Shape, typename Shape::T> : 0);
  const int most = (kMostSharedBytes - kBufferBytes<Shape, kUpdate>) / row;
  const int slots = most < 4 ? most : 4;
  return slots < Shape::G ? (slots < 1 ? 1 : slots) : Shape::G;
}

// Sums the gradients of sorted pairs by row.
template <class Shape, To kTo>
class Reducer {
 public:
  static constexpr bool kUpdate = kTo != To::kOutbox;
  using T = typename Shape::T;
  static constexpr int kSlots = slots_of<Shape, kUpdate>();
  using Gradients = RowRing<Shape, float, kSlots>;
  using Rows = RowRing<Shape, T, kSlots>;
  static constexpr int kBytes = Gradients::kBytes + (kUpdate ? Rows::kBytes : 0);

  // `shared`: `kBytes` for the whole block.
  OPER_DEVICE Reducer(const ReduceArgs& args, const Group<Shape::G>& group, char* shared)
      : a_(args), group_(group), gradients_(shared), rows_(shared + Gradients::kBytes) {}

  // Calls finish(is_there, table, sum, row of the table, its facts) for every run of equal keys
  // among the pairs [begin, end). Groups in lockstep with one whose run ends call it as well, with
  // `is_there` false.
  template <class Finish>
  OPER_DEVICE void sum_runs(int64_t begin, int64_t end, Finish finish) {
    const int count = static_cast<int>(end - begin);
    const int most = group_.most(count);
    // This lane's pair among those fetched next, up to `kSlots` ahead of those being added.
    Pair pair = locate(read(begin + group_.lane, end));
    unsigned coming_lasts = group_.ballot(pair.is_last);
#pragma unroll
    for (int t = 0; t < kSlots; ++t) start(t, pair, t, t < count, is_set(coming_lasts, t));
    Row<Shape> sum, row;
    sum.begin();
    int slot = 0;
    for (int first = 0; first < most; first += Shape::G) {
      const int n = most - first < Shape::G ? most - first : Shape::G;
      const unsigned lasts = coming_lasts;
      const int32_t table = pair.table;
      const float divisor = pair.divisor, weight = pair.weight;
      const RowFacts facts = pair.facts;
      const Raw next = read(begin + first + Shape::G + group_.lane, end);
      for (int t = 0; t < n; ++t) {
        wait_for_copies<kSlots - 1>();
        Row<Shape> gradient;
        gradients_.read(slot, gradient);
        const float length = group_.shuffle(divisor, t);
        if (length > 1.0f) gradient.divide(length);
        if (a_.batch.weights) gradient.scale(group_.shuffle(weight, t));
        sum.add(gradient);
        const bool is_last = is_set(lasts, t);
        if (kUpdate && is_last) rows_.read(slot, row);
        if (t + kSlots == Shape::G) {
          pair = locate(next);
          coming_lasts = group_.ballot(pair.is_last);
        }
        const int ahead = (t + kSlots) % Shape::G;
        start(slot, pair, ahead, first + t + kSlots < count, is_set(coming_lasts, ahead));
        slot = slot + 1 == kSlots ? 0 : slot + 1;
        if (group_.any(is_last)) {
          finish(is_last, group_.shuffle(table, t), sum, row,
                 RowFacts{group_.shuffle(facts.slot, t), group_.shuffle(facts.state, t),
                          group_.shuffle(facts.id, t)});
          if (is_last) sum.begin();
        }
      }
    }
  }

  // Sums the gradients of the pairs [begin, end) of one row. Returns the number of columns. With a
  // loop of its own, because every addition waits for the one before it: nothing else is done
  // between them, and as many gradients as registers hold are loaded before the first of these is
  // added. Uses no shared memory.
  OPER_DEVICE int sum_row(int64_t begin, int64_t end, Row<Shape>& sum) const {
    constexpr int kMost = Shape::V * Shape::E < 64 ? 64 / (Shape::V * Shape::E) : 1;
    constexpr int kInFlight = kMost < Shape::G ? kMost : Shape::G;
    const int count = static_cast<int>(end - begin);
    const int most = group_.most(count);
    sum.begin();
    Raw next = read(begin + group_.lane, end);
    const int dim = a_.dim > 0 ? a_.dim : group_.shuffle(locate(next).dim, 0);
    for (int first = 0; first < most; first += Shape::G) {
      const Pair pair = locate(next);
      next = read(begin + first + Shape::G + group_.lane, end);
      for (int t = 0; t < Shape::G && first + t < most; t += kInFlight) {
        RawRow<Shape, float> rows[kInFlight];
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
          const int64_t at = group_.shuffle(pair.at, t + u);
          if (first + t + u < count)
            rows[u].load(a_.grad.data + at, dim, group_.lane, a_.wide_grad && at % 4 == 0);
        }
#pragma unroll
        for (int u = 0; u < kInFlight; ++u) {
          const float length = group_.shuffle(pair.divisor, t + u);
          const float weight = a_.batch.weights ? group_.shuffle(pair.weight, t + u) : 1.0f;
          if (first + t + u >= count) continue;
          Row<Shape> gradient;
          rows[u].unpack(gradient);
          if (length > 1.0f) gradient.divide(length);
          if (a_.batch.weights) gradient.scale(weight);
          sum.add(gradient);
        }
      }
    }
    return dim;
  }

 private:
  // What a lane has read of its pair (Raw), and what it derived (Pair). Data of the table's row is
  // set only in the last pair of a run.
  struct Raw {
    int64_t key, after;  // key of this pair, and of the next one
    uint32_t payload;
    bool is_there;
  };
  struct Pair {
    int64_t at, row;  // element of the gradients; address in the table
    int32_t table, dim;
    float divisor, weight;
    RowFacts facts;
    bool is_last;
  };

  const ReduceArgs& a_;
  const Group<Shape::G>& group_;
  Gradients gradients_;
  Rows rows_;

  OPER_DEVICE Raw read(int64_t p, int64_t end) const {
    if (p >= end) return {0, 0, 0, false};
    return {a_.plan.keys.at(p), p + 1 < end ? a_.plan.keys.at(p + 1) : -1, a_.plan.payloads[p],
            true};
  }

  OPER_DEVICE Pair locate(const Raw& raw) const {
    Pair pair{};
    pair.table = a_.table_begin;  // a table of this class of rows, even without a pair
    if (!raw.is_there) return pair;
    pair.is_last = raw.after != raw.key;
    pair.divisor = pair.weight = 1.0f;
    uint32_t where = raw.payload;
    if (a_.batch.by_pair) {
      if (a_.batch.weights) pair.weight = a_.plan.pair_weights[where];
      where = a_.plan.pair_bags[where];
    }
    if (a_.batch.pooled) {
      const Feature& feature = a_.view.features[where >> a_.plan.bag_bits];
      const int64_t bag = where & ((1u << a_.plan.bag_bits) - 1u);
      pair.table = feature.table;
      pair.at = bag * a_.grad.stride + feature.column;
      if (a_.view.tables[pair.table].mean) {
        const int64_t* bound =
            a_.batch.bounds + a_.batch.key_of[feature.logical] * a_.batch.batch_size + bag;
        pair.divisor = static_cast<float>(bound[1] - bound[0]);
      }
    } else {
      pair.table =
          static_cast<int32_t>(last_at_most(a_.view.table_keys, a_.view.num_tables, raw.key));
      pair.at =
          static_cast<int64_t>(where) * a_.grad.stride + a_.view.tables[pair.table].piece_start;
    }
    const Table& table = a_.view.tables[pair.table];
    pair.dim = table.dim;
    if constexpr (kUpdate) {
      const int64_t slot = raw.key - table.key_begin;
      pair.row =
          reinterpret_cast<int64_t>(reinterpret_cast<const T*>(table.rows) + slot * table.dim);
      if (pair.is_last) pair.facts = read_facts(table, pair.table, slot);
    }
    return pair;
  }

  // State with one number per column is only prefetched.
  OPER_DEVICE RowFacts read_facts(const Table& table, int32_t t, int64_t slot) const {
    const Optimizer kind = kTo == To::kOptimizer ? a_.optimizers[t].optimizer.kind : kKindOf<kTo>;
    if (table.momentum1 != nullptr && kind != Optimizer::kNone &&
        kind != Optimizer::kRowWiseAdagrad)
      prefetch(table.momentum1 + slot * table.dim, 4 * table.dim);
    return facts_of<T>(table, kind, slot);
  }

  // Begins to fetch the gradient of lane `from`'s pair, and the table's row if the pair `is_last`.
  OPER_DEVICE void start(int slot, const Pair& pair, int from, bool is_there, bool is_last) {
    const int64_t at = group_.shuffle(pair.at, from);
    const int dim = a_.dim > 0 ? a_.dim : group_.shuffle(pair.dim, from);
    if (is_there)
      gradients_.start(slot, a_.grad.data + at, dim, group_.lane, a_.wide_grad && at % 4 == 0);
    if constexpr (kUpdate) {
      const int64_t row = group_.shuffle(pair.row, from);
      if (is_last)
        rows_.start(slot, reinterpret_cast<const T*>(row), dim, group_.lane, Shape::E > 1);
    }
    commit_copies();
  }
};

// Lists a long run for the next kernels, in any order.
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

// `is_there`: false if the group has no run and only stays in lockstep.
template <class Shape, To kTo>
OPER_DEVICE void finish_run(const ReduceArgs& a, bool is_there, int32_t t, int64_t run,
                            const Group<Shape::G>& group, float* buffer, Row<Shape>& sum,
                            Row<Shape>& row, const RowFacts& facts) {
  const Table& table = a.view.tables[t];
  if constexpr (kTo != To::kOutbox) {
    // A captured graph keeps its kernels; its tables may have been frozen since.
    if (a.optimizers[t].optimizer.kind == Optimizer::kNone) is_there = false;
    const RowOptimizer<Shape, kKindOf<kTo>> optimizer(table, a.dim, a.optimizers[t], group, buffer);
    if (is_there && a.grad.scale != 1.0f) sum.scale(a.grad.scale);
    const float norm = group.any(optimizer.clips()) ? optimizer.sum_of_squares(sum) : 0.0f;
    if (is_there) optimizer.clip_and_decay(facts.slot, sum, norm);
    const float squares = is_row_wise(optimizer.kind()) ? optimizer.sum_of_squares(sum) : 0.0f;
    optimizer.apply(sum, squares, row, facts, is_there);
  } else if (is_there) {
    char* box = a.view.outboxes[a.view.rank];
    const OutboxHeader* header = reinterpret_cast<const OutboxHeader*>(box);
    const uint32_t* segments = outbox_segments(box);
    const int64_t* offsets = outbox_offsets(box, a.view);
    const int64_t number = run - segments[static_cast<int64_t>(t) * a.view.world_size];
    float* out =
        reinterpret_cast<float*>(box + header->rows_offset) + offsets[t] + number * table.dim;
    sum.store(out, table.dim, group.lane, Shape::E > 1);
  }
}

// Divides `n` <= 32 runs, of `pairs` pairs each (by lane of the warp), among the warp's groups,
// with about equal numbers of pairs. Returns the runs of group `number`.
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

// Blocks that a multiprocessor must hold: fewer if the kernel has all optimizers, or a warp many
// rows, which take more registers.
template <class Shape, To kTo>
constexpr int kReduceBlocks =
    Shape::V * Shape::E > 8                                             ? 1
    : Shape::V * Shape::E > 4 || kTo == To::kOptimizer || Shape::G < 16 ? 2
                                                                        : 3;

template <class Shape, To kTo>
__global__ void __launch_bounds__(256, kReduceBlocks<Shape, kTo>) reduce_runs(const ReduceArgs a) {
  constexpr bool kUpdate = kTo != To::kOutbox;
  using Sums = Reducer<Shape, kTo>;
  static_assert(Sums::kBytes + kBufferBytes<Shape, kUpdate> <= kMostSharedBytes);
  alignas(16) __shared__ float buffers[kUpdate ? kBufferFloats<Shape> : 1];
  alignas(16) __shared__ char rings[kArrayBytes<Sums::kBytes>];
  float* buffer = kUpdate ? group_buffer<Shape>(buffers) : nullptr;
  // If tables differ in their optimizers, the groups of a warp diverge.
  const Group<Shape::G> group(kTo != To::kOptimizer);
  const Group<32> warp;
  const int64_t W = a.view.world_size;
  if (kUpdate ? *a.plan.refused != 0 : outbox_is_closed(a.view)) return;
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
      // Consecutive short runs.
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

// The table's row of a run and what its update needs, if it is updated here.
template <class Shape, To kTo>
OPER_DEVICE RowFacts load_row(const ReduceArgs& a, int64_t key, const Table& table, int32_t t,
                              int lane, Row<Shape>& row) {
  if constexpr (kTo == To::kOutbox) return {};
  using T = typename Shape::T;
  const int64_t slot = key - table.key_begin;
  row.load(reinterpret_cast<const T*>(table.rows) + slot * table.dim, table.dim, lane,
           Shape::E > 1);
  return facts_of<T>(table, a.optimizers[t].optimizer.kind, slot);
}

// Blocks that a multiprocessor must hold: fewer if gradients in flight take many registers.
template <class Shape>
constexpr int kChunkBlocks = Shape::V * Shape::E <= 8 ? 2 : 1;

// Sums chunks; finishes runs that are one chunk.
template <class Shape, To kTo>
__global__ void __launch_bounds__(256, kChunkBlocks<Shape>) reduce_chunks(const ReduceArgs a) {
  constexpr bool kUpdate = kTo != To::kOutbox;
  alignas(16) __shared__ float buffers[kUpdate ? kBufferFloats<Shape> : 1];
  float* buffer = kUpdate ? group_buffer<Shape>(buffers) : nullptr;
  const Group<Shape::G> group(kTo != To::kOptimizer);
  if (kUpdate ? *a.plan.refused != 0 : outbox_is_closed(a.view)) return;
  const Reducer<Shape, To::kOutbox> sums(a, group, nullptr);
  const int64_t W = a.view.world_size;
  const int64_t first_run = a.plan.segments[a.table_begin * W];
  const int64_t last_run = a.plan.segments[a.table_end * W];
  const int64_t count = a.long_runs.counts[0];
  for (int64_t k = group.index(); group.any(k < count); k += group.count()) {
    Chunk chunk{};
    if (k < count) chunk = a.long_runs.chunks[k];
    // None if the chunk is of another class of rows.
    const bool is_there = k < count && chunk.run >= first_run && chunk.run < last_run;
    int64_t begin = 0, end = 0;
    bool is_cut = false;
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

// Adds the sums of the chunks of runs that were cut, and finishes these.
template <class Shape, To kTo>
__global__ void __launch_bounds__(256, kBlocks<Shape>) reduce_cut_runs(const ReduceArgs a) {
  constexpr bool kUpdate = kTo != To::kOutbox;
  alignas(16) __shared__ float buffers[kUpdate ? kBufferFloats<Shape> : 1];
  float* buffer = kUpdate ? group_buffer<Shape>(buffers) : nullptr;
  const Group<Shape::G> group;
  const int64_t W = a.view.world_size;
  if (kUpdate ? *a.plan.refused != 0 : outbox_is_closed(a.view)) return;
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

// Writes the header of this rank's outbox, which stays closed if the batch is refused, for instance
// because it does not fit. `has_bags`: the batch does not stand in for one that Python refused. One
// block.
__global__ void __launch_bounds__(256)
    open_outbox_kernel(View view, BatchPlan plan, bool has_bags) {
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
    header->settings = *view.settings;
    const bool fits = header->rows_offset + floats * 4 <= view.outbox_bytes;
    if (!fits) report(view.error, 3, view.rank, header->rows_offset + floats * 4);
    if (*plan.refused && has_bags) report(view.error, 16, view.rank, 0);
    if (!fits || *plan.refused || *view.error.claimed == kLost) header->num_runs = -1;
  });
}

__global__ void __launch_bounds__(256) fill_outbox_kernel(View view, BatchPlan plan) {
  const int64_t W = view.world_size, T = view.num_tables;
  char* box = view.outboxes[view.rank];
  const OutboxHeader* header = reinterpret_cast<const OutboxHeader*>(box);
  uint32_t* segments = outbox_segments(box);
  const bool is_closed = outbox_is_closed(view);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t k = thread; k <= T * W; k += step) segments[k] = is_closed ? 0 : plan.segments[k];
  if (is_closed) return;
  uint32_t* slots = reinterpret_cast<uint32_t*>(box + header->slots_offset);
  for (int64_t run = thread; run < header->num_runs; run += step) {
    const int64_t key = plan.keys.at(plan.run_begin[run]);
    const Table& table = view.tables[last_at_most(view.table_keys, T, key)];
    const int64_t owner = last_at_most(table.owner_begin, W + 1, key - table.key_begin);
    slots[run] = static_cast<uint32_t>(key - table.key_begin - table.owner_begin[owner]);
  }
}

// Number of runs that a warp takes at once: at most one per lane, and so few that each warp takes
// runs several times.
int32_t runs_per_warp(const Batch& batch) {
  const int64_t warps = std::max<int64_t>(1, 6 * resident_threads() / 32);
  return static_cast<int32_t>(std::clamp<int64_t>(batch.max_pairs / warps, 1, 32));
}

}  // namespace

void reduce(const Launch& on, const Batch& batch, const BatchPlan& plan, const Gradient& grad,
            const LongRuns& long_runs, bool update_at_once) {
  if (!update_at_once) {
    OPER_LAUNCH(open_outbox_kernel, 1, 256, on.stream, on.view, plan, batch.batch_size > 0);
    OPER_LAUNCH(fill_outbox_kernel, blocks_for(batch.max_pairs, 256), 256, on.stream, on.view,
                plan);
  }
  // Calls launch(shape, where sums go, arguments) for each class of rows.
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
                            row_class.dim,
                            is_wide(grad.data, grad.stride),
                            runs_per_warp(batch)};
      with_shape(row_class, [&](auto shape) {
        if (!update_at_once) return launch(shape, Sink<To::kOutbox>{}, args);
        if (on.all_row_wise_adagrad) return launch(shape, Sink<To::kRowWiseAdagrad>{}, args);
        launch(shape, Sink<To::kOptimizer>{}, args);
      });
    }
  };
  clear(long_runs.counts, 0, 12, on.stream);
  for_classes([&](auto shape, auto sink, const ReduceArgs& args) {
    constexpr To kTo = decltype(sink)::value;
    const auto reduce_in = [&](auto chosen) {
      using S = decltype(chosen);
      OPER_LAUNCH((reduce_runs<S, kTo>), blocks_for(batch.max_pairs, 256 / S::G), 256, on.stream,
                  args);
    };
    // If rows repeat, the groups of a warp end their runs at different times: use whole shapes.
    if constexpr (kTo == To::kRowWiseAdagrad) {
      if (!on.rows_repeat) return reduce_in(Halved<decltype(shape)>{});
    }
    reduce_in(shape);
  });
  if (batch.max_pairs <= kLongRun) return;
  // After the short runs of all classes, which the list of long ones covers.
  for_classes([&](auto shape, auto sink, const ReduceArgs& args) {
    using S = decltype(shape);
    constexpr To kTo = decltype(sink)::value;
    OPER_LAUNCH((reduce_chunks<S, kTo>), blocks_for(long_runs.max_chunks, 256 / S::G), 256,
                on.stream, args);
    if (batch.max_pairs > kChunk)
      OPER_LAUNCH((reduce_cut_runs<S, kTo>), blocks_for(long_runs.max_partials, 256 / S::G), 256,
                  on.stream, args);
  });
}

}  // namespace oper::device
