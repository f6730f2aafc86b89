// Backward: from bag gradients to one gradient per row. Part of kernels.inl.

// ---- backward: gather the batch's keys ---------------------------------------------------------

// The lookups of one table over all its features: home keys, and for each id its bag, numbered
// through the table's features.
struct TableBatch {
  uint32_t* keys;      // [n]
  uint32_t* bags;      // [n]
  int64_t* positions;  // [n] index of each id in the batch (only with weights)
  int64_t n;
  int64_t num_bags;
};

// Gradient of a bag numbered through the table's features.
OPER_INLINE const float* bag_gradient(const Table& table, const Batch& batch, const float* grad,
                                      int64_t bag) {
  const FeatureBags* feature = &batch.features[table.features[0]];
  for (size_t k = 1; bag >= feature->num_bags; ++k) {
    bag -= feature->num_bags;
    feature = &batch.features[table.features[k]];
  }
  return grad + feature->out_begin + bag * batch.out_stride;
}

OPER_INLINE bool is_pushed(const Table& table, int64_t id) {
  return table.pushes[tier_of(table.home, position_of(table.home.head, id))];
}

// Keys of the ids that this rank reduces itself, which are all but those in pushed tiers.
template <class Id>
int64_t gather_keys(const Table& table, const Batch& batch, TableBatch& out, Scratch& scratch) {
  out.n = out.num_bags = 0;
  for (int32_t f : table.features) {
    const FeatureBags& bags = batch.features[f];
    out.n += bags.bounds[bags.num_bags] - bags.bounds[0];
    out.num_bags += bags.num_bags;
  }
  out.keys = scratch.get<uint32_t>(0, out.n);
  out.bags = scratch.get<uint32_t>(1, out.n);
  out.positions = batch.weights ? scratch.get<int64_t>(5, out.n) : nullptr;
  const Id* ids = static_cast<const Id*>(batch.ids);
  int64_t at = 0;
  uint32_t bag = 0;
  for (int32_t f : table.features) {
    const FeatureBags& bags = batch.features[f];
    const int64_t* bounds = bags.bounds;
    const int64_t n = bounds[bags.num_bags] - bounds[0];
    const int64_t bad = resolve(table.home, ids + bounds[0], n, n, out.keys + at);
    if (bad >= 0) return bounds[0] + bad;
    const uint32_t* keys = out.keys + at;
    for (int64_t b = 0; b < bags.num_bags; ++b, ++bag) {
      for (int64_t i = bounds[b]; i < bounds[b + 1]; ++i, ++keys) {
        if (table.has_push && is_pushed(table, ids[i])) continue;
        if (out.positions) out.positions[at] = i;
        out.keys[at] = *keys;
        out.bags[at++] = bag;
      }
    }
  }
  out.n = at;
  return -1;
}

// ---- backward: emit reduced rows in key order --------------------------------------------------

class Outbox {
 public:
  // Takes room for `count` rows of `table`; `ok()` tells whether there was any.
  Outbox(Context& context, const Table& table, int32_t index, int64_t count)
      : owner_begin_(table.owner_begin.data()),
        world_size_(context.world_size),
        dim_(table.dim) {
    OutboxTable* entry = context.outbox_table(context.rank, index);
    begin_ = Context::outbox_begin(entry);
    begin_[0] = 0;
    ok_ = context.take_outbox(table, count, entry);
    if (!ok_) return;
    slots_ = reinterpret_cast<uint32_t*>(context.outbox[context.rank] + entry->slots_offset);
    rows_ = reinterpret_cast<float*>(context.outbox[context.rank] + entry->rows_offset);
  }
  bool ok() const { return ok_; }
  // Destination of the next key, which is larger than all before.
  OPER_INLINE float* next(int64_t key) {
    while (key >= owner_begin_[owner_ + 1]) begin_[++owner_] = count_;
    slots_[count_] = static_cast<uint32_t>(key - owner_begin_[owner_]);
    return rows_ + (count_++) * dim_;
  }
  void close() {
    while (owner_ < world_size_) begin_[++owner_] = count_;
  }

 private:
  const int64_t* owner_begin_;
  int64_t* begin_ = nullptr;
  uint32_t* slots_ = nullptr;
  float* rows_ = nullptr;
  int32_t world_size_;
  int64_t dim_;
  int32_t owner_ = 0;
  int64_t count_ = 0;
  bool ok_ = false;
};

// ---- backward: small tables, accumulated in place ----------------------------------------------

// Sums in the order of the input, as the sorted path does, so both give the same bits.
template <int N>
bool reduce_dense(Context& context, int32_t index, const Batch& batch, const TableBatch& in,
                  const float* grad, Scratch& scratch) {
  const Table& table = context.tables[index];
  const int dim = table.dim;
  const int64_t num_rows = table.home.num_rows;
  float* sums = scratch.get<float>(2, num_rows * dim);
  uint8_t* seen = scratch.get<uint8_t>(3, num_rows);
  std::memset(seen, 0, static_cast<size_t>(num_rows));
  int64_t i = 0;
  while (i < in.n) {
    const uint32_t bag = in.bags[i];
    int64_t end = i + 1;
    while (end < in.n && in.bags[end] == bag) ++end;
    Row<N> g;
    g.load(bag_gradient(table, batch, grad, bag), dim);
    if (table.mean && end - i > 1) g.divide(static_cast<float>(end - i), dim);
    for (; i < end; ++i) {
      const uint32_t key = in.keys[i];
      float* sum = sums + static_cast<int64_t>(key) * dim;
      Row<N> value = g;
      if (in.positions) value.scale(batch.weights[in.positions[i]], dim);
      if (seen[key]) value.add(sum, dim);
      seen[key] = 1;
      value.store(sum, dim);
    }
  }
  int64_t count = 0;
  for (int64_t key = 0; key < num_rows; ++key) count += seen[key];
  Outbox outbox(context, table, index, count);
  if (!outbox.ok()) return false;
  for (int64_t key = 0; key < num_rows; ++key)
    if (seen[key])
      std::memcpy(outbox.next(key), sums + key * dim, static_cast<size_t>(dim) * 4);
  outbox.close();
  return true;
}

// ---- backward: everything else, sorted ---------------------------------------------------------

// Stable LSD radix sort on bits [shift, shift + bits); returns the sorted array, `a` or `b`.
template <class K>
K* radix_sort(K* a, K* b, int64_t n, int shift, int bits) {
  if (bits == 0 || n < 2) return a;
  const int passes = (bits + 10) / 11;
  const int digit = (bits + passes - 1) / passes;
  const uint32_t buckets = 1u << digit;
  uint32_t counts[4][2048];
  for (int p = 0; p < passes; ++p) std::memset(counts[p], 0, buckets * sizeof(uint32_t));
  for (int64_t i = 0; i < n; ++i)
    for (int p = 0; p < passes; ++p) ++counts[p][(a[i] >> (shift + p * digit)) & (buckets - 1)];
  for (int p = 0; p < passes; ++p) {
    uint32_t sum = 0;
    for (uint32_t k = 0; k < buckets; ++k) {
      const uint32_t count = counts[p][k];
      counts[p][k] = sum;
      sum += count;
    }
    for (int64_t i = 0; i < n; ++i)
      b[counts[p][(a[i] >> (shift + p * digit)) & (buckets - 1)]++] = a[i];
    std::swap(a, b);
  }
  return a;
}

// Gradient rows by combined bag, contiguous and divided by the bag length where pooling is mean.
// Rows in the caller's layout are `output_columns` apart, which maps a table's slice to a fraction
// of the cache sets; reading each one several times from there thrashes.
template <int N>
void stage_gradients(const Table& table, const Batch& batch, const float* grad, float* to) {
  const int dim = table.dim;
  for (int32_t f : table.features) {
    const FeatureBags& bags = batch.features[f];
    const float* from = grad + bags.out_begin;
    for (int64_t b = 0; b < bags.num_bags; ++b, to += dim) {
      const int64_t n = bags.bounds[b + 1] - bags.bounds[b];
      if (n == 0) continue;
      if (b + 8 < bags.num_bags)
        prefetch_row(from + (b + 8) * batch.out_stride, table.gradient_bytes());
      Row<N> g;
      g.load(from + b * batch.out_stride, dim);
      if (table.mean && n > 1) g.divide(static_cast<float>(n), dim);
      g.store(to, dim);
    }
  }
}

struct PairBits {
  int key, payload;
};

// K packs (key, payload); the payload is the combined bag, or the index in `in` with weights.
template <int N, class K, bool kWeighted>
bool reduce_sorted(Context& context, int32_t index, const Batch& batch, const TableBatch& in,
                   const float* grad, PairBits bits, Scratch& scratch) {
  const Table& table = context.tables[index];
  const int payload_bits = bits.payload;
  const int dim = table.dim;
  const int64_t n = in.n;
  const int64_t row_bytes = table.gradient_bytes();
  K* pairs = scratch.get<K>(2, n);
  K* spare = scratch.get<K>(3, n);
  for (int64_t i = 0; i < n; ++i)
    pairs[i] = (static_cast<K>(in.keys[i]) << payload_bits) |
               static_cast<K>(kWeighted ? static_cast<uint32_t>(i) : in.bags[i]);
  const K* sorted = radix_sort(pairs, spare, n, payload_bits, bits.key);
  const K mask = (K{1} << payload_bits) - 1;

  const float* staged = nullptr;
  if (table.has_push) {
    staged = reinterpret_cast<const float*>(
        context.outbox[context.rank] +
        context.request_table(context.rank, index)->gradients_offset);
  } else if (table.mean || n >= 2 * in.num_bags) {
    float* rows = scratch.get<float>(4, in.num_bags * dim);
    stage_gradients<N>(table, batch, grad, rows);
    staged = rows;
  }
  auto gradient = [&](K pair) -> const float* {
    const uint32_t payload = static_cast<uint32_t>(pair & mask);
    const uint32_t bag = kWeighted ? in.bags[payload] : payload;
    return staged ? staged + static_cast<int64_t>(bag) * dim
                  : bag_gradient(table, batch, grad, bag);
  };
  int64_t count = n > 0 ? 1 : 0;
  for (int64_t i = 1; i < n; ++i)
    count += (sorted[i] >> payload_bits) != (sorted[i - 1] >> payload_bits);
  Outbox outbox(context, table, index, count);
  if (!outbox.ok()) return false;
  constexpr int64_t kAhead = 12;
  for (int64_t i = 0; i < n;) {
    const K key = sorted[i] >> payload_bits;
    Row<N> sum;
    if (i + kAhead < n) prefetch_row(gradient(sorted[i + kAhead]), row_bytes);
    sum.load(gradient(sorted[i]), dim);
    if (kWeighted) sum.scale(batch.weights[in.positions[sorted[i] & mask]], dim);
    for (++i; i < n && (sorted[i] >> payload_bits) == key; ++i) {
      if (i + kAhead < n) prefetch_row(gradient(sorted[i + kAhead]), row_bytes);
      if (kWeighted) {
        sum.add_scaled(gradient(sorted[i]), batch.weights[in.positions[sorted[i] & mask]], dim);
      } else {
        sum.add(gradient(sorted[i]), dim);
      }
    }
    sum.store(outbox.next(static_cast<int64_t>(key)), dim);
  }
  outbox.close();
  return true;
}

int bits_for(uint64_t count) { return count <= 1 ? 0 : 64 - __builtin_clzll(count - 1); }

template <int N, class K>
bool reduce_packed(Context& context, int32_t index, const Batch& batch, const TableBatch& in,
                   const float* grad, PairBits bits, Scratch& scratch) {
  return in.positions ? reduce_sorted<N, K, true>(context, index, batch, in, grad, bits, scratch)
                      : reduce_sorted<N, K, false>(context, index, batch, in, grad, bits, scratch);
}

int64_t reduce(Context& context, int32_t index, const Batch& batch, const float* grad,
               Scratch& scratch) {
  const Table& table = context.tables[index];
  TableBatch in;
  const int64_t bad = batch.ids_are_32_bit ? gather_keys<int32_t>(table, batch, in, scratch)
                                           : gather_keys<int64_t>(table, batch, in, scratch);
  if (bad >= 0) return bad;
  // Sums of a small table stay in the cache, which then beats sorting.
  constexpr int64_t kDenseBytes = 256 << 10;
  const bool dense = !table.has_push &&
                     table.home.num_rows * table.gradient_bytes() <= kDenseBytes &&
                     table.home.num_rows <= 4 * in.n;
  const int64_t payloads = in.positions ? in.n : in.num_bags;
  const PairBits bits{bits_for(static_cast<uint64_t>(table.home.num_rows)),
                      bits_for(static_cast<uint64_t>(payloads))};
  const bool ok = with_row_width(table.dim, [&](auto width) {
    constexpr int N = decltype(width)::value;
    if (dense) return reduce_dense<N>(context, index, batch, in, grad, scratch);
    if (bits.key + bits.payload <= 32 && bits.payload < 32)
      return reduce_packed<N, uint32_t>(context, index, batch, in, grad, bits, scratch);
    return reduce_packed<N, uint64_t>(context, index, batch, in, grad, PairBits{bits.key, 32},
                                      scratch);
  });
  return ok ? kReduceOk : kReduceFull;
}
