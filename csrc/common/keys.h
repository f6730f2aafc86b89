// The directory of a dynamic table: which row a raw 64-bit key has. Its memory and its rules, shared by
// host and device.
//
// Slots are grouped into buckets of at most kBucketSlots; the number of buckets depends only on the
// number of slots. A key's hash selects its bucket, and the key is found, admitted and evicted within
// it, so every search is bounded and no decision depends on the number of ranks. Each rank keeps a
// contiguous range of buckets in its arena. All ranks read them; only the owner writes, during a
// step's update. Row = slot + 1; keys without a row of their own use row 0.
//
// Hashes are stored instead of keys: the hash is a bijection of 64-bit numbers, so any key is legal
// and equal hashes mean equal keys. A slot takes 17 bytes: a tag (one byte of the hash, compared
// first; 0 = free), the hash, and its age: the clock of the last update that saw the key, and its
// count. The hashes of kLineSlots slots are a cache line. Consecutive slots are in different lines,
// so that while a table fills, used slots, rows and ages are close together. A key's home is a line
// of its bucket; it takes a slot there if it can, so that a search mostly reads one line; for other
// keys it also reads the bucket's tags (a line, too) and the slot's line. Ages are stored after all
// buckets: lookups read lines at random and need no ages unless keys expire, so they touch half as
// many pages; updates write ages at random, and also touch fewer. With admission by count, a bucket
// also counts up to kBucketCandidates keys without a row (6.5 more bytes per slot), after the ages.
//
// An update that changes a slot or candidate, or frees it, stores its clock there. What has changed
// since an earlier clock is therefore known without a list of changes.
#pragma once

#include <vector>

#include "common/elements.h"
#include "common/philox.h"
#include "common/platform.h"

namespace oper {

constexpr int64_t kBucketSlots = 64, kLineSlots = 8, kBucketCandidates = 32;

// Which key of a bucket is evicted: the one with the lowest clock; with the lowest count; or with the
// lowest count / (updates since its clock + 1), in float32. Ties are broken by the lowest clock.
enum class Eviction : int64_t { kLeastRecent, kLeastFrequent, kLeastPerDistance };

struct KeyAge {
  uint32_t clock, count;
};

// Clocks count updates of the table, so that ages are in updates.
struct KeyRules {
  uint64_t seed = 0;            // of the hash
  uint64_t draws = 0;           // seed of admission by probability
  uint64_t min_count = 1;       // occurrences at which a key gets a row, at most 255
  uint64_t admit_below = 0;     // admits if a 64-bit draw is below it; 0 = always admits
  Eviction eviction = Eviction::kLeastRecent;
  uint32_t half_life = 0;       // updates after which counts are halved; 0 = never
  uint32_t time_to_live = 0;    // age beyond which a key loses its row; 0 = none

  OPER_HD bool has_candidates() const { return min_count > 1; }
  // The count, halved for every multiple of the half-life that the clock has passed since `since`.
  OPER_HD uint32_t decayed(uint32_t count, uint32_t since, uint32_t clock) const {
    if (half_life == 0 || clock <= since) return count;
    const uint32_t halvings = clock / half_life - since / half_life;
    return halvings > 31 ? 0 : count >> halvings;
  }
  OPER_HD bool is_expired(uint32_t since, uint32_t clock) const {
    return time_to_live != 0 && clock > since && clock - since > time_to_live;
  }
  // The age of a key that an update has seen `count` times.
  OPER_HD KeyAge seen(KeyAge age, uint64_t count, uint32_t clock) const;
  // Whether a key without a row gets one in the update `clock`, if admission is by probability.
  OPER_HD bool draws_row(uint64_t hash, uint32_t clock) const;
};

// How the rows of a dynamic table are initialised.
enum class StateWidth : int64_t { kNone, kPerColumn, kPerRow };
struct RowRules {
  uint64_t seed = 0;
  float bound = 0.0f;
  float first_state = 0.0f;  // of the first momentum; the second one's is 0
  StateWidth widths[2] = {StateWidth::kNone, StateWidth::kNone};  // of the momenta
  int32_t feature = 0;       // one of the collection that looks up in the table
};

struct KeyTableRules {
  int64_t num_slots;
  KeyRules keys;
  RowRules rows;
};

// ---- hashes --------------------------------------------------------------------------------------

// a * b / 2^64.
OPER_HD uint64_t high_product(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

// The finalizer of SplitMix64, which is a bijection.
OPER_HD uint64_t hash_of_key(int64_t key, uint64_t seed) {
  uint64_t x = static_cast<uint64_t>(key) ^ seed;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

OPER_HD int64_t key_of_hash(uint64_t hash, uint64_t seed) {
  uint64_t x = (hash ^ (hash >> 31) ^ (hash >> 62)) * 0x319642b2d24d8ec3u;
  x = (x ^ (x >> 27) ^ (x >> 54)) * 0x96de1b173f119089u;
  return static_cast<int64_t>(x ^ (x >> 30) ^ (x >> 60) ^ seed);
}

// Ascending in the hash: what is sorted by hash is sorted by bucket and by owner.
OPER_HD int64_t bucket_of_hash(uint64_t hash, int64_t num_buckets) {
  return static_cast<int64_t>(high_product(hash, static_cast<uint64_t>(num_buckets)));
}

OPER_HD uint8_t tag_of(uint64_t hash) {
  const uint8_t low = static_cast<uint8_t>(hash);
  return low == 0 ? 1 : low;
}

// A key's home line in its bucket, by bits of the hash that determine neither bucket nor tag.
OPER_HD int64_t home_line(uint64_t hash) { return static_cast<int64_t>(hash >> 8 & 7); }

// ---- memory --------------------------------------------------------------------------------------

// Division of numbers below 2^32 by one of them, as a multiplication (Lemire, Kaser, Kurz 2019).
class Divisor {
 public:
  explicit Divisor(uint64_t by) : inverse_(by > 1 ? ~uint64_t{0} / by + 1 : 0) {}
  OPER_HD int64_t quotient(int64_t of) const {
    if (inverse_ == 0) return of;
    return static_cast<int64_t>(high_product(inverse_, static_cast<uint64_t>(of)));
  }

 private:
  uint64_t inverse_;  // of 1: none
};

// Divides `total` < 2^32 items into `parts` contiguous ranges, of which the first ones have one
// item more.
struct Shares {
  int64_t size, larger;
  Divisor by_size, by_larger_size;
  Shares(int64_t total, int64_t parts)
      : size(total / parts),
        larger(total % parts),
        by_size(static_cast<uint64_t>(size)),
        by_larger_size(static_cast<uint64_t>(size) + 1) {}
  OPER_HD int64_t begin(int64_t part) const {
    return part * size + (part < larger ? part : larger);
  }
  OPER_HD int64_t part_of(int64_t thing) const {
    const int64_t end = larger * (size + 1);
    return thing < end ? by_larger_size.quotient(thing)
                       : larger + by_size.quotient(thing - end);
  }
};

OPER_HD int64_t buckets_for(int64_t num_slots) {
  return (num_slots + kBucketSlots - 1) / kBucketSlots;
}

// Offsets (bytes) of a bucket's arrays, each at a cache line: its tags (those beyond its slots are 0)
// and hashes; and the arrays of its candidates.
constexpr int64_t kHashesAt = kBucketSlots, kBucketBytes = kHashesAt + 8 * kBucketSlots,
                  kBucketAgeBytes = kBucketSlots * sizeof(KeyAge),
                  kCandidateClocksAt = 8 * kBucketCandidates,
                  kCandidateCountsAt = kCandidateClocksAt + 4 * kBucketCandidates,
                  kCandidateBytes = kCandidateCountsAt + kBucketCandidates;

// Lines and slots of a bucket: line l has the slots l, l + kLines, ...
constexpr int64_t kLines = kBucketSlots / kLineSlots;
static_assert(kLines == 8);
OPER_HD int64_t slot_of(int64_t line, int64_t index) { return index * kLines + line; }
// Index of a slot's hash among those of its bucket.
OPER_HD int64_t hash_index(int64_t slot) { return slot % kLines * kLineSlots + slot / kLines; }

// Stored as a free slot's hash: one whose home is another line, as a line's hashes are compared
// without the tags.
OPER_HD uint64_t free_hash(int64_t slot) { return slot % kLines == 0 ? uint64_t{1} << 8 : 0; }

struct KeyBucket {
  uint8_t* tags;
  uint64_t* hashes;
  KeyAge* ages;
  uint64_t* candidates;
  uint32_t* candidate_clocks;
  uint8_t* candidate_counts;
  int64_t num_slots, first_slot;
  OPER_HD uint64_t& hash(int64_t slot) const { return hashes[hash_index(slot)]; }
};

// A rank's part of a directory: buckets [first, end), then their ages, then their candidates. The
// addresses are those that bucket 0 would have if it were in this part.
struct DirectoryPart {
  char* buckets;
  KeyAge* ages;
  char* candidates;

  static DirectoryPart at(char* memory, int64_t first, int64_t end) {
    char* const ages = memory + (end - first) * kBucketBytes;
    char* const candidates = ages + (end - first) * kBucketAgeBytes;
    return {memory - first * kBucketBytes,
            reinterpret_cast<KeyAge*>(ages - first * kBucketAgeBytes),
            candidates - first * kCandidateBytes};
  }
  OPER_HD KeyBucket bucket(int64_t number, const Shares& slots) const {
    char* const at = buckets + number * kBucketBytes;
    char* const some = candidates + number * kCandidateBytes;
    const int64_t first = slots.begin(number);
    return {reinterpret_cast<uint8_t*>(at),
            reinterpret_cast<uint64_t*>(at + kHashesAt),
            ages + number * kBucketSlots,
            reinterpret_cast<uint64_t*>(some),
            reinterpret_cast<uint32_t*>(some + kCandidateClocksAt),
            reinterpret_cast<uint8_t*>(some + kCandidateCountsAt),
            slots.begin(number + 1) - first,
            first};
  }
};

inline int64_t directory_bytes(int64_t num_slots, int64_t world_size, int64_t rank, bool counts) {
  const Shares ranks(buckets_for(num_slots), world_size);
  return (ranks.begin(rank + 1) - ranks.begin(rank)) *
         (kBucketBytes + kBucketAgeBytes + (counts ? kCandidateBytes : 0));
}

// Offsets of the directories in a rank's memory (bytes), then their end.
inline std::vector<int64_t> directory_offsets(const std::vector<KeyTableRules>& rules,
                                              int64_t world_size, int64_t rank) {
  constexpr int64_t kPage = 4096;
  std::vector<int64_t> found{0};
  for (const KeyTableRules& r : rules) {
    const int64_t end =
        found.back() + directory_bytes(r.num_slots, world_size, rank, r.keys.has_candidates());
    found.push_back((end + kPage - 1) / kPage * kPage);
  }
  return found;
}

// ---- updates -------------------------------------------------------------------------------------

OPER_HD uint32_t saturated(uint64_t count) {
  return static_cast<uint32_t>(count < UINT32_MAX ? count : UINT32_MAX);
}

OPER_HD KeyAge KeyRules::seen(KeyAge age, uint64_t count, uint32_t clock) const {
  return {clock, saturated(uint64_t{decayed(age.count, age.clock, clock)} + count)};
}

OPER_HD bool KeyRules::draws_row(uint64_t hash, uint32_t clock) const {
  constexpr uint32_t kAdmissionDraw = 0x61646d74u;
  const Philox4 bits = draw_bits(draws, hash, clock, kAdmissionDraw);
  return (bits.word[0] | static_cast<uint64_t>(bits.word[1]) << 32) < admit_below;
}

// A new candidate takes the place with the lowest of these: a free one, or that of the key not seen
// for longest.
OPER_HD uint64_t candidate_order(uint8_t count, uint32_t clock) {
  return count == 0 ? 0 : uint64_t{clock} + 1;
}

OPER_HD int lowest_bit(uint64_t bits) {
#if defined(__CUDA_ARCH__)
  return __ffsll(static_cast<long long>(bits)) - 1;
#else
  return __builtin_ctzll(bits);
#endif
}

// The first of `slots` (a bit each, one at least) that is in `line`, or the first of all if none is.
OPER_HD int64_t first_slot_near(uint64_t slots, int64_t line) {
  const uint64_t near = slots & uint64_t{0x0101010101010101} << line;
  return lowest_bit(near != 0 ? near : slots);
}

// Keys are evicted in ascending order of score; kNeverEvicted: not in this update, which has seen the key.
constexpr uint64_t kNeverEvicted = ~uint64_t{0};  // no clock is as high
OPER_HD uint64_t eviction_score(uint32_t first, uint32_t second, uint32_t seen, uint32_t clock) {
  return seen == clock ? kNeverEvicted : uint64_t{first} << 32 | second;
}
// A count per distance, as a number with the same order. A clock that is ahead counts as the present
// one.
OPER_HD uint32_t count_per_distance(uint32_t count, uint32_t seen, uint32_t clock) {
  const uint32_t present = seen < clock ? clock : seen;  // named: compilers then vectorise this
  return bits_of_float(static_cast<float>(count) / static_cast<float>(present - seen + 1));
}
// A key in the home line is preferred if less than this share of the bucket's keys come before it, since
// keys in their home lines are found faster. With an eighth, nearly full tables evict 1 % more than in
// strict eviction order, with a quarter 3 %.
constexpr int64_t kNearShare = 16;

// ---- new rows ------------------------------------------------------------------------------------

// Four columns, from 4 * block on, of the row that a key begins with.
struct FirstColumns {
  float at[4];
};
OPER_HD FirstColumns first_columns(int64_t key, uint64_t seed, uint32_t block, float bound) {
  constexpr uint32_t kRowDraw = 0x696e6974u;
  const Philox4 bits = draw_bits(seed, static_cast<uint64_t>(key), block, kRowDraw);
  FirstColumns drawn;
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int k = 0; k < 4; ++k)
    drawn.at[k] = (static_cast<float>(bits.word[k] >> 8) * (1.0f / 8388608.0f) - 1.0f) * bound;
  return drawn;
}

}  // namespace oper
