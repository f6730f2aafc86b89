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
// first; 0 = free), the hash, the clock of the last update that saw the key, and its count. With
// admission by count, a bucket also counts up to kBucketCandidates keys that have no row (6.5 more
// bytes per slot).
#pragma once

#include <cstdint>
#include <vector>

#include "host/context.h"

namespace oper::host {

constexpr int64_t kBucketSlots = 128, kBucketCandidates = 64;

enum class Eviction : int64_t { kLeastRecent, kLeastFrequent };

// Clocks count updates of the table, so that ages are in updates.
struct KeyRules {
  uint64_t seed = 0;
  uint64_t min_count = 1;       // occurrences at which a key gets a row, at most 255
  uint64_t admit_below = 0;     // a draw of 64 bits below it admits; 0 = all are admitted
  Eviction eviction = Eviction::kLeastRecent;
  uint32_t half_life = 0;       // updates after which counts are halved; 0 = never
  uint32_t time_to_live = 0;    // age beyond which a key has no row any more; 0 = none
};

// A key of a batch, or one that has got a row: pairs of int64 in tensors.
struct KeyCount {
  uint64_t hash, count;
};
struct NewRow {
  int64_t row, key;
};

struct KeySlot {
  uint64_t hash;
  uint32_t clock, count;
};

struct KeyChanges {
  std::vector<NewRow> rows;  // by bucket
  int64_t admitted = 0, evicted = 0, expired = 0, refused = 0;
  void add(const KeyChanges& other);
};

// What a checkpoint has of a slot or candidate; free ones have the clock -1.
struct KeyRecord {
  int64_t key, count, clock;
};

class KeyDirectory {
 public:
  // `arenas`: by rank, where its part lies, `num_bytes` large and cleared.
  KeyDirectory(std::vector<char*> arenas, int64_t rank, int64_t num_slots, const KeyRules& rules);
  static int64_t num_bytes(int64_t num_slots, int64_t world_size, int64_t rank, bool counts);

  // Replaces keys by their rows in place. Returns how many had no row.
  int64_t find(int64_t* keys, int64_t n, uint32_t clock) const;
  // The distinct keys among these, by hash, and how often each is there.
  std::vector<KeyCount> distinct(const int64_t* keys, int64_t n) const;
  // Takes in what all ranks have looked up (by rank, each by hash) for the buckets of this rank.
  KeyChanges update(const std::vector<const KeyCount*>& lists, const std::vector<int64_t>& sizes,
                    uint32_t clock, ParallelFor parallel);

  // Reads slots or, with `candidates`, candidate places, of all ranks, starting at number `begin`.
  int64_t num_records(bool candidates) const;
  void read(bool candidates, int64_t begin, int64_t n, KeyRecord* out) const;
  // Writes the records that this rank owns; with `checks` none. Returns -1, or the index of the first record that cannot
  // be at its place; then nothing has been written.
  int64_t write(bool candidates, int64_t begin, int64_t n, const KeyRecord* records, bool checks);

 private:
  struct Bucket {
    uint8_t* tags;
    KeySlot* slots;
    uint64_t* candidates;
    uint32_t* candidate_clocks;
    uint8_t* candidate_counts;
    int64_t num_slots, first_slot;
  };
  struct Place {
    int64_t bucket, index;
  };

  uint64_t hash_of(int64_t key) const;
  int64_t key_of(uint64_t hash) const;
  int64_t bucket_of(uint64_t hash) const;
  int64_t first_slot(int64_t bucket) const;
  int64_t owner_of(int64_t bucket) const;
  char* address_of(int64_t bucket) const;
  Bucket bucket_at(int64_t bucket) const;
  Place place_of(bool candidates, int64_t number) const;
  bool is_expired(const Bucket& bucket, int64_t slot, uint32_t clock) const;
  uint32_t decayed(uint32_t count, uint32_t since, uint32_t clock) const;
  uint64_t admit(const Bucket& bucket, const KeyCount& key, uint32_t clock) const;
  int64_t take_slot(const Bucket& bucket, uint32_t clock, KeyChanges& changes) const;
  void prefetch_tags(uint64_t hash) const;
  void prefetch_slot(uint64_t hash) const;
  void update_bucket(const KeyCount* begin, const KeyCount* end, uint32_t clock,
                     std::vector<KeyCount>& fresh, KeyChanges& changes) const;

  std::vector<char*> arenas_;
  int64_t rank_, num_slots_, num_buckets_, bucket_bytes_;
  KeyRules rules_;
};

// float32 [n, dim] in [-bound, bound), drawn from seed, key and column and nothing else.
void draw_rows(const NewRow* rows, int64_t n, uint64_t seed, int64_t dim, float bound, float* out);

}  // namespace oper::host
