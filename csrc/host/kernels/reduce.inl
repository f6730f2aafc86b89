// Backward: sums the gradients of bags by row. Part of kernels.inl.

// Gradient of a bag. Bags are numbered consecutively over the table's features.
OPER_INLINE const float* bag_gradient(const Table& table, const Batch& batch, int64_t bag) {
  const FeatureBags* feature = &batch.features[table.features[0]];
  for (size_t k = 1; bag >= feature->num_bags; ++k) {
    bag -= feature->num_bags;
    feature = &batch.features[table.features[k]];
  }
  return feature->gradients + bag * feature->gradient_stride;
}

// An order and its arrays.
struct TableBatch {
  TableOrder order;
  char* base;
  const uint32_t* keys = TableOrder::at<const uint32_t>(base, order.keys);
  const uint32_t* bags = TableOrder::at<const uint32_t>(base, order.bags);
  const int64_t* positions = TableOrder::at<const int64_t>(base, order.positions);
};

// ---- the send buffer ----------------------------------------------------------------------------

// Writes one table's summed gradients to this rank's send buffer, in ascending order of linear
// indices.
class SendBufferWriter {
 public:
  // Allocates space for `count` rows of `table`; `ok()` is false if there was not enough.
  SendBufferWriter(Context& context, const Table& table, int32_t index, int64_t count)
      : owner_begin_(table.owner_begin.data()), world_size_(context.world_size), dim_(table.dim) {
    SendBufferTable* entry = context.send_buffer_table(context.rank, index);
    begin_ = entry->begin();
    begin_[0] = 0;
    ok_ = context.take_send_buffer(table, count, entry);
    if (!ok_) return;
    slots_ = context.in_send_buffer<uint32_t>(context.rank, entry->slots_offset);
    rows_ = context.in_send_buffer<float>(context.rank, entry->rows_offset);
  }
  bool ok() const { return ok_; }
  // Whether rows should bypass the caches when they are written: if the send buffers of a batch do
  // not fit the last-level cache, they will not be there when owners read them. Only for rows of
  // whole lines.
  bool streams(const Context& context) const {
    const int64_t bytes = context.send_buffer_header(context.rank)->used_bytes * world_size_;
    return bytes > last_level_cache_bytes() && dim_ % 16 == 0 &&
           reinterpret_cast<uintptr_t>(rows_) % 64 == 0;
  }
  // Where to store the row of `key`, which is larger than all before.
  OPER_INLINE float* next(int64_t key) {
    while (key >= owner_begin_[owner_ + 1]) begin_[++owner_] = count_;
    slots_[count_] = static_cast<uint32_t>(key - owner_begin_[owner_]);
    return rows_ + (count_++) * dim_;
  }
  // The same if `is_next`; otherwise, for the same key as in the last call, its place again. Does
  // not branch on `is_next`.
  OPER_INLINE float* next_or_same(int64_t key, bool is_next) {
    while (key >= owner_begin_[owner_ + 1]) begin_[++owner_] = count_;
    count_ += is_next;
    slots_[count_ - 1] = static_cast<uint32_t>(key - owner_begin_[owner_]);
    return rows_ + (count_ - 1) * dim_;
  }
  // Called after the last row.
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

// ---- small tables: sums of all rows in the cache ------------------------------------------------

// Sums in the order of the input, as `reduce_sorted` does, so that both give the same bits. Returns
// false if the send buffer is full.
template <int N>
bool reduce_dense(Context& context, int32_t index, const Batch& batch, const TableBatch& in,
                  Scratch& scratch) {
  const Table& table = context.tables[index];
  const int dim = table.dim;
  const int64_t num_rows = table.home.num_rows;
  float* sums = scratch.get<float>(2, num_rows * dim);
  uint8_t* seen = scratch.get<uint8_t>(3, num_rows);
  std::memset(seen, 0, static_cast<size_t>(num_rows));
  // The bags' gradients are `output_columns` apart, too far for the hardware prefetcher.
  const int64_t row_bytes = table.gradient_bytes();
  const int64_t ahead = rows_ahead(row_bytes, 12);
  int64_t i = 0;
  while (i < in.order.n) {
    const uint32_t bag = in.bags[i];
    if (i + ahead < in.order.n)
      prefetch_row(bag_gradient(table, batch, in.bags[i + ahead]), row_bytes);
    int64_t end = i + 1;
    while (end < in.order.n && in.bags[end] == bag) ++end;
    Row<N> g;
    g.load(bag_gradient(table, batch, bag), dim);
    if (table.mean && end - i > 1) g.divide(static_cast<float>(end - i), dim);
    for (; i < end; ++i) {
      const uint32_t key = in.keys[i];
      float* sum = sums + static_cast<int64_t>(key) * dim;
      Row<N> value;  // not copied as a whole, which would move 64 vectors if N is 0
      for (int k = 0; k < Row<N>::vectors(dim); ++k) value.v[k] = g.v[k];
      if (in.positions) value.scale(batch.weights[in.positions[i]], dim);
      if (seen[key]) value.add(sum, dim);
      seen[key] = 1;
      value.store(sum, dim);
    }
  }
  int64_t count = 0;
  for (int64_t key = 0; key < num_rows; ++key) count += seen[key];
  SendBufferWriter writer(context, table, index, count);
  if (!writer.ok()) return false;
  for (int64_t key = 0; key < num_rows; ++key)
    if (seen[key]) std::memcpy(writer.next(key), sums + key * dim, static_cast<size_t>(dim) * 4);
  writer.close();
  return true;
}

// ---- other tables: sorted ids -------------------------------------------------------------------

// Copies the bags' gradients to contiguous rows, for mean pooling divided by the bag's length. In
// the output's gradient, a table's rows are `output_columns` apart: they map to a fraction of the
// cache's sets, so that a row read several times would often have been replaced.
template <int N>
void stage_gradients(const Table& table, const Batch& batch, float* to) {
  const int dim = table.dim;
  const int64_t ahead = rows_ahead(table.gradient_bytes(), 8);
  for (int32_t f : table.features) {
    const FeatureBags& bags = batch.features[f];
    const float* from = bags.gradients;
    for (int64_t b = 0; b < bags.num_bags; ++b, to += dim) {
      const int64_t n = bags.bounds[b + 1] - bags.bounds[b];
      if (n == 0) continue;
      if (b + ahead < bags.num_bags)
        prefetch_row(from + (b + ahead) * bags.gradient_stride, table.gradient_bytes());
      Row<N> g;
      g.load(from + b * bags.gradient_stride, dim);
      if (table.mean && n > 1) g.divide(static_cast<float>(n), dim);
      g.store(to, dim);
    }
  }
}

// Whether `stage_gradients` pays off: if bags have at least two ids on average, or eight if the
// copies do not fit the cache.
OPER_INLINE bool is_staged(int64_t num_ids, int64_t num_bags, int64_t row_bytes) {
  constexpr int64_t kBytes = 8 << 20;
  return num_ids >= (num_bags * row_bytes <= kBytes ? 2 : 8) * num_bags;
}

// K: type of the packed pairs, see TableOrder. Returns false if the send buffer is full.
template <int N, class K, bool kWeighted>
bool reduce_sorted(Context& context, int32_t index, const Batch& batch, const TableBatch& in,
                   Scratch& scratch) {
  const Table& table = context.tables[index];
  const int payload_bits = in.order.payload_bits;
  const int dim = table.dim;
  const int64_t n = in.order.n;
  const int64_t row_bytes = table.gradient_bytes();
  const K* sorted = TableOrder::at<const K>(in.base, in.order.pairs);
  const K mask = (K{1} << payload_bits) - 1;

  const float* staged = nullptr;
  if (table.has_push) {
    staged = context.in_send_buffer<float>(
        context.rank, context.request_table(context.rank, index)->gradients_offset);
  } else if (table.features.size() == 1 && !table.mean &&
             batch.features[table.features[0]].gradient_stride == dim) {
    staged = batch.features[table.features[0]].gradients;  // already contiguous
  } else if (table.mean || is_staged(n, in.order.num_bags, row_bytes)) {
    float* rows = scratch.get<float>(4, in.order.num_bags * dim);
    stage_gradients<N>(table, batch, rows);
    staged = rows;
  }
  auto gradient = [&](K pair) -> const float* {
    const uint32_t payload = static_cast<uint32_t>(pair & mask);
    const uint32_t bag = kWeighted ? in.bags[payload] : payload;
    return staged ? staged + static_cast<int64_t>(bag) * dim
                  : bag_gradient(table, batch, bag);
  };
  SendBufferWriter writer(context, table, index, in.order.num_rows);
  if (!writer.ok()) return false;
  const int64_t ahead = rows_ahead(row_bytes, 12);
  // How often a row occurs cannot be predicted. For a narrow row, a mispredicted branch takes
  // longer than storing the sum after each of its gradients.
  if constexpr (N != 0 && N <= 4) {
    Row<N> sum;
    sum.zero(dim);
    K last = 0;
    for (int64_t i = 0; i < n; ++i) {
      const K key = sorted[i] >> payload_bits;
      if (i + ahead < n) prefetch_row(gradient(sorted[i + ahead]), row_bytes);
      const bool is_next = (i == 0) | (key != last);
      last = key;
      Row<N> g;
      g.load(gradient(sorted[i]), dim);
      if (kWeighted) g.scale(batch.weights[in.positions[sorted[i] & mask]], dim);
      sum.start_if(is_next, dim);
      sum.add(g, dim);
      sum.store(writer.next_or_same(static_cast<int64_t>(key), is_next), dim);
    }
    writer.close();
    return true;
  }
  const bool stream = writer.streams(context);
  for (int64_t i = 0; i < n;) {
    const K key = sorted[i] >> payload_bits;
    Row<N> sum;
    if (i + ahead < n) prefetch_row(gradient(sorted[i + ahead]), row_bytes);
    sum.load(gradient(sorted[i]), dim);
    if (kWeighted) sum.scale(batch.weights[in.positions[sorted[i] & mask]], dim);
    for (++i; i < n && (sorted[i] >> payload_bits) == key; ++i) {
      if (i + ahead < n) prefetch_row(gradient(sorted[i + ahead]), row_bytes);
      if (kWeighted) {
        sum.add_scaled(gradient(sorted[i]), batch.weights[in.positions[sorted[i] & mask]], dim);
      } else {
        sum.add(gradient(sorted[i]), dim);
      }
    }
    if (stream) {
      sum.stream(writer.next(static_cast<int64_t>(key)), dim);
    } else {
      sum.store(writer.next(static_cast<int64_t>(key)), dim);
    }
  }
  if (stream) finish_streaming();
  writer.close();
  return true;
}

template <int N, class K>
bool reduce_packed(Context& context, int32_t index, const Batch& batch, const TableBatch& in,
                   Scratch& scratch) {
  return in.positions ? reduce_sorted<N, K, true>(context, index, batch, in, scratch)
                      : reduce_sorted<N, K, false>(context, index, batch, in, scratch);
}

int64_t reduce(Context& context, int32_t index, const Batch& batch, Scratch& scratch) {
  const Table& table = context.tables[index];
  TableOrder order;
  char* base = nullptr;
  if (batch.resolved != nullptr && batch.resolved->order != nullptr) {
    base = batch.resolved->order;
    order = reinterpret_cast<const TableOrder*>(base)[index];
  } else {
    const int64_t bad = arrange(table, batch, nullptr, 0, scratch, order);
    if (bad >= 0) return bad;
  }
  const TableBatch in{order, base};
  const bool ok = with_row_width(table.dim, [&](auto width) {
    constexpr int N = decltype(width)::value;
    if (order.pair_bytes == 0) return reduce_dense<N>(context, index, batch, in, scratch);
    if (order.pair_bytes == 4)
      return reduce_packed<N, uint32_t>(context, index, batch, in, scratch);
    return reduce_packed<N, uint64_t>(context, index, batch, in, scratch);
  });
  return ok ? kReduceOk : kReduceFull;
}
