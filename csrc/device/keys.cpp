#include "device/keys.h"

#include <algorithm>
#include <utility>

namespace oper::device {

KeyTables::Layout KeyTables::layout(const std::vector<KeyTableRules>& rules, int64_t world_size,
                                    int64_t rank, int64_t seen_bytes) {
  const auto up = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  const int64_t T = static_cast<int64_t>(rules.size()), capacity = seen_bytes / kSeenKeyBytes;
  Layout found{};
  found.directories = directory_offsets(rules, world_size, rank);
  found.seen = found.directories.back();
  for (const KeyTableRules& r : rules) {
    const Shares ranks(buckets_for(r.num_slots), world_size);
    found.first_bucket.push_back(ranks.begin(rank));
    found.end_bucket.push_back(ranks.begin(rank + 1));
    found.changed.push_back(found.seen);
    found.seen += up(static_cast<int64_t>(sizeof(ChangedBucket)) *
                     (found.end_bucket.back() - found.first_bucket.back()));
  }
  found.hashes = found.seen + up(4 * (T * world_size + 1));
  found.counts = found.hashes + up(8 * capacity);
  found.num_changed = found.counts + up(4 * capacity);
  found.end = found.num_changed + up(4 * T);
  return found;
}

std::vector<int64_t> KeyTables::num_bytes(const std::vector<KeyTableRules>& rules,
                                          int64_t world_size, int64_t rank, int64_t seen_bytes) {
  const Layout found = layout(rules, world_size, rank, seen_bytes);
  return {found.directories.back(), found.seen, found.end};
}

KeyTables::KeyTables(const std::vector<int64_t>& arenas, int32_t rank, int64_t seen_bytes,
                     const std::vector<KeyTableRules>& of, std::vector<int64_t> table_of,
                     cudaStream_t stream)
    : rules(of), table_of_(std::move(table_of)) {
  const int64_t W = static_cast<int64_t>(arenas.size()), T = static_cast<int64_t>(rules.size());
  std::vector<std::vector<DirectoryPart>> parts(rules.size());
  std::vector<std::vector<int64_t>> first(rules.size());
  for (int64_t r = 0; r < W; ++r) {
    const Layout at = layout(rules, W, r, seen_bytes);
    char* const arena = reinterpret_cast<char*>(arenas[r]);
    std::vector<ChangedBucket*> changed;
    for (int64_t t = 0; t < T; ++t) {
      first[t].push_back(at.first_bucket[t]);
      parts[t].push_back(DirectoryPart::at(arena + at.directories[t], at.first_bucket[t],
                                           at.end_bucket[t]));
      changed.push_back(reinterpret_cast<ChangedBucket*>(arena + at.changed[t]));
    }
    lists.push_back({reinterpret_cast<uint32_t*>(arena + at.seen),
                     reinterpret_cast<uint64_t*>(arena + at.hashes),
                     reinterpret_cast<uint32_t*>(arena + at.counts),
                     reinterpret_cast<uint32_t*>(arena + at.num_changed),
                     memory_.copy(changed)});
    if (r != rank) continue;
    // As KeyDirectory::begin on the host: hashes of free slots.
    std::vector<uint64_t> free(static_cast<size_t>(kBucketSlots));
    for (int64_t slot = 0; slot < kBucketSlots; ++slot) free[hash_index(slot)] = free_hash(slot);
    const char* what = "cannot initialise a directory of keys";
    for (int64_t t = 0; t < T; ++t) {
      own.push_back({arena + at.directories[t], at.first_bucket[t], at.end_bucket[t]});
      const int64_t buckets = own.back().end - own.back().first;
      if (buckets == 0) continue;
      std::vector<char> bucket(static_cast<size_t>(kBucketBytes));
      std::copy_n(reinterpret_cast<const char*>(free.data()), 8 * kBucketSlots,
                  bucket.data() + kHashesAt);
      // Copies one empty bucket to the first place, then doubles the number of copies each time.
      char* const to = own.back().memory;
      check(cudaMemcpyAsync(to, bucket.data(), bucket.size(), cudaMemcpyHostToDevice, stream), what);
      for (int64_t done = 1; done < buckets; done *= 2)
        check(cudaMemcpyAsync(to + done * kBucketBytes, to,
                              static_cast<size_t>(std::min(done, buckets - done) * kBucketBytes),
                              cudaMemcpyDeviceToDevice, stream),
              what);
    }
  }
  std::vector<KeyTable> tables;
  for (int64_t t = 0; t < T; ++t) {
    const int64_t num_buckets = buckets_for(rules[t].num_slots);
    first[t].push_back(num_buckets);
    tables.push_back({rules[t].keys, rules[t].rows, num_buckets,
                      Shares(rules[t].num_slots, num_buckets), memory_.copy(first[t]),
                      memory_.copy(parts[t])});
  }
  view.tables = memory_.copy(tables);
  view.lists = memory_.copy(lists);
  view.clocks = memory_.take<uint32_t>(T);
  view.counters = memory_.take<Counter>(T * kNumKeyCounters);
  view.capacity = seen_bytes / kSeenKeyBytes;
  view.num_tables = static_cast<int32_t>(T);
  view.rank = rank;
  view.world_size = static_cast<int32_t>(W);
  is_mixed = T > 1;
}

const int32_t* KeyTables::table_of_keys(const int64_t* key_of, int64_t num_features,
                                        int64_t num_keys) {
  const std::vector<int64_t> wanted(key_of, key_of + num_features);
  const std::lock_guard<std::mutex> lock(lock_);
  for (const Known& known : known_)
    if (known.num_keys == num_keys && known.key_of == wanted) return known.tables;
  std::vector<int32_t> tables(static_cast<size_t>(num_keys), -1);
  for (size_t f = 0; f < wanted.size(); ++f)
    if (table_of_[f] >= 0) tables[wanted[f]] = static_cast<int32_t>(table_of_[f]);
  if (std::ranges::count(tables, -1) > 0) is_mixed = true;
  known_.push_back({wanted, num_keys, memory_.copy(tables)});
  return known_.back().tables;
}

SeenKeys lay_out_seen(int64_t num_ids, void* block) {
  BumpAllocator memory(block);
  SeenKeys seen{};
  const int64_t n = std::max<int64_t>(num_ids, 1);
  for (Keys* keys : {&seen.pairs.keys, &seen.pairs.spare_keys}) *keys = {memory.take<char>(8 * n), true};
  seen.pairs.payloads = memory.take<uint32_t>(n);
  seen.pairs.spare_payloads = memory.take<uint32_t>(n);
  seen.pairs.run_begin = memory.take<uint32_t>(n + 1);
  seen.pairs.num_runs = memory.take<int64_t>(1);
  seen.pairs.sort_scratch_bytes = sort_scratch_bytes(n);
  seen.pairs.sort_scratch = memory.take<char>(seen.pairs.sort_scratch_bytes);
  seen.hashes = memory.take<uint64_t>(n);
  seen.where = memory.take<uint32_t>(n);
  seen.num_ids = num_ids;
  seen.bytes = memory.used();
  return seen;
}

ReceivedKeys lay_out_received_keys(const KeyView& keys, void* block) {
  BumpAllocator memory(block);
  ReceivedKeys received{};
  const int64_t W = keys.world_size, most = W * keys.capacity;
  received.begin = memory.take<int64_t>(keys.num_tables * W + 1);
  if (W > 1) {  // otherwise the keys are merged from this rank's own list
    received.unmerged = memory.take<uint64_t>(most);
    received.counts = memory.take<uint32_t>(most);
  }
  received.hashes = memory.take<uint64_t>(most);
  received.totals = memory.take<uint64_t>(most);
  received.bytes = memory.used();
  return received;
}

}  // namespace oper::device
