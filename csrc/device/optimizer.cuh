// One optimizer step of a row that a group has in registers, with the arithmetic of
// csrc/host/kernels/update.inl.
#pragma once

#include "device/batch.cuh"
#include "device/group.cuh"

namespace oper::device {

// Position in hotness order of the row in a slot of this rank.
OPER_DEVICE int64_t position_at(const Table& table, int64_t slot) {
  for (int32_t k = 0; k < table.num_home_parts; ++k) {
    const HomePart& part = table.home_parts[k];
    if (slot < part.slot_begin || slot >= part.slot_end) continue;
    const uint32_t i = static_cast<uint32_t>(slot - part.slot_begin), n = part.num_offsets;
    return part.start + i / n * part.period + part.offsets[i % n];
  }
  return -1;
}

OPER_DEVICE int64_t id_at_position(const Table& table, int64_t position) {
  const int64_t num_head = table.head_ids.num_head;
  if (position < num_head) return table.head_ids.by_position[position];
  // The cold row (outside the explicit head) number `ordinal` comes after those head ids with
  // ascending[j] - j <= ordinal.
  const int64_t ordinal = position - num_head;
  return ordinal + lower_bound(num_head, ordinal + 1, [&](int64_t j) {
           return static_cast<int64_t>(table.head_ids.ascending[j]) - j;
         });
}

// Shared memory for one row of each group of a block. Its size in floats for one group, and for all
// groups of the block; and the address of this group's part.
template <class Shape>
constexpr int kRowFloats = Shape::G * Shape::V * Shape::E;
template <class Shape>
constexpr int kBufferFloats = 256 / Shape::G * kRowFloats<Shape>;
template <class Shape>
OPER_DEVICE float* group_buffer(float* buffers) {
  return buffers + threadIdx.x / Shape::G * kRowFloats<Shape>;
}

// ---- stochastic rounding of two neighbouring columns ---------------------------------------------

// `round_to` of both, the first by the lower 16 random bits, the second by the upper 16.
template <class T>
OPER_DEVICE uint32_t round_pair(T type, float first, float second, uint32_t random) {
  return round_to(type, first, random & 0xffffu).bits |
         static_cast<uint32_t>(round_to(type, second, random >> 16).bits) << 16;
}

// Whether `round_plain_pair`, which takes fewer instructions, gives the same result as `round_pair`
// for a number: it adds the random bits to the lowest bits, and truncates.
OPER_DEVICE bool is_plain(Float16, float value) {  // 2^-14 to 2^15
  return (bits_of_float(value) & 0x7fffffffu) - 0x38800000u < 0x47000000u - 0x38800000u;
}
OPER_DEVICE bool is_plain(BFloat16, float value) {  // below 2^127
  return (bits_of_float(value) & 0x7fffffffu) < 0x7f000000u;
}

#if defined(OPER_EMULATED)
template <class T>
uint32_t round_plain_pair(T type, float first, float second, uint32_t random) {
  return round_pair(type, first, second, random);
}
#else
OPER_DEVICE uint32_t round_plain_pair(Float16, float first, float second, uint32_t random) {
  uint32_t rounded;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;"
      : "=r"(rounded)
      : "f"(float_of_bits(bits_of_float(second) + (random >> 19))),
        "f"(float_of_bits(bits_of_float(first) + ((random & 0xffffu) >> 3))));
  return rounded;
}
OPER_DEVICE uint32_t round_plain_pair(BFloat16, float first, float second, uint32_t random) {
  return __byte_perm(bits_of_float(first) + (random & 0xffffu),
                     bits_of_float(second) + (random >> 16), 0x7632);
}
#endif

// Data of a row, in addition to its elements, that the optimizer needs.
struct RowFacts {
  int64_t slot;
  float state;  // of row-wise Adagrad
  uint32_t id;  // of rows of 16-bit elements, for stochastic rounding
};
template <class T>
OPER_DEVICE RowFacts facts_of(const Table& table, Optimizer kind, int64_t slot) {
  RowFacts facts{slot, 0.0f, 0};
  if (kind == Optimizer::kNone) return facts;
  if (kind == Optimizer::kRowWiseAdagrad) facts.state = table.momentum1[slot];
  if constexpr (sizeof(T) == 2)
    facts.id = static_cast<uint32_t>(id_at_position(table, position_at(table, slot)));
  return facts;
}

// kKind: the optimizer of all tables, or kNone if it is only known at run time.
template <class Shape, Optimizer kKind = Optimizer::kNone>
class RowOptimizer {
 public:
  using T = typename Shape::T;

  // `dim`: as in RowClass; `buffer`: see `group_buffer`.
  OPER_DEVICE RowOptimizer(const Table& table, int32_t dim, const UpdateArgs& args,
                           const Group<Shape::G>& group, float* buffer)
      : table_(table),
        dim_(dim > 0 ? dim : table.dim),
        args_(args.optimizer),
        rounding_(args.rounding),
        group_(group),
        buffer_(buffer) {}

  OPER_DEVICE void load_row(int64_t slot, Row<Shape>& w) const {
    w.load(reinterpret_cast<const T*>(table_.rows) + slot * dim_, dim_, group_.lane, Shape::E > 1);
  }

  OPER_DEVICE Optimizer kind() const { return kKind == Optimizer::kNone ? args_.kind : kKind; }
  OPER_DEVICE bool clips() const { return args_.max_norm > 0.0f; }

  // Turns a row's gradient into the one that the optimizer uses: clips it, then adds L2 weight
  // decay. `squares`: the gradient's sum of squares over all columns of the row, needed for
  // clipping.
  OPER_DEVICE void clip_and_decay(int64_t slot, Row<Shape>& g, float squares) const {
    if (clips()) {
      const float factor = clip_factor(squares, args_.max_norm);
      if (factor < 1.0f) g.scale(factor);
    }
    if (args_.decay != Decay::kL2) return;
    Row<Shape> w;
    load_row(slot, w);
    const float decay = args_.weight_decay;
    g.zip(w, [=](float& a, float b) { a += b * decay; });
  }

  OPER_DEVICE float sum_of_squares(const Row<Shape>& g) const {
    Row<Shape> squares;
    squares.zip(g, [](float& a, float b) { a = b * b; });
    return sum_in_host_order(squares, dim_, group_, buffer_);
  }

  // Updates the row `w` and writes it. `squares`: sum of squares of `g` over all columns of the
  // row, for row-wise optimizers. `writes`: false for a group that only takes part to stay in
  // lockstep.
  OPER_DEVICE void apply(const Row<Shape>& g, float squares, Row<Shape>& w, const RowFacts& facts,
                         bool writes = true) const {
    if (kind() == Optimizer::kNone) return;
    const int64_t slot = facts.slot;
    switch (kind()) {
      case Optimizer::kSgd: {
        const float rate = args_.learning_rate;
        w.zip(g, [=](float& a, float b) { a -= b * rate; });
        break;
      }
      case Optimizer::kRowWiseAdagrad:
        row_wise_adagrad(slot, g, squares, w, facts.state, writes);
        break;
      case Optimizer::kAdagrad: adagrad(slot, g, w); break;
      case Optimizer::kMomentumSgd: momentum_sgd(slot, g, w); break;
      case Optimizer::kLarsSgd: lars_sgd(slot, g, squares, w); break;
      case Optimizer::kLamb:
      case Optimizer::kPartialRowWiseLamb: lamb(slot, g, squares, w); break;
      default: adam(slot, g, squares, w); break;
    }
    if (!writes) return;
    T* row = reinterpret_cast<T*>(table_.rows) + slot * dim_;
    if constexpr (sizeof(T) == 4) {
      w.store(row, dim_, group_.lane, Shape::E > 1);
    } else {
      store_rounded(row, facts.id, w);
    }
  }

 private:
  const Table& table_;
  const int32_t dim_;
  // Copies, so that all used fields are loaded at once.
  const OptimizerArgs args_;
  const RoundingKey rounding_;
  const Group<Shape::G>& group_;
  float* buffer_;

  OPER_DEVICE void load_state(const float* state, int64_t slot, Row<Shape>& s) const {
    s.load(state + slot * dim_, dim_, group_.lane, Shape::E > 1);
  }
  OPER_DEVICE void store_state(float* state, int64_t slot, const Row<Shape>& s) const {
    s.store(state + slot * dim_, dim_, group_.lane, Shape::E > 1);
  }

  // Stochastic rounding, see `rounding_bits`. 8 columns use one block of 8 random numbers, unless a
  // column piece begins within a block.
  OPER_DEVICE void store_rounded(T* row, uint32_t id, const Row<Shape>& w) const {
#pragma unroll
    for (int i = 0; i < Shape::V; ++i) {
      const int column = Shape::column(i, group_.lane);
      if (column >= dim_) continue;
      const uint32_t first = static_cast<uint32_t>(table_.piece_start + column);
      if (Shape::E == 8 && first % 8 == 0) {
        const Philox4 bits = rounding_bits(rounding_, id, first / 8);
        const float (&v)[Shape::E] = w.v[i];
        bool are_plain = true;
#pragma unroll
        for (int e = 0; e < Shape::E; ++e) are_plain &= is_plain(T{}, v[e]);
        uint32_t words[Shape::E / 2 + 1];
        if (are_plain) {
#pragma unroll
          for (int k = 0; k < Shape::E / 2; ++k)
            words[k] = round_plain_pair(T{}, v[2 * k], v[2 * k + 1], bits.word[k % 4]);
        } else {
#pragma unroll
          for (int k = 0; k < Shape::E / 2; ++k)
            words[k] = round_pair(T{}, v[2 * k], v[2 * k + 1], bits.word[k % 4]);
        }
        *reinterpret_cast<uint4*>(row + column) = {words[0], words[1], words[2], words[3]};
        continue;
      }
#pragma unroll
      for (int e = 0; e < Shape::E; ++e) {
        const uint32_t at = first + e;
        const uint32_t random = word_of(rounding_bits(rounding_, id, at / 8), at % 8 / 2);
        row[column + e] = round_to(T{}, w.v[i][e], at % 2 ? random >> 16 : random & 0xffffu);
      }
    }
  }
  static OPER_DEVICE uint32_t word_of(const Philox4& bits, uint32_t k) {
    const uint32_t low = k % 2 ? bits.word[1] : bits.word[0];
    const uint32_t high = k % 2 ? bits.word[3] : bits.word[2];
    return k < 2 ? low : high;
  }

  OPER_DEVICE void row_wise_adagrad(int64_t slot, const Row<Shape>& g, float squares, Row<Shape>& w,
                                    float state, bool writes) const {
    // Every lane computes the state, and one writes it back.
    const float multiplier =
        rowwise_adagrad_multiplier(&state, squares, table_.row_columns, args_);
    group_.sync();  // all have read it
    if (writes && group_.lane == 0) table_.momentum1[slot] = state;
    if (args_.decay == Decay::kDecoupled) w.scale(1.0f - args_.learning_rate * args_.weight_decay);
    w.zip(g, [=](float& a, float b) { a -= b * multiplier; });
  }

  OPER_DEVICE void adagrad(int64_t slot, const Row<Shape>& g, Row<Shape>& w) const {
    Row<Shape> s;
    load_state(table_.momentum1, slot, s);
    s.zip(g, [](float& a, float b) { a += b * b; });
#pragma unroll
    for (int i = 0; i < Shape::V; ++i)
#pragma unroll
      for (int e = 0; e < Shape::E; ++e)
        w.v[i][e] -= args_.learning_rate * g.v[i][e] / (sqrtf(s.v[i][e]) + args_.eps);
    store_state(table_.momentum1, slot, s);
  }

  OPER_DEVICE float row_wise_root(int64_t slot, float squares) const {
    float state = table_.momentum2[slot];  // every lane computes it, one writes it back
    const float root = partial_adam_root(&state, squares, table_.row_columns, args_);
    group_.sync();
    if (group_.lane == 0) table_.momentum2[slot] = state;
    return root;
  }

  // Updates the moments of Adam or LAMB, and calls finish(i, e, step) for every element v[i][e].
  template <class Finish>
  OPER_DEVICE void moments(int64_t slot, const Row<Shape>& g, float squares, const Row<Shape>& w,
                           bool row_wise, Finish finish) const {
    const float root = row_wise ? row_wise_root(slot, squares) : 1.0f;
    const int64_t first = slot * dim_;
#pragma unroll
    for (int i = 0; i < Shape::V; ++i) {
      const int column = Shape::column(i, group_.lane);
      if (column >= dim_) continue;
      float m[Shape::E], s[Shape::E];
      load_elements(table_.momentum1 + first + column, m, Shape::E > 1);
      if (!row_wise) load_elements(table_.momentum2 + first + column, s, Shape::E > 1);
#pragma unroll
      for (int e = 0; e < Shape::E; ++e) {
        const float grad = g.v[i][e];
        m[e] = m[e] * args_.beta1 + grad * (1.0f - args_.beta1);
        float below = root;
        if (!row_wise) {
          s[e] = s[e] * args_.beta2 + grad * grad * (1.0f - args_.beta2);
          below = sqrtf(s[e] / args_.correction2) + args_.eps;
        }
        finish(i, e, (m[e] / args_.correction1) / below + w.v[i][e] * args_.weight_decay);
      }
      store_elements(table_.momentum1 + first + column, m, Shape::E > 1);
      if (!row_wise) store_elements(table_.momentum2 + first + column, s, Shape::E > 1);
    }
  }

  OPER_DEVICE void adam(int64_t slot, const Row<Shape>& g, float squares, Row<Shape>& w) const {
    moments(slot, g, squares, w, args_.kind == Optimizer::kPartialRowWiseAdam,
            [&](int i, int e, float step) { w.v[i][e] -= step * args_.learning_rate; });
  }

  OPER_DEVICE void momentum_sgd(int64_t slot, const Row<Shape>& g, Row<Shape>& w) const {
    Row<Shape> m;
    load_state(table_.momentum1, slot, m);
    m.zip(g, [&](float& a, float b) { a = a * args_.beta1 + b; });
    w.zip(m, [&](float& a, float b) { a -= b * args_.learning_rate; });
    store_state(table_.momentum1, slot, m);
  }

  OPER_DEVICE void lars_sgd(int64_t slot, const Row<Shape>& g, float squares, Row<Shape>& w) const {
    const float rate = lars_rate(sum_of_squares(w), squares, args_);
    Row<Shape> m;
    load_state(table_.momentum1, slot, m);
#pragma unroll
    for (int i = 0; i < Shape::V; ++i)
#pragma unroll
      for (int e = 0; e < Shape::E; ++e) {
        const float grad = g.v[i][e] + w.v[i][e] * args_.weight_decay;
        m.v[i][e] = m.v[i][e] * args_.beta1 + grad * rate;
        w.v[i][e] -= m.v[i][e];
      }
    store_state(table_.momentum1, slot, m);
  }

  // The step overwrites the gradient.
  OPER_DEVICE void lamb(int64_t slot, Row<Shape> g, float squares, Row<Shape>& w) const {
    moments(slot, g, squares, w, args_.kind == Optimizer::kPartialRowWiseLamb,
            [&](int i, int e, float step) { g.v[i][e] = step; });
    const float weights = sum_of_squares(w);
    const float rate = lamb_rate(weights, sum_of_squares(g), args_);
    w.zip(g, [=](float& a, float b) { a -= b * rate; });
  }
};

// Adds a slot that its owner has updated to the list of touched ones, if its row is replicated.
OPER_DEVICE void note_touched(const View& view, const Table& table, int64_t slot) {
  for (int32_t k = table.refresh_begin; k < table.refresh_end; ++k) {
    const Refresh& part = view.refreshes[k];
    if (part.owner == view.rank && slot >= part.slot_begin && slot < part.slot_end) {
      uint32_t* list = table.touched[view.rank];
      list[1 + atomicAdd(list, 1u)] = static_cast<uint32_t>(slot);
      return;
    }
  }
}

}  // namespace oper::device
