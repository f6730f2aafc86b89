// Backward on one rank: from bag gradients to one gradient per row.
//
// A run is summed in the order of the input, as on the host. Runs of more than kChunk pairs are cut
// into chunks of that many, each summed in order, then the chunks' sums in order: the same tree
// whatever the grid, and whatever else is in the batch.
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
  const UpdateArgs* optimizers;  // [T]
  int32_t table_begin, table_end;
  bool wide_grad;  // of columns that are multiples of four
  int32_t runs_per_group;  // at most the group's lanes
};

// Of shared memory, for the optimizer's sums.
template <class Shape, bool kUpdate>
constexpr int kBufferBytes = kUpdate ? 4 * kBufferFloats<Shape> : 16;

// Rows of gradients, and of the table where it is updated, on their way at once: as many as fit
// beside the optimizer's buffer into a block's shared memory.
template <class Shape, bool kUpdate>
constexpr int slots_of() {
  const int row = kRingBytes<Shape, float> + (kUpdate ? kRingBytes<Shape, typename Shape::T> : 0);
  const int most = (kMostSharedBytes - kBufferBytes<Shape, kUpdate>) / row;
  const int slots = most < 4 ? most : 4;
  return slots < Shape::G ? (slots < 1 ? 1 : slots) : Shape::G;
}

// Sums the gradients of sorted pairs by row.
template <class Shape, bool kUpdate>
class Reducer {
 public:
  using T = typename Shape::T;
  static constexpr int kSlots = slots_of<Shape, kUpdate>();
  using Gradients = RowRing<Shape, float, kSlots>;
  using Rows = RowRing<Shape, T, kSlots>;
  static constexpr int kBytes = Gradients::kBytes + (kUpdate ? Rows::kBytes : 0);

  // `shared`: `kBytes` for the whole block.
  OPER_DEVICE Reducer(const ReduceArgs& args, const Group<Shape::G>& group, char* shared)
      : a_(args), group_(group), gradients_(shared), rows_(shared + Gradients::kBytes) {}

  // Calls finish(table, key, sum, row of the table, its facts) for every run of equal keys among the
  // pairs [begin, end).
  template <class Finish>
  OPER_DEVICE void sum_runs(int64_t begin, int64_t end, Finish finish) {
    // Of the pairs to be fetched next, which are up to `kSlots` ahead of those to be added.
    Pair pair = locate(read(begin + group_.lane, end));
    unsigned coming_lasts = group_.ballot(pair.is_last);
#pragma unroll
    for (int t = 0; t < kSlots; ++t) start(t, pair, t, begin + t < end, is_set(coming_lasts, t));
    Row<Shape> sum, row;
    sum.begin();
    int slot = 0;
    for (int64_t p = begin; p < end; p += Shape::G) {
      const int n = static_cast<int>(end - p < Shape::G ? end - p : Shape::G);
      const unsigned lasts = coming_lasts;
      const int32_t table = pair.table;
      const float divisor = pair.divisor, weight = pair.weight;
      const RowFacts facts = pair.facts;
      const Raw next = read(p + Shape::G + group_.lane, end);
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
        start(slot, pair, ahead, p + t + kSlots < end, is_set(coming_lasts, ahead));
        slot = (slot + 1) % kSlots;
        if (is_last) {
          finish(group_.shuffle(table, t), a_.plan.keys.at(p + t), sum, row,
                 RowFacts{group_.shuffle(facts.state, t), group_.shuffle(facts.id, t)});
          sum.begin();
        }
      }
    }
  }

 private:
  // What a lane has read of its pair, and what it found by it. What belongs to the row of the table
  // comes with the last pair of its run.
  struct Raw {
    int64_t key, after;  // its own, and the next one
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
      if (pair.is_last) pair.facts = read_facts(table, a_.optimizers[pair.table].optimizer, slot);
    }
    return pair;
  }

  // States of as many numbers as the row has are fetched ahead only.
  OPER_DEVICE RowFacts read_facts(const Table& table, const OptimizerArgs& optimizer,
                                  int64_t slot) const {
    if (table.momentum1 != nullptr && optimizer.kind != Optimizer::kNone &&
        optimizer.kind != Optimizer::kRowWiseAdagrad)
      prefetch(table.momentum1 + slot * table.dim, 4 * table.dim);
    return facts_of<T>(table, optimizer.kind, slot);
  }

  // Begins to fetch the gradient of the pair of lane `from`, and with the last one the table's row.
  OPER_DEVICE void start(int slot, const Pair& pair, int from, bool is_there, bool is_last) {
    const int64_t at = group_.shuffle(pair.at, from);
    const int dim = group_.shuffle(pair.dim, from);
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

// Where the sum of a run goes: to the outbox, or to the optimizer.
enum class To { kOutbox, kOptimizer, kRowWiseAdagrad };
template <To kTo>
using Sink = std::integral_constant<To, kTo>;
template <To kTo>
constexpr Optimizer kKindOf =
    kTo == To::kRowWiseAdagrad ? Optimizer::kRowWiseAdagrad : Optimizer::kNone;

// Leaves a run for the next kernels; one lane does. The order of this list does not matter.
OPER_DEVICE void list_long_run(const LongRuns& long_runs, int64_t run, uint32_t pairs, bool lists) {
  if (!lists) return;
  const uint32_t chunks = (pairs + kChunk - 1) / kChunk;
  const uint32_t at = atomicAdd(long_runs.counts, 1u);
  const uint32_t first = atomicAdd(long_runs.counts + 1, chunks);
  long_runs.runs[at] = static_cast<uint32_t>(run);
  long_runs.first[at] = first;
  for (uint32_t k = 0; k < chunks; ++k) long_runs.chunk_run[first + k] = at;
}

template <class Shape, To kTo>
OPER_DEVICE void finish_run(const ReduceArgs& a, int32_t t, int64_t run, int64_t key,
                            const Group<Shape::G>& group, float* buffer, Row<Shape>& sum,
                            Row<Shape>& row, const RowFacts& facts) {
  const Table& table = a.view.tables[t];
  if constexpr (kTo != To::kOutbox) {
    // A graph may outlive the choice of its kernel: its tables may be frozen since.
    if (a.optimizers[t].optimizer.kind == Optimizer::kNone) return;
    const int64_t slot = key - table.key_begin;
    const RowOptimizer<Shape, kKindOf<kTo>> optimizer(a.view, table, a.optimizers[t], group,
                                                      buffer);
    if (a.grad.scale != 1.0f) sum.scale(a.grad.scale);
    const float norm = optimizer.clips() ? optimizer.sum_of_squares(sum) : 0.0f;
    optimizer.clip_and_decay(slot, sum, norm);
    const float squares = is_row_wise(optimizer.kind()) ? optimizer.sum_of_squares(sum) : 0.0f;
    optimizer.apply(slot, sum, squares, row, facts);
  } else {
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

// Blocks that a multiprocessor must hold: all optimizers together take more registers than one.
template <class Shape, To kTo>
constexpr int kReduceBlocks = Shape::V * Shape::E > 8                            ? 1
                              : Shape::V * Shape::E > 4 || kTo == To::kOptimizer ? 2
                                                                                 : 3;

template <class Shape, To kTo>
__global__ void __launch_bounds__(256, kReduceBlocks<Shape, kTo>) reduce_runs(const ReduceArgs a) {
  constexpr bool kUpdate = kTo != To::kOutbox;
  using Sums = Reducer<Shape, kUpdate>;
  static_assert(Sums::kBytes + kBufferBytes<Shape, kUpdate> <= kMostSharedBytes);
  alignas(16) __shared__ float buffers[kUpdate ? kBufferFloats<Shape> : 1];
  alignas(16) __shared__ char rings[kArrayBytes<Sums::kBytes>];
  float* buffer = kUpdate ? group_buffer<Shape>(buffers) : nullptr;
  const Group<Shape::G> group;
  const int64_t W = a.view.world_size;
  if (!kUpdate && outbox_is_full(a.view)) return;
  Sums sums(a, group, rings);
  const int64_t last = a.plan.segments[a.table_end * W];
  const int64_t step = a.runs_per_group;
  for (int64_t tile = a.plan.segments[a.table_begin * W] + group.index() * step; tile < last;
       tile += group.count() * step) {
    const int n = static_cast<int>(last - tile < step ? last - tile : step);
    uint32_t own_begin = 0, own_end = 0;
    if (group.lane < n) {
      own_begin = a.plan.run_begin[tile + group.lane];
      own_end = a.plan.run_begin[tile + group.lane + 1];
    }
    const unsigned are_long = group.ballot(own_end - own_begin > kChunk);
    for (int j = 0; j < n; ++j) {
      int k = j;
      while (k < n && !is_set(are_long, k)) ++k;
      if (k > j) {
        int64_t run = tile + j;
        sums.sum_runs(
            group.shuffle(own_begin, j), group.shuffle(own_end, k - 1),
            [&](int32_t t, int64_t key, Row<Shape>& sum, Row<Shape>& row, const RowFacts& facts) {
              finish_run<Shape, kTo>(a, t, run++, key, group, buffer, sum, row, facts);
            });
      }
      if (k < n)
        list_long_run(a.long_runs, tile + k,
                      group.shuffle(own_end, k) - group.shuffle(own_begin, k), group.lane == 0);
      j = k;
    }
  }
}

template <class Shape>
__global__ void __launch_bounds__(256, kBlocks<Shape>) reduce_chunks(const ReduceArgs a) {
  using Sums = Reducer<Shape, false>;
  alignas(16) __shared__ char rings[kArrayBytes<Sums::kBytes>];
  const Group<Shape::G> group;
  Sums sums(a, group, rings);
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
    float* partial = a.long_runs.partials + chunk * a.long_runs.stride;
    sums.sum_runs(begin, end,
                  [&](int32_t t, int64_t, Row<Shape>& sum, Row<Shape>&, const RowFacts&) {
                    sum.store(partial, a.view.tables[t].dim, group.lane, Shape::E > 1);
                  });
  }
}

// Partial sums that a group loads before it adds the first of them.
template <class Shape>
constexpr int kInFlight = Shape::V * Shape::E >= 32 || Shape::V > 4 ? 1 : 4 / Shape::V;

template <class Shape, To kTo>
__global__ void __launch_bounds__(256, kBlocks<Shape>) reduce_long_runs(const ReduceArgs a) {
  constexpr bool kUpdate = kTo != To::kOutbox;
  alignas(16) __shared__ float buffers[kUpdate ? kBufferFloats<Shape> : 1];
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
    Row<Shape> row;
    RowFacts facts{};
    if constexpr (kUpdate) {
      const int64_t slot = key - table.key_begin;
      row.load(reinterpret_cast<const typename Shape::T*>(table.rows) + slot * table.dim, table.dim,
               group.lane, Shape::E > 1);
      facts = facts_of<typename Shape::T>(table, a.optimizers[t].optimizer.kind, slot);
    }
    finish_run<Shape, kTo>(a, t, run, key, group, buffer, sum, row, facts);
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
                            is_wide(grad.data, grad.stride),
                            runs_per_group(row_class, batch)};
      with_shape(row_class, [&](auto shape) {
        if (!update_at_once) return launch(shape, Sink<To::kOutbox>{}, args);
        if (on.all_row_wise_adagrad) return launch(shape, Sink<To::kRowWiseAdagrad>{}, args);
        launch(shape, Sink<To::kOptimizer>{}, args);
      });
    }
  };
  clear(long_runs.counts, 0, 8, on.stream);
  for_classes([&](auto shape, auto sink, const ReduceArgs& args) {
    using S = decltype(shape);
    OPER_LAUNCH((reduce_runs<S, decltype(sink)::value>), blocks_for(batch.max_pairs, 256 / S::G),
                256, on.stream, args);
  });
  if (batch.max_pairs <= kChunk) return;
  // Once all short runs are summed: the list of long ones is of all classes.
  for_classes([&](auto shape, auto sink, const ReduceArgs& args) {
    using S = decltype(shape);
    const int blocks = blocks_for(long_runs.capacity, 256 / S::G);
    OPER_LAUNCH(reduce_chunks<S>, blocks, 256, on.stream, args);
    OPER_LAUNCH((reduce_long_runs<S, decltype(sink)::value>), blocks, 256, on.stream, args);
  });
}

}  // namespace oper::device
