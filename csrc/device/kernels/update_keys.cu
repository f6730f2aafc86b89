// At the owner of buckets: decides which keys get and lose rows. Then, on all ranks: initialises
// new rows.
//
// One warp updates a bucket, key by key in the order of hashes, when the keys of all ranks have
// been merged. The changes in a bucket depend only on these keys and their counts.
#include "device/batch.cuh"
#include "device/bucket.cuh"
#include "device/keys.h"

namespace oper::device {
namespace {

// Whether a table is frozen: then its optimizer's arguments are those of no optimizer.
OPER_DEVICE bool is_frozen(const View& view, const UpdateArgs* optimizers, const KeyTable& table) {
  const Feature& piece = view.features[view.first_piece[table.rows.feature]];
  return optimizers[piece.table].optimizer.kind == Optimizer::kNone;
}

// One block begins the update: writes the bounds of the received keys, and advances clocks. If a
// rank has refused its batch, there are no received keys, and clocks stay.
__global__ void __launch_bounds__(256)
    begin_update_kernel(View view, KeyView keys, ReceivedKeys received,
                        const UpdateArgs* optimizers, const uint32_t* refused) {
  const int64_t W = keys.world_size, T = keys.num_tables;
  const bool skips = refused != nullptr ? *refused != 0 : is_refused(view);
  block_sums(
      T * W,
      [&](int64_t k) {
        const uint32_t* begin = keys.lists[k % W].begin + k / W * W + keys.rank;
        const bool skipped = skips || is_frozen(view, optimizers, keys.tables[k / W]);
        return skipped ? 0 : static_cast<int64_t>(begin[1]) - begin[0];
      },
      [&](int64_t k, int64_t before) { received.begin[k] = before; });
  for (int64_t t = threadIdx.x; t < T; t += 256) {
    keys.lists[keys.rank].num_changed[t] = 0;
    if (!skips && !is_frozen(view, optimizers, keys.tables[t])) ++keys.clocks[t];
  }
}

// Calls body(index among the received keys, table * W + source, index in the source's lists) for
// all keys.
template <class Body>
OPER_DEVICE void for_keys(const KeyView& keys, const ReceivedKeys& received, Body body) {
  const int32_t W = keys.world_size, parts = keys.num_tables * W;
  for (int64_t e = thread_index(); e < received.begin[parts]; e += num_threads()) {
    const int32_t part = static_cast<int32_t>(last_at_most(received.begin, parts, e));
    const int64_t first = keys.lists[part % W].begin[part / W * W + keys.rank];
    body(e, part, first + e - received.begin[part]);
  }
}

__global__ void __launch_bounds__(256) receive_kernel(KeyView keys, ReceivedKeys received) {
  for_keys(keys, received, [&](int64_t e, int32_t part, int64_t i) {
    const KeyLists& from = keys.lists[part % keys.world_size];
    received.unmerged[e] = from.hashes[i];
    received.counts[e] = from.counts[i];
  });
}

// Merges the sources' lists: a key's place is the number of keys before it in all of them.
__global__ void __launch_bounds__(256) merge_keys_kernel(KeyView keys, ReceivedKeys received) {
  const int32_t W = keys.world_size;
  for_keys(keys, received, [&](int64_t e, int32_t part, int64_t i) {
    const KeyLists& own = keys.lists[keys.rank];
    const uint64_t hash = W == 1 ? own.hashes[i] : received.unmerged[e];
    const uint32_t count = W == 1 ? own.counts[i] : received.counts[e];
    uint64_t total = count & ~kFound, known = count & kFound;
    bool is_first = true;
    const int32_t of_table = part / W * W;
    int64_t place = e - received.begin[part] + received.begin[of_table];
    for (int32_t other = of_table; other < of_table + W; ++other) {
      if (other == part) continue;
      const uint64_t* hashes = received.unmerged + received.begin[other];
      const int64_t n = received.begin[other + 1] - received.begin[other];
      const int64_t at = last_that(-1, n, [&](int64_t k) { return hashes[k] < hash; }) + 1;
      place += at;
      if (at == n || hashes[at] != hash) continue;
      const uint32_t more = received.counts[received.begin[other] + at];
      total += more & ~kFound;
      known |= more & kFound;
      is_first &= other > part;
      place += other < part;
    }
    received.hashes[place] = hash;
    received.totals[place] = is_first ? total | (known != 0 ? kKnown : 0) : 0;
  });
}

// Updates the bucket whose first received key is key `begin`.
OPER_DEVICE void update_bucket(const Group<32>& warp, const KeyView& keys,
                               const ReceivedKeys& received, int32_t t, int64_t begin) {
  const KeyTable& table = keys.tables[t];
  const int64_t end_of_table = received.begin[(t + 1) * keys.world_size];
  const int64_t number = bucket_of_hash(received.hashes[begin], table.num_buckets);
  WarpBucket bucket(warp, table, table.parts[keys.rank].bucket(number, table.slots),
                    keys.clocks[t]);
  int64_t end = begin, num_fresh = 0;
  for (int num = 32; num == 32; end += num) {
    const int64_t j = end + warp.lane;
    const uint64_t hash = j < end_of_table ? received.hashes[j] : 0;
    const bool is_here =
        j < end_of_table && bucket_of_hash(hash, table.num_buckets) == number;
    const uint64_t total = is_here ? received.totals[j] : 0;
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
    if (is_here) received.totals[j] = own;
  }
  // Admits keys by descending count, then by hash. The score is the complement of the count, which
  // is not 0.
  Scored last{0, 0};
  for (int64_t admitted = 0; admitted < num_fresh; ++admitted) {
    Scored next{~uint64_t{0}, ~uint64_t{0}};
    for (int64_t j = begin + warp.lane; j < end; j += 32) {
      const Scored one{~received.totals[j], received.hashes[j]};
      if (one.score != ~uint64_t{0} && (admitted == 0 || last.is_before(one)) &&
          one.is_before(next))
        next = one;
    }
    last = next = first_of(warp, next);
    if (bucket.admit(next.number, ~next.score)) continue;
    // The keys that follow do not get a slot, either.
    bucket.events[kRefused] = static_cast<uint32_t>(num_fresh - admitted);
    break;
  }
  const KeyLists& own = keys.lists[keys.rank];
  bucket.list_changes(own.num_changed + t, own.changed[t], number);
  if (warp.lane != 0) return;
#pragma unroll
  for (int k = 0; k < kLookups; ++k)
    if (bucket.events[k] != 0)
      atomicAdd(keys.counters + t * kNumKeyCounters + k, static_cast<Counter>(bucket.events[k]));
}

// A warp takes the buckets whose first keys are in a tile of 32 keys.
__global__ void __launch_bounds__(256) update_buckets_kernel(KeyView keys, ReceivedKeys received) {
  const Group<32> warp;
  const int64_t W = keys.world_size, num_keys = received.begin[keys.num_tables * W];
  for (int64_t tile = warp.index() * 32; tile < num_keys; tile += warp.count() * 32) {
    const int64_t j = tile + warp.lane;
    int32_t t = 0;
    bool begins = false;
    if (j < num_keys) {
      t = static_cast<int32_t>(
          last_that(0, keys.num_tables, [&](int64_t k) { return received.begin[k * W] <= j; }));
      const int64_t num_buckets = keys.tables[t].num_buckets;
      begins =
          j == received.begin[t * W] || bucket_of_hash(received.hashes[j], num_buckets) !=
                                            bucket_of_hash(received.hashes[j - 1], num_buckets);
    }
    for (unsigned left = warp.ballot(begins); left != 0; left &= left - 1) {
      const int first = lowest_bit(left);
      update_bucket(warp, keys, received, warp.shuffle(t, first), tile + first);
    }
  }
}

// ---- new rows -----------------------------------------------------------------------------------

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
  const int32_t* const pieces = view.first_piece + rules.feature;
  for (int32_t f = pieces[0]; f < pieces[1]; ++f) {
    const int32_t index = view.features[f].table;
    const Table& table = view.tables[index];
    const int64_t home = locate(table.home, row);
    const int64_t owner = last_at_most(table.owner_begin, view.world_size, home);
    const int64_t slot = home - table.owner_begin[owner], row_bytes = bytes_of_row(table.type, table.dim);
    if (owner == view.rank) {
      begin_row(warp, table, rules, key, table.rows + slot * row_bytes);
      begin_state(warp, table.momentum1, rules.widths[0], slot, table.dim, rules.first_state);
      begin_state(warp, table.momentum2, rules.widths[1], slot, table.dim, 0.0f);
      if (view.changed != nullptr && warp.lane == 0) mark_changed(view, index, slot);
    }
    for (int32_t k = table.refresh_begin; k < table.refresh_end; ++k) {
      const Refresh& part = view.refreshes[k];
      if (part.replicas != nullptr && part.owner == owner && part.slot_begin <= slot &&
          slot < part.slot_end)
        begin_row(warp, table, rules, key,
                  part.replicas + (part.first + (slot - part.slot_begin) * part.stride) * row_bytes);
    }
  }
}

// A warp initialises the rows of a bucket.
__global__ void __launch_bounds__(256) begin_rows_kernel(View view, KeyView keys) {
  const Group<32> warp;
  const int32_t T = keys.num_tables, W = keys.world_size;
  for (int32_t k = 0; k < T * W; ++k) {
    const int32_t t = k % T;
    const int32_t source = (k / T + view.rank) % W;  // so that no peer serves all ranks at once
    const KeyTable& table = keys.tables[t];
    const KeyLists& from = keys.lists[source];
    const int64_t count = from.num_changed[t];
    for (int64_t i = warp.index(); i < count; i += warp.count()) {
      const ChangedBucket changed = from.changed[t][i];
      const KeyBucket bucket = table.parts[source].bucket(changed.number, table.slots);
      for (uint64_t given = changed.given; given != 0; given &= given - 1) {
        const int64_t slot = lowest_bit(given);
        begin_pieces(warp, view, table.rows, bucket.first_slot + slot + 1,
                     key_of_hash(bucket.hash(slot), table.rules.seed));
      }
    }
  }
}

}  // namespace

void update_keys(const Launch& on, const KeyView& keys, const ReceivedKeys& received,
                 const uint32_t* refused) {
  const int64_t most = keys.world_size * keys.capacity;
  OPER_LAUNCH(begin_update_kernel, 1, 256, on.stream, on.view, keys, received, on.optimizers,
              refused);
  if (keys.world_size > 1)
    OPER_LAUNCH(receive_kernel, blocks_for(most, 256), 256, on.stream, keys, received);
  OPER_LAUNCH(merge_keys_kernel, blocks_for(most, 256), 256, on.stream, keys, received);
  OPER_LAUNCH(update_buckets_kernel, blocks_for(most, 256), 256, on.stream, keys, received);
}

void begin_rows(const Launch& on, const KeyView& keys) {
  OPER_LAUNCH(begin_rows_kernel, blocks_for(keys.capacity, 8), 256, on.stream, on.view, keys);
}

}  // namespace oper::device
