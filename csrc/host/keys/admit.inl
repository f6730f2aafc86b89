// Which key is evicted, and the initial values of a new key's row. Part of kernels.inl.

// Scores of a bucket's slots, ascending in the order of eviction; kNever: not to be evicted.
struct EvictionOrder {
  static constexpr uint64_t kNever = ~uint64_t{0};  // no clock is as high
  uint64_t scores[kBucketSlots];

  // For all places of a bucket, even beyond its slots; vectorised unless counts are halved.
  OPER_INLINE EvictionOrder(const KeyRules& rules, const KeyAge* ages, int64_t num_slots,
                            uint32_t clock) {
    const bool by_clock = rules.eviction == Eviction::kLeastRecent;
    const bool by_distance = rules.eviction == Eviction::kLeastPerDistance;
    const auto score_all = [&](const auto& score) {
      for (int64_t i = 0; i < kBucketSlots; ++i)
        scores[i] = ages[i].clock == clock ? kNever : score(ages[i]);
    };
    const auto of = [](uint64_t high, uint64_t low) { return high << 32 | low; };
    // Floats >= 0 have the order of their bits. A clock that is ahead counts as the
    // present one.
    const auto per_distance = [&](uint32_t count, uint32_t since) {
      const uint32_t distance = std::max(clock, since) - since + 1;
      const float ratio = static_cast<float>(count) / static_cast<float>(distance);
      return of(std::bit_cast<uint32_t>(ratio), since);
    };
    if (rules.half_life != 0) {
      score_all([&](const KeyAge& age) {
        const uint32_t count = rules.decayed(age.count, age.clock, clock);
        return by_distance ? per_distance(count, age.clock) : of(count, age.clock);
      });
    } else if (by_distance) {
      score_all([&](const KeyAge& age) { return per_distance(age.count, age.clock); });
    } else if (by_clock) {
      score_all([&](const KeyAge& age) { return of(age.clock, age.count); });
    } else {
      score_all([&](const KeyAge& age) { return of(age.count, age.clock); });
    }
    std::fill(scores + num_slots, scores + kBucketSlots, kNever);
  }
  // The slot of a line that comes first in that order, or -1.
  OPER_INLINE int64_t first_in(int64_t line) const {
    int64_t first = -1;
    uint64_t least = kNever;
    for (int64_t i = line; i < kBucketSlots; i += kLines) {
      const bool is_less = scores[i] < least;
      first = is_less ? i : first;
      least = is_less ? scores[i] : least;
    }
    return first;
  }
  OPER_INLINE int64_t num_before(int64_t slot) const {
    uint64_t n = 0;
    for (int64_t i = 0; i < kBucketSlots; ++i) n += scores[i] < scores[slot];
    return static_cast<int64_t>(n);
  }
  // The first slot of all, or -1.
  OPER_INLINE int64_t first() const {
    uint64_t least = kNever;
    for (int64_t i = 0; i < kBucketSlots; ++i) least = std::min(least, scores[i]);
    return least == kNever ? -1 : std::find(scores, scores + kBucketSlots, least) - scores;
  }
};

// The slot of the first key in eviction order. A key in the home line is preferred if less than a sixteenth of
// the bucket's keys come before it, since keys in their home lines are found faster. With an eighth, nearly full
// tables evict 1 % more than in strict eviction order, with a quarter 3 %.
int64_t victim(const KeyRules& rules, const KeyAge* ages, int64_t num_slots, int64_t line,
               uint32_t clock) {
  constexpr int64_t kNearShare = 16;
  const EvictionOrder order(rules, ages, num_slots, clock);
  const int64_t near = order.first_in(line);
  return near >= 0 && order.num_before(near) < num_slots / kNearShare ? near : order.first();
}

// Draws blocks of four columns, 16 blocks at a time, vectorised.
void draw_row(int64_t key, uint64_t seed, int64_t begin, int64_t end, float bound, float* out) {
  constexpr int64_t kColumns = 64;
  constexpr uint32_t kRowDraw = 0x696e6974u;
  float drawn[kColumns];
  for (int64_t first = begin / 4 * 4; first < end; first += kColumns) {
    for (int64_t j = 0; j < kColumns / 4; ++j) {
      const Philox4 bits = draw_bits(seed, static_cast<uint64_t>(key),
                                     static_cast<uint32_t>(first / 4 + j), kRowDraw);
      for (int64_t k = 0; k < 4; ++k)
        drawn[4 * j + k] =
            (static_cast<float>(bits.word[k] >> 8) * (1.0f / 8388608.0f) - 1.0f) * bound;
    }
    const int64_t from = std::max(begin, first), to = std::min(end, first + kColumns);
    std::copy(drawn + (from - first), drawn + (to - first), out + (from - begin));
  }
}
