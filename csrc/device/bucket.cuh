// A bucket of a directory of keys, updated by a warp.
#pragma once

#include "device/batch.cuh"
#include "device/keys.h"

namespace oper::device {

// A number with a score. `first_of` returns, of one per lane, the one with the lowest score; if
// several have that score, of these the one with the lowest number.
struct Scored {
  uint64_t score;
  uint64_t number;
  OPER_DEVICE bool is_before(const Scored& other) const {
    return score < other.score || (score == other.score && number < other.number);
  }
};
OPER_DEVICE Scored first_of(const Group<32>& warp, Scored own) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const Scored other{warp.shuffle_xor(own.score, distance), warp.shuffle_xor(own.number, distance)};
    if (other.is_before(own)) own = other;
  }
  return own;
}

constexpr int kSlotsOfLane = kBucketSlots / 32;

// A bucket in the registers of a warp: lane l has the slots l and l + 32, and candidate l. Changes
// are written to memory immediately.
struct WarpBucket {
  const Group<32>& warp;
  const KeyTable& table;
  const KeyBucket at;
  const uint32_t clock;
  uint8_t tags[kSlotsOfLane];
  uint64_t hashes[kSlotsOfLane];
  KeyAge ages[kSlotsOfLane];
  uint64_t candidate = 0;
  uint32_t candidate_clock = 0;
  uint8_t candidate_count = 0;
  // Slots (a bit each) that keys have lost, and those that were given to other keys.
  uint64_t lost = 0, given = 0;
  uint32_t events[kLookups] = {};

  OPER_DEVICE WarpBucket(const Group<32>& lanes, const KeyTable& of, const KeyBucket& bucket,
                         uint32_t now)
      : warp(lanes), table(of), at(bucket), clock(now) {
#pragma unroll
    for (int k = 0; k < kSlotsOfLane; ++k) {
      tags[k] = at.tags[slot(k)];
      hashes[k] = at.hash(slot(k));
      ages[k] = at.ages[slot(k)];
    }
    if (!table.rules.has_candidates()) return;
    candidate = at.candidates[warp.lane];
    candidate_clock = at.candidate_clocks[warp.lane];
    candidate_count = at.candidate_counts[warp.lane];
  }

  OPER_DEVICE int slot(int k) const { return warp.lane + 32 * k; }
  // A bit for each slot of the bucket; `holds(k)` tests the k-th slot of this lane.
  template <class Holds>
  OPER_DEVICE uint64_t slots_where(Holds holds) const {
    uint64_t found = 0;
#pragma unroll
    for (int k = 0; k < kSlotsOfLane; ++k)
      found |= static_cast<uint64_t>(warp.ballot(holds(k))) << 32 * k;
    return found;
  }
  OPER_DEVICE void set_age(int k, KeyAge age) { at.ages[slot(k)] = ages[k] = age; }
  // Lookups without gradients may run at the same time: they read the old or the new hash.
  OPER_DEVICE void set_key(int k, uint8_t tag, uint64_t hash) {
    at.hash(slot(k)) = hashes[k] = hash;
    at.tags[slot(k)] = tags[k] = tag;
  }

  // Counts a key. Returns its count if the key is to get a row, otherwise 0. `is_known`: a lookup
  // has found its row.
  OPER_DEVICE uint64_t count(uint64_t hash, uint64_t occurrences, bool is_known) {
    const uint64_t held = slots_where(
        [&](int k) { return tags[k] == tag_of(hash) && hashes[k] == hash; });
    if (held != 0) {
      bool is_live = false;
#pragma unroll
      for (int k = 0; k < kSlotsOfLane; ++k) {
        if ((held >> slot(k) & 1) == 0) continue;
        // The key may have received its row in an update after the lookup that did not find it.
        is_live = is_known || !table.rules.is_expired(ages[k].clock, clock - 1);
        if (is_live) {
          set_age(k, table.rules.seen(ages[k], occurrences, clock));
        } else {
          set_key(k, 0, free_hash(slot(k)));
          set_age(k, {clock, 0});  // for `changed` on the host
        }
      }
      if (warp.ballot(is_live) != 0) return 0;
      ++events[kExpired];
      lost |= held;
    }
    if (table.rules.admit_below != 0) return table.rules.draws_row(hash, clock) ? occurrences : 0;
    if (!table.rules.has_candidates()) return occurrences;
    return count_candidate(hash, occurrences);
  }

  OPER_DEVICE uint64_t count_candidate(uint64_t hash, uint64_t occurrences) {
    const unsigned found = warp.ballot(candidate_count != 0 && candidate == hash);
    int place = found != 0 ? lowest_bit(found) : 0;
    const uint64_t before = warp.shuffle(static_cast<uint32_t>(candidate_count), place);
    const uint64_t total = occurrences + (found != 0 ? before : 0);
    if (found == 0) {
      if (total >= table.rules.min_count) return total;
      place = static_cast<int>(first_of(warp, {candidate_order(candidate_count, candidate_clock),
                                               static_cast<uint64_t>(warp.lane)})
                                   .number);
    }
    if (warp.lane == place)
      set_candidate(hash, static_cast<uint8_t>(total < 255 ? total : 255));
    return total >= table.rules.min_count ? total : 0;
  }
  OPER_DEVICE void set_candidate(uint64_t hash, uint8_t count) {
    at.candidates[warp.lane] = candidate = hash;
    at.candidate_clocks[warp.lane] = candidate_clock = clock;
    at.candidate_counts[warp.lane] = candidate_count = count;
  }

  // The slot for a new key, see KeyDirectory::take_slot of the host.
  OPER_DEVICE int take_slot(int64_t line) {
    const uint64_t free =
        slots_where([&](int k) { return tags[k] == 0 && slot(k) < at.num_slots; });
    if (free != 0) return static_cast<int>(first_slot_near(free, line));
    if (table.rules.time_to_live != 0) {
      const uint64_t expired = slots_where([&](int k) {
        return slot(k) < at.num_slots && table.rules.is_expired(ages[k].clock, clock);
      });
      if (expired != 0) {
        ++events[kExpired];
        return static_cast<int>(first_slot_near(expired, line));
      }
    }
    const int found = victim(line);
    events[kEvicted] += found >= 0;
    return found;
  }

  OPER_DEVICE uint64_t score(int k) const {
    if (slot(k) >= at.num_slots) return kNeverEvicted;
    const uint32_t seen = ages[k].clock;
    const uint32_t count = table.rules.decayed(ages[k].count, seen, clock);
    switch (table.rules.eviction) {
      case Eviction::kLeastRecent: return eviction_score(seen, count, seen, clock);
      case Eviction::kLeastFrequent: return eviction_score(count, seen, seen, clock);
      default: return eviction_score(count_per_distance(count, seen, clock), seen, seen, clock);
    }
  }
  OPER_DEVICE int victim(int64_t line) const {
    const auto first_where = [&](auto holds) {
      Scored own{kNeverEvicted, kBucketSlots};
#pragma unroll
      for (int k = 0; k < kSlotsOfLane; ++k) {
        const Scored one{score(k), static_cast<uint64_t>(slot(k))};
        if (holds(k) && one.score != kNeverEvicted && one.is_before(own)) own = one;
      }
      return first_of(warp, own);
    };
    const Scored near = first_where([&](int k) { return slot(k) % kLines == line; });
    if (near.score != kNeverEvicted) {
      const uint64_t before = slots_where([&](int k) { return score(k) < near.score; });
      if (popcount64(before) < at.num_slots / kNearShare) return static_cast<int>(near.number);
    }
    const Scored first = first_where([](int) { return true; });
    return first.score == kNeverEvicted ? -1 : static_cast<int>(first.number);
  }

  // Gives a new key a row; returns false if this update has seen all keys of the bucket.
  OPER_DEVICE bool admit(uint64_t hash, uint64_t count) {
    const int place = take_slot(home_line(hash));
    if (place < 0) return false;
#pragma unroll
    for (int k = 0; k < kSlotsOfLane; ++k)
      if (place == slot(k)) {
        set_key(k, tag_of(hash), hash);
        set_age(k, {clock, saturated(count)});
      }
    if (table.rules.has_candidates() && candidate_count != 0 && candidate == hash)
      set_candidate(hash, 0);
    ++events[kAdmitted];
    given |= uint64_t{1} << place;
    return true;
  }

  // Lists the bucket if keys of its slots have changed.
  OPER_DEVICE void list_changes(uint32_t* num_changed, ChangedBucket* list, int64_t number) const {
    if (warp.lane == 0 && (lost | given) != 0)
      list[atomicAdd(num_changed, 1u)] = {given, lost & ~given, number};
  }
};

}  // namespace oper::device
