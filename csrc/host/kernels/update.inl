// The update by the owner of rows: sums the gradients of all ranks, and applies the optimizer. Part
// of kernels.inl.

// Gradients of one rank for rows of this owner; those before `at` have been used.
struct Incoming {
  const uint32_t* slots;
  const float* rows;
  int64_t at, end;
};

// Updates the moments of Adam or LAMB, and calls finish(i, vector i of the row's step) for all
// vectors.
template <int N, class Finish>
OPER_INLINE void update_moments(const Table& table, int64_t slot, const Row<N>& g,
                                float squares_of_row, const Row<N>& w, bool row_wise,
                                Finish finish) {
  const OptimizerArgs& args = table.optimizer;
  const int dim = table.dim;
  Row<N> m, s;
  Lanes root = {};
  m.load(table.momentum1 + slot * dim, dim);
  if (row_wise) {
    root += partial_adam_root(table.momentum2 + slot, squares_of_row, table.row_columns, args);
  } else {
    s.load(table.momentum2 + slot * dim, dim);
  }
  for (int i = 0; i < Row<N>::vectors(dim); ++i) {
    m.v[i] = m.v[i] * args.beta1 + g.v[i] * (1.0f - args.beta1);
    if (!row_wise) {
      s.v[i] = s.v[i] * args.beta2 + g.v[i] * g.v[i] * (1.0f - args.beta2);
      for (int k = 0; k < 16; ++k)
        root[k] = std::sqrt(s.v[i][k] / args.correction2) + args.eps;
    }
    finish(i, (m.v[i] / args.correction1) / root + w.v[i] * args.weight_decay);
  }
  m.store(table.momentum1 + slot * dim, dim);
  if (!row_wise) s.store(table.momentum2 + slot * dim, dim);
}

// One optimizer step of a row, see optimizer.h. `g`: its gradient, summed over the global batch;
// `squares_of_row`: the sum of squares of the gradient over all columns of the row, for row-wise
// optimizers; `random`: 16 random bits for every column of 16-bit rows, otherwise null. kScaled:
// for the optimizers of `has_velocity_or_trust`, whose tables are not split by columns, so that
// norms are those of `dim` columns.
template <bool kScaled, int N, class E>
OPER_INLINE void apply_optimizer(const Table& table, int64_t slot, const Row<N>& g,
                                 float squares_of_row, const uint16_t* random) {
  const OptimizerArgs& args = table.optimizer;
  const int dim = table.dim;
  const int n = Row<N>::vectors(dim);
  E* row = table.row<E>(slot);
  Row<N> w;
  w.load(row, dim);
  if constexpr (kScaled) {
    if (args.kind == Optimizer::kMomentumSgd || args.kind == Optimizer::kLarsSgd) {
      Row<N> m;
      m.load(table.momentum1 + slot * dim, dim);
      if (args.kind == Optimizer::kMomentumSgd) {
        for (int i = 0; i < n; ++i) {
          m.v[i] = m.v[i] * args.beta1 + g.v[i];
          w.v[i] -= m.v[i] * args.learning_rate;
        }
      } else {
        const float rate = lars_rate(w.sum_of_squares(dim), squares_of_row, args);
        for (int i = 0; i < n; ++i) {
          m.v[i] = m.v[i] * args.beta1 + (g.v[i] + w.v[i] * args.weight_decay) * rate;
          w.v[i] -= m.v[i];
        }
      }
      m.store(table.momentum1 + slot * dim, dim);
    } else {  // LAMB
      Row<N> step;
      update_moments(table, slot, g, squares_of_row, w,
                     args.kind == Optimizer::kPartialRowWiseLamb,
                     [&](int i, const Lanes& x) { step.v[i] = x; });
      // Beyond the last column a step is 0 / eps, which is NaN if eps is 0.
      for (int k = Row<N>::part(dim); k > 0 && k < 16; ++k) step.v[n - 1][k] = 0.0f;
      const float rate = lamb_rate(w.sum_of_squares(dim), step.sum_of_squares(dim), args);
      for (int i = 0; i < n; ++i) w.v[i] -= step.v[i] * rate;
    }
  } else {
    switch (args.kind) {
      case Optimizer::kSgd:
        for (int i = 0; i < n; ++i) w.v[i] -= g.v[i] * args.learning_rate;
        break;
      case Optimizer::kRowWiseAdagrad: {
        const float multiplier = rowwise_adagrad_multiplier(
            table.momentum1 + slot, squares_of_row, table.row_columns, args);
        if (args.decay == Decay::kDecoupled) {
          const float keep = 1.0f - args.learning_rate * args.weight_decay;
          for (int i = 0; i < n; ++i) w.v[i] *= keep;
        }
        for (int i = 0; i < n; ++i) w.v[i] -= g.v[i] * multiplier;
        break;
      }
      case Optimizer::kAdagrad: {
        Row<N> m;
        m.load(table.momentum1 + slot * dim, dim);
        for (int i = 0; i < n; ++i) {
          m.v[i] += g.v[i] * g.v[i];
          for (int k = 0; k < 16; ++k)
            w.v[i][k] -= args.learning_rate * g.v[i][k] / (std::sqrt(m.v[i][k]) + args.eps);
        }
        m.store(table.momentum1 + slot * dim, dim);
        break;
      }
      case Optimizer::kAdam:
      case Optimizer::kPartialRowWiseAdam:
        update_moments(table, slot, g, squares_of_row, w,
                       args.kind == Optimizer::kPartialRowWiseAdam,
                       [&](int i, const Lanes& step) { w.v[i] -= step * args.learning_rate; });
        break;
      default:
        return;  // rows that are not trained
    }
  }
  if constexpr (sizeof(E) == 4) {
    w.store(row, dim);
  } else {
    w.store_rounded(row, random, dim);
  }
}

// Iterates over the rows for which any rank has a gradient, by ascending slot. Each row is found
// some steps before its use, so that its data can be prefetched. Does not branch on which ranks
// have a row, which cannot be predicted.
class Merge {
 public:
  static constexpr int64_t kMostAhead = 16;
  struct Entry {
    int64_t slot;
    int32_t count;             // number of gradients
    const float* const* rows;  // the gradients, in rank order
  };

  Merge(const Table& table, std::vector<Incoming>& in)
      : table_(table),
        in_(in),
        row_bytes_(table.row_bytes()),
        ahead_(rows_ahead(table.row_bytes() + table.gradient_bytes(), kMostAhead)),
        has_row_state_(table.optimizer.kind == Optimizer::kRowWiseAdagrad),
        next_(in.size()),
        rows_(kRing * in.size()) {
    for (size_t r = 0; r < in.size(); ++r) next_[r] = slot_of(in[r]);
    while (found_ < ahead_ && find()) {
    }
  }
  // Writes the next row to `entry`, valid until the following call; returns false after the last
  // row.
  OPER_INLINE bool take(Entry* entry) {
    find();
    if (taken_ == found_) return false;
    *entry = ring_[taken_++ % kRing];
    return true;
  }

 private:
  static constexpr int64_t kRing = 32;
  static constexpr uint64_t kNone = ~uint64_t{0};
  static_assert(kRing > kMostAhead + 1);

  static OPER_INLINE uint64_t slot_of(const Incoming& box) {
    return box.at < box.end ? box.slots[box.at] : kNone;
  }
  // Finds one more row; returns false if there is none.
  OPER_INLINE bool find() {
    const size_t W = in_.size();
    uint64_t slot = kNone;
    for (size_t r = 0; r < W; ++r) slot = std::min(slot, next_[r]);
    if (slot == kNone) return false;
    const float** rows = rows_.data() + static_cast<size_t>(found_ % kRing) * W;
    int32_t count = 0;
    for (size_t r = 0; r < W; ++r) {
      Incoming& box = in_[r];
      const bool has = next_[r] == slot;
      rows[count] = box.rows + box.at * table_.dim;
      count += has;
      box.at += has;
      next_[r] = slot_of(box);
    }
    const int64_t gradient_bytes = table_.gradient_bytes();
    prefetch_row(rows[0], gradient_bytes);
    if (W == 2) {
      prefetch_row(rows[count - 1], gradient_bytes);
    } else {
      for (int32_t k = 1; k < count; ++k) prefetch_row(rows[k], gradient_bytes);
    }
    prefetch_row_for_write(table_.rows + static_cast<int64_t>(slot) * row_bytes_, row_bytes_);
    if (has_row_state_) __builtin_prefetch(table_.momentum1 + slot, 1, 3);
    ring_[found_++ % kRing] = {static_cast<int64_t>(slot), count, rows};
    return true;
  }

  const Table& table_;
  std::vector<Incoming>& in_;
  int64_t row_bytes_, ahead_;  // number of rows found ahead
  bool has_row_state_;
  std::vector<uint64_t> next_;      // [W], slot of the next gradient of each Incoming
  std::vector<const float*> rows_;  // [kRing, W]
  Entry ring_[kRing];
  int64_t found_ = 0, taken_ = 0;
};

// Added to a row's gradient if only one rank has one: x + (-0.0) is bitwise x.
template <int N>
struct Neutral {
  alignas(64) float v[16 * (N > 0 ? N : 1)];
  constexpr Neutral() : v() {
    for (float& x : v) x = -0.0f;
  }
};

// Calls body(slot, gradient) for each row in `in`, with the sum of its gradients in the order of
// `in`, times gradient_scale.
template <int N, class Body>
void merge_rows(const Table& table, std::vector<Incoming>& in, float gradient_scale, Body body) {
  const int dim = table.dim;
  Merge merge(table, in);
  for (Merge::Entry entry; merge.take(&entry);) {
    Row<N> g;
    g.load(entry.rows[0], dim);
    int32_t k = 1;
    if constexpr (N != 0) {
      static constexpr Neutral<N> neutral;
      g.add(entry.count > 1 ? entry.rows[1] : neutral.v, dim);
      k = 2;
    }
    for (; k < entry.count; ++k) g.add(entry.rows[k], dim);
    if (gradient_scale != 1.0f) g.scale(gradient_scale, dim);
    body(entry.slot, g);
  }
}

// The gradients that each rank has for this rank's rows, in rank order: in pulled tiers, from the
// ranks' send buffers; or, if `pushed`, in pushed tiers.
std::vector<Incoming> incoming(const Context& context, int32_t index, bool pushed) {
  const Table& table = context.tables[index];
  // If this rank owns all rows of a table with pushed tiers only, it has no requests of its own:
  // its own gradients are in its send buffer.
  const bool at_once = table.is_pushed && !table.has_push;
  std::vector<Incoming> in;
  if (pushed ? !table.is_pushed : at_once) return in;
  for (int32_t r = 0; r < context.world_size; ++r) {
    if (pushed && !(at_once && r == context.rank)) {
      in.push_back({table.pushed[r].slots.data(), table.pushed[r].rows.data(), 0,
                    static_cast<int64_t>(table.pushed[r].slots.size())});
      continue;
    }
    SendBufferTable* entry = context.send_buffer_table(r, index);
    const int64_t* begin = entry->begin();
    in.push_back({context.in_send_buffer<uint32_t>(r, entry->slots_offset),
                  context.in_send_buffer<float>(r, entry->rows_offset), begin[context.rank],
                  begin[context.rank + 1]});
  }
  return in;
}

// `merge_rows` for all rows of this rank, first those of pulled tiers, then those of pushed ones.
// The kept gradients of earlier micro-batches come first.
template <int N, class Body>
void merge_all(const Context& context, int32_t index, float gradient_scale, Body body) {
  const Table& table = context.tables[index];
  for (const bool pushed : {false, true}) {
    std::vector<Incoming> in = incoming(context, index, pushed);
    if (in.empty()) continue;
    for (size_t k = context.num_left; k-- > 0;) {
      const PushedRows& part = table.left[pushed][k];
      in.insert(in.begin(), {part.slots.data(), part.rows.data(), 0,
                             static_cast<int64_t>(part.slots.size())});
    }
    merge_rows<N>(table, in, gradient_scale, body);
  }
}

void keep(Context& context, int32_t index) {
  Table& table = context.tables[index];
  with_row_width(table.dim, [&](auto width) {
    constexpr int N = decltype(width)::value;
    for (const bool pushed : {false, true}) {
      std::vector<Incoming> in = incoming(context, index, pushed);
      PushedRows& part = table.left[pushed][context.num_left];
      part.slots.clear();
      if (in.empty()) continue;
      size_t most = 0;
      for (const Incoming& box : in) most += static_cast<size_t>(box.end - box.at);
      if (part.rows.size() < most * static_cast<size_t>(table.dim))
        part.rows.resize(most * static_cast<size_t>(table.dim));
      float* to = part.rows.data();
      merge_rows<N>(table, in, 1.0f, [&](int64_t slot, Row<N>& g) {
        part.slots.push_back(static_cast<uint32_t>(slot));
        g.store(to, table.dim);
        to += table.dim;
      });
    }
  });
}

// From positions to ids. Fast for positions that ascend, as within a tier: the search for the id of
// a cold row (one outside the explicit head) begins at the last one found.
class IdsOfPositions {
 public:
  explicit IdsOfPositions(const HeadIds& head) : head_(head) {}
  int64_t at(int64_t position) {
    const int64_t H = head_.num_head;
    if (position < H) return head_.by_position[position];
    // The cold row number `ordinal` comes after those head ids with ascending[j] - j <= ordinal.
    const int64_t ordinal = position - H;
    const auto behind = [&](int64_t j) { return head_.ascending[j] - j <= ordinal; };
    if (k_ > 0 && !behind(k_ - 1)) k_ = 0;  // another tier
    int64_t stride = 1, low = k_;
    while (low + stride <= H && behind(low + stride - 1)) {
      low += stride;
      stride *= 2;
    }
    int64_t high = std::min(H, low + stride);  // the answer lies in [low, high]
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (behind(middle)) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    k_ = low;
    return ordinal + low;
  }

 private:
  const HeadIds& head_;
  int64_t k_ = 0;  // number of head ids below the last cold row
};

// Random numbers for rounding the columns of a row, or of a piece of it, see `rounding_bits`.
class RoundingNumbers {
 public:
  explicit RoundingNumbers(const Table& table) : table_(table), ids_(table.head_ids) {}
  const uint16_t* of(int64_t slot) {
    const uint32_t row = static_cast<uint32_t>(ids_.at(table_.position_at(slot)));
    const RoundingKey key = table_.rounding;
    const uint32_t first = static_cast<uint32_t>(table_.first_column) / 8;
    const uint32_t last = static_cast<uint32_t>(table_.first_column + table_.dim - 1) / 8;
    for (uint32_t block = first; block <= last; ++block) {
      const Philox4 bits = rounding_bits(key, row, block);
      std::memcpy(numbers_ + 8 * (block - first), &bits, sizeof bits);
    }
    return numbers_ + table_.first_column % 8;
  }

 private:
  const Table& table_;
  IdsOfPositions ids_;
  uint16_t numbers_[16 * kMaxVectors + 32];  // whole vectors from any column of a block
};

// Turns a row's gradient into the one that the optimizer uses: clips it, then adds L2 weight decay.
template <class E, int N>
OPER_INLINE void clip_and_decay(const Context& context, const Table& table, int64_t slot,
                                Row<N>& g) {
  if (table.clips()) {
    const float sum = table.pieces.empty() ? g.sum_of_squares(table.dim)
                                           : squares_of_row(context, table, slot, 0);
    const float factor = clip_factor(sum, table.optimizer.max_norm);
    if (factor < 1.0f) g.scale(factor, table.dim);
  }
  if (table.optimizer.decay == Decay::kL2)
    g.add_scaled(table.row<E>(slot), table.optimizer.weight_decay, table.dim);
}

void squares(const Context& context, int32_t index, float gradient_scale, int32_t round) {
  const Table& table = context.tables[index];
  const int64_t num_slots =
      table.owner_begin[context.rank + 1] - table.owner_begin[context.rank];
  float* to = table.squares[context.rank] + round * num_slots;
  const bool before_clipping = table.clips() && round == 0;
  with_rows(table, [&](auto width, auto element) {
    constexpr int N = decltype(width)::value;
    merge_all<N>(context, index, gradient_scale, [&](int64_t slot, Row<N>& g) {
      if (!before_clipping) clip_and_decay<decltype(element)>(context, table, slot, g);
      to[slot] = g.sum_of_squares(table.dim);
    });
  });
}

template <bool kScaled>
void update_rows(const Context& context, int32_t index, float gradient_scale) {
  const Table& table = context.tables[index];
  uint32_t* touched = table.has_replicas ? table.touched[context.rank] : nullptr;
  const bool row_wise = is_row_wise(table.optimizer.kind);
  int64_t num_updated = 0;
  auto replicated = [&](int64_t slot) {
    for (const auto& range : table.replicated_slots)
      if (slot >= range.first && slot < range.second) return true;
    return false;
  };
  with_rows(table, [&](auto width, auto element) {
    constexpr int N = decltype(width)::value;
    using E = decltype(element);
    [[maybe_unused]] RoundingNumbers numbers(table);
    // Inlined, so that the gradient remains in registers.
    const auto update_row = [&](int64_t slot, Row<N>& g) __attribute__((always_inline)) {
      clip_and_decay<E>(context, table, slot, g);
      const float sum = !row_wise                ? 0.0f
                        : table.pieces.empty() ? g.sum_of_squares(table.dim)
                                               : squares_of_row(context, table, slot,
                                                                table.rounds_of_squares() - 1);
      const uint16_t* random = sizeof(E) == 2 ? numbers.of(slot) : nullptr;
      apply_optimizer<kScaled, N, E>(table, slot, g, sum, random);
      ++num_updated;
      if (table.changed) table.changed[slot / 64] |= uint64_t{1} << slot % 64;
      if (touched && replicated(slot)) touched[++touched[0]] = static_cast<uint32_t>(slot);
    };
    merge_all<N>(context, index, gradient_scale, update_row);
  });
  table.counters.add(kUpdatedRows, context.rank, num_updated);
}

void update(const Context& context, int32_t index, float gradient_scale) {
  const Table& table = context.tables[index];
  if (table.has_replicas) table.touched[context.rank][0] = 0;
  if (table.optimizer.kind == Optimizer::kNone) return;  // frozen: no row changes
  if (has_velocity_or_trust(table.optimizer.kind))
    return update_rows<true>(context, index, gradient_scale);
  update_rows<false>(context, index, gradient_scale);
}
