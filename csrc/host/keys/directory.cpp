#include "host/keys/directory.h"

#include <bit>
#include <limits>
#include <utility>

#include "host/kernels/kernels.h"

namespace oper::host {

namespace {

constexpr size_t kAhead = 96;         // how many keys before its use an age is prefetched
constexpr size_t kBucketsAhead = 16;  // how many keys before its use a bucket is prefetched

// The first slot with `tag` for which body(slot) is true, or -1.
template <class Body>
int64_t first_slot_where(const uint8_t* tags, uint8_t tag, Body body) {
  for (uint64_t bits = equal_tags(tags, tag); bits != 0; bits &= bits - 1)
    if (const int64_t slot = std::countr_zero(bits); body(slot)) return slot;
  return -1;
}

bool by_hash(const KeyCount& a, const KeyCount& b) { return a.hash < b.hash; }

}  // namespace

void KeyEvents::add(const KeyEvents& other) {
  admitted += other.admitted;
  evicted += other.evicted;
  expired += other.expired;
  refused += other.refused;
}

// ---- places --------------------------------------------------------------------------------------

KeyDirectory::KeyDirectory(const std::vector<char*>& arenas, int64_t rank, int64_t num_slots,
                           const KeyRules& rules)
    : rank_(rank),
      num_slots_(num_slots),
      num_buckets_(buckets_for(num_slots)),
      slots_(num_slots_, num_buckets_),
      rules_(rules) {
  const Shares ranks(num_buckets_, static_cast<int64_t>(arenas.size()));
  for (size_t r = 0; r < arenas.size(); ++r) {
    const int64_t first = ranks.begin(static_cast<int64_t>(r));
    const int64_t end = ranks.begin(static_cast<int64_t>(r) + 1);
    first_bucket_.push_back(first);
    parts_.push_back(DirectoryPart::at(arenas[r], first, end));
  }
}

void KeyDirectory::begin() const {
  for (int64_t bucket = first_bucket_[rank_]; bucket < end_bucket(); ++bucket) {
    const KeyBucket at = bucket_at(bucket);
    for (int64_t slot = 0; slot < kBucketSlots; ++slot) at.hash(slot) = free_hash(slot);
  }
}

std::vector<int64_t> KeyDirectory::place_bounds() const {
  std::vector<int64_t> bounds;
  for (int64_t bucket : first_bucket_) bounds.push_back(bucket * kBucketSlots);
  bounds.push_back(num_places());
  return bounds;
}

// ---- updates -------------------------------------------------------------------------------------

// Distributes hashes to bins by their high bits, and sorts each bin. A bin has few hashes, unless a
// key is frequent or keys were chosen to collide.
std::vector<KeyCount> KeyDirectory::distinct(std::span<const int64_t> keys) const {
  const int64_t n = static_cast<int64_t>(keys.size());
  if (n == 0) return {};
  const int bits = std::clamp(static_cast<int>(std::bit_width(keys.size() - 1)), 1, 16);
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

std::vector<KeyCount> KeyDirectory::merge(
    const std::vector<std::span<const KeyCount>>& lists) const {
  std::vector<KeyCount> keys;
  for (const std::span<const KeyCount>& list : lists) {
    const auto is_below = [&](int64_t owner) {
      return [this, owner](const KeyCount& k) { return owner_of(bucket_of(k.hash)) < owner; };
    };
    const auto begin = std::partition_point(list.begin(), list.end(), is_below(rank_));
    const auto end = std::partition_point(begin, list.end(), is_below(rank_ + 1));
    const auto middle = static_cast<int64_t>(keys.size());
    keys.insert(keys.end(), begin, end);
    std::inplace_merge(keys.begin(), keys.begin() + middle, keys.end(), by_hash);
  }
  if (keys.empty()) return keys;
  size_t last = 0;  // index of the key to which counts of equal keys are added
  for (size_t i = 1; i < keys.size(); ++i) {
    if (keys[i].hash == keys[last].hash)
      keys[last].count += keys[i].count;
    else
      keys[++last] = keys[i];
  }
  keys.resize(last + 1);
  return keys;
}

void KeyDirectory::count(std::span<const PlaceCount> keys, uint32_t clock) const {
  KeyAge* const ages = parts_[rank_].ages;
  const size_t n = keys.size();
  // Prefetches into the second-level cache, since it can fetch more lines at once than the first.
  const auto fetch = [&](size_t i) { __builtin_prefetch(ages + keys[i].place, 0, 2); };
  for (size_t i = 0; i < std::min(n, kAhead); ++i) fetch(i);
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) fetch(i + kAhead);
    KeyAge& age = ages[keys[i].place];
    age = rules_.seen(age, keys[i].count, clock);
  }
}

// Counts a key without a row. Returns its count if the key is to get a row, otherwise 0.
uint64_t KeyDirectory::admitted_count(const KeyBucket& bucket, const KeyCount& key,
                                      uint32_t clock) const {
  if (rules_.admit_below != 0) return rules_.draws_row(key.hash, clock) ? key.count : 0;
  if (!rules_.has_candidates()) return key.count;
  int64_t place = -1, oldest = 0;
  for (int64_t i = 0; i < kBucketCandidates; ++i) {
    if (bucket.candidate_counts[i] != 0 && bucket.candidates[i] == key.hash) {
      place = i;
      break;
    }
    const auto order = [&](int64_t k) {
      return candidate_order(bucket.candidate_counts[k], bucket.candidate_clocks[k]);
    };
    if (order(i) < order(oldest)) oldest = i;
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

// The slot for a new key with home line `line`: a free one, else that of an expired key (of
// several, one in the line if there is one), else that of the key to be evicted. -1 if this update
// has seen all keys of the bucket.
int64_t KeyDirectory::take_slot(const KeyBucket& bucket, int64_t line, uint32_t clock,
                                KeyChanges& changes) const {
  const uint64_t all = ~uint64_t{0} >> (kBucketSlots - bucket.num_slots);
  if (const uint64_t free = equal_tags(bucket.tags, 0) & all; free != 0)
    return first_slot_near(free, line);
  if (rules_.time_to_live != 0) {
    uint64_t expired = 0;
    for (int64_t i = 0; i < bucket.num_slots; ++i)
      expired |= static_cast<uint64_t>(rules_.is_expired(bucket.ages[i].clock, clock)) << i;
    if (expired != 0) {
      ++changes.expired;
      return first_slot_near(expired, line);
    }
  }
  const int64_t found = kernels().victim(rules_, bucket.ages, bucket.num_slots, line, clock);
  changes.evicted += found >= 0;
  return found;
}

void KeyDirectory::admit_in_bucket(std::span<const KeyCount> keys, uint32_t clock,
                                   std::vector<KeyCount>& fresh, KeyChanges& changes) const {
  const KeyBucket bucket = bucket_at(bucket_of(keys.front().hash));
  fresh.clear();
  for (const KeyCount& key : keys) {
    const int64_t slot = first_slot_where(bucket.tags, tag_of(key.hash), [&](int64_t at) {
      return bucket.hash(at) == key.hash;
    });
    // The key got its row in an update after the lookup that did not find it.
    if (slot >= 0 && !rules_.is_expired(bucket.ages[slot].clock, clock - 1)) {
      bucket.ages[slot] = rules_.seen(bucket.ages[slot], key.count, clock);
      continue;
    }
    if (slot >= 0) {
      bucket.tags[slot] = 0;
      __atomic_store_n(&bucket.hash(slot), free_hash(slot), __ATOMIC_RELAXED);
      bucket.ages[slot] = {clock, 0};  // for `changed`
      ++changes.expired;
      changes.rows.push_back({-(bucket.first_slot + slot + 1), key_of(key.hash)});
    }
    const uint64_t count = admitted_count(bucket, key, clock);
    if (count != 0) fresh.push_back({key.hash, count});
  }
  std::sort(fresh.begin(), fresh.end(), [](const KeyCount& a, const KeyCount& b) {
    return std::pair(b.count, a.hash) < std::pair(a.count, b.hash);
  });
  for (const KeyCount& key : fresh) {
    const int64_t slot = take_slot(bucket, home_line(key.hash), clock, changes);
    if (slot < 0) {
      ++changes.refused;
      continue;
    }
    // Atomic, since lookups without gradients may run at the same time: they read the old or the
    // new hash.
    __atomic_store_n(&bucket.hash(slot), key.hash, __ATOMIC_RELAXED);
    bucket.tags[slot] = tag_of(key.hash);
    bucket.ages[slot] = {clock, saturated(key.count)};
    ++changes.admitted;
    changes.rows.push_back({bucket.first_slot + slot + 1, key_of(key.hash)});
    if (rules_.has_candidates())
      for (int64_t i = 0; i < kBucketCandidates; ++i)
        if (bucket.candidates[i] == key.hash && bucket.candidate_counts[i] != 0) {
          bucket.candidate_clocks[i] = clock;
          bucket.candidate_counts[i] = 0;
        }
  }
}

void KeyDirectory::fetch(std::span<const KeyCount> keys) const {
  for (const KeyCount& key : keys.first(std::min(keys.size(), kBucketsAhead))) {
    const int64_t bucket = bucket_of(key.hash);
    const char* at = parts_[rank_].buckets + bucket * kBucketBytes;
    __builtin_prefetch(at, 0, 2);
    __builtin_prefetch(at + kHashesAt + 64 * home_line(key.hash), 1, 2);
    for (int64_t slot = 0; slot < kBucketSlots; slot += kLineSlots)
      __builtin_prefetch(parts_[rank_].ages + place_in(bucket, slot), 1, 2);
  }
}

void KeyDirectory::admit(std::span<const KeyCount> keys, uint32_t clock,
                         KeyChanges& changes) const {
  std::vector<KeyCount> fresh;
  for (size_t at = 0, next; at < keys.size(); at = next) {
    const int64_t bucket = bucket_of(keys[at].hash);
    for (next = at; next < keys.size() && bucket_of(keys[next].hash) == bucket; ++next)
      if (next + kBucketsAhead < keys.size()) fetch(keys.subspan(next + kBucketsAhead, 1));
    admit_in_bucket(keys.subspan(at, next - at), clock, fresh, changes);
  }
}

KeyOccupancy KeyDirectory::occupancy() const {
  KeyOccupancy found;
  for (int64_t number = first_bucket_[rank_]; number < end_bucket(); ++number) {
    const KeyBucket bucket = bucket_at(number);
    // Tags beyond the bucket's slots are 0.
    const int64_t held = kBucketSlots - std::popcount(equal_tags(bucket.tags, 0));
    found.slots += held;
    found.full_buckets += held == bucket.num_slots;
  }
  return found;
}

// ---- checkpoints ---------------------------------------------------------------------------------

int64_t KeyDirectory::num_records(bool candidates) const {
  if (!candidates) return num_slots_;
  return rules_.has_candidates() ? num_buckets_ * kBucketCandidates : 0;
}

KeyDirectory::Place KeyDirectory::place_of(bool candidates, int64_t number) const {
  if (candidates) return {number / kBucketCandidates, number % kBucketCandidates};
  const int64_t bucket = slots_.part_of(number);
  return {bucket, number - first_slot(bucket)};
}

void KeyDirectory::read(bool candidates, int64_t begin, int64_t n, KeyRecord* out) const {
  for (int64_t i = 0; i < n; ++i) {
    const auto [number, at] = place_of(candidates, begin + i);
    const KeyBucket bucket = bucket_at(number);
    const bool is_free = (candidates ? bucket.candidate_counts : bucket.tags)[at] == 0;
    if (is_free)
      out[i] = {0, 0, -1};
    else if (candidates)
      out[i] = {key_of(bucket.candidates[at]), bucket.candidate_counts[at],
                bucket.candidate_clocks[at]};
    else
      out[i] = {key_of(bucket.hash(at)), bucket.ages[at].count, bucket.ages[at].clock};
  }
}

int64_t KeyDirectory::write(bool candidates, std::span<const int64_t> numbers,
                            const KeyRecord* records, bool checks) {
  constexpr int64_t kMost = std::numeric_limits<uint32_t>::max();
  const int64_t n = static_cast<int64_t>(numbers.size());
  int64_t bucket = -1, begin = 0;  // of the last record; index of the first record in that bucket
  for (int64_t i = 0; i < n; ++i) {
    const KeyRecord& r = records[i];
    const int64_t its = place_of(candidates, numbers[i]).bucket;
    if (its != bucket) bucket = its, begin = i;
    if (r.clock == -1) continue;
    for (int64_t k = begin; k < i; ++k)
      if (records[k].clock != -1 && records[k].key == r.key) return i;
    const bool is_legal = r.clock >= 0 && r.clock < kMost && r.count >= (candidates ? 1 : 0) &&
                          r.count <= (candidates ? 255 : kMost);
    if (!is_legal || bucket_of(hash_of(r.key)) != bucket) return i;
  }
  if (checks) return -1;
  for (int64_t i = 0; i < n; ++i) {
    const auto [number, at] = place_of(candidates, numbers[i]);
    if (owner_of(number) != rank_) continue;
    const KeyBucket bucket = bucket_at(number);
    const KeyRecord& r = records[i];
    const bool is_free = r.clock == -1;
    const uint64_t hash = is_free ? free_hash(at) : hash_of(r.key);
    if (candidates) {
      bucket.candidates[at] = is_free ? 0 : hash;
      bucket.candidate_clocks[at] = is_free ? 0 : static_cast<uint32_t>(r.clock);
      bucket.candidate_counts[at] = static_cast<uint8_t>(is_free ? 0 : r.count);
    } else {
      bucket.tags[at] = is_free ? 0 : tag_of(hash);
      bucket.hash(at) = hash;
      bucket.ages[at] = {};
      if (!is_free)
        bucket.ages[at] = {static_cast<uint32_t>(r.clock), static_cast<uint32_t>(r.count)};
    }
  }
  return -1;
}

std::vector<int64_t> KeyDirectory::changed(bool candidates, uint32_t since) const {
  std::vector<int64_t> found;
  if (candidates && num_records(true) == 0) return found;
  for (int64_t bucket = first_bucket_[rank_]; bucket < end_bucket(); ++bucket) {
    const KeyBucket at = bucket_at(bucket);
    const int64_t n = candidates ? kBucketCandidates : at.num_slots;
    const int64_t first = candidates ? bucket * kBucketCandidates : at.first_slot;
    for (int64_t i = 0; i < n; ++i)
      if ((candidates ? at.candidate_clocks[i] : at.ages[i].clock) > since)
        found.push_back(first + i);
  }
  return found;
}

std::vector<int64_t> KeyDirectory::expired(int64_t since, uint32_t clock) const {
  std::vector<int64_t> found;
  if (rules_.time_to_live == 0) return found;
  for (int64_t bucket = first_bucket_[rank_]; bucket < end_bucket(); ++bucket) {
    const KeyBucket at = bucket_at(bucket);
    for (int64_t i = 0; i < at.num_slots; ++i) {
      const uint32_t seen = at.ages[i].clock;
      if (at.tags[i] != 0 && rules_.is_expired(seen, clock) &&
          (since < 0 || !rules_.is_expired(seen, static_cast<uint32_t>(since))))
        found.push_back(at.first_slot + i);
    }
  }
  return found;
}

}  // namespace oper::host
