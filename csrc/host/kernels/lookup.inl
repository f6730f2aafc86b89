// Forward: from ids to pooled rows. Part of kernels.inl.

// ---- forward ------------------------------------------------------------------------------------

// Adds the row at address `at` times its weight to `row`, rounded as in FBGEMM's lookups for
// inference.
template <int N, bool kWeighted, class E>
OPER_INLINE void add_stored(int64_t at, float weight, int dim, Row<N>& row) {
  const E* p = reinterpret_cast<const E*>(at);
  if constexpr (kIsCodes<E>) {
    ScaleBias of(p);
    if (kWeighted) of.multiply(weight);
    row.add_codes(p, of, dim);
  } else if constexpr (kWeighted) {
    row.add_fused(p, weight, dim);
  } else {
    row.add(p, dim);
  }
}

// Replaces the element type of a table whose rows have several types.
struct Mixed {};

// Prefetches a row of a table with several types, whose widest rows have `most` bytes. Takes the
// same number of steps for all types, since a branch on the type would be mispredicted: for narrow
// rows the last line is prefetched repeatedly.
OPER_INLINE void prefetch_marked(RowPlace at, int64_t most) {
  const int64_t last = at.last_byte();
  for (int64_t k = 0; k < most; k += 64) __builtin_prefetch(at.row() + std::min(k, last), 0, 3);
  __builtin_prefetch(at.row() + last, 0, 3);
}

// Pools a bag of `n` rows of codes, rounded as by FBGEMM: the sum begins with zero, and for mean
// pooling it is multiplied by 1 / n. `at`: addresses; the rows up to `ahead` after the bag are
// prefetched; `w`: weights of the ids.
template <int N, bool kWeighted, class E>
OPER_INLINE void pool_codes(const Table& table, const int64_t* at, int64_t n, const float* w,
                            int64_t ahead, Row<N>& row) {
  const int dim = table.dim;
  const int64_t row_bytes = table.row_bytes();
  row.zero(dim);
  for (int64_t i = 0; i < n; ++i) {
    prefetch_codes(reinterpret_cast<const void*>(at[i + ahead]), row_bytes);
    add_stored<N, kWeighted, E>(at[i], kWeighted ? w[i] : 1.0f, dim, row);
  }
  if (table.mean && n > 1) row.scale(1.0f / static_cast<float>(n), dim);
}

// The same for rows of numbers. The sum begins with the first row, and for mean pooling is divided
// by n. kCached: rows are in the cache, and not prefetched.
template <int N, bool kWeighted, bool kCached, class E>
OPER_INLINE void pool_numbers(const Table& table, const int64_t* at, int64_t n, const float* w,
                              int64_t ahead, Row<N>& row) {
  const int dim = table.dim;
  const int64_t row_bytes = N > 0 ? N * 16 * static_cast<int64_t>(sizeof(E)) : table.row_bytes();
  if (!kCached) prefetch_row(reinterpret_cast<const void*>(at[ahead]), row_bytes);
  row.load(reinterpret_cast<const E*>(at[0]), dim);
  if (kWeighted) row.scale(w[0], dim);
  for (int64_t i = 1; i < n; ++i) {
    if (!kCached) prefetch_row(reinterpret_cast<const void*>(at[i + ahead]), row_bytes);
    const E* p = reinterpret_cast<const E*>(at[i]);
    if (kWeighted) {
      row.add_scaled(p, w[i], dim);
    } else {
      row.add(p, dim);
    }
  }
  if (table.mean && n > 1) row.divide(static_cast<float>(n), dim);
}

// Calls body(E{}), where E is the element type.
template <class Body>
OPER_INLINE void with_type(RowType type, Body body) {
  switch (type) {
    case RowType::kFloat32: return body(float{});
    case RowType::kFloat16: return body(Float16{});
    case RowType::kBFloat16: return body(BFloat16{});
    case RowType::kInt8: return body(Int8{});
    case RowType::kInt4: return body(Int4{});
  }
}

// The same for a table with rows of several types, rounded as in `pool_codes`.
template <int N, bool kWeighted>
OPER_INLINE void pool_mixed(const Table& table, const int64_t* at, int64_t n, const float* w,
                            int64_t ahead, Row<N>& row) {
  const int dim = table.dim;
  const int64_t most = table.row_bytes();
  row.zero(dim);
  for (int64_t i = 0; i < n; ++i) {
    prefetch_marked({at[i + ahead]}, most);
    with_type(RowPlace{at[i]}.type(), [&](auto element) __attribute__((always_inline)) {
      add_stored<N, kWeighted, decltype(element)>(at[i] & RowPlace::kAddress,
                                                  kWeighted ? w[i] : 1.0f, dim, row);
    });
  }
  if (table.mean && n > 1) row.scale(1.0f / static_cast<float>(n), dim);
}

// Selects those of `n` RowPlaces that have rows of a type: writes their addresses to `rows` and
// their indices to `which` (which need space for 8 more), and returns their number.
OPER_INLINE int64_t select_type(RowType type, const int64_t* at, int64_t n, int64_t* rows,
                                int64_t* which) {
  int64_t count = 0;
#if defined(OPER_KERNELS_AVX512)
  const __m512i wanted = _mm512_set1_epi64(static_cast<int64_t>(type));
  __m512i index = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
  for (int64_t i = 0; i < n; i += 8) {
    const __mmask8 some = static_cast<__mmask8>(n - i >= 8 ? 0xff : (1 << (n - i)) - 1);
    const __m512i place = _mm512_maskz_loadu_epi64(some, at + i);
    const __mmask8 those =
        _mm512_mask_cmpeq_epi64_mask(some, _mm512_srli_epi64(place, RowPlace::kTypeAt), wanted);
    const __m512i row = _mm512_and_si512(place, _mm512_set1_epi64(RowPlace::kAddress));
    _mm512_storeu_si512(rows + count, _mm512_maskz_compress_epi64(those, row));
    _mm512_storeu_si512(which + count, _mm512_maskz_compress_epi64(those, index));
    count += __builtin_popcount(those);
    index = _mm512_add_epi64(index, _mm512_set1_epi64(8));
  }
#else
  for (int64_t i = 0; i < n; ++i) {
    rows[count] = at[i] & RowPlace::kAddress;
    which[count] = i;
    count += RowPlace{at[i]}.type() == type;
  }
#endif
  return count;
}

// Pools bags of one id each of a table with several types, kSome bags at a time and these type by
// type: in the order of the bags, the branch on each row's type would often be mispredicted.
template <int N, bool kWeighted, bool kStream>
OPER_INLINE void pool_singles(const Table& table, const int64_t* at, const float* w,
                              int64_t num_bags, int64_t ahead, float* out, int64_t stride) {
  constexpr int64_t kSome = 64;
  alignas(64) int64_t rows[kSome + 8], which[kSome + 8];
  const int dim = table.dim;
  const int64_t most = table.row_bytes(), *last = at + num_bags - 1;
  // After a batch's last id, `at` repeats its place, which need not be prefetched again.
  const int64_t end = num_bags + (last[0] == last[1] && last[0] == last[ahead] ? 0 : ahead);
  for (int64_t b = 0; b < num_bags; b += kSome) {
    const int64_t n = std::min(kSome, num_bags - b);
    for (int64_t i = b + ahead; i < std::min(end, b + n + ahead); ++i)
      prefetch_marked({at[i]}, most);
    for (const RowType type : table.types) {
      const int64_t count = select_type(type, at + b, n, rows, which);
      with_type(type, [&](auto element) __attribute__((always_inline)) {
        for (int64_t i = 0; i < count; ++i) {
          const int64_t bag = b + which[i];
          Row<N> row;
          row.zero(dim);
          add_stored<N, kWeighted, decltype(element)>(rows[i], kWeighted ? w[bag] : 1.0f, dim, row);
          kStream ? row.stream(out + bag * stride, dim) : row.store(out + bag * stride, dim);
        }
      });
    }
  }
}

// Pools bags of one feature into rows `stride` floats apart. `addresses`: from the first bag's
// first id on; `offsets` [num_bags + 1] are indices of `weights`, which belong to the whole batch.
template <int N, bool kWeighted, bool kStream, bool kCached, class E>
void pool_block(const Table& table, const int64_t* addresses, const int64_t* offsets,
                const float* weights, int64_t num_bags, float* out, int64_t stride) {
  const int dim = table.dim;
  const int64_t ahead = rows_ahead(table.row_bytes());
  if constexpr (std::is_same_v<E, Mixed>) {
    bool are_single = num_bags > 0;
    for (int64_t b = 0; b < num_bags; ++b) are_single &= offsets[b + 1] - offsets[b] == 1;
    if (are_single)
      return pool_singles<N, kWeighted, kStream>(table, addresses,
                                                 kWeighted ? weights + offsets[0] : nullptr,
                                                 num_bags, ahead, out, stride);
  }
  const int64_t* at = addresses;
  for (int64_t b = 0; b < num_bags; ++b) {
    const int64_t n = offsets[b + 1] - offsets[b];
    const float* w = kWeighted ? weights + offsets[b] : nullptr;
    Row<N> row;  // filled in place, since copying it would move 64 vectors if N is 0
    if (n == 0) {
      row.zero(dim);
    } else if constexpr (std::is_same_v<E, Mixed>) {
      pool_mixed<N, kWeighted>(table, at, n, w, ahead, row);
    } else if constexpr (kIsCodes<E>) {
      pool_codes<N, kWeighted, E>(table, at, n, w, ahead, row);
    } else {
      pool_numbers<N, kWeighted, kCached, E>(table, at, n, w, ahead, row);
    }
    at += n;
    if (kStream) {
      row.stream(out + b * stride, dim);
    } else {
      row.store(out + b * stride, dim);
    }
  }
}

// Counts the rows at `addresses` by the rank whose arena they are in: for each arena in a pass over
// the addresses, which are in the cache, that the compiler vectorises.
OPER_INLINE void count_rows(const Table& table, const int64_t* addresses, int64_t n, Moved kind,
                            Scratch& scratch) {
  int64_t* counts = scratch.rows_read(kind, table.index);
  const Arenas& arenas = *table.arenas;
  const size_t last = arenas.rank.size() - 1;
  const int64_t mask = table.types.empty() ? -1 : RowPlace::kAddress;  // removes the rows' types
  int64_t left = n;
  for (size_t k = 0; k < last && left > 0; ++k) {
    const int64_t end = arenas.send_buffer[k];
    int64_t above = 0;
    for (int64_t i = 0; i < n; ++i) above += (addresses[i] & mask) >= end;
    counts[arenas.rank[k]] += left - above;
    left = above;
  }
  counts[arenas.rank[last]] += left;
}

// `for_blocks` for a batch that was resolved before.
template <Moved kKind, class Body>
void for_resolved(const Table& table, const BagRange& range, Scratch& scratch, Body body) {
  constexpr int64_t kCounted = 1024;  // ids whose addresses stay in the first-level cache
  const int64_t* bounds = range.bags.bounds;
  const Resolved& resolved = *range.batch.resolved;
  const int64_t* rows = resolved.addresses + resolved.first[range.feature] - bounds[0];
  for (int64_t b = range.begin, end; b < range.end; b = end) {
    end = b + 1;
    while (end < range.end && bounds[end + 1] - bounds[b] <= kCounted) ++end;
    count_rows(table, rows + bounds[b], bounds[end] - bounds[b], kKind, scratch);
    body(b, end, rows + bounds[b]);
  }
}

// Calls body(begin, end, places of their ids) for consecutive ranges [begin, end) of bags. Returns
// the first bad id's index in the batch, or -1. Ids are resolved a few at a time, but always
// kPrefetch ids before they are needed, so that their rows can be prefetched.
template <Moved kKind, class Body>
int64_t for_blocks(const Table& table, const BagRange& range, Scratch& scratch, Body body) {
  if (range.batch.resolved != nullptr && range.bags.rows == nullptr) {
    for_resolved<kKind>(table, range, scratch, body);
    return -1;
  }
  const int64_t* bounds = range.bags.bounds;
  const int64_t first = bounds[range.begin], total = bounds[range.end] - first;
  const int64_t id_bytes = range.batch.ids_are_32_bit ? 4 : 8;
  const char* ids = static_cast<const char*>(range.batch.ids) + first * id_bytes;
  int64_t room = 8 * kBlockIds;  // size of `addresses`, which are those of the ids [kept, resolved)
  int64_t* addresses = scratch.get<int64_t>(0, room + kPrefetch);
  int64_t kept = 0, resolved = 0;
  for (int64_t b = range.begin, end; b < range.end; b = end) {
    const int64_t begin = bounds[b] - first;
    const int64_t need = std::min(total, bounds[b + 1] - first + kPrefetch);
    while (resolved < need) {
      const int64_t n = std::min(kBlockIds, total - resolved);
      if (resolved + n - kept > room) {
        if (resolved + n - begin > room / 2) {
          // The bag is longer than the buffer.
          std::vector<int64_t> old(addresses + (begin - kept), addresses + (resolved - kept));
          room = 2 * (need - begin + kBlockIds);
          addresses = scratch.get<int64_t>(0, room + kPrefetch);
          std::copy(old.begin(), old.end(), addresses);
        } else {
          std::copy(addresses + (begin - kept), addresses + (resolved - kept), addresses);
        }
        kept = begin;
      }
      int64_t* to = addresses + (resolved - kept);
      if (range.bags.rows != nullptr) {  // already resolved, and counted
        std::copy_n(range.bags.rows + (first - bounds[0]) + resolved, n, to);
      } else {
        // The hardware prefetcher does not see that ids are read in sequence, since rows are read
        // between.
        prefetch_row(ids + id_bytes * std::min(total, resolved + kIdsAhead), id_bytes * n);
        const int64_t bad =
            resolve(table.read, range.batch, first + resolved, n, total - resolved, to);
        if (bad >= 0) return first + resolved + bad;
        count_rows(table, to, n, kKind, scratch);
      }
      if (resolved == 0) {
        const int64_t most = table.row_bytes();
        for (int64_t i = 0; i < std::min(n, rows_ahead(most)); ++i)
          table.types.empty() ? prefetch_row(reinterpret_cast<const void*>(to[i]), most)
                              : prefetch_marked({to[i]}, most);
      }
      resolved += n;
      if (resolved == total) std::fill(to + n, to + n + kPrefetch, to[n - 1]);
    }
    end = b + 1;
    while (end < range.end && std::min(total, bounds[end + 1] - first + kPrefetch) <= resolved)
      ++end;
    body(b, end, addresses + (begin - kept));
  }
  return -1;
}

using PoolBlock = void (*)(const Table&, const int64_t* addresses, const int64_t* offsets,
                           const float* weights, int64_t num_bags, float* out, int64_t stride);

// Whether most rows will be in the core's own cache, since there are few and each is read several
// times. Then prefetching, which takes as many instructions as adding, does not pay off.
OPER_INLINE bool is_cached(const Table& table, int64_t num_ids) {
  constexpr int64_t kBytes = 512 << 10;
  const int64_t rows = table.home.num_rows;
  return rows <= num_ids && rows * table.row_bytes() <= kBytes;
}

// The function that pools the blocks of a range of bags.
PoolBlock pool_block_of(const Table& table, int64_t num_ids, bool is_weighted, bool stream) {
  PoolBlock found = nullptr;
  const bool cached = is_cached(table, num_ids);
  const auto choose = [&](auto width, auto element) {
    constexpr int N = decltype(width)::value;
    constexpr bool kWhole = N != 0;  // a variant for cached rows exists only for rows in registers
    using E = decltype(element);
    if (is_weighted) {
      found = pool_block<N, true, false, false, E>;
    } else if (stream) {
      found = cached ? pool_block<N, false, true, kWhole, E> : pool_block<N, false, true, false, E>;
    } else {
      found = cached ? pool_block<N, false, false, kWhole, E> : pool_block<N, false, false, false, E>;
    }
  };
  const auto with_width = [&](auto element) {
    with_row_width(table.dim, [&](auto width) { choose(width, element); });
  };
  if (!table.types.empty()) {
    with_width(Mixed{});
  } else if (table.row_type == RowType::kInt8) {
    with_width(Int8{});
  } else if (table.row_type == RowType::kInt4) {
    with_width(Int4{});
  } else {
    with_rows(table, choose);
  }
  return found;
}

int64_t pool_range(const Table& table, const BagRange& range, float* out, Scratch& scratch) {
  const int64_t* bounds = range.bags.bounds;
  const int64_t stride = range.batch.out_stride;
  const float* weights = range.batch.weights;
  float* first = out + range.bags.out_begin;
  const bool lines = reinterpret_cast<uintptr_t>(first) % 64 == 0 && stride % 16 == 0 &&
                     table.dim % 16 == 0;
  const bool stream = range.batch.stream && lines && weights == nullptr;
  const PoolBlock pool_some =
      pool_block_of(table, bounds[range.end] - bounds[range.begin], weights != nullptr, stream);
  const int64_t bad = for_blocks<kRows>(
      table, range, scratch, [&](int64_t b, int64_t end, const int64_t* rows) {
        pool_some(table, rows, bounds + b, weights, end - b, first + b * stride, stride);
      });
  if (stream) finish_streaming();
  return bad;
}

int64_t pool(const Table& table, const BagRange& range, float* out, Scratch& scratch) {
  if (range.batch.lengths == nullptr) return pool_range(table, range, out, scratch);
  NewBounds made(range);
  const int64_t n = range.end - range.begin;
  made.bags.out_begin += range.begin * range.batch.out_stride;
  const int64_t bad =
      pool_range(table, BagRange{range.batch, made.bags, 0, n, range.feature}, out, scratch);
  finish_streaming();
  return bad;
}

void weight_gradient(const Table& table, const BagRange& range, const float* grad, float* out,
                     Scratch& scratch) {
  const int64_t* bounds = range.bags.bounds;
  for_blocks<kWeightRows>(table, range, scratch, [&](int64_t b, int64_t end, const int64_t* rows) {
    with_rows(table, [&](auto width, auto element) {
      constexpr int N = decltype(width)::value;
      using E = decltype(element);
      const int64_t* at = rows;
      const int64_t ahead = rows_ahead(table.row_bytes());
      for (; b < end; ++b) {
        const int64_t n = bounds[b + 1] - bounds[b];
        Row<N> g;
        g.load(grad + range.bags.out_begin + b * range.batch.out_stride, table.dim);
        if (table.mean && n > 1) g.divide(static_cast<float>(n), table.dim);
        for (int64_t i = 0; i < n; ++i, ++at) {
          prefetch_row(reinterpret_cast<const void*>(at[ahead]), table.row_bytes());
          out[bounds[b] + i] += g.dot(reinterpret_cast<const E*>(*at), table.dim);
        }
      }
    });
  });
}

int64_t locate_rows(const Table& table, const BagRange& range, int64_t* addresses) {
  const int64_t first = range.bags.bounds[range.begin];
  const int64_t n = range.bags.bounds[range.end] - first;
  const int64_t bad = resolve(table.read, range.batch, first, n, n, addresses);
  return bad < 0 ? bad : first + bad;
}

// ---- the physical limit of a pooled lookup, see GatherJob ---------------------------------------

template <int N, bool kStream>
void gather_rows(const GatherJob& job, int64_t begin, int64_t end) {
  const int dim = static_cast<int>(job.dim);
  const int64_t bytes = N > 0 ? 64 * N : 4 * job.dim;
  const int64_t* at = job.addresses + job.offsets[begin];
  for (int64_t i = 0; i < job.prefetch; ++i)
    prefetch_row(reinterpret_cast<const void*>(at[i]), bytes);
  for (int64_t b = begin; b < end; ++b) {
    Row<N> sum;
    sum.zero(dim);
    for (int64_t n = job.offsets[b + 1] - job.offsets[b]; n > 0; --n, ++at) {
      prefetch_row(reinterpret_cast<const void*>(at[job.prefetch]), bytes);
      sum.add(reinterpret_cast<const float*>(*at), dim);
    }
    if (kStream) {
      sum.stream(job.out + job.destinations[b], dim);
    } else {
      sum.store(job.out + job.destinations[b], dim);
    }
  }
  if (kStream) finish_streaming();
}

void gather(const GatherJob& job, int64_t begin, int64_t end) {
  const auto run = [&](auto width) {
    constexpr int N = decltype(width)::value;
    job.stream ? gather_rows<N, true>(job, begin, end) : gather_rows<N, false>(job, begin, end);
  };
  if (job.dim == 256) return run(std::integral_constant<int, 16>{});
  with_row_width(static_cast<int>(job.dim), run);
}

// ---- samples that share bags: from rows of bags to rows of samples, and back --------------------

void spread(const SampleJob& job, const float* bags, float* samples) {
  with_row_width(static_cast<int>(job.dim), [&](auto width) {
    constexpr int N = decltype(width)::value;
    const int dim = static_cast<int>(job.dim);
    int64_t bag = -1;
    Row<N> row;
    // Backwards: in place, a bag's row must be read before a sample's row overwrites it.
    for (int64_t b = job.count - 1; b >= 0; --b) {
      if (job.bags[b] != bag) {
        bag = job.bags[b];
        row.load(bags + bag * job.stride, dim);
      }
      if (samples != bags || bag != b) row.store(samples + b * job.stride, dim);
    }
  });
}

void add_up(const SampleJob& job, const float* samples, float* bags, int64_t num_bags,
            int64_t bags_stride) {
  with_row_width(static_cast<int>(job.dim), [&](auto width) {
    constexpr int N = decltype(width)::value;
    const int dim = static_cast<int>(job.dim);
    const int64_t row_bytes = 4 * job.dim, ahead = rows_ahead(row_bytes, 12), last = job.count - 1;
    for (int64_t k = 0; k < num_bags; ++k)
      std::memset(bags + k * bags_stride, 0, static_cast<size_t>(row_bytes));
    for (int64_t b = 0; b < job.count;) {
      const int64_t bag = job.bags[b];
      float* at = bags + bag * bags_stride;
      Row<N> sum;
      sum.load(at, dim);
      do {
        prefetch_row(samples + std::min(b + ahead, last) * job.stride, row_bytes);
        sum.add(samples + b * job.stride, dim);
      } while (++b <= last && job.bags[b] == bag);
      sum.store(at, dim);
    }
  });
}
