// From ids to places, by the read map (addresses) or the home map (linear indices), see
// common/directory.h. Part of kernels.inl.

// How many ids before its use a word of the head map is prefetched.
constexpr int64_t kWordsAhead = 64;

// Index of the first id outside [0, num_rows), or -1. If there is none, it takes a single pass that
// the compiler vectorises.
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

// `resolve` for ids in hotness order and a single tier whose period is a power of two. Returns
// whether all ids are valid. The places of invalid ids are computed, too, but never used: in
// unsigned numbers, since signed ones must not overflow.
template <class Id, class Out>
bool resolve_even(const TableMap& map, const Id* ids, int64_t n, Out* out) {
  const TierMap& tier = map.tiers[0];
  const uint64_t limit = static_cast<uint64_t>(map.num_rows);
  const uint64_t base = static_cast<uint64_t>(tier.base[0]);
  const uint64_t step = static_cast<uint64_t>(tier.step[0]);
  uint64_t bad = 0;
  const auto each = [&](auto place) {
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t id = static_cast<uint64_t>(static_cast<int64_t>(ids[i]));
      bad |= static_cast<uint64_t>(id >= limit);
      out[i] = static_cast<Out>(place(id));
    }
    return bad == 0;
  };
  if (tier.period == 1) return each([=](uint64_t id) { return base + id * step; });
  if (tier.period == 2 && tier.step[1] == tier.step[0]) {
    const uint64_t apart = static_cast<uint64_t>(tier.base[1]) - base;
    return each([=](uint64_t id) { return base + ((0 - (id & 1)) & apart) + (id >> 1) * step; });
  }
  const uint64_t mask = static_cast<uint64_t>(tier.period - 1);
  const int shift = tier.shift;
  const int64_t* bases = tier.base;
  const int64_t* steps = tier.step;
  return each([=](uint64_t id) {
    return static_cast<uint64_t>(bases[id & mask]) +
           (id >> shift) * static_cast<uint64_t>(steps[id & mask]);
  });
}

// Prefetches an id's word of the head map. The id may be invalid.
template <class Id>
OPER_INLINE void prefetch_word(const TableMap& map, Id id) {
  const uint64_t word = static_cast<uint64_t>(static_cast<int64_t>(id)) >> 5;
  __builtin_prefetch(reinterpret_cast<const void*>(
      reinterpret_cast<uintptr_t>(map.head.words) + sizeof *map.head.words * word), 0, 3);
}

#if defined(OPER_KERNELS_AVX512)

// Set bits of each 64-bit lane whose high half is zero.
OPER_INLINE __m512i popcount_low(__m512i x) {
  const __m512i nibble = _mm512_set1_epi8(15);
  const __m512i counts = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
  const __m512i low = _mm512_shuffle_epi8(counts, _mm512_and_si512(x, nibble));
  const __m512i high =
      _mm512_shuffle_epi8(counts, _mm512_and_si512(_mm512_srli_epi16(x, 4), nibble));
  return _mm512_sad_epu8(_mm512_add_epi8(low, high), _mm512_setzero_si512());
}

OPER_INLINE __m512i load_ids(const int64_t* ids, __mmask8 some) {
  return _mm512_maskz_loadu_epi64(some, ids);
}
OPER_INLINE __m512i load_ids(const int32_t* ids, __mmask8 some) {
  return _mm512_cvtepi32_epi64(_mm256_maskz_loadu_epi32(some, ids));
}
OPER_INLINE void store_places(int64_t* out, __mmask8 some, __m512i places) {
  _mm512_mask_storeu_epi64(out, some, places);
}
OPER_INLINE void store_places(uint32_t* out, __mmask8 some, __m512i places) {
  _mm256_mask_storeu_epi32(out, some, _mm512_cvtepi64_epi32(places));
}

// Entry `at` of FlatTiers::base or step, for eight lanes. kRegisters: number of registers, `first`
// and `second`, that hold all entries; 0 = they are in memory.
template <int kRegisters>
OPER_INLINE __m512i entries_at(const int64_t* entries, __m512i first, __m512i second, __m512i at) {
  if (kRegisters == 1) return _mm512_permutexvar_epi64(at, first);
  if (kRegisters == 2) return _mm512_permutex2var_epi64(first, at, second);
  return _mm512_i64gather_epi64(at, entries, 8);
}

// `resolve` for eight ids at a time. Only words and positions of the head map are gathered from
// memory. Quotients are computed in double: offsets are below 2^32, so that (offset + 0.5) / period
// differs from every integer by more than the rounding error.
template <int kRegisters, bool kHead, class Id, class Out>
int64_t resolve_flat(const TableMap& map, const Id* ids, int64_t n, int64_t readable, Out* out) {
  const FlatTiers& flat = *map.flat;
  const __m512i num_rows = _mm512_set1_epi64(map.num_rows);
  const __m512i num_head = _mm512_set1_epi64(map.head.num_head);
  const __m512i one = _mm512_set1_epi64(1);
  const __m512i starts = _mm512_loadu_si512(flat.start), periods = _mm512_loadu_si512(flat.period);
  const __m512i firsts = _mm512_loadu_si512(flat.first);
  const __m512d inverses = _mm512_loadu_pd(flat.inverse), half = _mm512_set1_pd(0.5);
  const __m512i base0 = _mm512_loadu_si512(flat.base.data());
  const __m512i base1 = _mm512_loadu_si512(flat.base.data() + 8);
  const __m512i step0 = _mm512_loadu_si512(flat.step.data());
  const __m512i step1 = _mm512_loadu_si512(flat.step.data() + 8);
  if (kHead && readable <= 2 * kWordsAhead)  // too few for the prefetch below
    for (int64_t k = 0; k < readable; ++k) prefetch_word(map, ids[k]);
  const int64_t* positions = reinterpret_cast<const int64_t*>(map.head.positions);
  for (int64_t i = 0; i < n; i += 8) {
    const __mmask8 some = static_cast<__mmask8>(n - i >= 8 ? 0xff : (1 << (n - i)) - 1);
    const __m512i id = load_ids(ids + i, some);
    const __mmask8 good = _mm512_mask_cmplt_epu64_mask(some, id, num_rows);
    if (__builtin_expect(good != some, 0)) return i + __builtin_ctz(~good);
    __m512i position = id;
    if (kHead) {
      if (i + kWordsAhead + 8 <= readable)
        for (int64_t k = i + kWordsAhead; k < i + kWordsAhead + 8; ++k)
          prefetch_word(map, ids[k]);
      const __m512i word = _mm512_mask_i64gather_epi64(_mm512_setzero_si512(), some,
                                                       _mm512_srli_epi64(id, 5),
                                                       map.head.words, 8);
      const __m512i bit = _mm512_sllv_epi64(
          one, _mm512_and_si512(id, _mm512_set1_epi64(31)));
      const __m512i below = _mm512_and_si512(word, _mm512_sub_epi64(bit, one));
      const __m512i rank =
          _mm512_add_epi64(_mm512_srli_epi64(word, 32), popcount_low(below));
      const __mmask8 hot = _mm512_test_epi64_mask(word, bit);
      position = _mm512_sub_epi64(_mm512_add_epi64(num_head, id), rank);
      const __m512i listed = _mm512_cvtepu32_epi64(_mm512_mask_i64gather_epi32(
          _mm256_setzero_si256(), hot, rank, positions, 4));
      position = _mm512_mask_mov_epi64(position, hot, listed);
    }
    __m512i tier = _mm512_setzero_si512();
    for (int32_t k = 1; k < map.num_tiers; ++k) {
      const __m512i start = _mm512_permutexvar_epi64(_mm512_set1_epi64(k), starts);
      tier = _mm512_mask_add_epi64(tier, _mm512_cmpge_epi64_mask(position, start), tier, one);
    }
    const __m512i offset =
        _mm512_sub_epi64(position, _mm512_permutexvar_epi64(tier, starts));
    const __m512d scaled = _mm512_mul_pd(_mm512_add_pd(_mm512_cvtepi64_pd(offset), half),
                                         _mm512_permutexvar_pd(tier, inverses));
    const __m512i round = _mm512_cvttpd_epi64(scaled);
    const __m512i place = _mm512_sub_epi64(
        offset, _mm512_mullo_epi64(round, _mm512_permutexvar_epi64(tier, periods)));
    const __m512i at = _mm512_add_epi64(place, _mm512_permutexvar_epi64(tier, firsts));
    const __m512i base = entries_at<kRegisters>(flat.base.data(), base0, base1, at);
    const __m512i step = entries_at<kRegisters>(flat.step.data(), step0, step1, at);
    store_places(out + i, some, _mm512_add_epi64(base, _mm512_mullo_epi64(round, step)));
  }
  return -1;
}

template <class Id, class Out>
int64_t resolve_flat(const TableMap& map, const Id* ids, int64_t n, int64_t readable, Out* out) {
  const auto with_registers = [&](auto head) {
    constexpr bool kHead = decltype(head)::value;
    if (map.flat->num_entries <= 8) return resolve_flat<1, kHead>(map, ids, n, readable, out);
    if (map.flat->num_entries <= FlatTiers::kInRegisters)
      return resolve_flat<2, kHead>(map, ids, n, readable, out);
    return resolve_flat<0, kHead>(map, ids, n, readable, out);
  };
  return map.head.words ? with_registers(std::true_type{}) : with_registers(std::false_type{});
}

#endif

// Writes the places of ids[0, n); returns the first bad id's index, or -1. The ids [n, readable)
// will be resolved next: their words of the head map are prefetched.
template <class Id, class Out>
int64_t resolve(const TableMap& map, const Id* ids, int64_t n, int64_t readable, Out* out) {
  const bool is_even = map.num_tiers == 1 && map.head.words == nullptr && map.tiers[0].shift >= 0;
#if defined(OPER_KERNELS_AVX512)
  if (!is_even && map.flat != nullptr) return resolve_flat(map, ids, n, readable, out);
#endif
  if (is_even && resolve_even(map, ids, n, out)) return -1;
  const int64_t bad = first_bad(ids, n, map.num_rows);
  if (bad >= 0) return bad;
  for (int64_t i = 0; i < n; ++i) {
    if (map.head.words && i + kWordsAhead < readable) prefetch_word(map, ids[i + kWordsAhead]);
    out[i] = static_cast<Out>(locate(map, ids[i]));
  }
  return -1;
}

// The same for the ids [first, first + n) of a batch.
template <class Out>
int64_t resolve(const TableMap& map, const Batch& batch, int64_t first, int64_t n, int64_t readable,
                Out* out) {
  if (batch.ids_are_32_bit)
    return resolve(map, static_cast<const int32_t*>(batch.ids) + first, n, readable, out);
  return resolve(map, static_cast<const int64_t*>(batch.ids) + first, n, readable, out);
}
