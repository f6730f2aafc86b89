// Finds the rows of keys. Part of kernels.inl.
//
// Of each part of a batch, the distinct keys are numbered first, then looked for in their home
// lines, and those that are not there by their tags. Memory is prefetched some keys before it is
// used.

OPER_INLINE uint64_t slots_with_tag(const uint8_t* tags, uint8_t tag) {
#if defined(OPER_KERNELS_AVX512)
  return _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(tags),
                                _mm512_set1_epi8(static_cast<char>(tag)));
#elif defined(OPER_KERNELS_AVX2)
  const __m256i wanted = _mm256_set1_epi8(static_cast<char>(tag));
  const __m256i* halves = reinterpret_cast<const __m256i*>(tags);
  const uint32_t low = static_cast<uint32_t>(
      _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_loadu_si256(halves), wanted)));
  const uint32_t high = static_cast<uint32_t>(
      _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_loadu_si256(halves + 1), wanted)));
  return low | static_cast<uint64_t>(high) << 32;
#else
  return equal_tags(tags, tag);
#endif
}

// Bit k is set if hash k of a line is `hash`.
OPER_INLINE uint32_t equal_hashes(const uint64_t* line, uint64_t hash) {
#if defined(OPER_KERNELS_AVX512)
  return _mm512_cmpeq_epi64_mask(_mm512_loadu_si512(line),
                                 _mm512_set1_epi64(static_cast<long long>(hash)));
#elif defined(OPER_KERNELS_AVX2)
  const __m256i wanted = _mm256_set1_epi64x(static_cast<long long>(hash));
  const __m256i* halves = reinterpret_cast<const __m256i*>(line);
  const int low = _mm256_movemask_pd(
      _mm256_castsi256_pd(_mm256_cmpeq_epi64(_mm256_loadu_si256(halves), wanted)));
  const int high = _mm256_movemask_pd(
      _mm256_castsi256_pd(_mm256_cmpeq_epi64(_mm256_loadu_si256(halves + 1), wanted)));
  return static_cast<uint32_t>(low | high << 4);
#else
  uint32_t found = 0;
  for (int64_t k = 0; k < kLineSlots; ++k)
    found |= static_cast<uint32_t>(__atomic_load_n(line + k, __ATOMIC_RELAXED) == hash) << k;
  return found;
#endif
}

// Where kSize keys are looked for. The owner's update may run at the same time as a lookup without
// gradients: each hash is then read as the old or the new one, also in vectors.
template <int64_t kSize>
struct KeyBlock {
  int64_t buckets[kSize];
  const char* addresses[kSize];

  const uint64_t* hashes(int64_t i) const {
    return reinterpret_cast<const uint64_t*>(addresses[i] + kHashesAt);
  }
  const uint64_t* home(int64_t i, uint64_t hash) const {
    return hashes(i) + home_line(hash) * kLineSlots;
  }
  OPER_INLINE void locate(const KeyDirectory& directory, const uint64_t* of, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      buckets[i] = directory.bucket_of(of[i]);
      addresses[i] = directory.address_of(buckets[i]);
    }
  }
  OPER_INLINE bool is_live(const KeyDirectory& directory, int64_t i, int64_t slot,
                           uint32_t clock) const {
    return !directory.has_expired(buckets[i], slot, clock);
  }
  // Writes the place and row of key i, in `slot`, to number `to`.
  OPER_INLINE void take(const KeyDirectory& directory, int64_t i, int64_t slot, bool is_found,
                        DistinctKeys& distinct, int64_t to) const {
    const int64_t row = directory.first_slot(buckets[i]) + 1 + slot;
    distinct.places[to] = KeyDirectory::place_in(buckets[i], slot);
    distinct.rows[to] = is_found ? static_cast<uint32_t>(row) : 0;
  }
};

constexpr int64_t kBlockKeys = 32;

// Calls each stage(block, index of its first key, number of keys) for all blocks of `n` keys. Each
// stage is kBehind blocks behind the one before it, so that the data which the earlier stage has
// prefetched have arrived.
template <class... Stages>
OPER_INLINE void in_blocks(int64_t n, const Stages&... stages) {
  constexpr int64_t kSize = kBlockKeys, kBehind = 2;
  constexpr int64_t kRing = kBehind * (sizeof...(Stages) - 1) + 1;
  KeyBlock<kSize> ring[kRing];
  const int64_t blocks = (n + kSize - 1) / kSize;
  for (int64_t step = 0; step < blocks + kRing - 1; ++step) {
    int64_t block = step;
    const auto run = [&](const auto& stage) {
      if (block >= 0 && block < blocks)
        stage(ring[block % kRing], block * kSize, std::min(kSize, n - block * kSize));
      block -= kBehind;
    };
    (run(stages), ...);
  }
}

// Searches whole buckets, whose tags have been prefetched, for the `n` keys that are not in their
// home lines. `numbers`: their numbers in `distinct`.
OPER_INLINE void find_by_tags(const KeyDirectory& directory, const uint64_t* hashes,
                              const int64_t* numbers, int64_t n, uint32_t clock,
                              DistinctKeys& distinct) {
  const auto tags = [](const KeyBlock<kBlockKeys>& block, int64_t i, uint64_t hash) {
    return slots_with_tag(reinterpret_cast<const uint8_t*>(block.addresses[i]), tag_of(hash));
  };
  in_blocks(
      n,
      [&](KeyBlock<kBlockKeys>& block, int64_t first, int64_t count) {
        block.locate(directory, hashes + first, count);
        for (int64_t i = 0; i < count; ++i)
          if (const uint64_t found = tags(block, i, hashes[first + i]); found != 0)
            __builtin_prefetch(block.hashes(i) + hash_index(std::countr_zero(found)), 0, 2);
      },
      [&](KeyBlock<kBlockKeys>& block, int64_t first, int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
          const uint64_t hash = hashes[first + i];
          for (uint64_t left = tags(block, i, hash); left != 0; left &= left - 1) {
            const int64_t slot = std::countr_zero(left);
            const uint64_t* at = block.hashes(i) + hash_index(slot);
            if (__atomic_load_n(at, __ATOMIC_RELAXED) != hash) continue;
            const bool is_live = block.is_live(directory, i, slot, clock);
            block.take(directory, i, slot, is_live, distinct, numbers[first + i]);
            distinct.num_missed -= is_live;
            break;
          }
        }
      });
}

// Hides a number's value from the compiler, so that it does not turn a selection by the number into
// a branch.
OPER_INLINE uint32_t opaque(uint32_t x) {
  asm("" : "+r"(x));
  return x;
}

constexpr int64_t kNumberedKeys = 128;  // maximum number of keys that one call numbers

// Numbers keys in the order of their first occurrence, and counts them. Keys of earlier calls are
// recognised in vectorised loops, the others one by one. Whether a key is new cannot be predicted,
// so the loop over the others branches only on collisions in the hash table.
OPER_INLINE void number_keys(const uint64_t* hashes, int64_t n, DistinctKeys& distinct,
                             uint16_t* numbers) {
  constexpr uint32_t kNone = DistinctKeys::kMost;  // this and larger values mean no number
  uint16_t* const table = distinct.table.data();
  uint64_t* const known = distinct.hashes.data();
  uint32_t* const counts = distinct.counts.data();
  const uint64_t mask = distinct.mask;
  uint32_t size = static_cast<uint32_t>(distinct.size);
  std::fill_n(counts + size, n, 0u);
  uint32_t found[kNumberedKeys], is_left[kNumberedKeys];
  uint16_t left[kNumberedKeys + 1];
  for (int64_t i = 0; i < n; ++i) found[i] = table[hashes[i] >> 8 & mask] - 1u;
  for (int64_t i = 0; i < n; ++i)
    is_left[i] = (found[i] >= kNone) | (known[found[i] % kNone] != hashes[i]);
  int64_t num_left = 0;
  for (int64_t i = 0; i < n; ++i) {
    numbers[i] = static_cast<uint16_t>(found[i]);
    left[num_left] = static_cast<uint16_t>(i);
    num_left += is_left[i];
  }
  for (int64_t k = 0; k < num_left; ++k) {
    const uint64_t hash = hashes[left[k]];
    uint64_t at = hash >> 8 & mask;
    uint32_t number = table[at] - 1u;
    const uint32_t is_other = opaque(known[number % kNone] != hash);
    if (__builtin_expect(opaque(number < kNone) & is_other, 0)) {
      int64_t probes = DistinctKeys::kProbes;
      do {
        at = (at + 1) & mask;
        number = table[at] - 1u;
      } while (number < kNone && known[number] != hash && --probes != 0);
      distinct.has_repeats |= probes == 0;
      if (probes == 0) number = kNone;  // replaces another key
    }
    const uint32_t is_new = opaque(number >= kNone);
    number ^= (number ^ size) & (0 - is_new);
    table[at] = static_cast<uint16_t>(number + 1);
    numbers[left[k]] = static_cast<uint16_t>(number);
    known[size] = hash;  // overwritten later unless it is new
    size += is_new;
  }
  for (int64_t i = 0; i < n; ++i) ++counts[numbers[i]];
  distinct.size = size;
}

// Looks for keys in their home lines, and collects those that are not there.
template <int64_t kMost>
struct HomeSearch {
  KeyBlock<kNumberedKeys> block;
  int64_t begin = 0, size = 0;               // the block has the keys with numbers [begin, begin + size)
  uint64_t left[kMost + 1];                  // hashes of keys that are not in their home lines
  int64_t numbers[kMost + 1], num_left = 0;  // and their numbers

  // Searches the lines that the previous call has prefetched. Prefetches the tags of the buckets of
  // keys that are not there, and the home lines of the keys from number `next` on. Both into the
  // second-level cache, which can fetch more lines at once than the first (the first 24 on Zen 4,
  // where searches took 0.7 times as long as with prefetches into the first level).
  OPER_INLINE void go_on(const KeyDirectory& directory, int64_t next, uint32_t clock,
                         DistinctKeys& distinct) {
    const uint64_t* const hashes = distinct.hashes.data();
    const int64_t first = begin, count = size;
    int64_t to = num_left;  // in a register
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t hash = hashes[first + i];
      const uint32_t found = equal_hashes(block.home(i, hash), hash);
      const int64_t slot = slot_of(home_line(hash), std::countr_zero(found | 0x80));
      const bool is_found = found != 0 && block.is_live(directory, i, slot, clock);
      block.take(directory, i, slot, is_found, distinct, first + i);
      left[to] = hash;
      numbers[to] = first + i;
      to += !is_found;
    }
    for (int64_t k = num_left; k < to; ++k)
      __builtin_prefetch(block.addresses[numbers[k] - first], 0, 2);
    num_left = to;
    begin = next;
    size = distinct.size - next;
    const int64_t fetched = size;
    block.locate(directory, hashes + next, fetched);
    for (int64_t i = 0; i < fetched; ++i) __builtin_prefetch(block.home(i, hashes[next + i]), 0, 2);
  }
};

template <class Id, class Row>
int64_t find_typed(const KeyDirectory& directory, const Id* keys, int64_t n, uint32_t clock,
                   DistinctKeys& distinct, Row* rows, int64_t* missed) {
  constexpr int64_t kAtOnce = 4096, kLook = 16;  // kLook: rows that are checked together for 0
  uint64_t hashes[kNumberedKeys];
  uint16_t numbers[kAtOnce];
  int64_t num_missed = 0;
  distinct.begin(n);
  const uint32_t* const found = distinct.rows.data();
  for (int64_t first = 0; first < n; first += kAtOnce, keys += kAtOnce, rows += kAtOnce) {
    const int64_t count = std::min(kAtOnce, n - first);
    HomeSearch<kAtOnce> search;
    // Lines of the directory arrive while further keys are numbered.
    for (int64_t begin = 0; begin < count; begin += kNumberedKeys) {
      const int64_t block = std::min(kNumberedKeys, count - begin), before = distinct.size;
      for (int64_t i = 0; i < block; ++i)  // vectorised
        hashes[i] = directory.hash_of(static_cast<int64_t>(keys[begin + i]));
      number_keys(hashes, block, distinct, numbers + begin);
      search.go_on(directory, before, clock, distinct);
    }
    search.go_on(directory, distinct.size, clock, distinct);
    distinct.num_missed += search.num_left;
    if (search.num_left != 0)
      find_by_tags(directory, search.left, search.numbers, search.num_left, clock, distinct);
    for (int64_t i = 0; i < count; ++i) rows[i] = static_cast<Row>(found[numbers[i]]);
    if (distinct.num_missed == 0) continue;
    for (int64_t begin = 0; begin < count; begin += kLook) {
      if (begin + kLook <= count) {  // skips keys that all have a row, as most do
        uint32_t has_missed = 0;
        for (int64_t i = 0; i < kLook; ++i) has_missed |= rows[begin + i] == 0;
        if (has_missed == 0) continue;
      }
      for (int64_t i = begin; i < std::min(begin + kLook, count); ++i) {
        if (missed != nullptr) missed[num_missed] = static_cast<int64_t>(keys[i]);
        num_missed += rows[i] == 0;
      }
    }
  }
  return num_missed;
}

int64_t find_keys(const KeyDirectory& directory, const FindKeys& job, DistinctKeys& distinct) {
  const auto find = [&](const auto* keys, auto* rows) {
    return find_typed(directory, keys, job.n, job.clock, distinct, rows, job.missed);
  };
  const auto find_rows_of = [&](const auto* keys) {
    return job.are_rows_32_bit ? find(keys, static_cast<int32_t*>(job.rows))
                               : find(keys, static_cast<int64_t*>(job.rows));
  };
  return job.are_keys_32_bit ? find_rows_of(static_cast<const int32_t*>(job.keys))
                             : find_rows_of(static_cast<const int64_t*>(job.keys));
}
