// Bounds of bags from their lengths. Part of kernels.inl.
//
// If one thread wrote all bounds (8 bytes each) before a lookup with one id per bag, that would
// take a tenth of the lookup's time. Instead, it only sums the lengths of blocks of kTaskBags bags.
// The thread that pools a block then computes the block's bounds in the first-level cache, and
// writes them to memory for the backward pass.

template <class Length>
int64_t start_blocks(const Length* lengths, int64_t num_keys, int64_t size, int64_t* offsets) {
  int64_t sum = 0;
  Length signs = 0;
  for (int64_t key = 0; key < num_keys; ++key) {
    for (int64_t b = key * size, end; b < (key + 1) * size; b = end) {
      end = std::min(b + kTaskBags, (key + 1) * size);
      prefetch_row(lengths + end, static_cast<int64_t>(sizeof(Length)) * (end - b));
      offsets[b] = sum;
      int64_t more = 0;
      for (int64_t i = b; i < end; ++i) {
        more += lengths[i];
        signs |= lengths[i];
      }
      sum += more;
    }
  }
  offsets[num_keys * size] = sum;
  // Sums of lengths below 2^32 do not overflow, and no batch has bags that long.
  return static_cast<uint64_t>(signs) >> 32 != 0 ? -1 : sum;
}

int64_t start_bounds(const void* lengths, bool are_32_bit, int64_t num_keys, int64_t batch_size,
                     int64_t* offsets) {
  const auto start = [&](auto* typed) {
    return start_blocks(typed, num_keys, batch_size, offsets);
  };
  return are_32_bit ? start(static_cast<const int32_t*>(lengths))
                    : start(static_cast<const int64_t*>(lengths));
}

// out[i] = first + lengths[0] + ... + lengths[i - 1], for i in [0, n].
template <class Length>
OPER_INLINE void add_up(const Length* lengths, int64_t n, int64_t first, int64_t* out) {
  int64_t i = 0;
#if defined(OPER_KERNELS_AVX512)
  const __m512i none = _mm512_setzero_si512(), last = _mm512_set1_epi64(7);
  __m512i before = _mm512_set1_epi64(first);
  for (; i + 8 <= n; i += 8) {
    const __m512i each = load_ids(lengths + i, 0xff);
    __m512i sum = _mm512_add_epi64(each, _mm512_alignr_epi64(each, none, 7));
    sum = _mm512_add_epi64(sum, _mm512_alignr_epi64(sum, none, 6));
    sum = _mm512_add_epi64(sum, _mm512_alignr_epi64(sum, none, 4));
    sum = _mm512_add_epi64(sum, before);
    _mm512_storeu_si512(out + i, _mm512_sub_epi64(sum, each));
    before = _mm512_permutexvar_epi64(last, sum);
  }
  first = _mm_cvtsi128_si64(_mm512_castsi512_si128(before));
#endif
  for (; i < n; ++i) {
    out[i] = first;
    first += lengths[i];
  }
  out[n] = first;
}

// Copies bounds to memory, whole cache lines past the caches. No other thread may access these
// lines at the same time.
OPER_INLINE void leave_bounds(const int64_t* from, int64_t n, int64_t* to) {
  int64_t i = 0;
  if (reinterpret_cast<uintptr_t>(to) % 64 == 0)
    for (; i + 8 <= n; i += 8)
      stream_lanes(reinterpret_cast<float*>(to + i),
                   lanes_of(reinterpret_cast<const float*>(from + i)));
  std::copy(from + i, from + n, to + i);
}

// Computes the bounds of a block of at most kTaskBags bags.
struct NewBounds {
  alignas(64) int64_t bounds[kTaskBags + 1];
  FeatureBags bags;

  explicit NewBounds(const BagRange& range) : bags(range.bags) {
    const Batch& batch = range.batch;
    const int64_t n = range.end - range.begin;
    const int64_t at = range.bags.bounds + range.begin - batch.offsets;
    int64_t* to = batch.offsets + at;
    if (batch.lengths_are_32_bit) {
      add_up(static_cast<const int32_t*>(batch.lengths) + at, n, *to, bounds);
    } else {
      add_up(static_cast<const int64_t*>(batch.lengths) + at, n, *to, bounds);
    }
    leave_bounds(bounds, n, to);
    bags.bounds = bounds;
    bags.num_bags = n;
  }
};
