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

// A row of `dim` floats. N > 0: exactly 16 * N columns, kept in registers. N == 0: any dim.
template <int N>
struct Row {
  Lanes v[N > 0 ? N : kMaxVectors];

  static OPER_INLINE int full(int dim) { return N > 0 ? N : dim / 16; }
  static OPER_INLINE int part(int dim) { return N > 0 ? 0 : dim % 16; }

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
    const int n = full(dim) + (part(dim) ? 1 : 0);
    for (int i = 0; i < n; ++i) v[i] *= w;
  }
  OPER_INLINE void divide(float w, int dim) {
    const int n = full(dim) + (part(dim) ? 1 : 0);
    for (int i = 0; i < n; ++i) v[i] /= w;
  }
  OPER_INLINE void zero(int dim) {
    const int n = full(dim) + (part(dim) ? 1 : 0);
    for (int i = 0; i < n; ++i) v[i] = Lanes{};
  }
  OPER_INLINE void store(float* p, int dim) const {
    const int n = full(dim);
    for (int i = 0; i < n; ++i) *reinterpret_cast<Loose*>(p + 16 * i) = v[i];
    if (part(dim)) store_part(p + 16 * n, v[n], part(dim));
  }
  OPER_INLINE float sum_of_squares(int dim) const {
    const int n = full(dim) + (part(dim) ? 1 : 0);
    Lanes s = v[0] * v[0];
    for (int i = 1; i < n; ++i) s += v[i] * v[i];
    for (int width = 8; width > 0; width /= 2)
      for (int i = 0; i < width; ++i) s[i] += s[i + width];
    return s[0];
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

template <class Id>
int64_t pool_ids(const Table& table, const BagRange& bags, float* out, int64_t stride,
                 Scratch& scratch) {
  const Id* ids = static_cast<const Id*>(bags.ids);
  int64_t b = bags.bag_begin;
  while (b < bags.bag_end) {
    // As many bags as fit a block, at least one.
    const int64_t first = bags.offsets[b];
    int64_t end = b + 1;
    while (end < bags.bag_end && bags.offsets[end + 1] - first <= kBlockIds) ++end;
    const int64_t n = bags.offsets[end] - first;
    int64_t* addresses = scratch.get<int64_t>(0, n + kPrefetch);
    const int64_t bad = resolve(table.read, ids + first, n, addresses);
    if (bad >= 0) return first + bad;
    for (int64_t i = 0; i < kPrefetch; ++i) addresses[n + i] = n > 0 ? addresses[n - 1] : 0;
    for (int64_t i = 0; i < std::min(n, kPrefetch); ++i)
      prefetch_row(reinterpret_cast<const void*>(addresses[i]), table.row_bytes());
    with_row_width(table.dim, [&](auto width) {
      constexpr int N = decltype(width)::value;
      if (bags.weights != nullptr) {
        pool_block<N, true>(table, addresses, bags.offsets + b, bags.weights, end - b,
                            out + b * stride, stride);
      } else {
        pool_block<N, false>(table, addresses, bags.offsets + b, nullptr, end - b,
                             out + b * stride, stride);
      }
    });
    b = end;
  }
  return -1;
}

int64_t pool(const Table& table, const BagRange& bags, float* out, int64_t stride,
             Scratch& scratch) {
  return bags.ids_are_32_bit ? pool_ids<int32_t>(table, bags, out, stride, scratch)
                             : pool_ids<int64_t>(table, bags, out, stride, scratch);
}

// ---- backward: gather the batch's keys ---------------------------------------------------------

// The lookups of one table over all its features: home keys and the combined bag of each id
// (feature index within the table * batch size + bag).
struct TableBatch {
  uint32_t* keys;        // [n]
  uint32_t* bags;        // [n]
  const float* weights;  // per id of the whole input, or null
  int64_t* positions;    // [n] index of each id in the input (weights only)
  int64_t n;
};

OPER_INLINE const float* bag_gradient(const Context& context, const Table& table,
                                      const float* grad, int64_t stride, int64_t batch_size,
                                      uint32_t bag) {
  int64_t feature = 0, b = bag;
  if (table.features.size() > 1) {
    feature = bag / batch_size;
    b = bag - feature * batch_size;
  }
  return grad + b * stride + context.features[table.features[feature]].column;
}

template <class Id>
int64_t gather_keys(const Table& table, const Batch& batch, TableBatch& out, Scratch& scratch) {
  const int64_t B = batch.batch_size;
  out.n = 0;
  for (int32_t f : table.features)
    if (batch.key_of[f] >= 0)
      out.n += batch.offsets[(batch.key_of[f] + 1) * B] - batch.offsets[batch.key_of[f] * B];
  out.keys = scratch.get<uint32_t>(0, out.n);
  out.bags = scratch.get<uint32_t>(1, out.n);
  out.weights = batch.weights;
  out.positions = batch.weights ? scratch.get<int64_t>(5, out.n) : nullptr;
  const Id* ids = static_cast<const Id*>(batch.ids);
  int64_t at = 0;
  for (size_t k = 0; k < table.features.size(); ++k) {
    const int64_t key = batch.key_of[table.features[k]];
    if (key < 0) continue;
    const int64_t* offsets = batch.offsets + key * B;
    const int64_t n = offsets[B] - offsets[0];
    const int64_t bad = resolve(table.home, ids + offsets[0], n, out.keys + at);
    if (bad >= 0) return offsets[0] + bad;
    for (int64_t b = 0; b < B; ++b) {
      const uint32_t bag = static_cast<uint32_t>(k * B + b);
      for (int64_t i = offsets[b]; i < offsets[b + 1]; ++i) {
        if (out.positions) out.positions[at] = i;
        out.bags[at++] = bag;
      }
    }
  }
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
                  const float* grad, int64_t stride, Scratch& scratch) {
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
    g.load(bag_gradient(context, table, grad, stride, batch.batch_size, bag), dim);
    if (table.mean && end - i > 1) g.divide(static_cast<float>(end - i), dim);
    for (; i < end; ++i) {
      const uint32_t key = in.keys[i];
      float* sum = sums + static_cast<int64_t>(key) * dim;
      Row<N> value = g;
      if (in.weights) value.scale(in.weights[in.positions[i]], dim);
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
const float* stage_gradients(const Context& context, const Table& table, const Batch& batch,
                             const float* grad, int64_t stride, Scratch& scratch) {
  const int64_t B = batch.batch_size;
  const int dim = table.dim;
  float* staged = scratch.get<float>(4, static_cast<int64_t>(table.features.size()) * B * dim);
  for (size_t k = 0; k < table.features.size(); ++k) {
    const int64_t key = batch.key_of[table.features[k]];
    if (key < 0) continue;
    const int64_t* offsets = batch.offsets + key * B;
    const float* from = grad + context.features[table.features[k]].column;
    for (int64_t b = 0; b < B; ++b) {
      const int64_t n = offsets[b + 1] - offsets[b];
      if (n == 0) continue;
      if (b + 8 < B) prefetch_row(from + (b + 8) * stride, table.row_bytes());
      Row<N> g;
      g.load(from + b * stride, dim);
      if (table.mean && n > 1) g.divide(static_cast<float>(n), dim);
      g.store(staged + (static_cast<int64_t>(k) * B + b) * dim, dim);
    }
  }
  return staged;
}

struct PairBits {
  int key, payload;
};

// K packs (key, payload); the payload is the combined bag, or the index in `in` with weights.
template <int N, class K, bool kWeighted>
bool reduce_sorted(Context& context, int32_t index, const Batch& batch, const TableBatch& in,
                   const float* grad, int64_t stride, PairBits bits, Scratch& scratch) {
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

  const int64_t bags = static_cast<int64_t>(table.features.size()) * batch.batch_size;
  const float* staged = table.mean || n >= 2 * bags
                            ? stage_gradients<N>(context, table, batch, grad, stride, scratch)
                            : nullptr;
  auto gradient = [&](K pair) -> const float* {
    const uint32_t payload = static_cast<uint32_t>(pair & mask);
    const uint32_t bag = kWeighted ? in.bags[payload] : payload;
    return staged ? staged + static_cast<int64_t>(bag) * dim
                  : bag_gradient(context, table, grad, stride, batch.batch_size, bag);
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
    if (kWeighted) sum.scale(in.weights[in.positions[sorted[i] & mask]], dim);
    for (++i; i < n && (sorted[i] >> payload_bits) == key; ++i) {
      if (i + kAhead < n) prefetch_row(gradient(sorted[i + kAhead]), row_bytes);
      if (kWeighted) {
        sum.add_scaled(gradient(sorted[i]), in.weights[in.positions[sorted[i] & mask]], dim);
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
                   const float* grad, int64_t stride, PairBits bits, Scratch& scratch) {
  return in.weights
             ? reduce_sorted<N, K, true>(context, index, batch, in, grad, stride, bits, scratch)
             : reduce_sorted<N, K, false>(context, index, batch, in, grad, stride, bits, scratch);
}

int64_t reduce(Context& context, int32_t index, const Batch& batch, const float* grad,
               int64_t stride, Scratch& scratch) {
  const Table& table = context.tables[index];
  TableBatch in;
  const int64_t bad = batch.ids_are_32_bit ? gather_keys<int32_t>(table, batch, in, scratch)
                                           : gather_keys<int64_t>(table, batch, in, scratch);
  if (bad >= 0) return bad;
  // Sums of a small table stay in the cache, which then beats sorting.
  constexpr int64_t kDenseBytes = 256 << 10;
  const bool dense = table.home.num_rows * table.row_bytes() <= kDenseBytes &&
                     table.home.num_rows <= 4 * in.n;
  const uint64_t payloads = in.weights ? static_cast<uint64_t>(in.n)
                                       : table.features.size() * batch.batch_size;
  const PairBits bits{bits_for(static_cast<uint64_t>(table.home.num_rows)), bits_for(payloads)};
  const bool ok = with_row_width(table.dim, [&](auto width) {
    constexpr int N = decltype(width)::value;
    if (dense) return reduce_dense<N>(context, index, batch, in, grad, stride, scratch);
    if (bits.key + bits.payload <= 32 && bits.payload < 32)
      return reduce_packed<N, uint32_t>(context, index, batch, in, grad, stride, bits, scratch);
    return reduce_packed<N, uint64_t>(context, index, batch, in, grad, stride,
                                      PairBits{bits.key, 32}, scratch);
  });
  return ok ? kReduceOk : kReduceFull;
}

// ---- update at the owner -----------------------------------------------------------------------

struct Incoming {  // what one rank left for this owner
  const uint32_t* slots;
  const float* rows;
  int64_t at, end;
};

template <int N>
void update_rows(const Context& context, const Table& table, Incoming* in,
                 const OptimizerArgs& args, uint32_t* touched) {
  const int dim = table.dim;
  const int32_t W = context.world_size;
  const int64_t row_bytes = table.row_bytes();
  constexpr int64_t kAhead = 10;
  constexpr uint64_t kNone = ~uint64_t{0};
  auto replicated = [&](uint32_t slot) {
    for (const auto& range : table.replicated_slots)
      if (slot >= range.first && slot < range.second) return true;
    return false;
  };
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
        if (table.state) __builtin_prefetch(table.state + ahead, 1, 3);
      }
    }
    if (args.gradient_scale != 1.0f) g.scale(args.gradient_scale, dim);
    float multiplier = args.learning_rate;
    if (args.kind == Optimizer::kRowWiseAdagrad)
      multiplier = rowwise_adagrad_multiplier(table.state + slot, g.sum_of_squares(dim), dim, args);
    Row<N> w;
    float* row = table.rows + static_cast<int64_t>(slot) * dim;
    w.load(row, dim);
    const int vectors = Row<N>::full(dim) + (Row<N>::part(dim) ? 1 : 0);
    for (int i = 0; i < vectors; ++i) w.v[i] -= g.v[i] * multiplier;
    w.store(row, dim);
    if (touched && replicated(static_cast<uint32_t>(slot)))
      touched[++touched[0]] = static_cast<uint32_t>(slot);
  }
}

void update(const Context& context, int32_t index, const OptimizerArgs& args) {
  const Table& table = context.tables[index];
  std::vector<Incoming> in(static_cast<size_t>(context.world_size));
  for (int32_t r = 0; r < context.world_size; ++r) {
    OutboxTable* entry = context.outbox_table(r, index);
    const int64_t* begin = Context::outbox_begin(entry);
    in[r].slots = reinterpret_cast<const uint32_t*>(context.outbox[r] + entry->slots_offset);
    in[r].rows = reinterpret_cast<const float*>(context.outbox[r] + entry->rows_offset);
    in[r].at = begin[context.rank];
    in[r].end = begin[context.rank + 1];
  }
  uint32_t* touched = table.has_replicas ? table.touched[context.rank] : nullptr;
  if (touched) touched[0] = 0;
  with_row_width(table.dim, [&](auto width) {
    update_rows<decltype(width)::value>(context, table, in.data(), args, touched);
  });
}

}  // namespace OPER_KERNELS

const Kernels OPER_KERNELS_TABLE = {OPER_KERNELS_NAME, OPER_KERNELS::pool, OPER_KERNELS::reduce,
                                    OPER_KERNELS::update};

}  // namespace oper::host
