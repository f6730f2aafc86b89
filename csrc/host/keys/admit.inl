// Which key is evicted, and the initial values of a new key's row. Part of kernels.inl.

// The scores of a bucket's slots, see `eviction_score`.
struct EvictionOrder {
  uint64_t scores[kBucketSlots];

  // Computed for kBucketSlots slots, also if the bucket has fewer, and in separate loops, because
  // compilers vectorise a division only if it is made for every element.
  OPER_INLINE EvictionOrder(const KeyRules& rules, const KeyAge* ages, int64_t num_slots,
                            uint32_t clock) {
    uint32_t clocks[kBucketSlots], counts[kBucketSlots];
    for (int64_t i = 0; i < kBucketSlots; ++i) {
      clocks[i] = ages[i].clock;
      counts[i] = ages[i].count;
    }
    if (rules.half_life != 0) halve(rules.half_life, clocks, clock, counts);
    const auto order_by = [&](const uint32_t* first, const uint32_t* second) {
      for (int64_t i = 0; i < kBucketSlots; ++i)
        scores[i] = eviction_score(first[i], second[i], clocks[i], clock);
    };
    if (rules.eviction == Eviction::kLeastRecent) {
      order_by(clocks, counts);
    } else if (rules.eviction == Eviction::kLeastFrequent) {
      order_by(counts, clocks);
    } else {
      uint32_t ratios[kBucketSlots];
      for (int64_t i = 0; i < kBucketSlots; ++i)
        ratios[i] = count_per_distance(counts[i], clocks[i], clock);
      order_by(ratios, clocks);
    }
    std::fill(scores + num_slots, scores + kBucketSlots, kNeverEvicted);
  }
  // KeyRules::decayed for all slots. Quotients are computed in double: of integers below 2^32, none
  // is rounded up to an integer, so that truncation is exact.
  OPER_INLINE static void halve(uint32_t half_life, const uint32_t* clocks, uint32_t clock,
                                uint32_t* counts) {
    const uint32_t now = clock / half_life;
    const double updates = half_life;
    uint32_t then[kBucketSlots];
    std::copy(clocks, clocks + kBucketSlots, then);
    if (half_life > 1)  // so that quotients fit int32, for which there are vector instructions
      for (int64_t i = 0; i < kBucketSlots; ++i)
        then[i] = static_cast<uint32_t>(
            static_cast<int32_t>(static_cast<double>(clocks[i]) / updates));
    for (int64_t i = 0; i < kBucketSlots; ++i) {
      const uint32_t halvings = now - std::min(now, then[i]);
      counts[i] = halvings > 31 ? 0 : counts[i] >> (halvings & 31);
    }
  }
  // The slot of a line whose key is evicted first, or -1 if none may be.
  OPER_INLINE int64_t first_in(int64_t line) const {
    int64_t first = -1;
    uint64_t least = kNeverEvicted;
    for (int64_t i = line; i < kBucketSlots; i += kLines) {
      const bool is_less = scores[i] < least;
      first = is_less ? i : first;
      least = is_less ? scores[i] : least;
    }
    return first;
  }
  // The number of slots whose keys are evicted before that of `slot`.
  OPER_INLINE int64_t num_before(int64_t slot) const {
    uint64_t n = 0;
    for (int64_t i = 0; i < kBucketSlots; ++i) n += scores[i] < scores[slot];
    return static_cast<int64_t>(n);
  }
  // The slot whose key is evicted first of all, or -1.
  OPER_INLINE int64_t first() const {
    uint64_t least = kNeverEvicted;
    for (int64_t i = 0; i < kBucketSlots; ++i) least = std::min(least, scores[i]);
    return least == kNeverEvicted ? -1 : std::find(scores, scores + kBucketSlots, least) - scores;
  }
};

// The slot whose key is evicted, see `kNearShare`; -1 if none may be.
int64_t victim(const KeyRules& rules, const KeyAge* ages, int64_t num_slots, int64_t line,
               uint32_t clock) {
  const EvictionOrder order(rules, ages, num_slots, clock);
  const int64_t near = order.first_in(line);
  return near >= 0 && order.num_before(near) < num_slots / kNearShare ? near : order.first();
}

constexpr int64_t kDrawnColumns = 64;  // drawn at once: two registers of eight lanes

// Draws columns [4 * block, 4 * block + kDrawnColumns) of a new key's row, see `first_columns`.
OPER_INLINE void draw_columns(int64_t key, uint64_t seed, int64_t block, float bound, float* out) {
#if defined(OPER_KERNELS_AVX512)
  // Philox in 64-bit lanes, one block of four columns per lane; products use the lower 32 bits.
  // Twice as fast as compiled scalar code, which unpacks and packs every product.
  constexpr int kHalves = 2;
  const auto all = [](uint32_t x) { return _mm512_set1_epi64(static_cast<int64_t>(x)); };
  const __m512i lanes = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
  __m512i a[kHalves], b[kHalves], c[kHalves], d[kHalves];
  for (int h = 0; h < kHalves; ++h) {
    a[h] = all(static_cast<uint32_t>(key));
    b[h] = all(static_cast<uint32_t>(static_cast<uint64_t>(key) >> 32));
    c[h] = _mm512_add_epi64(lanes, _mm512_set1_epi64(block + 8 * h));
    d[h] = all(kRowDraw);
  }
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round, key0 += kPhiloxStep0, key1 += kPhiloxStep1)
    for (int h = 0; h < kHalves; ++h) {
      const __m512i p = _mm512_mul_epu32(a[h], all(kPhiloxFactor0));
      const __m512i q = _mm512_mul_epu32(c[h], all(kPhiloxFactor1));
      a[h] = _mm512_xor_si512(_mm512_xor_si512(_mm512_srli_epi64(q, 32), b[h]), all(key0));
      c[h] = _mm512_xor_si512(_mm512_xor_si512(_mm512_srli_epi64(p, 32), d[h]), all(key1));
      b[h] = q;
      d[h] = p;
    }
  const auto pairs = [](__m512i low, __m512i high) {
    return _mm512_mask_blend_epi32(0xaaaa, low, _mm512_slli_epi64(high, 32));
  };
  const auto store = [&](__m512i bits, float* to) {
    const __m512 drawn = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32(bits, 8)),
                                       _mm512_set1_ps(1.0f / 8388608.0f));
    _mm512_storeu_ps(to, _mm512_mul_ps(_mm512_sub_ps(drawn, _mm512_set1_ps(1.0f)),
                                       _mm512_set1_ps(bound)));
  };
  const __m512i first = _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0);
  const __m512i second = _mm512_add_epi64(first, _mm512_set1_epi64(4));
  for (int h = 0; h < kHalves; ++h) {
    const __m512i ab = pairs(a[h], b[h]), cd = pairs(c[h], d[h]);
    store(_mm512_permutex2var_epi64(ab, first, cd), out + 32 * h);
    store(_mm512_permutex2var_epi64(ab, second, cd), out + 32 * h + 16);
  }
#else
  for (int64_t j = 0; j < kDrawnColumns / 4; ++j) {
    const FirstColumns four = first_columns(key, seed, static_cast<uint32_t>(block + j), bound);
    for (int64_t k = 0; k < 4; ++k) out[4 * j + k] = four.at[k];
  }
#endif
}

void draw_row(int64_t key, uint64_t seed, int64_t begin, int64_t end, float bound, float* out) {
  float drawn[kDrawnColumns];
  for (int64_t first = begin / 4 * 4; first < end; first += kDrawnColumns) {
    draw_columns(key, seed, first / 4, bound, drawn);
    const int64_t from = std::max(begin, first), to = std::min(end, first + kDrawnColumns);
    std::copy(drawn + (from - first), drawn + (to - first), out + (from - begin));
  }
}
