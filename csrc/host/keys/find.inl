// Which rows keys have. Part of kernels.inl.

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

// Keys that are being found, and the slots that may have them: bit i of `found` is slot i's.
struct KeyBlock {
  static constexpr int64_t kSize = 32;
  uint64_t hashes[kSize], found[kSize];
  int64_t first_rows[kSize];
  const char* buckets[kSize];

  const KeySlot* slots(int64_t i) const {
    return reinterpret_cast<const KeySlot*>(buckets[i] + KeyDirectory::kSlotsAt);
  }

  OPER_INLINE void fetch_buckets(const KeyDirectory& directory, const uint64_t* of, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      hashes[i] = of[i];
      const int64_t bucket = directory.bucket_of(hashes[i]);
      buckets[i] = directory.address_of(bucket);
      first_rows[i] = directory.first_slot(bucket) + 1;
      __builtin_prefetch(buckets[i]);
    }
  }
  OPER_INLINE void fetch_slots(int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      found[i] = slots_with_tag(reinterpret_cast<const uint8_t*>(buckets[i]), tag_of(hashes[i]));
      __builtin_prefetch(slots(i) + std::countr_zero(found[i]));  // where there is none: behind them
    }
  }
  OPER_INLINE int64_t row(const KeyDirectory& directory, int64_t i, uint32_t clock) const {
    for (uint64_t left = found[i]; left != 0; left &= left - 1) {
      const int64_t number = std::countr_zero(left);
      const KeySlot& slot = slots(i)[number];
      // A lookup without gradients may meet the owner's update: whole numbers, old or new ones.
      if (__builtin_expect(__atomic_load_n(&slot.hash, __ATOMIC_RELAXED) == hashes[i], 1))
        return directory.is_expired(slot.clock, clock) ? 0 : first_rows[i] + number;
    }
    return 0;
  }
};

// The rows of keys that were found a moment ago.
struct RecentKeys {
  static constexpr uint64_t kLeast = 1024, kMost = 16384;
  uint64_t mask;  // places in use, less one
  uint64_t hashes[kMost];
  uint32_t rows[kMost];  // 0 = none
  // Of a call with so many keys.
  explicit RecentKeys(int64_t n)
      : mask(std::clamp(std::bit_ceil(static_cast<uint64_t>(n)) / 2, kLeast, kMost) - 1) {
    std::fill_n(rows, mask + 1, 0u);
  }
  // The bits between those that choose the tag and the bucket.
  uint64_t place_of(uint64_t hash) const { return hash >> 8 & mask; }
};

// Keys that come often are found among the recent ones. Blocks of the others pass three stages: buckets
// are on their way while the slots of the block before are fetched, and those of the one before that are
// read. Which keys are recent is known to nobody before, so nothing branches on it.
template <class Id>
int64_t find_typed(const KeyDirectory& directory, const Id* keys, int64_t n, uint32_t clock,
                   int64_t* rows, int64_t* missed) {
  constexpr int64_t kAtOnce = 512, kSize = KeyBlock::kSize;
  RecentKeys recent(n);
  KeyBlock ring[4];
  uint64_t hashes[kAtOnce], searched[kAtOnce];
  uint16_t places[kAtOnce];  // of keys that are searched
  int64_t num_missed = 0;
  for (int64_t first = 0; first < n; first += kAtOnce, keys += kAtOnce, rows += kAtOnce) {
    const int64_t count = std::min(kAtOnce, n - first);
    int64_t num_searched = 0;
    for (int64_t i = 0; i < count; ++i)  // in vectors
      hashes[i] = directory.hash_of(static_cast<int64_t>(keys[i]));
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t at = recent.place_of(hashes[i]);
      const uint32_t row = recent.rows[at];
      rows[i] = row;
      searched[num_searched] = hashes[i];
      places[num_searched] = static_cast<uint16_t>(i);
      num_searched += (recent.hashes[at] != hashes[i]) | (row == 0);
    }
    const int64_t blocks = (num_searched + kSize - 1) / kSize;
    const auto size_of = [=](int64_t block) {
      return std::min(kSize, num_searched - block * kSize);
    };
    for (int64_t step = 0; step < blocks + 2; ++step) {
      if (step < blocks)
        ring[step % 4].fetch_buckets(directory, searched + step * kSize, size_of(step));
      if (step >= 1 && step <= blocks) ring[(step - 1) % 4].fetch_slots(size_of(step - 1));
      if (step < 2) continue;
      const KeyBlock& block = ring[(step - 2) % 4];
      const uint16_t* to = places + (step - 2) * kSize;
      for (int64_t i = 0; i < size_of(step - 2); ++i) {
        const int64_t row = block.row(directory, i, clock);
        const uint64_t at = recent.place_of(block.hashes[i]);
        recent.hashes[at] = block.hashes[i];
        recent.rows[at] = static_cast<uint32_t>(row);
        rows[to[i]] = row;
        if (missed != nullptr) missed[num_missed] = static_cast<int64_t>(keys[to[i]]);
        num_missed += row == 0;
      }
    }
  }
  return num_missed;
}

int64_t find_keys(const KeyDirectory& directory, const void* keys, bool are_32_bit, int64_t n,
                  uint32_t clock, int64_t* rows, int64_t* missed) {
  return are_32_bit
             ? find_typed(directory, static_cast<const int32_t*>(keys), n, clock, rows, missed)
             : find_typed(directory, static_cast<const int64_t*>(keys), n, clock, rows, missed);
}
