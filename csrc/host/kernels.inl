// Body of kernels_*.cpp. Define OPER_KERNELS (a namespace), OPER_KERNELS_TABLE, OPER_KERNELS_NAME.
// No include guard and no includes: the including file has them, before its target pragma.

namespace oper::host {
namespace OPER_KERNELS {

// 16 lanes; the compiler splits them into what the target has. `Loose` may be unaligned.
typedef float Lanes __attribute__((vector_size(64)));
typedef float Loose __attribute__((vector_size(64), aligned(4), may_alias));

constexpr int kMaxVectors = 64;     // dim <= 1024
constexpr int64_t kPrefetch = 24;   // rows ahead; 16..32 measured equal on current server cores
constexpr int64_t kBlockIds = 1024; // ids resolved at a time

#define OPER_INLINE inline __attribute__((always_inline))

// ---- rows as vectors ---------------------------------------------------------------------------

OPER_INLINE Lanes load_part(const float* p, int count) {
  Lanes v = {};
  // Constant sizes compile to single moves; the common small dims are multiples of four.
  if (count == 8) {
    std::memcpy(&v, p, 32);
  } else if (count == 4) {
    std::memcpy(&v, p, 16);
  } else {
    std::memcpy(&v, p, static_cast<size_t>(count) * 4);
  }
  return v;
}

OPER_INLINE void store_part(float* p, const Lanes& v, int count) {
  if (count == 8) {
    std::memcpy(p, &v, 32);
  } else if (count == 4) {
    std::memcpy(p, &v, 16);
  } else {
    std::memcpy(p, &v, static_cast<size_t>(count) * 4);
  }
}

// A fixed tree, so that every instruction set gives the same bits.
OPER_INLINE float sum_of_lanes(Lanes s) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) s[i] += s[i + width];
  return s[0];
}

// A row of `dim` floats. N > 0: exactly 16 * N columns, kept in registers. N == 0: any dim.
template <int N>
struct Row {
  Lanes v[N > 0 ? N : kMaxVectors];

  static OPER_INLINE int full(int dim) { return N > 0 ? N : dim / 16; }
  static OPER_INLINE int part(int dim) { return N > 0 ? 0 : dim % 16; }
  static OPER_INLINE int vectors(int dim) { return full(dim) + (part(dim) ? 1 : 0); }

  OPER_INLINE void load(const float* p, int dim) {
    const int n = full(dim);
    for (int i = 0; i < n; ++i) v[i] = *reinterpret_cast<const Loose*>(p + 16 * i);
    if (part(dim)) v[n] = load_part(p + 16 * n, part(dim));
  }
  OPER_INLINE void add(const float* p, int dim) {
    const int n = full(dim);
    for (int i = 0; i < n; ++i) v[i] += *reinterpret_cast<const Loose*>(p + 16 * i);
    if (part(dim)) v[n] += load_part(p + 16 * n, part(dim));
  }
  // v += w * p, the product rounded first.
  OPER_INLINE void add_scaled(const float* p, float w, int dim) {
    const int n = full(dim);
    for (int i = 0; i < n; ++i) v[i] += *reinterpret_cast<const Loose*>(p + 16 * i) * w;
    if (part(dim)) v[n] += load_part(p + 16 * n, part(dim)) * w;
  }
  OPER_INLINE void scale(float w, int dim) {
    const int n = vectors(dim);
    for (int i = 0; i < n; ++i) v[i] *= w;
  }
  OPER_INLINE void divide(float w, int dim) {
    const int n = vectors(dim);
    for (int i = 0; i < n; ++i) v[i] /= w;
  }
  OPER_INLINE void zero(int dim) {
    const int n = vectors(dim);
    for (int i = 0; i < n; ++i) v[i] = Lanes{};
  }
  OPER_INLINE void store(float* p, int dim) const {
    const int n = full(dim);
    for (int i = 0; i < n; ++i) *reinterpret_cast<Loose*>(p + 16 * i) = v[i];
    if (part(dim)) store_part(p + 16 * n, v[n], part(dim));
  }
  OPER_INLINE float sum_of_squares(int dim) const {
    const int n = vectors(dim);
    Lanes s = v[0] * v[0];
    for (int i = 1; i < n; ++i) s += v[i] * v[i];
    return sum_of_lanes(s);
  }
  OPER_INLINE float dot(const float* p, int dim) const {
    Row other;
    other.load(p, dim);
    const int n = vectors(dim);
    Lanes s = v[0] * other.v[0];
    for (int i = 1; i < n; ++i) s += v[i] * other.v[i];
    return sum_of_lanes(s);
  }
};

OPER_INLINE void prefetch_row(const void* p, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64)
    __builtin_prefetch(static_cast<const char*>(p) + at, 0, 3);
}

OPER_INLINE void prefetch_row_for_write(const void* p, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64)
    __builtin_prefetch(static_cast<const char*>(p) + at, 1, 3);
}

// Calls body(std::integral_constant<int, N>) with N = dim / 16 when that fits registers, else 0.
template <class Body>
OPER_INLINE auto with_row_width(int dim, Body body) {
  if (dim % 16 == 0) {
    switch (dim / 16) {
      case 1: return body(std::integral_constant<int, 1>{});
      case 2: return body(std::integral_constant<int, 2>{});
      case 4: return body(std::integral_constant<int, 4>{});
      case 6: return body(std::integral_constant<int, 6>{});
      case 8: return body(std::integral_constant<int, 8>{});
      default: break;
    }
  }
  return body(std::integral_constant<int, 0>{});
}

// ---- resolving ids -----------------------------------------------------------------------------

// Places of ids[0..n); a bad id is resolved as 0 and its index returned (-1: none).
template <class Id, class Out>
int64_t resolve(const TableMap& map, const Id* ids, int64_t n, Out* out) {
  const uint64_t num_rows = static_cast<uint64_t>(map.num_rows);
  int64_t bad = -1;
  auto checked = [&](int64_t i) -> int64_t {
    const int64_t id = static_cast<int64_t>(ids[i]);
    if (__builtin_expect(static_cast<uint64_t>(id) >= num_rows, 0)) {
      if (bad < 0) bad = i;
      return 0;
    }
    return id;
  };
  if (map.num_tiers == 1 && map.head.bits == nullptr && map.tiers[0].shift >= 0) {
    // The usual table: one tier dealt to a power of two of ranks; hoist its constants.
    const TierMap tier = map.tiers[0];
    const int64_t mask = tier.period - 1;
    if (tier.period == 1) {
      const int64_t base = tier.base[0], step = tier.step[0];
      for (int64_t i = 0; i < n; ++i) out[i] = static_cast<Out>(base + checked(i) * step);
      return bad;
    }
    for (int64_t i = 0; i < n; ++i) {
      const int64_t id = checked(i);
      const int64_t k = id & mask;
      out[i] = static_cast<Out>(tier.base[k] + (id >> tier.shift) * tier.step[k]);
    }
    return bad;
  }
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<Out>(locate(map, checked(i)));
  return bad;
}

// ---- forward -----------------------------------------------------------------------------------

template <int N, bool kWeighted>
void pool_block(const Table& table, const int64_t* addresses, const int64_t* offsets,
                const float* weights, int64_t num_bags, float* out, int64_t stride) {
  const int dim = table.dim;
  const int64_t row_bytes = N > 0 ? N * 64 : table.row_bytes();
  const int64_t* at = addresses;
  for (int64_t b = 0; b < num_bags; ++b) {
    const int64_t n = offsets[b + 1] - offsets[b];
    Row<N> row;
    if (n == 0) {
      row.zero(dim);
    } else {
      prefetch_row(reinterpret_cast<const void*>(at[kPrefetch]), row_bytes);
      const float* w = kWeighted ? weights + offsets[b] : nullptr;
      row.load(reinterpret_cast<const float*>(at[0]), dim);
      if (kWeighted) row.scale(w[0], dim);
      for (int64_t i = 1; i < n; ++i) {
        prefetch_row(reinterpret_cast<const void*>(at[i + kPrefetch]), row_bytes);
        const float* p = reinterpret_cast<const float*>(at[i]);
        if (kWeighted) {
          row.add_scaled(p, w[i], dim);
        } else {
          row.add(p, dim);
        }
      }
      if (table.mean && n > 1) row.divide(static_cast<float>(n), dim);
      at += n;
    }
    row.store(out + b * stride, dim);
  }
}

// Calls body(first bag, last bag, addresses of their rows) for blocks of bags; returns the first bad
// id's index in the batch, or -1.
template <class Id, class Body>
int64_t for_blocks(const Table& table, const BagRange& range, Scratch& scratch, Body body) {
  const Id* ids = static_cast<const Id*>(range.batch.ids);
  const int64_t* bounds = range.bags.bounds;
  int64_t b = range.begin;
  while (b < range.end) {
    // As many bags as fit a block, at least one.
    const int64_t first = bounds[b];
    int64_t end = b + 1;
    while (end < range.end && bounds[end + 1] - first <= kBlockIds) ++end;
    const int64_t n = bounds[end] - first;
    int64_t* addresses = scratch.get<int64_t>(0, n + kPrefetch);
    const int64_t bad = resolve(table.read, ids + first, n, addresses);
    if (bad >= 0) return first + bad;
    for (int64_t i = 0; i < kPrefetch; ++i) addresses[n + i] = n > 0 ? addresses[n - 1] : 0;
    for (int64_t i = 0; i < std::min(n, kPrefetch); ++i)
      prefetch_row(reinterpret_cast<const void*>(addresses[i]), table.row_bytes());
    body(b, end, addresses);
    b = end;
  }
  return -1;
}

template <class Id>
int64_t pool_ids(const Table& table, const BagRange& range, float* out, Scratch& scratch) {
  const int64_t* bounds = range.bags.bounds;
  const int64_t stride = range.batch.out_stride;
  const float* weights = range.batch.weights;
  return for_blocks<Id>(table, range, scratch, [&](int64_t b, int64_t end, const int64_t* rows) {
    float* to = out + range.bags.out_begin + b * stride;
    with_row_width(table.dim, [&](auto width) {
      constexpr int N = decltype(width)::value;
      if (weights != nullptr) {
        pool_block<N, true>(table, rows, bounds + b, weights, end - b, to, stride);
      } else {
        pool_block<N, false>(table, rows, bounds + b, nullptr, end - b, to, stride);
      }
    });
  });
}

int64_t pool(const Table& table, const BagRange& range, float* out, Scratch& scratch) {
  return range.batch.ids_are_32_bit ? pool_ids<int32_t>(table, range, out, scratch)
                                    : pool_ids<int64_t>(table, range, out, scratch);
}

template <class Id>
void weight_gradient_ids(const Table& table, const BagRange& range, const float* grad, float* out,
                         Scratch& scratch) {
  const int64_t* bounds = range.bags.bounds;
  for_blocks<Id>(table, range, scratch, [&](int64_t b, int64_t end, const int64_t* rows) {
    with_row_width(table.dim, [&](auto width) {
      constexpr int N = decltype(width)::value;
      const int64_t* at = rows;
      for (; b < end; ++b) {
        const int64_t n = bounds[b + 1] - bounds[b];
        Row<N> g;
        g.load(grad + range.bags.out_begin + b * range.batch.out_stride, table.dim);
        if (table.mean && n > 1) g.divide(static_cast<float>(n), table.dim);
        for (int64_t i = 0; i < n; ++i, ++at) {
          prefetch_row(reinterpret_cast<const void*>(at[kPrefetch]), table.row_bytes());
          out[bounds[b] + i] += g.dot(reinterpret_cast<const float*>(*at), table.dim);
        }
      }
    });
  });
}

void weight_gradient(const Table& table, const BagRange& range, const float* grad, float* out,
                     Scratch& scratch) {
  if (range.batch.ids_are_32_bit) {
    weight_gradient_ids<int32_t>(table, range, grad, out, scratch);
  } else {
    weight_gradient_ids<int64_t>(table, range, grad, out, scratch);
  }
}

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
    const int64_t bad = resolve(table.home, ids + bounds[0], n, out.keys + at);
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
        prefetch_row(from + (b + 8) * batch.out_stride, table.row_bytes());
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
  const int64_t row_bytes = table.row_bytes();
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
  const bool dense = !table.has_push && table.home.num_rows * table.row_bytes() <= kDenseBytes &&
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

// ---- update at the owner -----------------------------------------------------------------------

struct Incoming {  // what one rank left for this owner
  const uint32_t* slots;
  const float* rows;
  int64_t at, end;
};

// One optimizer step of a row; `g` is the exact gradient and `squares_of_row` the sum of its squares
// over all columns of the row. FBGEMM's definitions, see optimizer.h.
template <int N>
OPER_INLINE void apply_optimizer(const Table& table, int64_t slot, const Row<N>& g,
                                 float squares_of_row) {
  const OptimizerArgs& args = table.optimizer;
  const int dim = table.dim;
  const int n = Row<N>::vectors(dim);
  float* row = table.rows + slot * dim;
  Row<N> w;
  w.load(row, dim);
  switch (args.kind) {
    case Optimizer::kNone:
      return;
    case Optimizer::kSgd:
      for (int i = 0; i < n; ++i) w.v[i] -= g.v[i] * args.learning_rate;
      break;
    case Optimizer::kRowWiseAdagrad: {
      const float multiplier = rowwise_adagrad_multiplier(table.momentum1 + slot, squares_of_row,
                                                          table.row_columns, args);
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
    case Optimizer::kPartialRowWiseAdam: {
      Row<N> m;
      m.load(table.momentum1 + slot * dim, dim);
      for (int i = 0; i < n; ++i)
        m.v[i] = m.v[i] * args.beta1 + g.v[i] * (1.0f - args.beta1);
      m.store(table.momentum1 + slot * dim, dim);
      if (args.kind == Optimizer::kPartialRowWiseAdam) {
        const float root =
            partial_adam_root(table.momentum2 + slot, squares_of_row, table.row_columns, args);
        for (int i = 0; i < n; ++i)
          w.v[i] -= ((m.v[i] / args.correction1) / root + w.v[i] * args.weight_decay) *
                    args.learning_rate;
      } else {
        Row<N> s;
        s.load(table.momentum2 + slot * dim, dim);
        for (int i = 0; i < n; ++i) {
          s.v[i] = s.v[i] * args.beta2 + g.v[i] * g.v[i] * (1.0f - args.beta2);
          Lanes root;
          for (int k = 0; k < 16; ++k)
            root[k] = std::sqrt(s.v[i][k] / args.correction2) + args.eps;
          w.v[i] -= ((m.v[i] / args.correction1) / root + w.v[i] * args.weight_decay) *
                    args.learning_rate;
        }
        s.store(table.momentum2 + slot * dim, dim);
      }
      break;
    }
  }
  w.store(row, dim);
}

// Calls body(slot, gradient) for every row of this rank that any rank has a gradient of, summed in
// rank order and scaled.
template <int N, class Body>
void merge_rows(const Context& context, const Table& table, std::vector<Incoming>& in,
                float gradient_scale, Body body) {
  const int dim = table.dim;
  const int64_t row_bytes = table.row_bytes();
  const bool row_state = table.optimizer.kind == Optimizer::kRowWiseAdagrad;
  const int32_t W = context.world_size;
  constexpr int64_t kAhead = 10;
  constexpr uint64_t kNone = ~uint64_t{0};
  for (;;) {
    uint64_t slot = kNone;
    for (int32_t r = 0; r < W; ++r)
      if (in[r].at < in[r].end) slot = std::min<uint64_t>(slot, in[r].slots[in[r].at]);
    if (slot == kNone) break;
    Row<N> g;
    bool first = true;
    for (int32_t r = 0; r < W; ++r) {
      Incoming& box = in[r];
      if (box.at >= box.end || box.slots[box.at] != slot) continue;
      const float* row = box.rows + box.at * dim;
      if (first) {
        g.load(row, dim);
      } else {
        g.add(row, dim);
      }
      first = false;
      ++box.at;
      if (box.at + kAhead < box.end) {
        const int64_t ahead = box.slots[box.at + kAhead];
        prefetch_row_for_write(table.rows + ahead * dim, row_bytes);
        if (row_state) __builtin_prefetch(table.momentum1 + ahead, 1, 3);
      }
    }
    if (gradient_scale != 1.0f) g.scale(gradient_scale, dim);
    body(static_cast<int64_t>(slot), g);
  }
}

// The same over reduced rows and, in tiers of their own, pushed rows.
template <int N, class Body>
void merge_all(const Context& context, int32_t index, float gradient_scale, Body body) {
  const Table& table = context.tables[index];
  std::vector<Incoming> in(static_cast<size_t>(context.world_size));
  for (int32_t r = 0; r < context.world_size; ++r) {
    OutboxTable* entry = context.outbox_table(r, index);
    const int64_t* begin = Context::outbox_begin(entry);
    in[r] = {reinterpret_cast<const uint32_t*>(context.outbox[r] + entry->slots_offset),
             reinterpret_cast<const float*>(context.outbox[r] + entry->rows_offset),
             begin[context.rank], begin[context.rank + 1]};
  }
  merge_rows<N>(context, table, in, gradient_scale, body);
  if (!table.has_push) return;
  for (int32_t r = 0; r < context.world_size; ++r)
    in[r] = {table.pushed[r].slots.data(), table.pushed[r].rows.data(), 0,
             static_cast<int64_t>(table.pushed[r].slots.size())};
  merge_rows<N>(context, table, in, gradient_scale, body);
}

int64_t position_at(const Table& table, int64_t slot) {
  for (const HomeTier& tier : table.home_tiers) {
    if (slot < tier.slot_begin || slot >= tier.slot_end) continue;
    const int64_t n = static_cast<int64_t>(tier.offsets.size());
    const int64_t k = slot - tier.slot_begin;
    return tier.start + k / n * tier.period + tier.offsets[k % n];
  }
  return -1;
}

// Sum over all pieces of a row, in column order: the same number at every piece's owner.
float squares_of_row(const Context& context, const Table& table, int64_t slot) {
  const int64_t position = position_at(table, slot);
  float sum = 0.0f;
  for (int32_t p : table.pieces) {
    const Table& piece = context.tables[p];
    const int64_t key =
        locate_in_tier(piece.home.tiers[tier_of(piece.home, position)], position);
    int32_t owner = 0;
    while (key >= piece.owner_begin[owner + 1]) ++owner;
    sum += piece.squares[owner][key - piece.owner_begin[owner]];
  }
  return sum;
}

template <int N>
OPER_INLINE void add_l2(const Table& table, int64_t slot, Row<N>& g) {
  if (table.optimizer.decay != Decay::kL2) return;
  g.add_scaled(table.rows + slot * table.dim, table.optimizer.weight_decay, table.dim);
}

void squares(const Context& context, int32_t index, float gradient_scale) {
  const Table& table = context.tables[index];
  float* to = table.squares[context.rank];
  with_row_width(table.dim, [&](auto width) {
    constexpr int N = decltype(width)::value;
    merge_all<N>(context, index, gradient_scale, [&](int64_t slot, Row<N>& g) {
      add_l2<N>(table, slot, g);
      to[slot] = g.sum_of_squares(table.dim);
    });
  });
}

void update(const Context& context, int32_t index, float gradient_scale) {
  const Table& table = context.tables[index];
  uint32_t* touched = table.has_replicas ? table.touched[context.rank] : nullptr;
  if (touched) touched[0] = 0;
  const bool row_wise = is_row_wise(table.optimizer.kind);
  auto replicated = [&](int64_t slot) {
    for (const auto& range : table.replicated_slots)
      if (slot >= range.first && slot < range.second) return true;
    return false;
  };
  with_row_width(table.dim, [&](auto width) {
    constexpr int N = decltype(width)::value;
    merge_all<N>(context, index, gradient_scale, [&](int64_t slot, Row<N>& g) {
      add_l2<N>(table, slot, g);
      const float sum = !row_wise                ? 0.0f
                        : table.pieces.empty() ? g.sum_of_squares(table.dim)
                                               : squares_of_row(context, table, slot);
      apply_optimizer<N>(table, slot, g, sum);
      if (touched && replicated(slot)) touched[++touched[0]] = static_cast<uint32_t>(slot);
    });
  });
}

#include "host/push.inl"

}  // namespace OPER_KERNELS

const Kernels OPER_KERNELS_TABLE = {OPER_KERNELS_NAME, OPER_KERNELS::pool,
                                    OPER_KERNELS::weight_gradient, OPER_KERNELS::reduce,
                                    OPER_KERNELS::squares, OPER_KERNELS::update,
                                    OPER_KERNELS::request, OPER_KERNELS::pool_for,
                                    OPER_KERNELS::pool_pushed, OPER_KERNELS::stage,
                                    OPER_KERNELS::reduce_pushed};

}  // namespace oper::host
