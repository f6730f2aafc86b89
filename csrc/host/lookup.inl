// Forward: from ids to pooled rows. Part of kernels.inl.

// ---- resolving ids -----------------------------------------------------------------------------

// Index of the first id outside [0, num_rows), or -1. The common case is one pass that the compiler
// turns into vector code.
template <class Id>
int64_t first_bad(const Id* ids, int64_t n, int64_t num_rows) {
  const uint64_t limit = static_cast<uint64_t>(num_rows);
  uint64_t any = 0;
  for (int64_t i = 0; i < n; ++i)
    any |= static_cast<uint64_t>(static_cast<uint64_t>(static_cast<int64_t>(ids[i])) >= limit);
  if (__builtin_expect(any == 0, 1)) return -1;
  int64_t i = 0;
  while (static_cast<uint64_t>(static_cast<int64_t>(ids[i])) < limit) ++i;
  return i;
}

// Places of ids[0..n); returns the first bad id's index, or -1.
template <class Id, class Out>
int64_t resolve(const TableMap& map, const Id* ids, int64_t n, Out* out) {
  const int64_t bad = first_bad(ids, n, map.num_rows);
  if (bad >= 0) return bad;
  const TierMap& tier = map.tiers[0];
  if (map.num_tiers > 1 || map.head.bits != nullptr || tier.shift < 0) {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<Out>(locate(map, ids[i]));
    return -1;
  }
  // The usual table: one tier dealt evenly to a power of two of ranks; hoist its constants.
  const int64_t base = tier.base[0], step = tier.step[0];
  if (tier.period == 1) {
    for (int64_t i = 0; i < n; ++i)
      out[i] = static_cast<Out>(base + static_cast<int64_t>(ids[i]) * step);
    return -1;
  }
  const int64_t mask = tier.period - 1;
  const int shift = tier.shift;
  if (tier.period == 2 && tier.step[1] == step) {
    const int64_t apart = tier.base[1] - base;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t id = static_cast<int64_t>(ids[i]);
      out[i] = static_cast<Out>(base + (-(id & 1) & apart) + (id >> 1) * step);
    }
    return -1;
  }
  const int64_t* bases = tier.base;
  const int64_t* steps = tier.step;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t id = static_cast<int64_t>(ids[i]);
    out[i] = static_cast<Out>(bases[id & mask] + (id >> shift) * steps[id & mask]);
  }
  return -1;
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

// Counts whose rows `addresses` are: passes over numbers in cache that the compiler turns into
// vector code.
OPER_INLINE void count_rows(const Table& table, const int64_t* addresses, int64_t n, Moved kind,
                            Scratch& scratch) {
  int64_t* counts = scratch.rows_read(kind, table.index);
  const Arenas& arenas = *table.arenas;
  const size_t last = arenas.rank.size() - 1;
  int64_t left = n;
  for (size_t k = 0; k < last && left > 0; ++k) {
    const int64_t end = arenas.outbox[k];
    int64_t above = 0;
    for (int64_t i = 0; i < n; ++i) above += addresses[i] >= end;
    counts[arenas.rank[k]] += left - above;
    left = above;
  }
  counts[arenas.rank[last]] += left;
}

// Calls body(first bag, last bag, addresses of their rows) for blocks of bags; returns the first bad
// id's index in the batch, or -1.
template <Moved kKind, class Id, class Body>
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
    count_rows(table, addresses, n, kKind, scratch);
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
  return for_blocks<kRows, Id>(table, range, scratch, [&](int64_t b, int64_t end,
                                                         const int64_t* rows) {
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
  for_blocks<kWeightRows, Id>(table, range, scratch, [&](int64_t b, int64_t end,
                                                        const int64_t* rows) {
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
