// Orders ids by linear index, the part of the backward pass that depends only on ids. Part of
// kernels.inl.

// Passes of `radix_sort` for this many bits, at most 11 in each.
int num_passes(int bits) { return (bits + 10) / 11; }

// Stable LSD radix sort on bits [shift, shift + bits); returns the sorted array, `a` or `b`.
template <class K>
K* radix_sort(K* a, K* b, int64_t n, int shift, int bits) {
  if (bits == 0 || n < 2) return a;
  const int passes = num_passes(bits);
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

// Bits of the numbers below `count`.
int bits_for(uint64_t count) { return count <= 1 ? 0 : 64 - __builtin_clzll(count - 1); }

// Calls body(linear indices of ids, their number, index of the first in the batch, their bag) for
// ranges of ids of one bag, over all features of the table; bags are numbered consecutively over
// the features. Returns the first bad id's index, or -1.
template <class Body>
int64_t for_keys(const Table& table, const Batch& batch, Body body) {
  constexpr int64_t kAtOnce = 512;
  uint32_t keys[kAtOnce];
  uint32_t bag = 0;
  for (int32_t f : table.features) {
    const FeatureBags& bags = batch.features[f];
    const int64_t* bounds = bags.bounds;
    const int64_t stop = bounds[bags.num_bags];
    int64_t b = 0;
    for (int64_t first = bounds[0]; first < stop;) {
      const int64_t n = std::min(kAtOnce, stop - first);
      const int64_t bad = resolve(table.home, batch, first, n, stop - first, keys);
      if (bad >= 0) return first + bad;
      for (int64_t i = first; i < first + n;) {
        const int64_t end = std::min(bounds[b + 1], first + n);
        if (end > i) body(keys + (i - first), end - i, i, bag + static_cast<uint32_t>(b));
        i = end;
        b += i == bounds[b + 1];
      }
      first += n;
    }
    bag += static_cast<uint32_t>(bags.num_bags);
  }
  return -1;
}

// Memory for the arrays of one table's order, from base + memory on or, if base is null, from
// scratch.
class OrderMemory {
 public:
  OrderMemory(char* base, int64_t memory, Scratch& scratch)
      : base_(base), at_(memory), scratch_(scratch) {}
  // Returns `count` items and writes their place, see TableOrder::at. `slot`: of the scratch.
  template <class T>
  T* take(int slot, int64_t count, int64_t* place) {
    if (base_ == nullptr) {
      T* data = scratch_.get<T>(slot, count);
      *place = reinterpret_cast<int64_t>(data);
      return data;
    }
    *place = at_;
    at_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return reinterpret_cast<T*>(base_ + *place);
  }

 private:
  char* base_;
  int64_t at_;
  Scratch& scratch_;
};

// A list of ids, in the order of the input.
struct BagIds {
  uint32_t* keys;  // linear indices
  uint32_t* bags;
  int64_t* positions;  // indices in the batch; null without weights
  int64_t n = 0;
  // Adds `count` ids of a bag; `first`: index of the first in the batch.
  OPER_INLINE void add(const uint32_t* key, int64_t count, int64_t first, uint32_t bag) {
    const int64_t at = n;
    for (int64_t i = 0; i < count; ++i) keys[at + i] = key[i];
    for (int64_t i = 0; i < count; ++i) bags[at + i] = bag;
    if (positions)
      for (int64_t i = 0; i < count; ++i) positions[at + i] = first + i;
    n = at + count;
  }
};

// Keys and bags in the order of the input, for `reduce_dense`.
int64_t arrange_dense(const Table& table, const Batch& batch, OrderMemory& memory,
                      TableOrder& order) {
  BagIds ids{memory.take<uint32_t>(0, order.n, &order.keys),
             memory.take<uint32_t>(1, order.n, &order.bags),
             batch.weights ? memory.take<int64_t>(5, order.n, &order.positions) : nullptr};
  return for_keys(table, batch, [&](const uint32_t* key, int64_t n, int64_t first, uint32_t bag) {
    ids.add(key, n, first, bag);
  });
}

// Pairs (key, payload), packed into a K each and sorted by key.
template <class K>
int64_t arrange_sorted(const Table& table, const Batch& batch, OrderMemory& memory,
                       Scratch& scratch, TableOrder& order) {
  const bool weighted = batch.weights != nullptr;
  const int shift = order.payload_bits;
  K* result = memory.take<K>(2, order.n, &order.pairs);
  K* spare = scratch.get<K>(3, order.n);
  uint32_t* bags = nullptr;
  int64_t* positions = nullptr;
  if (weighted) {
    bags = memory.take<uint32_t>(1, order.n, &order.bags);
    positions = memory.take<int64_t>(5, order.n, &order.positions);
  }
  // Every pass of the sort swaps the arrays: this choice makes it end in `result`.
  K* pairs = num_passes(order.key_bits) % 2 ? spare : result;
  int64_t at = 0;
  const int64_t bad = for_keys(
      table, batch, [&](const uint32_t* key, int64_t n, int64_t first, uint32_t bag) {
        if (!weighted && !table.has_push) {
          for (int64_t i = 0; i < n; ++i)
            pairs[at + i] = (static_cast<K>(key[i]) << shift) | static_cast<K>(bag);
          at += n;
          return;
        }
        for (int64_t i = 0; i < n; ++i) {
          if (table.has_push && table.is_pushed_key(key[i])) continue;
          if (weighted) {
            bags[at] = bag;
            positions[at] = first + i;
          }
          pairs[at] = (static_cast<K>(key[i]) << shift) |
                      static_cast<K>(weighted ? static_cast<uint32_t>(at) : bag);
          ++at;
        }
      });
  if (bad >= 0) return bad;
  order.n = at;
  const K* sorted = radix_sort(pairs, pairs == result ? spare : result, at, shift, order.key_bits);
  if (sorted != result) std::copy(sorted, sorted + at, result);  // fewer than two are not sorted
  order.num_rows = at > 0 ? 1 : 0;
  for (int64_t i = 1; i < at; ++i)
    order.num_rows += (result[i] >> shift) != (result[i - 1] >> shift);
  return -1;
}

int64_t arrange(const Table& table, const Batch& batch, char* base, int64_t place, Scratch& scratch,
                TableOrder& order) {
  OrderMemory memory(base, place, scratch);
  order = TableOrder{};
  order.pairs = order.keys = order.bags = order.positions = TableOrder::kNone;
  order.n = batch.num_ids(table);
  order.num_bags = batch.num_bags(table);
  if (table.has_push && table.all_pushed) {  // owners sort them
    order.n = 0;
    order.pair_bytes = 4;
    memory.take<uint32_t>(2, 0, &order.pairs);
    return -1;
  }
  // If the gradients of all rows fit the cache, adding them up there takes less time than sorting.
  constexpr int64_t kDenseBytes = 256 << 10;
  const int64_t rows = table.home.num_rows;
  if (!table.has_push && rows * table.gradient_bytes() <= kDenseBytes && rows <= 4 * order.n)
    return arrange_dense(table, batch, memory, order);
  order.key_bits = bits_for(static_cast<uint64_t>(rows));
  order.payload_bits =
      bits_for(static_cast<uint64_t>(batch.weights ? order.n : order.num_bags));
  order.pair_bytes = 4;
  if (order.key_bits + order.payload_bits <= 32 && order.payload_bits < 32)
    return arrange_sorted<uint32_t>(table, batch, memory, scratch, order);
  order.pair_bytes = 8;
  order.payload_bits = 32;
  return arrange_sorted<uint64_t>(table, batch, memory, scratch, order);
}
