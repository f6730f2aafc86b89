// The directory of a dynamic table, a hash table from raw 64-bit keys to rows: its layout in memory
// and its rules, shared by host and device.
//
// Slots are grouped into buckets of at most kBucketSlots. The number of buckets depends on the
// number of slots only. A key's hash selects its bucket; the key is found, admitted and evicted
// within that, so that every search is bounded and no decision depends on the number of ranks. Each
// rank has a contiguous range of buckets in its arena. All ranks read them, and only the owner
// writes them, during the update of a step. Slot k is row k + 1; keys without their own row use row
// 0, the default row.
//
// Hashes are stored instead of keys. The hash is a bijection of 64-bit numbers, so that every key
// is allowed and equal hashes mean equal keys. A slot takes 17 bytes: a tag (one byte of the hash,
// 0 = free), the hash, and the key's age: its count, and the clock of the last update that saw it.
// The hashes of kLineSlots slots are a cache line of the bucket. Consecutive slots are in different
// lines, so that the used slots, and their rows and ages, are close together while a table fills.
// Each key has a home line in its bucket, and takes a slot there if it can: then a search reads a
// single line. Otherwise it also reads the bucket's tags (another line) and the line of the slot.
// Ages are stored after all buckets: lookups need them only if keys expire, and so touch half as
// many pages. With admission by count, a bucket also counts up to kBucketCandidates keys without a
// row, its candidates (6.5 more bytes per slot), which are stored after the ages.
//
// An update that changes or frees a slot or a candidate stores its clock there. Changes since an
// earlier clock can therefore be found without a list of changes.
#pragma once

#include <vector>

#include "common/elements.h"
#include "common/philox.h"
#include "common/platform.h"

namespace oper {

constexpr int64_t kBucketSlots = 64, kLineSlots = 8, kBucketCandidates = 32;

// Which key of a bucket is evicted.
enum class Eviction : int64_t {
  kLeastRecent,      // the one with the lowest clock; of several, the one with the lowest count
  kLeastFrequent,    // with the lowest count; of several, the one with the lowest clock
  kLeastPerDistance  // with the lowest count / (updates since its clock + 1), in float32; likewise
};

struct KeyAge {
  uint32_t clock, count;
};

// The rules of a directory. Clocks count the updates of the table: all times are in updates.
struct KeyRules {
  uint64_t seed = 0;            // seed of the hash
  uint64_t draws = 0;           // seed of admission by probability
  uint64_t min_count = 1;       // occurrences at which a key gets a row, at most 255
  uint64_t admit_below = 0;     // admits a key if a random 64-bit number is below it; 0 = all keys
  Eviction eviction = Eviction::kLeastRecent;
  uint32_t half_life = 0;       // updates after which counts are halved; 0 = never
  uint32_t time_to_live = 0;    // updates without the key after which it loses its row; 0 = no limit

  OPER_HD bool has_candidates() const { return min_count > 1; }
  // A count that was stored at clock `since`: halved for each multiple of the half-life since then.
  OPER_HD uint32_t decayed(uint32_t count, uint32_t since, uint32_t clock) const {
    if (half_life == 0 || clock <= since) return count;
    const uint32_t halvings = clock / half_life - since / half_life;
    return halvings > 31 ? 0 : count >> halvings;
  }
  OPER_HD bool is_expired(uint32_t since, uint32_t clock) const {
    return time_to_live != 0 && clock > since && clock - since > time_to_live;
  }
  // The new age of a key that the update `clock` sees `count` times.
  OPER_HD KeyAge seen(KeyAge age, uint64_t count, uint32_t clock) const;
  // With admission by probability: whether a key without a row gets one in the update `clock`.
  OPER_HD bool draws_row(uint64_t hash, uint32_t clock) const;
};

// How the rows of new keys are initialised.
enum class StateWidth : int64_t { kNone, kPerColumn, kPerRow };
struct RowRules {
  uint64_t seed = 0;
  float bound = 0.0f;        // numbers are uniform in [-bound, bound)
  float first_state = 0.0f;  // initial value of optimizer state 1; that of state 2 is 0
  StateWidth widths[2] = {StateWidth::kNone, StateWidth::kNone};  // widths of states 1 and 2
  int32_t feature = 0;       // number, in the collection, of a feature that looks up in this table
};

struct KeyTableRules {
  int64_t num_slots;
  KeyRules keys;
  RowRules rows;
};

// ---- hashes --------------------------------------------------------------------------------------

// The upper 64 bits of a * b.
OPER_HD uint64_t high_product(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

// The finalizer of SplitMix64, which is a bijection, and its inverse.
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

// Ascends with the hash, so that keys sorted by hash are also sorted by bucket and by owner.
OPER_HD int64_t bucket_of_hash(uint64_t hash, int64_t num_buckets) {
  return static_cast<int64_t>(high_product(hash, static_cast<uint64_t>(num_buckets)));
}

OPER_HD uint8_t tag_of(uint64_t hash) {
  const uint8_t low = static_cast<uint8_t>(hash);
  return low == 0 ? 1 : low;
}

// A key's home line in its bucket, from bits of the hash that determine neither bucket nor tag.
OPER_HD int64_t home_line(uint64_t hash) { return static_cast<int64_t>(hash >> 8 & 7); }

// ---- memory --------------------------------------------------------------------------------------

// Divides numbers below 2^32 by a number below 2^32, by multiplication (Lemire, Kaser, Kurz,
// "Faster remainder by direct computation", 2019).
class Divisor {
 public:
  explicit Divisor(uint64_t by) : inverse_(by > 1 ? ~uint64_t{0} / by + 1 : 0) {}
  OPER_HD int64_t quotient(int64_t of) const {
    if (inverse_ == 0) return of;
    return static_cast<int64_t>(high_product(inverse_, static_cast<uint64_t>(of)));
  }

 private:
  uint64_t inverse_;  // 0: the divisor is 1
};

// Divides `total` < 2^32 items into `parts` contiguous ranges of `size` items; the first `larger`
// ranges have one item more.
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
  OPER_HD int64_t part_of(int64_t item) const {
    const int64_t end = larger * (size + 1);
    return item < end ? by_larger_size.quotient(item) : larger + by_size.quotient(item - end);
  }
};

OPER_HD int64_t buckets_for(int64_t num_slots) {
  return (num_slots + kBucketSlots - 1) / kBucketSlots;
}

// Byte offsets of a bucket's arrays, which begin at cache lines: its tags (0 beyond its slots) and
// its hashes; its ages, which are stored elsewhere; and the arrays of its candidates.
constexpr int64_t kHashesAt = kBucketSlots, kBucketBytes = kHashesAt + 8 * kBucketSlots,
                  kBucketAgeBytes = kBucketSlots * sizeof(KeyAge),
                  kCandidateClocksAt = 8 * kBucketCandidates,
                  kCandidateCountsAt = kCandidateClocksAt + 4 * kBucketCandidates,
                  kCandidateBytes = kCandidateCountsAt + kBucketCandidates;

// Line l of a bucket has the slots l, l + kLines, ...
constexpr int64_t kLines = kBucketSlots / kLineSlots;
static_assert(kLines == 8);
OPER_HD int64_t slot_of(int64_t line, int64_t index) { return index * kLines + line; }
// Index of a slot's hash among those of its bucket.
OPER_HD int64_t hash_index(int64_t slot) { return slot % kLines * kLineSlots + slot / kLines; }

// Stored as the hash of a free slot: one whose home line is another, since lookups compare the
// hashes of a home line without looking at tags.
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

// A rank's part of a directory: its buckets [first, end), then their ages, then their candidates.
// The pointers are where bucket 0 would be if it were in this part, so that buckets are indexed by
// number.
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

// Bytes of a rank's part. `counts`: with candidates.
inline int64_t directory_bytes(int64_t num_slots, int64_t world_size, int64_t rank, bool counts) {
  const Shares ranks(buckets_for(num_slots), world_size);
  return (ranks.begin(rank + 1) - ranks.begin(rank)) *
         (kBucketBytes + kBucketAgeBytes + (counts ? kCandidateBytes : 0));
}

// Byte offsets of the directories of all tables in a rank's memory, then their end.
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

// A new candidate takes the place for which this is lowest: a free one, or that of the candidate
// that has not been seen for the longest time.
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

// The first of `slots` (a bit each, at least one) that is in `line`, or the first of all if none
// is.
OPER_HD int64_t first_slot_near(uint64_t slots, int64_t line) {
  const uint64_t near = slots & uint64_t{0x0101010101010101} << line;
  return lowest_bit(near != 0 ? near : slots);
}

// Keys are evicted in ascending order of score, first by `first`, then by `second`. kNeverEvicted:
// not in this update, since it has seen the key.
constexpr uint64_t kNeverEvicted = ~uint64_t{0};  // no clock is as high
OPER_HD uint64_t eviction_score(uint32_t first, uint32_t second, uint32_t seen, uint32_t clock) {
  return seen == clock ? kNeverEvicted : uint64_t{first} << 32 | second;
}
// See Eviction::kLeastPerDistance; as an integer with the same order. `seen`: the key's clock; one
// that is ahead of `clock` counts as equal to it.
OPER_HD uint32_t count_per_distance(uint32_t count, uint32_t seen, uint32_t clock) {
  const uint32_t present = seen < clock ? clock : seen;  // named: compilers then vectorise this
  return bits_of_float(static_cast<float>(count) / static_cast<float>(present - seen + 1));
}
// For a new key, a key in its home line is evicted if less than 1 / kNearShare of the bucket's keys
// come before it in the order of eviction, since keys in their home lines are found faster. With 8
// instead of 16, nearly full tables evict 1 % more than in strict order, with 4 3 %.
constexpr int64_t kNearShare = 16;

// ---- new rows ------------------------------------------------------------------------------------

// Stream of the random numbers that initialise rows ("init"), see `draw_bits`.
constexpr uint32_t kRowDraw = 0x696e6974u;

// Columns [4 * block, 4 * block + 4) of a new key's row.
struct FirstColumns {
  float at[4];
};
OPER_HD FirstColumns first_columns(int64_t key, uint64_t seed, uint32_t block, float bound) {
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
