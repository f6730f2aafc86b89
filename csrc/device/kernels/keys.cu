// Directories of dynamic tables: the rows of keys, and which keys get and lose rows.
//
// A warp updates a bucket, key by key in the order of hashes; no two warps update one bucket. Keys of
// a bucket are known from all ranks before. Its decisions depend on these keys and their counts alone.
#include "device/batch.cuh"
#include "device/keys.h"

namespace oper::device {
namespace {

OPER_DEVICE int64_t owner_of(const KeyView& keys, const KeyTable& table, int64_t bucket) {
  return last_at_most(table.first_bucket, keys.world_size, bucket);
}

// ---- lookups -------------------------------------------------------------------------------------

constexpr int kSearchLanes = 8;  // that search for a key: a line has a hash for each

// The slot of each group's key in its bucket, or -1. All groups of the warp call it together.
OPER_DEVICE int64_t search(const Group<32>& warp, bool is_there, const KeyBucket& bucket,
                           uint64_t hash) {
  const int sub = warp.lane % kSearchLanes, first = warp.lane / kSearchLanes * kSearchLanes;
  const auto of_group = [&](bool holds) { return warp.ballot(holds) >> first & 0xffu; };
  const int64_t line = home_line(hash);
  const unsigned home =
      of_group(is_there && bucket.hashes[line * kLineSlots + sub] == hash);
  const bool is_left = is_there && home == 0;
  if (warp.ballot(is_left) == 0) return home != 0 ? slot_of(line, lowest_bit(home)) : -1;
  int found = -1;  // of the slots of eight tags
  if (is_left) {
    const uint64_t tags = reinterpret_cast<const uint64_t*>(bucket.tags)[sub];
    for (int j = 0; j < 8; ++j) {
      const int slot = 8 * sub + j;
      if (static_cast<uint8_t>(tags >> 8 * j) == tag_of(hash) && bucket.hash(slot) == hash)
        found = slot;
    }
  }
  const unsigned elsewhere = of_group(found >= 0);
  const int slot = warp.shuffle(found, first + (elsewhere != 0 ? lowest_bit(elsewhere) : 0));
  return home != 0 ? slot_of(line, lowest_bit(home)) : slot;
}

OPER_DEVICE int64_t key_at(const KeyLookup& x, int64_t i) {
  return x.ids_are_32_bit ? static_cast<const int32_t*>(x.ids)[i]
                          : static_cast<const int64_t*>(x.ids)[i];
}
OPER_DEVICE int32_t table_at(const KeyLookup& x, int64_t i) {
  return x.table_of[last_that(0, x.num_keys,
                              [&](int64_t k) { return x.bounds[k * x.batch_size] <= i; })];
}

// A warp takes 32 ids at a time; each of its groups searches for the keys of its lanes.
__global__ void __launch_bounds__(256)
    find_kernel(KeyView keys, KeyLookup x, int64_t* rows, ListedIds listed) {
  const Group<32> warp;
  for (int64_t tile = warp.index() * 32; tile < x.num_ids; tile += warp.count() * 32) {
    const int64_t i = tile + warp.lane;
    const int32_t t = i < x.num_ids ? table_at(x, i) : -1;
    const int64_t key = i < x.num_ids ? key_at(x, i) : 0;
    const uint64_t hash = t < 0 ? 0 : hash_of_key(key, keys.tables[t].rules.seed);
    int64_t row = t < 0 ? key : 0;
    for (int k = 0; k < kSearchLanes; ++k) {
      const int from = warp.lane / kSearchLanes * kSearchLanes + k;
      const int32_t of = warp.shuffle(t, from);
      const uint64_t wanted = warp.shuffle(hash, from);
      KeyBucket bucket{};
      if (of >= 0) {
        const KeyTable& table = keys.tables[of];
        const int64_t number = bucket_of_hash(wanted, table.num_buckets);
        bucket = table.parts[owner_of(keys, table, number)].bucket(number, table.slots);
      }
      const int64_t slot = search(warp, of >= 0, bucket, wanted);
      if (slot < 0 || warp.lane != from) continue;
      const KeyRules& rules = keys.tables[of].rules;
      if (rules.time_to_live == 0 || !rules.is_expired(bucket.ages[slot].clock, keys.clocks[of]))
        row = bucket.first_slot + slot + 1;
    }
    if (i < x.num_ids) {
      rows[i] = row;
      if (listed.hashes != nullptr) {
        listed.hashes[i] = hash;
        listed.where[i] = t < 0 ? static_cast<uint32_t>(keys.num_tables) << 1
                                : static_cast<uint32_t>(t) << 1 | (row != 0 ? 1u : 0u);
      }
    }
    for (unsigned left = warp.ballot(t >= 0); left != 0;) {
      const int leader = lowest_bit(left);
      const int32_t of = warp.shuffle(t, leader);
      const bool is_same = t == of;
      const unsigned same = warp.ballot(is_same), missed = warp.ballot(is_same && row == 0);
      if (warp.lane == leader) {
        Counter* counters = keys.counters + t * kNumKeyCounters;
        atomicAdd(counters + kLookups, static_cast<Counter>(popcount32(same)));
        if (missed != 0) atomicAdd(counters + kMissed, static_cast<Counter>(popcount32(missed)));
      }
      left &= ~same;
    }
  }
}

// ---- keys that a rank has seen -------------------------------------------------------------------

__global__ void __launch_bounds__(256) add_kernel(ListedIds x, int64_t first, SeenKeys seen) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < x.num_ids;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const uint64_t hash = x.hashes[i];
    seen.hashes[first + i] = hash;
    seen.where[first + i] = x.where[i];
    seen.pairs.keys.set(first + i, static_cast<int64_t>(hash));
    seen.pairs.payloads[first + i] = static_cast<uint32_t>(first + i);
  }
}

// Replaces hashes, of which the runs are known, by the table and the number of the run.
__global__ void __launch_bounds__(256) number_kernel(SeenKeys seen) {
  const int64_t num_runs = *seen.pairs.num_runs;
  for (int64_t p = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; p < seen.num_ids;
       p += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t run =
        last_at_most(seen.pairs.run_begin, num_runs, static_cast<uint32_t>(p));
    const int64_t table = seen.where[seen.pairs.payloads[p]] >> 1;
    seen.pairs.keys.set(p, table << 32 | run);
  }
}

// First key of every table and owner, and the end of the last one's. One warp for each.
__global__ void __launch_bounds__(256)
    key_segments_kernel(View view, KeyView keys, SeenKeys seen, uint32_t* refused) {
  const Group<32> warp;
  const int64_t W = keys.world_size, k = warp.index();
  if (k > keys.num_tables * W) return;
  const uint32_t t = static_cast<uint32_t>(k / W);
  const auto is_below = [&](int64_t run) {
    const uint32_t id = seen.pairs.payloads[seen.pairs.run_begin[run]], of = seen.where[id] >> 1;
    if (of != t || k == keys.num_tables * W) return of < t;
    const KeyTable& table = keys.tables[t];
    return bucket_of_hash(seen.hashes[id], table.num_buckets) < table.first_bucket[k % W];
  };
  const int64_t run = lower_bound(warp, *seen.pairs.num_runs, 1,
                                  [&](int64_t r) { return is_below(r) ? 0 : 1; });
  if (warp.lane != 0) return;
  keys.lists[keys.rank].begin[k] = static_cast<uint32_t>(run);
  if (k < keys.num_tables * W || run <= keys.capacity) return;
  report(view.error, 17, keys.rank, run);
  *refused = 1;
}

__global__ void __launch_bounds__(256)
    leave_kernel(KeyView keys, SeenKeys seen, bool found_varies) {
  const KeyLists& own = keys.lists[keys.rank];
  const int64_t num_runs = *seen.pairs.num_runs, num_keys = own.begin[keys.num_tables * keys.world_size];
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       r < num_keys && r < keys.capacity; r += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t begin = seen.pairs.run_begin[r];
    const int64_t end = r + 1 < num_runs ? seen.pairs.run_begin[r + 1] : seen.num_ids;
    bool found = false;
    for (int64_t p = begin; p < (found_varies ? end : begin + 1) && !found; ++p)
      found = (seen.where[seen.pairs.payloads[p]] & 1) != 0;
    own.hashes[r] = seen.hashes[seen.pairs.payloads[begin]];
    own.counts[r] = static_cast<uint32_t>(end - begin) | (found ? kFound : 0u);
  }
}

// ---- at the owner --------------------------------------------------------------------------------

// The arguments of a table's optimizer are those of no optimizer while the table is frozen.
OPER_DEVICE bool is_frozen(const View& view, const UpdateArgs* optimizers, const KeyTable& table) {
  for (int32_t f = 0; f < view.num_features; ++f)
    if (view.features[f].logical == table.rows.feature)
      return optimizers[view.features[f].table].optimizer.kind == Optimizer::kNone;
  return false;
}

// One block: begins an update unless a rank has refused its batch; then no rank has left any keys.
__global__ void __launch_bounds__(256)
    begin_update_kernel(View view, KeyView keys, KeyInbox inbox, const UpdateArgs* optimizers,
                        const uint32_t* refused) {
  const int64_t W = keys.world_size, T = keys.num_tables;
  const bool skips = refused != nullptr ? *refused != 0 : is_refused(view);
  block_sums(
      T * W,
      [&](int64_t k) {
        const uint32_t* begin = keys.lists[k % W].begin + k / W * W + keys.rank;
        const bool skipped = skips || is_frozen(view, optimizers, keys.tables[k / W]);
        return skipped ? 0 : static_cast<int64_t>(begin[1]) - begin[0];
      },
      [&](int64_t k, int64_t before) { inbox.begin[k] = before; });
  for (int64_t t = threadIdx.x; t < T; t += 256) {
    keys.lists[keys.rank].num_given[t] = 0;
    if (!skips && !is_frozen(view, optimizers, keys.tables[t])) ++keys.clocks[t];
  }
}

// Calls body(index in the inbox, table * W + source, index in the source's lists) for all keys.
template <class Body>
OPER_DEVICE void for_keys(const KeyView& keys, const KeyInbox& inbox, Body body) {
  const int64_t parts = static_cast<int64_t>(keys.num_tables) * keys.world_size;
  for (int64_t e = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       e < inbox.begin[parts]; e += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t part = last_at_most(inbox.begin, parts, e);
    const KeyLists& from = keys.lists[part % keys.world_size];
    const int64_t first = from.begin[part / keys.world_size * keys.world_size + keys.rank];
    body(e, part, first + e - inbox.begin[part]);
  }
}

__global__ void __launch_bounds__(256) receive_kernel(KeyView keys, KeyInbox inbox) {
  for_keys(keys, inbox, [&](int64_t e, int64_t part, int64_t i) {
    const KeyLists& from = keys.lists[part % keys.world_size];
    inbox.received[e] = from.hashes[i];
    inbox.counts[e] = from.counts[i];
  });
}

// Merges the sources' lists: a key's place is the number of keys before it in all of them.
__global__ void __launch_bounds__(256) merge_keys_kernel(KeyView keys, KeyInbox inbox) {
  const int64_t W = keys.world_size;
  for_keys(keys, inbox, [&](int64_t e, int64_t part, int64_t i) {
    const KeyLists& own = keys.lists[keys.rank];
    const uint64_t hash = W == 1 ? own.hashes[i] : inbox.received[e];
    const uint32_t count = W == 1 ? own.counts[i] : inbox.counts[e];
    uint64_t total = count & ~kFound, known = count & kFound;
    bool is_first = true;
    const int64_t of_table = part / W * W;
    int64_t place = e - inbox.begin[part] + inbox.begin[of_table];
    for (int64_t other = of_table; other < of_table + W; ++other) {
      if (other == part) continue;
      const uint64_t* hashes = inbox.received + inbox.begin[other];
      const int64_t n = inbox.begin[other + 1] - inbox.begin[other];
      const int64_t at = last_that(-1, n, [&](int64_t k) { return hashes[k] < hash; }) + 1;
      place += at;
      if (at == n || hashes[at] != hash) continue;
      const uint32_t more = inbox.counts[inbox.begin[other] + at];
      total += more & ~kFound;
      known |= more & kFound;
      is_first &= other > part;
      place += other < part;
    }
    inbox.hashes[place] = hash;
    inbox.totals[place] = is_first ? total | (known != 0 ? kKnown : 0) : 0;
  });
}

// Of values of the lanes, the one with the lowest score, and of these with the lowest number.
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

// A bucket in the registers of a warp: lane l has the slots l and l + 32, and candidate l. Changes are
// written to memory at once.
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
  // Of the slots: whose keys have lost them, and that have been given to other keys.
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
  // A bit for each slot.
  template <class Holds>
  OPER_DEVICE uint64_t slots_where(Holds holds) const {
    uint64_t found = 0;
#pragma unroll
    for (int k = 0; k < kSlotsOfLane; ++k)
      found |= static_cast<uint64_t>(warp.ballot(holds(k))) << 32 * k;
    return found;
  }
  OPER_DEVICE void set_age(int k, KeyAge age) { at.ages[slot(k)] = ages[k] = age; }
  // Concurrent lookups without gradients may read the hash; they get the old or the new one.
  OPER_DEVICE void set_key(int k, uint8_t tag, uint64_t hash) {
    at.hash(slot(k)) = hashes[k] = hash;
    at.tags[slot(k)] = tags[k] = tag;
  }

  // Counts a key, and returns with which count it is to get a row; 0 = it has one, or gets none.
  OPER_DEVICE uint64_t count(uint64_t hash, uint64_t occurrences, bool is_known) {
    const uint64_t held = slots_where(
        [&](int k) { return tags[k] == tag_of(hash) && hashes[k] == hash; });
    if (held != 0) {
      const int place = lowest_bit(held), k = place / 32;
      bool is_live = false;
      if (place == slot(k)) {
        // The key may have got its row in an update after the lookup that missed it.
        is_live = is_known || !table.rules.is_expired(ages[k].clock, clock - 1);
        if (is_live) {
          set_age(k, table.rules.seen(ages[k], occurrences, clock));
        } else {
          set_key(k, 0, free_hash(place));
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

  // A slot for a new key: a free one, an expired one, or that of the key to be evicted; -1 if all keys
  // of the bucket have been seen in this update.
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
      const int count = popcount32(static_cast<uint32_t>(before)) +
                        popcount32(static_cast<uint32_t>(before >> 32));
      if (count < at.num_slots / kNearShare) return static_cast<int>(near.number);
    }
    const Scored first = first_where([](int) { return true; });
    return first.score == kNeverEvicted ? -1 : static_cast<int>(first.number);
  }

  // Gives a new key a row, unless all keys of the bucket have been seen in this update.
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

  // Lists the slots whose keys have changed. `first`: the number of the bucket's first slot.
  OPER_DEVICE void list_changes(uint32_t* num_given, uint32_t* list, uint32_t first) const {
    const uint64_t changed = lost | given;
    if (changed == 0) return;
    const auto num_in = [](uint64_t bits) {
      return static_cast<uint32_t>(popcount32(static_cast<uint32_t>(bits)) +
                                   popcount32(static_cast<uint32_t>(bits >> 32)));
    };
    uint32_t begin = 0;
    if (warp.lane == 0) begin = atomicAdd(num_given, num_in(changed));
    begin = warp.shuffle(begin, 0);
#pragma unroll
    for (int k = 0; k < kSlotsOfLane; ++k) {
      const uint64_t bit = uint64_t{1} << slot(k);
      if ((changed & bit) == 0) continue;
      list[begin + num_in(changed & (bit - 1))] =
          (first + static_cast<uint32_t>(slot(k))) | ((given & bit) != 0 ? 0 : kEmptied);
    }
  }
};

// Updates the bucket of key `begin` of the inbox, which is its first one.
OPER_DEVICE void update_bucket(const Group<32>& warp, const KeyView& keys, const KeyInbox& inbox,
                               int32_t t, int64_t begin) {
  const KeyTable& table = keys.tables[t];
  const int64_t end_of_table = inbox.begin[(t + 1) * keys.world_size];
  const int64_t number = bucket_of_hash(inbox.hashes[begin], table.num_buckets);
  WarpBucket bucket(warp, table, table.parts[keys.rank].bucket(number, table.slots),
                    keys.clocks[t]);
  int64_t end = begin, num_fresh = 0;
  for (int num = 32; num == 32; end += num) {
    const int64_t j = end + warp.lane;
    const uint64_t hash = j < end_of_table ? inbox.hashes[j] : 0;
    const bool is_here =
        j < end_of_table && bucket_of_hash(hash, table.num_buckets) == number;
    const uint64_t total = is_here ? inbox.totals[j] : 0;
    num = popcount32(warp.ballot(is_here));
    uint64_t own = 0;  // count with which the lane's key gets a row
    for (int k = 0; k < num; ++k) {
      const uint64_t seen = warp.shuffle(total, k);
      if (seen == 0) continue;
      const uint64_t fresh =
          bucket.count(warp.shuffle(hash, k), seen & ~kKnown, (seen & kKnown) != 0);
      num_fresh += fresh != 0;
      if (warp.lane == k) own = fresh;
    }
    if (is_here) inbox.totals[j] = own;
  }
  // By descending count, then by hash. Scores are of descending counts: no count is 0 here.
  Scored last{0, 0};
  for (int64_t admitted = 0; admitted < num_fresh; ++admitted) {
    Scored next{~uint64_t{0}, ~uint64_t{0}};
    for (int64_t j = begin + warp.lane; j < end; j += 32) {
      const Scored one{~inbox.totals[j], inbox.hashes[j]};
      if (one.score != ~uint64_t{0} && (admitted == 0 || last.is_before(one)) &&
          one.is_before(next))
        next = one;
    }
    last = next = first_of(warp, next);
    if (bucket.admit(next.number, ~next.score)) continue;
    // Nor do those that follow.
    bucket.events[kRefused] = static_cast<uint32_t>(num_fresh - admitted);
    break;
  }
  const KeyLists& own = keys.lists[keys.rank];
  bucket.list_changes(own.num_given + t, own.given[t],
                      static_cast<uint32_t>((number - table.first_bucket[keys.rank]) * kBucketSlots));
  if (warp.lane != 0) return;
#pragma unroll
  for (int k = 0; k < kLookups; ++k)
    if (bucket.events[k] != 0)
      atomicAdd(keys.counters + t * kNumKeyCounters + k, static_cast<Counter>(bucket.events[k]));
}

// A warp takes the buckets that begin within a tile of 32 keys.
__global__ void __launch_bounds__(256) update_buckets_kernel(KeyView keys, KeyInbox inbox) {
  const Group<32> warp;
  const int64_t W = keys.world_size, num_keys = inbox.begin[keys.num_tables * W];
  for (int64_t tile = warp.index() * 32; tile < num_keys; tile += warp.count() * 32) {
    const int64_t j = tile + warp.lane;
    int32_t t = 0;
    bool begins = false;
    if (j < num_keys) {
      t = static_cast<int32_t>(
          last_that(0, keys.num_tables, [&](int64_t k) { return inbox.begin[k * W] <= j; }));
      const int64_t num_buckets = keys.tables[t].num_buckets;
      begins = j == inbox.begin[t * W] || bucket_of_hash(inbox.hashes[j], num_buckets) !=
                                              bucket_of_hash(inbox.hashes[j - 1], num_buckets);
    }
    for (unsigned left = warp.ballot(begins); left != 0; left &= left - 1) {
      const int first = lowest_bit(left);
      update_bucket(warp, keys, inbox, warp.shuffle(t, first), tile + first);
    }
  }
}

// ---- new rows ------------------------------------------------------------------------------------

OPER_DEVICE void store(char* row, RowType type, int64_t column, float value) {
  switch (type) {
    case RowType::kFloat16:
      reinterpret_cast<Float16*>(row)[column] = nearest(Float16{}, value);
      return;
    case RowType::kBFloat16:
      reinterpret_cast<BFloat16*>(row)[column] = nearest(BFloat16{}, value);
      return;
    default: reinterpret_cast<float*>(row)[column] = value;
  }
}

OPER_DEVICE void begin_row(const Group<32>& warp, const Table& table, const RowRules& rules,
                           int64_t key, char* row) {
  const int64_t first = table.piece_start, end = first + table.dim;
  for (int64_t block = first / 4 + warp.lane; 4 * block < end; block += 32) {
    const FirstColumns four = first_columns(key, rules.seed, static_cast<uint32_t>(block), rules.bound);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      if (const int64_t column = 4 * block + k; first <= column && column < end)
        store(row, table.type, column - first, four.at[k]);
  }
}

OPER_DEVICE void begin_state(const Group<32>& warp, float* state, StateWidth width, int64_t slot,
                             int64_t dim, float value) {
  if (width == StateWidth::kNone) return;
  const int64_t columns = width == StateWidth::kPerRow ? 1 : dim;
  for (int64_t c = warp.lane; c < columns; c += 32) state[slot * columns + c] = value;
}

// Initialises one row in all column pieces, where this rank holds them.
OPER_DEVICE void begin_pieces(const Group<32>& warp, const View& view, const RowRules& rules,
                              int64_t row, int64_t key) {
  for (int32_t f = 0; f < view.num_features; ++f) {
    if (view.features[f].logical != rules.feature) continue;
    const int32_t index = view.features[f].table;
    const Table& table = view.tables[index];
    const int64_t home = locate(table.home, row);
    const int64_t owner = last_at_most(table.owner_begin, view.world_size, home);
    const int64_t slot = home - table.owner_begin[owner], row_bytes = bytes_of_row(table.type, table.dim);
    if (owner == view.rank) {
      begin_row(warp, table, rules, key, table.rows + slot * row_bytes);
      begin_state(warp, table.momentum1, rules.widths[0], slot, table.dim, rules.first_state);
      begin_state(warp, table.momentum2, rules.widths[1], slot, table.dim, 0.0f);
    }
    for (int32_t k = 0; k < view.num_refreshes; ++k) {
      const Refresh& part = view.refreshes[k];
      if (part.table == index && part.replicas != nullptr && part.owner == owner &&
          part.slot_begin <= slot && slot < part.slot_end)
        begin_row(warp, table, rules, key,
                  part.replicas + (part.first + (slot - part.slot_begin) * part.stride) * row_bytes);
    }
  }
}

// A warp initialises a row.
__global__ void __launch_bounds__(256) begin_rows_kernel(View view, KeyView keys) {
  const Group<32> warp;
  const int64_t W = keys.world_size;
  for (int64_t part = 0; part < keys.num_tables * W; ++part) {
    const KeyTable& table = keys.tables[part / W];
    const int64_t source = (part + view.rank) % W;  // so that no peer serves all ranks at once
    const KeyLists& from = keys.lists[source];
    const int64_t count = from.num_given[part / W];
    for (int64_t i = warp.index(); i < count; i += warp.count()) {
      const uint32_t place = from.given[part / W][i];
      if ((place & kEmptied) != 0) continue;
      const int64_t number = table.first_bucket[source] + place / kBucketSlots;
      const int64_t slot = place % kBucketSlots;
      const KeyBucket bucket = table.parts[source].bucket(number, table.slots);
      begin_pieces(warp, view, table.rows, bucket.first_slot + slot + 1,
                   key_of_hash(bucket.hash(slot), table.rules.seed));
    }
  }
}

}  // namespace

void find_keys(const KeyView& keys, const KeyLookup& lookup, int64_t* rows, const ListedIds& listed,
               cudaStream_t stream) {
  OPER_LAUNCH(find_kernel, blocks_for(lookup.num_ids, 256), 256, stream, keys, lookup, rows, listed);
}

void add_keys(const ListedIds& lookup, int64_t first, const SeenKeys& seen, cudaStream_t stream) {
  OPER_LAUNCH(add_kernel, blocks_for(lookup.num_ids, 256), 256, stream, lookup, first, seen);
}

void leave_keys(const View& view, const KeyView& keys, SeenKeys& seen, bool found_varies,
                bool is_mixed, uint32_t* refused, cudaStream_t stream) {
  sort_into_runs(seen.pairs, seen.num_ids, 0, 64, stream);
  if (is_mixed && seen.num_ids > 0) {
    OPER_LAUNCH(number_kernel, blocks_for(seen.num_ids, 256), 256, stream, seen);
    sort_into_runs(seen.pairs, seen.num_ids, 32,
                   32 + bits_for(static_cast<uint64_t>(keys.num_tables) + 1), stream);
  }
  const int64_t segments = static_cast<int64_t>(keys.num_tables) * keys.world_size + 1;
  OPER_LAUNCH(key_segments_kernel, static_cast<int>((segments + 7) / 8), 256, stream, view, keys,
              seen, refused);
  OPER_LAUNCH(leave_kernel, blocks_for(seen.num_ids, 256), 256, stream, keys, seen, found_varies);
}

void update_keys(const Launch& on, const KeyView& keys, const KeyInbox& inbox,
                 const uint32_t* refused) {
  const int64_t most = keys.world_size * keys.capacity;
  OPER_LAUNCH(begin_update_kernel, 1, 256, on.stream, on.view, keys, inbox, on.optimizers, refused);
  if (keys.world_size > 1)
    OPER_LAUNCH(receive_kernel, blocks_for(most, 256), 256, on.stream, keys, inbox);
  OPER_LAUNCH(merge_keys_kernel, blocks_for(most, 256), 256, on.stream, keys, inbox);
  OPER_LAUNCH(update_buckets_kernel, blocks_for(most, 256), 256, on.stream, keys, inbox);
}

void begin_rows(const Launch& on, const KeyView& keys) {
  OPER_LAUNCH(begin_rows_kernel, blocks_for(keys.capacity, 8), 256, on.stream, on.view, keys);
}

}  // namespace oper::device
