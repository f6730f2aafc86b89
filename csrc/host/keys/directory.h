// Directories of dynamic tables in host memory, see common/keys.h.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "common/keys.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace oper::host {

// Occurrences of a key with a row; `place`: see KeyDirectory::place_in.
struct PlaceCount {
  uint32_t place, count;
};
// Occurrences of a key without a row.
struct KeyCount {
  uint64_t hash, count;
};
// A row given to a new key; or -row and the key that has lost it, if no other key got it.
struct NewRow {
  int64_t row, key;
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

// The record of a slot or candidate in a checkpoint; free ones have clock -1.
struct KeyRecord {
  int64_t key, count, clock;
};

// Bit i is set if tags[i] is `tag`, for 64 tags.
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

// A part of a batch: keys, and where results are written.
struct FindKeys {
  const void* keys;
  bool are_keys_32_bit;
  int64_t n;        // at most DistinctKeys::kMost
  uint32_t clock;   // of the table
  void* rows;       // [n], 0 = none
  bool are_rows_32_bit;
  int64_t* missed;  // [n], gets the keys without a row, one after the other; null: not needed
};

// The distinct keys of a part of a batch, numbered in the order of their first occurrence.
struct DistinctKeys {
  static constexpr int64_t kMost = 1 << 16;  // keys of a part
  static constexpr int64_t kProbes = 16;     // probes after which a key replaces another one in `table`
  // By number: the hash, the row (0 = none), the place if there is a row, and the occurrences.
  std::vector<uint64_t> hashes = std::vector<uint64_t>(kMost + 1);
  std::vector<uint32_t> rows = std::vector<uint32_t>(kMost), places = rows, counts = rows;
  // A hash table of the numbers: number + 1, 0 = empty. The largest number + 1 is also stored as 0;
  // it belongs to the last key of a part, which no later one looks for.
  std::vector<uint16_t> table = std::vector<uint16_t>(kMost);
  uint64_t mask = 0;  // used size of `table`, minus one
  int64_t size = 0, num_missed = 0;
  bool has_repeats = false;  // whether a key may have several numbers

  // Prepares for `n` keys.
  void begin(int64_t n) {
    mask = std::clamp<uint64_t>(2 * std::bit_ceil(static_cast<uint64_t>(n)), 1, kMost) - 1;
    std::fill_n(table.begin(), mask + 1, uint16_t{0});
    size = num_missed = 0;
    has_repeats = false;
  }
};

class KeyDirectory {
 public:
  // `arenas`: addresses of the ranks' parts, each of directory_bytes(), which must be cleared
  // before begin().
  KeyDirectory(const std::vector<char*>& arenas, int64_t rank, int64_t num_slots,
               const KeyRules& rules);
  // Initialises this rank's part.
  void begin() const;

  // ---- places ----

  uint64_t hash_of(int64_t key) const { return hash_of_key(key, rules_.seed); }
  int64_t bucket_of(uint64_t hash) const { return bucket_of_hash(hash, num_buckets_); }
  int64_t first_slot(int64_t bucket) const { return slots_.begin(bucket); }
  int64_t owner_of(int64_t bucket) const {
    int64_t owner = 0;
    for (size_t r = 1; r < first_bucket_.size(); ++r) owner += bucket >= first_bucket_[r];
    return owner;
  }
  char* address_of(int64_t bucket) const {
    return parts_[owner_of(bucket)].buckets + bucket * kBucketBytes;
  }
  // Whether the key in a slot of a bucket has expired.
  bool has_expired(int64_t bucket, int64_t slot, uint32_t clock) const {
    return rules_.time_to_live != 0 &&
           rules_.is_expired(parts_[owner_of(bucket)].ages[place_in(bucket, slot)].clock, clock);
  }
  int64_t num_rows() const { return num_slots_ + 1; }
  // The place of a slot: its number among the slots of all buckets, as if each bucket had
  // kBucketSlots.
  static uint32_t place_in(int64_t bucket, int64_t slot) {
    return static_cast<uint32_t>(bucket * kBucketSlots + slot);
  }
  int64_t num_places() const { return num_buckets_ * kBucketSlots; }
  // [W + 1]: the first place of each rank's buckets, then the end of the last rank's.
  std::vector<int64_t> place_bounds() const;

  // ---- updates, of this rank's buckets ----

  // The distinct keys among `keys`, with their numbers of occurrences, sorted by hash.
  std::vector<KeyCount> distinct(std::span<const int64_t> keys) const;
  // Merges the ranks' lists of keys without a row, each sorted by hash. Returns the keys of this
  // rank's buckets, each once with the sum of its counts, sorted by hash.
  std::vector<KeyCount> merge(const std::vector<std::span<const KeyCount>>& lists) const;
  // Adds the counts of keys that have rows, each listed once.
  void count(std::span<const PlaceCount> keys, uint32_t clock) const;
  // Prefetches what `admit` reads first to the second-level cache: of the first keys' buckets the tags,
  // the keys' home lines, and all ages, which decide evictions.
  void fetch(std::span<const KeyCount> keys) const;
  // Counts or admits keys that had no row, sorted by hash; they are all such keys of some buckets.
  void admit(std::span<const KeyCount> keys, uint32_t clock, KeyChanges& changes) const;

  KeyOccupancy occupancy() const;

  // ---- checkpoints ----

  // There is a record for each slot or, if `candidates`, for each candidate's place; they are
  // numbered over all ranks. `read` reads the records [begin, begin + n).
  int64_t num_records(bool candidates) const;
  void read(bool candidates, int64_t begin, int64_t n, KeyRecord* out) const;
  // Writes those of the records with these numbers that this rank owns or, if `checks`, only checks
  // all. Returns -1, or the index of the first record that is invalid, cannot be in its bucket or
  // has the key of an earlier one; then nothing has been written. `numbers` must be ascending:
  // a key is compared with the earlier records of its bucket in this call only.
  int64_t write(bool candidates, std::span<const int64_t> numbers, const KeyRecord* records,
                bool checks);
  // Numbers of the records in this rank's buckets that updates after clock `since` have changed or
  // freed, ascending.
  std::vector<int64_t> changed(bool candidates, uint32_t since) const;
  // Slots in this rank's buckets, ascending, whose keys have expired at `clock` but had not at
  // clock `since`; `since` = -1: all that have expired at `clock`.
  std::vector<int64_t> expired(int64_t since, uint32_t clock) const;

 private:
  struct Place {
    int64_t bucket, index;
  };

  int64_t key_of(uint64_t hash) const { return key_of_hash(hash, rules_.seed); }
  KeyBucket bucket_at(int64_t bucket) const { return parts_[owner_of(bucket)].bucket(bucket, slots_); }
  int64_t end_bucket() const {  // of this rank
    const size_t next = static_cast<size_t>(rank_) + 1;
    return next < first_bucket_.size() ? first_bucket_[next] : num_buckets_;
  }
  Place place_of(bool candidates, int64_t number) const;
  uint64_t admitted_count(const KeyBucket& bucket, const KeyCount& key, uint32_t clock) const;
  int64_t take_slot(const KeyBucket& bucket, int64_t line, uint32_t clock, KeyChanges& changes) const;
  void admit_in_bucket(std::span<const KeyCount> keys, uint32_t clock,
                       std::vector<KeyCount>& fresh, KeyChanges& changes) const;

  int64_t rank_, num_slots_, num_buckets_;
  Shares slots_;                       // distribution of slots over buckets
  std::vector<int64_t> first_bucket_;  // [W]
  std::vector<DirectoryPart> parts_;   // [W]
  KeyRules rules_;
};

}  // namespace oper::host
