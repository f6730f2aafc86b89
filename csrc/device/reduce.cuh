// Sums gradients by row, for the kernels of short runs (reduce.cu) and of long ones (long_runs.cu).
// A run is a distinct row of the batch with all its pairs, see BatchPlan.
#pragma once

#include "device/batch.cuh"
#include "device/optimizer.cuh"
#include "device/ring.cuh"

namespace oper::device {

struct ReduceArgs {
  View view;
  Batch batch;
  BatchPlan plan;
  Gradient grad;
  LongRuns long_runs;
  const UpdateArgs* optimizers;         // [T]
  int32_t table_begin, table_end, dim;  // as in RowClass
  // Gradients at multiples of four columns are aligned to 16 bytes.
  bool wide_grad;
  int32_t runs_per_warp;                // runs that a warp takes at a time, at most 32
};

// Where the sum of a run goes: to the send buffer, to the table's optimizer, or to row-wise Adagrad
// if that is the optimizer of all tables.
enum class To { kSendBuffer, kOptimizer, kRowWiseAdagrad };
template <To kTo>
using Sink = std::integral_constant<To, kTo>;
template <To kTo>
constexpr Optimizer kKindOf =
    kTo == To::kRowWiseAdagrad ? Optimizer::kRowWiseAdagrad : Optimizer::kNone;

// Bytes of shared memory for `sum_in_host_order` in the optimizer.
template <class Shape, bool kUpdate>
constexpr int kBufferBytes = kUpdate ? 4 * kBufferFloats<Shape> : 16;

// Number of gradients (and rows of the table, if it is updated) that are in flight at the same
// time: up to four, but no more than a group has lanes, or than fit into a block's shared memory
// with the optimizer's buffer.
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
  static constexpr bool kUpdate = kTo != To::kSendBuffer;
  using T = typename Shape::T;
  static constexpr int kSlots = slots_of<Shape, kUpdate>();
  using Gradients = RowRing<Shape, float, kSlots>;
  using Rows = RowRing<Shape, T, kSlots>;
  static constexpr int kBytes = Gradients::kBytes + (kUpdate ? Rows::kBytes : 0);

  // `shared`: `kBytes` for the whole block.
  OPER_DEVICE Reducer(const ReduceArgs& args, const Group<Shape::G>& group, char* shared)
      : a_(args), group_(group), gradients_(shared), rows_(shared + Gradients::kBytes) {}

  // Calls finish(is_there, table, sum, row of the table, RowFacts) for every run among the pairs
  // [begin, end). In lockstep, the other groups of the warp call it, too, with `is_there` false.
  template <class Finish>
  OPER_DEVICE void sum_runs(int64_t begin, int64_t end, Finish finish) {
    const int count = static_cast<int>(end - begin);
    const int most = group_.most(count);
    // The pair of this lane among those whose gradients are fetched next, kSlots pairs before they
    // are added.
    Pair pair = locate(read(begin + group_.lane, end));
    unsigned coming_lasts = group_.ballot(pair.is_last);
#pragma unroll
    for (int t = 0; t < kSlots; ++t) start(pair, t, t < count, is_set(coming_lasts, t));
    Row<Shape> sum, row;
    sum.begin();
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
        gradients_.read(gradient);
        const float length = group_.shuffle(divisor, t);
        if (length > 1.0f) gradient.divide(length);
        if (a_.batch.weights) gradient.scale(group_.shuffle(weight, t));
        sum.add(gradient);
        const bool is_last = is_set(lasts, t);
        if (kUpdate && is_last) rows_.read(row);
        if (t + kSlots == Shape::G) {
          pair = locate(next);
          coming_lasts = group_.ballot(pair.is_last);
        }
        const int ahead = (t + kSlots) % Shape::G;
        start(pair, ahead, first + t + kSlots < count, is_set(coming_lasts, ahead));
        if (group_.any(is_last)) {
          finish(is_last, group_.shuffle(table, t), sum, row,
                 RowFacts{group_.shuffle(facts.slot, t), group_.shuffle(facts.state, t),
                          group_.shuffle(facts.id, t)});
          if (is_last) sum.begin();
        }
      }
    }
  }

  // Sums the gradients of the pairs [begin, end) of one row; returns the number of columns. In a
  // long run every addition waits for the one before it: so this loop does nothing else between
  // additions, and loads as many gradients as registers hold before it adds them. Uses no shared
  // memory.
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
  // Data that a lane reads for its pair.
  struct Raw {
    int64_t key, after;  // keys of this pair and of the next one
    uint32_t payload;
    bool is_there;
  };
  // Data that it derives from these.
  struct Pair {
    int64_t at;             // index of the gradient's first element
    int64_t row;            // address of the table's row
    int32_t table, dim;
    float divisor, weight;  // divisor: length of the bag for mean pooling, otherwise 1
    RowFacts facts;         // only in the last pair of a run
    bool is_last;           // of its run
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

  // Facts of the table's row. State with one number per column is prefetched.
  OPER_DEVICE RowFacts read_facts(const Table& table, int32_t t, int64_t slot) const {
    const Optimizer kind = kTo == To::kOptimizer ? a_.optimizers[t].optimizer.kind : kKindOf<kTo>;
    if (table.momentum1 != nullptr && kind != Optimizer::kNone &&
        kind != Optimizer::kRowWiseAdagrad)
      prefetch(table.momentum1 + slot * table.dim, 4 * table.dim);
    return facts_of<T>(table, kind, slot);
  }

  // Begins to fetch the gradient of the pair of lane `from` and, if the pair `is_last`, the table's
  // row into the current slots; then advances to the next slots.
  OPER_DEVICE void start(const Pair& pair, int from, bool is_there, bool is_last) {
    const int64_t at = group_.shuffle(pair.at, from);
    const int dim = a_.dim > 0 ? a_.dim : group_.shuffle(pair.dim, from);
    if (is_there)
      gradients_.start(a_.grad.data + at, dim, group_.lane, a_.wide_grad && at % 4 == 0);
    if constexpr (kUpdate) {
      const int64_t row = group_.shuffle(pair.row, from);
      if (is_last)
        rows_.start(reinterpret_cast<const T*>(row), dim, group_.lane, Shape::E > 1);
      rows_.advance();
    }
    gradients_.advance();
    commit_copies();
  }
};

// Sends the sum of a run to its sink. `is_there`: false if the group has no run, and only takes
// part to stay in lockstep.
template <class Shape, To kTo>
OPER_DEVICE void finish_run(const ReduceArgs& a, bool is_there, int32_t t, int64_t run,
                            const Group<Shape::G>& group, float* buffer, Row<Shape>& sum,
                            Row<Shape>& row, const RowFacts& facts) {
  const Table& table = a.view.tables[t];
  if constexpr (kTo != To::kSendBuffer) {
    // A CUDA graph repeats the kernels that were captured, but tables may have been frozen since.
    if (a.optimizers[t].optimizer.kind == Optimizer::kNone) is_there = false;
    const RowOptimizer<Shape, kKindOf<kTo>> optimizer(table, a.dim, a.optimizers[t], group, buffer);
    if (is_there && a.grad.scale != 1.0f) sum.scale(a.grad.scale);
    const float norm = group.any(optimizer.clips()) ? optimizer.sum_of_squares(sum) : 0.0f;
    if (is_there) optimizer.clip_and_decay(facts.slot, sum, norm);
    const float squares = is_row_wise(optimizer.kind()) ? optimizer.sum_of_squares(sum) : 0.0f;
    optimizer.apply(sum, squares, row, facts, is_there);
  } else if (is_there) {
    char* send_buffer = a.view.send_buffers[a.view.rank];
    const SendBufferHeader* header = reinterpret_cast<const SendBufferHeader*>(send_buffer);
    const uint32_t* segments = send_buffer_segments(send_buffer);
    const int64_t* offsets = send_buffer_offsets(send_buffer, a.view);
    const int64_t number = run - segments[static_cast<int64_t>(t) * a.view.world_size];
    float* out = reinterpret_cast<float*>(send_buffer + header->rows_offset) + offsets[t] +
                 number * table.dim;
    sum.store(out, table.dim, group.lane, Shape::E > 1);
  }
}

// Calls launch(shape, Sink, arguments) for each class of rows.
template <class Launching>
void for_row_classes(const Launch& on, ReduceArgs args, bool update_at_once, Launching launch) {
  for (const RowClass& row_class : on.classes) {
    args.table_begin = row_class.table_begin;
    args.table_end = row_class.table_end;
    args.dim = row_class.dim;
    with_shape(row_class, [&](auto shape) {
      if (!update_at_once) return launch(shape, Sink<To::kSendBuffer>{}, args);
      if (on.all_row_wise_adagrad) return launch(shape, Sink<To::kRowWiseAdagrad>{}, args);
      launch(shape, Sink<To::kOptimizer>{}, args);
    });
  }
}

// Sums the long runs, which the kernels of short ones have listed.
void reduce_long_runs(const Launch& on, const ReduceArgs& args, bool update_at_once);

}  // namespace oper::device
