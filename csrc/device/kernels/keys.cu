// Directories of dynamic tables: finds the rows of keys, and lists a batch's keys for the owners of
// their buckets.
#include "device/batch.cuh"
#include "device/keys.h"

namespace oper::device {
namespace {

OPER_DEVICE int64_t owner_of(const KeyView& keys, const KeyTable& table, int64_t bucket) {
  return last_at_most(table.first_bucket, keys.world_size, bucket);
}

// ---- lookups -------------------------------------------------------------------------------------

constexpr int kSearchLanes = 8;  // lanes that search for a key; a line has a hash for each

// The slot in its bucket of the key that each group of kSearchLanes looks for, or -1. All groups of
// the warp call it together; `is_there`: whether the group has a key.
OPER_DEVICE int64_t search(const Group<32>& warp, bool is_there, const KeyBucket& bucket,
                           uint64_t hash) {
  const int sub = warp.lane % kSearchLanes, first = warp.lane / kSearchLanes * kSearchLanes;
  const auto of_group = [&](bool holds) { return warp.ballot(holds) >> first & 0xffu; };
  const int64_t line = home_line(hash);
  const unsigned home =
      of_group(is_there && bucket.hashes[line * kLineSlots + sub] == hash);
  const bool is_left = is_there && home == 0;
  if (warp.ballot(is_left) == 0) return home != 0 ? slot_of(line, lowest_bit(home)) : -1;
  int found = -1;  // slot, among the eight whose tags this lane compares
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

// A warp takes 32 ids at a time; each of its groups searches for the keys of its lanes, one after
// the other.
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
  for (int64_t i = thread_index(); i < x.num_ids; i += num_threads()) {
    const uint64_t hash = x.hashes[i];
    seen.hashes[first + i] = hash;
    seen.where[first + i] = x.where[i];
    seen.pairs.keys.set(first + i, static_cast<int64_t>(hash));
    seen.pairs.payloads[first + i] = static_cast<uint32_t>(first + i);
  }
}

// Replaces hashes, which have been sorted into runs, by (table, number of the run), to sort them by
// table.
__global__ void __launch_bounds__(256) number_kernel(SeenKeys seen) {
  const int64_t num_runs = *seen.pairs.num_runs;
  for (int64_t p = thread_index(); p < seen.num_ids; p += num_threads()) {
    const int64_t run =
        last_at_most(seen.pairs.run_begin, num_runs, static_cast<uint32_t>(p));
    const int64_t table = seen.where[seen.pairs.payloads[p]] >> 1;
    seen.pairs.keys.set(p, table << 32 | run);
  }
}

// One warp for each number: the first key of every table and owner, and their end. Refuses the
// batch if the keys do not fit.
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

// Writes the keys of this rank's batch to its arena.
__global__ void __launch_bounds__(256)
    leave_kernel(KeyView keys, SeenKeys seen, bool found_varies) {
  const KeyLists& own = keys.lists[keys.rank];
  const int64_t num_runs = *seen.pairs.num_runs, num_keys = own.begin[keys.num_tables * keys.world_size];
  for (int64_t r = thread_index(); r < num_keys && r < keys.capacity; r += num_threads()) {
    const int64_t begin = seen.pairs.run_begin[r];
    const int64_t end = r + 1 < num_runs ? seen.pairs.run_begin[r + 1] : seen.num_ids;
    bool found = false;
    for (int64_t p = begin; p < (found_varies ? end : begin + 1) && !found; ++p)
      found = (seen.where[seen.pairs.payloads[p]] & 1) != 0;
    own.hashes[r] = seen.hashes[seen.pairs.payloads[begin]];
    own.counts[r] = static_cast<uint32_t>(end - begin) | (found ? kFound : 0u);
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

}  // namespace oper::device
