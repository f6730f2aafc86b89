#include "host/keys.h"

#include <algorithm>
#include <limits>
#include <utility>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "common/philox.h"

namespace oper::host {

namespace {

constexpr int64_t kAhead = 32;  // keys whose buckets are fetched together
constexpr uint32_t kAdmissionDraw = 0x61646d74u, kRowDraw = 0x696e6974u;

// Where the arrays of a bucket begin; each begins at a cache line.
constexpr int64_t kSlotsAt = kBucketSlots, kCandidatesAt = kSlotsAt + 16 * kBucketSlots,
                  kCandidateClocksAt = kCandidatesAt + 8 * kBucketCandidates,
                  kCandidateCountsAt = kCandidateClocksAt + 4 * kBucketCandidates,
                  kBucketEnd = kCandidateCountsAt + kBucketCandidates;

int64_t buckets_for(int64_t num_slots) { return (num_slots + kBucketSlots - 1) / kBucketSlots; }

int64_t bytes_per_bucket(bool counts) { return counts ? kBucketEnd : kCandidatesAt; }

// `total` things dealt to `parts` in order, the first ones getting one more: where part k begins.
int64_t share_begin(int64_t total, int64_t parts, int64_t k) {
  return k * (total / parts) + std::min(k, total % parts);
}

int64_t share_of(int64_t total, int64_t parts, int64_t thing) {
  const int64_t size = total / parts, larger = total % parts;
  const int64_t end = larger * (size + 1);
  return thing < end ? thing / (size + 1) : larger + (thing - end) / size;
}

uint8_t tag_of(uint64_t hash) {
  const uint8_t low = static_cast<uint8_t>(hash);
  return low == 0 ? 1 : low;
}

// Bit i: whether tags[i] is `tag`, of 16.
uint32_t matches(const uint8_t* tags, uint8_t tag) {
#if defined(__SSE2__)
  const __m128i found = _mm_loadu_si128(reinterpret_cast<const __m128i*>(tags));
  return static_cast<uint32_t>(
      _mm_movemask_epi8(_mm_cmpeq_epi8(found, _mm_set1_epi8(static_cast<char>(tag)))));
#else
  uint32_t mask = 0;
  for (int i = 0; i < 16; ++i) mask |= static_cast<uint32_t>(tags[i] == tag) << i;
  return mask;
#endif
}

// The slot from `begin` (a multiple of 16) on that has a tag and, unless `any`, a hash; or -1. Free
// places behind a bucket's slots have the tag 0 and are not among `num_slots`.
template <bool any = false>
int64_t search(const uint8_t* tags, const KeySlot* slots, int64_t num_slots, uint8_t tag,
               uint64_t hash) {
  for (int64_t at = 0; at < num_slots; at += 16) {
    for (uint32_t mask = matches(tags + at, tag); mask != 0; mask &= mask - 1) {
      const int64_t slot = at + __builtin_ctz(mask);
      if (any) return slot < num_slots ? slot : -1;
      // A lookup without gradients may meet the owner's update: whole numbers, old or new ones.
      if (__atomic_load_n(&slots[slot].hash, __ATOMIC_RELAXED) == hash) return slot;
    }
  }
  return -1;
}

uint32_t age(uint32_t since, uint32_t clock) { return clock > since ? clock - since : 0; }

uint32_t saturated(uint64_t count) {
  return static_cast<uint32_t>(std::min<uint64_t>(count, std::numeric_limits<uint32_t>::max()));
}

bool by_hash(const KeyCount& a, const KeyCount& b) { return a.hash < b.hash; }

Philox4 draw(uint64_t seed, uint64_t of, uint32_t number, uint32_t purpose) {
  return philox4x32({{static_cast<uint32_t>(of), static_cast<uint32_t>(of >> 32), number, purpose}},
                    static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

}  // namespace

void KeyChanges::add(const KeyChanges& other) {
  rows.insert(rows.end(), other.rows.begin(), other.rows.end());
  admitted += other.admitted;
  evicted += other.evicted;
  expired += other.expired;
  refused += other.refused;
}

KeyDirectory::KeyDirectory(std::vector<char*> arenas, int64_t rank, int64_t num_slots,
                           const KeyRules& rules)
    : arenas_(std::move(arenas)),
      rank_(rank),
      num_slots_(num_slots),
      num_buckets_(buckets_for(num_slots)),
      bucket_bytes_(bytes_per_bucket(rules.min_count > 1)),
      rules_(rules) {}

int64_t KeyDirectory::num_bytes(int64_t num_slots, int64_t world_size, int64_t rank, bool counts) {
  const int64_t buckets = buckets_for(num_slots);
  return (share_begin(buckets, world_size, rank + 1) - share_begin(buckets, world_size, rank)) *
         bytes_per_bucket(counts);
}

// ---- places --------------------------------------------------------------------------------------

// The finalizer of SplitMix64, which is a bijection, and its inverse.
uint64_t KeyDirectory::hash_of(int64_t key) const {
  uint64_t x = static_cast<uint64_t>(key) ^ rules_.seed;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

int64_t KeyDirectory::key_of(uint64_t hash) const {
  uint64_t x = (hash ^ (hash >> 31) ^ (hash >> 62)) * 0x319642b2d24d8ec3u;
  x = (x ^ (x >> 27) ^ (x >> 54)) * 0x96de1b173f119089u;
  return static_cast<int64_t>(x ^ (x >> 30) ^ (x >> 60) ^ rules_.seed);
}

// Ascending in the hash: what is sorted by hash is sorted by bucket and by owner.
int64_t KeyDirectory::bucket_of(uint64_t hash) const {
  return static_cast<int64_t>(
      (static_cast<unsigned __int128>(hash) * static_cast<uint64_t>(num_buckets_)) >> 64);
}

int64_t KeyDirectory::first_slot(int64_t bucket) const {
  return share_begin(num_slots_, num_buckets_, bucket);
}

int64_t KeyDirectory::owner_of(int64_t bucket) const {
  return share_of(num_buckets_, static_cast<int64_t>(arenas_.size()), bucket);
}

char* KeyDirectory::address_of(int64_t bucket) const {
  const int64_t W = static_cast<int64_t>(arenas_.size());
  const int64_t owner = W == 1 ? 0 : owner_of(bucket);
  return arenas_[static_cast<size_t>(owner)] +
         (bucket - share_begin(num_buckets_, W, owner)) * bucket_bytes_;
}

KeyDirectory::Bucket KeyDirectory::bucket_at(int64_t bucket) const {
  char* at = address_of(bucket);
  const int64_t first = first_slot(bucket);
  return {reinterpret_cast<uint8_t*>(at),
          reinterpret_cast<KeySlot*>(at + kSlotsAt),
          reinterpret_cast<uint64_t*>(at + kCandidatesAt),
          reinterpret_cast<uint32_t*>(at + kCandidateClocksAt),
          reinterpret_cast<uint8_t*>(at + kCandidateCountsAt),
          first_slot(bucket + 1) - first,
          first};
}

// ---- lookups -------------------------------------------------------------------------------------

int64_t KeyDirectory::find(int64_t* keys, int64_t n, uint32_t clock) const {
  int64_t missed = 0;
  uint64_t hashes[kAhead];
  Bucket buckets[kAhead];
  for (int64_t begin = 0; begin < n; begin += kAhead) {
    const int64_t count = std::min(kAhead, n - begin);
    for (int64_t i = 0; i < count; ++i) {
      hashes[i] = hash_of(keys[begin + i]);
      buckets[i] = bucket_at(bucket_of(hashes[i]));
      __builtin_prefetch(buckets[i].tags);
      __builtin_prefetch(buckets[i].tags + 64);
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t slot =
          search<true>(buckets[i].tags, nullptr, buckets[i].num_slots, tag_of(hashes[i]), 0);
      if (slot >= 0) __builtin_prefetch(buckets[i].slots + slot);
    }
    for (int64_t i = 0; i < count; ++i) {
      const Bucket& bucket = buckets[i];
      const int64_t slot =
          search(bucket.tags, bucket.slots, bucket.num_slots, tag_of(hashes[i]), hashes[i]);
      const bool found = slot >= 0 && !is_expired(bucket, slot, clock);
      keys[begin + i] = found ? bucket.first_slot + slot + 1 : 0;
      missed += !found;
    }
  }
  return missed;
}

// Sorted by bins of the hash's high bits, then within bins: few are in one unless somebody wants them to
// be, or a key is there often.
std::vector<KeyCount> KeyDirectory::distinct(const int64_t* keys, int64_t n) const {
  int bits = 1;
  while (bits < 16 && (int64_t{1} << bits) < n) ++bits;
  std::vector<uint64_t> hashes(static_cast<size_t>(n)), sorted(hashes.size());
  std::vector<int64_t> ends((size_t{1} << bits) + 1);
  for (int64_t i = 0; i < n; ++i) {
    hashes[i] = hash_of(keys[i]);
    ++ends[(hashes[i] >> (64 - bits)) + 1];
  }
  for (size_t bin = 1; bin < ends.size(); ++bin) ends[bin] += ends[bin - 1];
  for (int64_t i = 0; i < n; ++i) sorted[ends[hashes[i] >> (64 - bits)]++] = hashes[i];
  int64_t begin = 0;
  for (size_t bin = 0; bin + 1 < ends.size(); ++bin) {
    if (ends[bin] - begin > 1) std::sort(sorted.begin() + begin, sorted.begin() + ends[bin]);
    begin = ends[bin];
  }
  std::vector<KeyCount> found;
  found.reserve(sorted.size());
  for (uint64_t hash : sorted) {
    if (!found.empty() && found.back().hash == hash)
      ++found.back().count;
    else
      found.push_back({hash, 1});
  }
  return found;
}

// ---- updates -------------------------------------------------------------------------------------

bool KeyDirectory::is_expired(const Bucket& bucket, int64_t slot, uint32_t clock) const {
  return rules_.time_to_live != 0 && age(bucket.slots[slot].clock, clock) > rules_.time_to_live;
}

// Halved at every multiple of the half-life that has passed since, whether the key was seen or not.
uint32_t KeyDirectory::decayed(uint32_t count, uint32_t since, uint32_t clock) const {
  if (rules_.half_life == 0 || clock <= since) return count;
  const uint32_t halvings = clock / rules_.half_life - since / rules_.half_life;
  return halvings > 31 ? 0 : count >> halvings;
}

// How often a key without a row has been seen where that gives it one, else 0.
uint64_t KeyDirectory::admit(const Bucket& bucket, const KeyCount& key, uint32_t clock) const {
  if (rules_.admit_below != 0) {
    const Philox4 bits = draw(rules_.seed, key.hash, clock, kAdmissionDraw);
    const uint64_t drawn = bits.word[0] | static_cast<uint64_t>(bits.word[1]) << 32;
    return drawn < rules_.admit_below ? key.count : 0;
  }
  if (rules_.min_count <= 1) return key.count;
  int64_t place = -1, oldest = 0;
  for (int64_t i = 0; i < kBucketCandidates; ++i) {
    if (bucket.candidate_counts[i] != 0 && bucket.candidates[i] == key.hash) {
      place = i;
      break;
    }
    const bool is_free = bucket.candidate_counts[i] == 0;
    const bool was_free = bucket.candidate_counts[oldest] == 0;
    if (!was_free && (is_free || bucket.candidate_clocks[i] < bucket.candidate_clocks[oldest]))
      oldest = i;
  }
  const uint64_t total = key.count + (place < 0 ? 0 : bucket.candidate_counts[place]);
  if (place < 0) {
    if (total >= rules_.min_count) return total;
    place = oldest;
  }
  bucket.candidates[place] = key.hash;
  bucket.candidate_clocks[place] = clock;
  bucket.candidate_counts[place] = static_cast<uint8_t>(std::min<uint64_t>(total, 255));
  return total >= rules_.min_count ? total : 0;
}

// A slot for a new key: a free one, one that has expired, or that of the key to be evicted; -1 where all
// keys of the bucket have been seen in this update.
int64_t KeyDirectory::take_slot(const Bucket& bucket, uint32_t clock, KeyChanges& changes) const {
  const int64_t free = search<true>(bucket.tags, nullptr, bucket.num_slots, 0, 0);
  if (free >= 0) return free;
  int64_t victim = -1;
  std::pair<uint32_t, uint32_t> least{};
  for (int64_t i = 0; i < bucket.num_slots; ++i) {
    if (is_expired(bucket, i, clock)) {
      ++changes.expired;
      return i;
    }
    const uint32_t since = bucket.slots[i].clock;
    if (since == clock) continue;
    const uint32_t count = decayed(bucket.slots[i].count, since, clock);
    const auto score = rules_.eviction == Eviction::kLeastRecent ? std::pair(since, count)
                                                                 : std::pair(count, since);
    if (victim < 0 || score < least) {
      victim = i;
      least = score;
    }
  }
  changes.evicted += victim >= 0;
  return victim;
}

void KeyDirectory::prefetch_tags(uint64_t hash) const {
  const char* at = address_of(bucket_of(hash));
  __builtin_prefetch(at);
  __builtin_prefetch(at + 64);
}

void KeyDirectory::prefetch_slot(uint64_t hash) const {
  const Bucket bucket = bucket_at(bucket_of(hash));
  const int64_t slot = search<true>(bucket.tags, nullptr, bucket.num_slots, tag_of(hash), 0);
  if (slot >= 0) __builtin_prefetch(bucket.slots + slot);
}

void KeyDirectory::update_bucket(const KeyCount* begin, const KeyCount* end, uint32_t clock,
                                 std::vector<KeyCount>& fresh, KeyChanges& changes) const {
  const Bucket bucket = bucket_at(bucket_of(begin->hash));
  fresh.clear();
  for (const KeyCount* key = begin; key < end; ++key) {
    const int64_t slot =
        search(bucket.tags, bucket.slots, bucket.num_slots, tag_of(key->hash), key->hash);
    // As the lookups of this step saw it, which have read the row: its gradient is in there.
    if (slot >= 0 && !is_expired(bucket, slot, clock - 1)) {
      const uint32_t before = decayed(bucket.slots[slot].count, bucket.slots[slot].clock, clock);
      bucket.slots[slot].count = saturated(before + key->count);
      bucket.slots[slot].clock = clock;
      continue;
    }
    if (slot >= 0) {
      bucket.tags[slot] = 0;
      ++changes.expired;
    }
    const uint64_t count = admit(bucket, *key, clock);
    if (count != 0) fresh.push_back({key->hash, count});
  }
  std::sort(fresh.begin(), fresh.end(), [](const KeyCount& a, const KeyCount& b) {
    return std::pair(b.count, a.hash) < std::pair(a.count, b.hash);
  });
  for (const KeyCount& key : fresh) {
    const int64_t slot = take_slot(bucket, clock, changes);
    if (slot < 0) {
      ++changes.refused;
      continue;
    }
    __atomic_store_n(&bucket.slots[slot].hash, key.hash, __ATOMIC_RELAXED);
    bucket.tags[slot] = tag_of(key.hash);
    bucket.slots[slot].clock = clock;
    bucket.slots[slot].count = saturated(key.count);
    ++changes.admitted;
    changes.rows.push_back({bucket.first_slot + slot + 1, key_of(key.hash)});
    if (rules_.min_count > 1)
      for (int64_t i = 0; i < kBucketCandidates; ++i)
        if (bucket.candidates[i] == key.hash) bucket.candidate_counts[i] = 0;
  }
}

KeyChanges KeyDirectory::update(const std::vector<const KeyCount*>& lists,
                                const std::vector<int64_t>& sizes, uint32_t clock,
                                ParallelFor parallel) {
  std::vector<KeyCount> keys;
  for (size_t r = 0; r < lists.size(); ++r) {
    const KeyCount *begin = lists[r], *end = begin + sizes[r];
    const auto is_below = [&](int64_t owner) {
      return [this, owner](const KeyCount& k) { return owner_of(bucket_of(k.hash)) < owner; };
    };
    begin = std::partition_point(begin, end, is_below(rank_));
    end = std::partition_point(begin, end, is_below(rank_ + 1));
    const auto middle = static_cast<int64_t>(keys.size());
    keys.insert(keys.end(), begin, end);
    std::inplace_merge(keys.begin(), keys.begin() + middle, keys.end(), by_hash);
  }
  size_t last = 0;  // counts of one key are added up
  for (size_t i = 1; i < keys.size(); ++i) {
    if (keys[i].hash == keys[last].hash)
      keys[last].count += keys[i].count;
    else
      keys[++last] = keys[i];
  }
  if (!keys.empty()) keys.resize(last + 1);

  // Buckets have nothing to do with each other; changes are put together in their order.
  constexpr size_t kTask = 2048;
  std::vector<size_t> bounds{0};
  while (bounds.back() < keys.size()) {
    size_t end = std::min(keys.size(), bounds.back() + kTask);
    while (end < keys.size() && bucket_of(keys[end].hash) == bucket_of(keys[end - 1].hash)) ++end;
    bounds.push_back(end);
  }
  struct Work {
    const KeyDirectory& directory;
    const std::vector<KeyCount>& keys;
    const std::vector<size_t>& bounds;
    uint32_t clock;
    std::vector<KeyChanges> changes;
  } work{*this, keys, bounds, clock, std::vector<KeyChanges>(bounds.size() - 1)};
  const auto body = [](int64_t first, int64_t stop, void* argument) {
    Work& w = *static_cast<Work*>(argument);
    std::vector<KeyCount> fresh;
    for (int64_t task = first; task < stop; ++task) {
      const KeyCount* end = w.keys.data() + w.bounds[static_cast<size_t>(task) + 1];
      for (const KeyCount* at = w.keys.data() + w.bounds[static_cast<size_t>(task)]; at < end;) {
        const KeyCount* next = at;
        for (const int64_t bucket = w.directory.bucket_of(at->hash);
             next < end && w.directory.bucket_of(next->hash) == bucket; ++next) {
          if (end - next > kAhead) w.directory.prefetch_tags(next[kAhead].hash);
          if (end - next > kAhead / 2) w.directory.prefetch_slot(next[kAhead / 2].hash);
        }
        w.directory.update_bucket(at, next, w.clock, fresh,
                                  w.changes[static_cast<size_t>(task)]);
        at = next;
      }
    }
  };
  if (work.changes.size() > 1)
    parallel(static_cast<int64_t>(work.changes.size()), body, &work);
  else
    body(0, static_cast<int64_t>(work.changes.size()), &work);
  KeyChanges all;
  for (const KeyChanges& changes : work.changes) all.add(changes);
  return all;
}

// ---- checkpoints ---------------------------------------------------------------------------------

int64_t KeyDirectory::num_records(bool candidates) const {
  if (!candidates) return num_slots_;
  return rules_.min_count > 1 ? num_buckets_ * kBucketCandidates : 0;
}

KeyDirectory::Place KeyDirectory::place_of(bool candidates, int64_t number) const {
  if (candidates) return {number / kBucketCandidates, number % kBucketCandidates};
  const int64_t bucket = share_of(num_slots_, num_buckets_, number);
  return {bucket, number - first_slot(bucket)};
}

void KeyDirectory::read(bool candidates, int64_t begin, int64_t n, KeyRecord* out) const {
  for (int64_t i = 0; i < n; ++i) {
    const auto [number, at] = place_of(candidates, begin + i);
    const Bucket bucket = bucket_at(number);
    const bool is_free = (candidates ? bucket.candidate_counts : bucket.tags)[at] == 0;
    if (is_free)
      out[i] = {0, 0, -1};
    else if (candidates)
      out[i] = {key_of(bucket.candidates[at]), bucket.candidate_counts[at],
                bucket.candidate_clocks[at]};
    else
      out[i] = {key_of(bucket.slots[at].hash), bucket.slots[at].count, bucket.slots[at].clock};
  }
}

int64_t KeyDirectory::write(bool candidates, int64_t begin, int64_t n, const KeyRecord* records,
                            bool checks) {
  constexpr int64_t kMost = std::numeric_limits<uint32_t>::max();
  for (int64_t i = 0; i < n; ++i) {
    const KeyRecord& r = records[i];
    if (r.clock == -1) continue;
    const bool is_legal = r.clock >= 0 && r.clock < kMost && r.count >= (candidates ? 1 : 0) &&
                          r.count <= (candidates ? 255 : kMost);
    if (!is_legal || bucket_of(hash_of(r.key)) != place_of(candidates, begin + i).bucket) return i;
  }
  if (checks) return -1;
  for (int64_t i = 0; i < n; ++i) {
    const auto [number, at] = place_of(candidates, begin + i);
    if (owner_of(number) != rank_) continue;
    const Bucket bucket = bucket_at(number);
    const KeyRecord& r = records[i];
    const bool is_free = r.clock == -1;
    const uint64_t hash = is_free ? 0 : hash_of(r.key);
    if (candidates) {
      bucket.candidates[at] = hash;
      bucket.candidate_clocks[at] = is_free ? 0 : static_cast<uint32_t>(r.clock);
      bucket.candidate_counts[at] = static_cast<uint8_t>(is_free ? 0 : r.count);
    } else {
      bucket.tags[at] = is_free ? 0 : tag_of(hash);
      bucket.slots[at].hash = hash;
      bucket.slots[at].clock = is_free ? 0 : static_cast<uint32_t>(r.clock);
      bucket.slots[at].count = is_free ? 0 : static_cast<uint32_t>(r.count);
    }
  }
  return -1;
}

void draw_rows(const NewRow* rows, int64_t n, uint64_t seed, int64_t dim, float bound, float* out) {
  for (int64_t i = 0; i < n; ++i)
    for (int64_t first = 0; first < dim; first += 4) {
      const Philox4 bits = draw(seed, static_cast<uint64_t>(rows[i].key),
                                static_cast<uint32_t>(first / 4), kRowDraw);
      for (int64_t k = 0; k < std::min<int64_t>(4, dim - first); ++k)
        out[i * dim + first + k] =
            (static_cast<float>(bits.word[k] >> 8) * (1.0f / 8388608.0f) - 1.0f) * bound;
    }
}

}  // namespace oper::host
