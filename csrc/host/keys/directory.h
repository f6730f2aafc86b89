// The directory of a dynamic table: which row a raw 64-bit key has.
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

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace oper::host {

constexpr int64_t kBucketSlots = 64, kLineSlots = 8, kBucketCandidates = 32;

// Which key of a bucket is evicted: the one with the lowest clock; with the lowest count; or with the
// lowest count / (updates since its clock + 1), in float32. Ties are broken by the lowest clock.
enum class Eviction : int64_t { kLeastRecent, kLeastFrequent, kLeastPerDistance };

// Clocks count updates of the table, so that ages are in updates.
struct KeyRules {
  uint64_t seed = 0;            // of the hash
  uint64_t draws = 0;           // seed of admission by probability
  uint64_t min_count = 1;       // occurrences at which a key gets a row, at most 255
  uint64_t admit_below = 0;     // admits if a 64-bit draw is below it; 0 = always admits
  Eviction eviction = Eviction::kLeastRecent;
  uint32_t half_life = 0;       // updates after which counts are halved; 0 = never
  uint32_t time_to_live = 0;    // age beyond which a key loses its row; 0 = none

  // The count, halved for every multiple of the half-life that the clock has passed since `since`.
  uint32_t decayed(uint32_t count, uint32_t since, uint32_t clock) const {
    if (half_life == 0 || clock <= since) return count;
    const uint32_t halvings = clock / half_life - since / half_life;
    return halvings > 31 ? 0 : count >> halvings;
  }
};

// Occurrences in a batch of keys with a row (by slot) and without one.
struct PlaceCount {
  uint32_t place, count;
};
struct KeyCount {
  uint64_t hash, count;
};
// A row that was reset for a new key; or -row for a row that a key lost without a successor.
struct NewRow {
  int64_t row, key;
};

struct KeyAge {
  uint32_t clock, count;
};

struct KeyEvents {
  int64_t admitted = 0, evicted = 0, expired = 0, refused = 0;
  void add(const KeyEvents& other);
};

// Numbers of slots with a key, and of buckets without a free slot.
struct KeyOccupancy {
  int64_t slots = 0, full_buckets = 0;
};

struct KeyChanges : KeyEvents {
  std::vector<NewRow> rows;  // by bucket
};

// The checkpointed state of a slot or candidate; free ones have clock -1.
struct KeyRecord {
  int64_t key, count, clock;
};

// Division of numbers below 2^32 by one of them, as a multiplication (Lemire, Kaser, Kurz 2019).
class Divisor {
 public:
  explicit Divisor(uint64_t by) : inverse_(by > 1 ? ~uint64_t{0} / by + 1 : 0) {}
  int64_t quotient(int64_t of) const {
    if (inverse_ == 0) return of;
    return static_cast<int64_t>(
        (static_cast<unsigned __int128>(inverse_) * static_cast<uint64_t>(of)) >> 64);
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
  int64_t begin(int64_t part) const { return part * size + std::min(part, larger); }
  int64_t part_of(int64_t thing) const {
    const int64_t end = larger * (size + 1);
    return thing < end ? by_larger_size.quotient(thing)
                       : larger + by_size.quotient(thing - end);
  }
};

inline uint8_t tag_of(uint64_t hash) {
  const uint8_t low = static_cast<uint8_t>(hash);
  return low == 0 ? 1 : low;
}

// Bit i, of 64: whether tags[i] is `tag`.
inline uint64_t equal_tags(const uint8_t* tags, uint8_t tag) {
  uint64_t found = 0;
#if defined(__SSE2__)
  const __m128i wanted = _mm_set1_epi8(static_cast<char>(tag));
  for (int k = 0; k < 4; ++k) {
    const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(tags + 16 * k));
    const int bits = _mm_movemask_epi8(_mm_cmpeq_epi8(some, wanted));
    found |= static_cast<uint64_t>(static_cast<uint32_t>(bits)) << 16 * k;
  }
#else
  for (int i = 0; i < 64; ++i) found |= static_cast<uint64_t>(tags[i] == tag) << i;
#endif
  return found;
}

// Keys of a part of a batch, at most DistinctKeys::kMost, and where results are written.
struct FindKeys {
  const void* keys;
  bool are_keys_32_bit;
  int64_t n;
  uint32_t clock;
  void* rows;  // [n], 0 = none
  bool are_rows_32_bit;
  int64_t* missed;  // [n], consecutive keys without a row; null: not needed
};

// The distinct keys of a part of a batch, numbered in the order of their first occurrence.
struct DistinctKeys {
  static constexpr int64_t kMost = 1 << 16;  // ids of a part
  static constexpr int64_t kProbes = 16;     // number of probes before a key replaces another one
  // By number: the hash, the row (0 = none), the place if there is a row, and the occurrences.
  std::vector<uint64_t> hashes = std::vector<uint64_t>(kMost + 1);
  std::vector<uint32_t> rows = std::vector<uint32_t>(kMost), places = rows, counts = rows;
  // Hash table, by bits that determine neither tag nor bucket: a key's number + 1, or 0 = empty. The
  // largest number wraps to 0 as well, but belongs to the last id, so no later one looks for it.
  std::vector<uint16_t> table = std::vector<uint16_t>(kMost);
  uint64_t mask = 0;  // used size of `table`, minus one
  int64_t size = 0, num_missed = 0;
  bool has_repeats = false;  // a key may have several numbers

  // Prepares for `n` ids.
  void begin(int64_t n) {
    mask = std::clamp<uint64_t>(2 * std::bit_ceil(static_cast<uint64_t>(n)), 1, kMost) - 1;
    std::fill_n(table.begin(), mask + 1, uint16_t{0});
    size = num_missed = 0;
    has_repeats = false;
  }
};

// A key's home line in its bucket, by bits of the hash that determine neither bucket nor tag.
inline int64_t home_line(uint64_t hash) { return static_cast<int64_t>(hash >> 8 & 7); }

// Lines and slots of a bucket: line l has the slots l, l + kLines, ...
constexpr int64_t kLines = kBucketSlots / kLineSlots;
static_assert(kLines == 8);
inline int64_t slot_of(int64_t line, int64_t index) { return index * kLines + line; }
// Index of a slot's hash among those of its bucket.
inline int64_t hash_index(int64_t slot) { return slot % kLines * kLineSlots + slot / kLines; }

// Stored as a free slot's hash: one whose home is another line, as a line's hashes are compared
// without the tags.
inline uint64_t free_hash(int64_t slot) { return slot % kLines == 0 ? uint64_t{1} << 8 : 0; }

class KeyDirectory {
 public:
  // Offsets (bytes) of a bucket's arrays, each at a cache line: its tags (those beyond its slots are 0) and
  // hashes; and the arrays of its candidates.
  static constexpr int64_t kHashesAt = kBucketSlots, kBucketBytes = kHashesAt + 8 * kBucketSlots,
                           kCandidateClocksAt = 8 * kBucketCandidates,
                           kCandidateCountsAt = kCandidateClocksAt + 4 * kBucketCandidates,
                           kCandidateBytes = kCandidateCountsAt + kBucketCandidates;

  // `arenas`: addresses of the ranks' parts, each of `num_bytes` cleared bytes.
  KeyDirectory(const std::vector<char*>& arenas, int64_t rank, int64_t num_slots,
               const KeyRules& rules);
  static int64_t num_bytes(int64_t num_slots, int64_t world_size, int64_t rank, bool counts);
  // Initialises this rank's part, which must be cleared.
  void begin() const;

  // ---- places ----

  // The finalizer of SplitMix64, which is a bijection.
  uint64_t hash_of(int64_t key) const {
    uint64_t x = static_cast<uint64_t>(key) ^ rules_.seed;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  // Ascending in the hash: what is sorted by hash is sorted by bucket and by owner.
  int64_t bucket_of(uint64_t hash) const {
    return static_cast<int64_t>(
        (static_cast<unsigned __int128>(hash) * static_cast<uint64_t>(num_buckets_)) >> 64);
  }
  int64_t first_slot(int64_t bucket) const { return slots_.begin(bucket); }
  int64_t owner_of(int64_t bucket) const {
    int64_t owner = 0;
    for (size_t r = 1; r < first_bucket_.size(); ++r) owner += bucket >= first_bucket_[r];
    return owner;
  }
  char* address_of(int64_t bucket) const {
    return bases_[owner_of(bucket)] + bucket * kBucketBytes;
  }
  bool is_expired(uint32_t since, uint32_t clock) const {
    return rules_.time_to_live != 0 && clock > since && clock - since > rules_.time_to_live;
  }
  // Whether the key in a slot of a bucket has expired.
  bool has_expired(int64_t bucket, int64_t slot, uint32_t clock) const {
    return rules_.time_to_live != 0 &&
           is_expired(ages_[owner_of(bucket)][place_in(bucket, slot)].clock, clock);
  }
  int64_t num_rows() const { return num_slots_ + 1; }
  // Slots of all buckets are numbered as if each had kBucketSlots.
  static uint32_t place_in(int64_t bucket, int64_t slot) {
    return static_cast<uint32_t>(bucket * kBucketSlots + slot);
  }
  int64_t num_places() const { return num_buckets_ * kBucketSlots; }
  // [W + 1]: the first place of each rank's buckets, then the end of the last rank's.
  std::vector<int64_t> place_bounds() const;

  // ---- updates, of this rank's buckets ----

  // The distinct ones of `keys`, sorted by hash, and their numbers of occurrences.
  std::vector<KeyCount> distinct(std::span<const int64_t> keys) const;
  // Merges the ranks' lists of keys without a row (each by hash), for this rank's buckets.
  std::vector<KeyCount> merge(const std::vector<std::span<const KeyCount>>& lists) const;
  // Adds the counts of keys that have rows, each listed once.
  void count(std::span<const PlaceCount> keys, uint32_t clock) const;
  // Counts or admits keys that had no row, sorted by hash; they are all such keys of some buckets.
  void admit(std::span<const KeyCount> keys, uint32_t clock, KeyChanges& changes) const;

  KeyOccupancy occupancy() const;

  // ---- checkpoints ----

  // Reads slots or, with `candidates`, candidate places, of all ranks, starting at number `begin`.
  int64_t num_records(bool candidates) const;
  void read(bool candidates, int64_t begin, int64_t n, KeyRecord* out) const;
  // Writes the records with these numbers that this rank owns, or with `checks` only checks all of
  // them. Returns -1, or the index of the first record that cannot be at its place; then nothing has
  // been written.
  int64_t write(bool candidates, std::span<const int64_t> numbers, const KeyRecord* records,
                bool checks);
  // Numbers of the records in this rank's buckets that updates after clock `since` have changed or
  // removed, ascending.
  std::vector<int64_t> changed(bool candidates, uint32_t since) const;
  // Slots in this rank's buckets whose keys have expired at `clock` and had not at clock `since`,
  // ascending; -1 = at no clock before.
  std::vector<int64_t> expired(int64_t since, uint32_t clock) const;

 private:
  struct Bucket {
    uint8_t* tags;
    uint64_t* hashes;
    KeyAge* ages;
    uint64_t* candidates;
    uint32_t* candidate_clocks;
    uint8_t* candidate_counts;
    int64_t num_slots, first_slot;
    uint64_t& hash(int64_t slot) const { return hashes[hash_index(slot)]; }
  };
  struct Place {
    int64_t bucket, index;
  };

  int64_t key_of(uint64_t hash) const;
  Bucket bucket_at(int64_t bucket) const;
  int64_t end_bucket() const {  // of this rank
    const size_t next = static_cast<size_t>(rank_) + 1;
    return next < first_bucket_.size() ? first_bucket_[next] : num_buckets_;
  }
  Place place_of(bool candidates, int64_t number) const;
  uint64_t admitted_count(const Bucket& bucket, const KeyCount& key, uint32_t clock) const;
  int64_t take_slot(const Bucket& bucket, int64_t line, uint32_t clock, KeyChanges& changes) const;
  void admit_in_bucket(std::span<const KeyCount> keys, uint32_t clock,
                       std::vector<KeyCount>& fresh, KeyChanges& changes) const;

  int64_t rank_, num_slots_, num_buckets_;
  Shares slots_;                       // distribution of slots over buckets
  std::vector<int64_t> first_bucket_;  // [W] of each rank
  // [W] per rank, the address that bucket 0, or its candidates, would have if the rank owned it
  std::vector<char*> bases_, candidate_bases_;
  std::vector<KeyAge*> ages_;
  KeyRules rules_;
};

}  // namespace oper::host
