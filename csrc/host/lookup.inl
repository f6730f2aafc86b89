// Forward: from ids to pooled rows. Part of kernels.inl.

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
