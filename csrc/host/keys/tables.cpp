#include "host/keys/tables.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "host/kernels/kernels.h"
#include "host/memory.h"
#include "host/tasks.h"

namespace oper::host {

namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kTaskKeys = 4096, kTaskIds = DistinctKeys::kMost;  // that a thread takes at a time
constexpr int64_t kSmall = 4096;  // keys; fewer are not worth waking threads

}  // namespace

KeyTables::KeyTables(const std::vector<char*>& arenas, int64_t rank, int64_t seen_bytes,
                     const std::vector<KeyTableRules>& rules, std::vector<int64_t> table_of)
    : arenas_(arenas), rank_(rank), seen_bytes_(seen_bytes), table_of_(std::move(table_of)) {
  for (int64_t r = 0; r < num_ranks(); ++r)
    layouts_.push_back(layout(rules, num_ranks(), r, seen_bytes));
  for (size_t t = 0; t < rules.size(); ++t) {
    std::vector<char*> parts;
    for (size_t r = 0; r < arenas.size(); ++r)
      parts.push_back(arenas[r] + layouts_[r].directories[t]);
    KeyDirectory directory(parts, rank, rules[t].num_slots, rules[t].keys);
    std::vector<int64_t> bounds = directory.place_bounds();
    tables_.push_back({std::move(directory), rules[t].rows, std::move(bounds), 0, {}});
  }
  // By writing, since only pages that exist can become huge ones.
  std::memset(arenas_[rank], 0, static_cast<size_t>(layouts_[rank].seen));
  for (const KeyTable& table : tables_) table.directory.begin();
}

KeyTables::Layout KeyTables::layout(const std::vector<KeyTableRules>& rules, int64_t world_size,
                                    int64_t rank, int64_t seen_bytes) {
  Layout found;
  const int64_t T = static_cast<int64_t>(rules.size());
  found.directories = directory_offsets(rules, world_size, rank);
  int64_t at = found.seen = found.directories.back(), num_rows = 0;
  for (const KeyTableRules& r : rules) num_rows += r.num_slots;
  const int64_t entry = static_cast<int64_t>(sizeof(SeenTable)) + 8 * (world_size + 1);
  found.fresh = at = round_up(at + round_up(T * entry, 64) + seen_bytes, kPage);
  // Twice the rows: in one update a key may lose a row, which another one gets.
  found.end = at + 8 * (T + 1) + 2 * num_rows * static_cast<int64_t>(sizeof(NewRow));
  return found;
}

std::vector<int64_t> KeyTables::num_bytes(const std::vector<KeyTableRules>& rules,
                                          int64_t world_size, int64_t rank, int64_t seen_bytes) {
  int64_t directories = 0;
  for (const KeyTableRules& r : rules)
    directories += directory_bytes(r.num_slots, world_size, rank, r.keys.has_candidates());
  return {directories, layout(rules, world_size, rank, seen_bytes).end};
}

// ---- lookups -------------------------------------------------------------------------------------

// The dynamic table of each list of ids of the batch; -1 = none.
std::vector<int64_t> KeyTables::tables_of_keys(const KeyBatch& batch) const {
  std::vector<int64_t> found(batch.bounds.size() - 1, -1);
  for (size_t f = 0; f < table_of_.size(); ++f)
    if (table_of_[f] >= 0) found[batch.key_of[f]] = table_of_[f];
  return found;
}

bool KeyTables::has_short_rows(const KeyBatch& batch) const {
  const std::vector<int64_t> table_of_key = tables_of_keys(batch);
  for (size_t key = 0; key < table_of_key.size(); ++key) {
    if (batch.bounds[key] == batch.bounds[key + 1]) continue;
    const int64_t table = table_of_key[key];
    if (table < 0 || tables_[table].directory.num_rows() > std::numeric_limits<int32_t>::max())
      return false;
  }
  return true;
}

std::vector<KeyPart> KeyTables::find(const KeyBatch& batch, void* rows, bool is_short,
                                     PlaceCount* counts) {
  const std::vector<int64_t> table_of_key = tables_of_keys(batch);
  std::vector<KeyPart> tasks;
  for (size_t key = 0; key < table_of_key.size(); ++key)
    for (int64_t at = batch.bounds[key], end = batch.bounds[key + 1]; at < end; at += kTaskIds)
      tasks.push_back({table_of_key[key], at, std::min(end, at + kTaskIds), 0, 0, 0});
  const int64_t n = batch.bounds.back(), width = batch.ids_are_32_bit ? 4 : 8;
  const bool keeps = counts != nullptr;
  int64_t* missed = keeps ? reinterpret_cast<int64_t*>(missed_buffer_.get(8 * n)) : nullptr;
  const char* ids = static_cast<const char*>(batch.ids);
  run_all(tasks, n < kSmall, [&](KeyPart& task) {
    const char* from = ids + task.begin * width;
    const int64_t count = task.end - task.begin;
    if (task.table >= 0) {
      const KeyTable& table = tables_[task.table];
      const auto distinct = distinct_.borrow();
      const FindKeys job{from, batch.ids_are_32_bit, count, table.clock,
                         static_cast<char*>(rows) + task.begin * (is_short ? 4 : 8), is_short,
                         keeps ? missed + task.begin : nullptr};
      task.missed = kernels().find_keys(table.directory, job, *distinct);
      if (!keeps) return;
      PlaceCount* to = counts + task.begin;
      for (int64_t k = 0; k < distinct->size; ++k) {
        to[task.counted] = {distinct->places[k], distinct->counts[k]};
        task.counted += distinct->rows[k] != 0;
      }
      task.has_repeats = distinct->has_repeats;
    } else if (batch.ids_are_32_bit) {
      std::copy_n(reinterpret_cast<const int32_t*>(from), count,
                  static_cast<int64_t*>(rows) + task.begin);
    } else {
      std::copy_n(reinterpret_cast<const int64_t*>(from), count,
                  static_cast<int64_t*>(rows) + task.begin);
    }
  });
  std::erase_if(tasks, [](const KeyPart& task) { return task.table < 0; });
  missed_.clear();
  for (const KeyPart& part : tasks) {
    Counts& of_table = tables_[part.table].counts;
    of_table.lookups += part.end - part.begin;
    of_table.missed += part.missed;
    if (keeps)
      missed_.insert(missed_.end(), missed + part.begin, missed + part.begin + part.missed);
  }
  return tasks;
}

// ---- keys that a rank has seen ------------------------------------------------------------------

KeyTables::Left KeyTables::leave(const std::vector<SeenBatch>& seen, int64_t* table) {
  for (int64_t t = 0; t < num_tables(); ++t)
    if (tables_[t].clock >= kLastClock) {
      *table = t;
      return Left::kClockAtEnd;
    }
  int64_t n = 0;
  for (const SeenBatch& batch : seen)
    for (const KeyPart& part : batch.parts) n += part.counted + part.missed;
  std::atomic<int64_t> cursor{header_bytes()};
  std::atomic<bool> full{false};
  run_all(all_tables(), n < kSmall, [&](int64_t t) {
    if (!leave_table(t, seen, cursor)) full.store(true);
  });
  return full.load() ? Left::kNoRoom : Left::kAll;
}

// Lists the keys of one table. Within a part keys are distinct (unless has_repeats); counts of
// several parts are added up.
bool KeyTables::leave_table(int64_t t, const std::vector<SeenBatch>& seen,
                            std::atomic<int64_t>& cursor) {
  const KeyTable& table = tables_[t];
  std::vector<std::span<const PlaceCount>> lists;
  std::vector<int64_t> missed;
  bool has_repeats = false;
  for (const SeenBatch& batch : seen) {
    const int64_t* keys = batch.missed;
    for (const KeyPart& part : batch.parts) {
      if (part.table == t) {
        lists.emplace_back(batch.counts + part.begin, part.counted);
        missed.insert(missed.end(), keys, keys + part.missed);
        has_repeats |= part.has_repeats != 0;
      }
      keys += part.missed;
    }
  }
  const auto counting = countings_.borrow();
  if (has_repeats || lists.size() > 1) {
    std::vector<uint32_t>& counts = counting->counts;
    std::vector<PlaceCount>& keys = counting->keys;
    counts.resize(std::max(counts.size(), static_cast<size_t>(table.directory.num_places())));
    keys.clear();
    for (const std::span<const PlaceCount>& list : lists)
      for (const PlaceCount& key : list) {
        if (counts[key.place] == 0) keys.push_back(key);
        counts[key.place] += key.count;
      }
    for (PlaceCount& key : keys) key.count = std::exchange(counts[key.place], 0);
    lists = {keys};
  }
  std::span<const PlaceCount> known;
  if (!lists.empty()) known = lists[0];
  const std::vector<KeyCount> keys = table.directory.distinct(missed);

  SeenTable* entry = seen_table(rank_, t);
  // Space for one more, since the loop below also writes keys of other owners, which the next
  // overwrites.
  const int64_t count_bytes =
      round_up(static_cast<int64_t>(known.size_bytes() + sizeof(PlaceCount)), 64);
  const int64_t key_bytes = round_up(static_cast<int64_t>(keys.size() * sizeof(KeyCount)), 64);
  entry->counts_at = cursor.fetch_add(count_bytes + key_bytes);
  entry->keys_at = entry->counts_at + count_bytes;
  entry->num_keys = static_cast<int64_t>(keys.size());
  if (entry->keys_at + key_bytes > header_bytes() + seen_bytes_) return false;
  std::ranges::copy(keys, reinterpret_cast<KeyCount*>(seen_at(rank_) + entry->keys_at));
  int64_t* begin = seen_begin(entry);
  PlaceCount* const first = reinterpret_cast<PlaceCount*>(seen_at(rank_) + entry->counts_at);
  PlaceCount* to = first;
  for (size_t r = 0; r < arenas_.size(); ++r) {
    const int64_t lowest = table.place_bounds[r], end = table.place_bounds[r + 1];
    begin[r] = to - first;
    for (const PlaceCount& key : known) {  // does not branch on the owner, which cannot be predicted
      *to = key;
      to += (key.place >= lowest) & (key.place < end);
    }
  }
  begin[arenas_.size()] = to - first;
  return true;
}

// ---- updates -------------------------------------------------------------------------------------

void KeyTables::update(const std::vector<bool>& frozen) {
  for (size_t t = 0; t < tables_.size(); ++t) tables_[t].clock += !frozen[t];
  count_known(frozen);
  const std::vector<KeyChanges> changes = admit_missed(frozen);
  int64_t* begin = fresh(rank_);
  NewRow* to = reinterpret_cast<NewRow*>(begin + num_tables() + 1);
  begin[0] = 0;
  for (size_t t = 0; t < tables_.size(); ++t) {
    const KeyChanges& of = changes[t];
    std::copy(of.rows.begin(), of.rows.end(), to + begin[t]);
    begin[t + 1] = begin[t] + static_cast<int64_t>(of.rows.size());
    tables_[t].counts.add(of);
  }
}

// Rank by rank: the keys of one rank are distinct, so that no two threads write to the same slot.
void KeyTables::count_known(const std::vector<bool>& frozen) {
  for (int64_t r = 0; r < num_ranks(); ++r) {
    std::vector<Task> tasks;
    int64_t n = 0;
    for (int64_t t = 0; t < num_tables(); ++t) {
      if (frozen[t]) continue;
      const int64_t* begin = seen_begin(seen_table(r, t));
      const int64_t end = begin[rank_ + 1];
      n += end - begin[rank_];
      for (int64_t at = begin[rank_]; at < end; at += kTaskKeys)
        tasks.push_back({t, at, std::min(end, at + kTaskKeys)});
    }
    run_all(tasks, n < kSmall, [&](const Task& task) {
      const KeyTable& table = tables_[task.table];
      const auto* keys = reinterpret_cast<const PlaceCount*>(
          seen_at(r) + seen_table(r, task.table)->counts_at);
      table.directory.count({keys + task.begin, keys + task.end}, table.clock);
    });
  }
}

// Admits keys without a row, and returns the changes by table, in the order of buckets. Tasks run
// concurrently, since buckets are independent.
std::vector<KeyChanges> KeyTables::admit_missed(const std::vector<bool>& frozen) {
  std::vector<KeyChanges> result(tables_.size());
  std::vector<std::vector<KeyCount>> keys(tables_.size());
  int64_t n = 0;
  for (int64_t r = 0; r < num_ranks(); ++r)
    for (int64_t t = 0; t < num_tables(); ++t) n += seen_table(r, t)->num_keys;
  if (n == 0) return result;
  run_all(all_tables(), n < kSmall, [&](int64_t t) {
    if (frozen[t]) return;
    std::vector<std::span<const KeyCount>> lists;
    for (int64_t r = 0; r < num_ranks(); ++r) {
      const SeenTable* entry = seen_table(r, t);
      lists.emplace_back(reinterpret_cast<const KeyCount*>(seen_at(r) + entry->keys_at),
                         entry->num_keys);
    }
    keys[t] = tables_[t].directory.merge(lists);
  });
  std::vector<Task> tasks;
  for (int64_t t = 0; t < num_tables(); ++t) {
    const std::vector<KeyCount>& of = keys[t];
    const KeyDirectory& directory = tables_[t].directory;
    const int64_t size = static_cast<int64_t>(of.size());
    for (int64_t begin = 0, end; begin < size; begin = end) {
      end = std::min(size, begin + kTaskKeys / 4);
      while (end < size && directory.bucket_of(of[end].hash) ==
                               directory.bucket_of(of[end - 1].hash))
        ++end;
      tasks.push_back({t, begin, end});
    }
  }
  std::vector<KeyChanges> changes(tasks.size());
  run_all(tasks, n < kSmall / 4, [&](const Task& task) {
    const auto keys_of = [&](const Task& of) {
      return std::span(keys[of.table]).subspan(of.begin, of.end - of.begin);
    };
    const size_t k = static_cast<size_t>(&task - tasks.data());
    if (k == 0) tables_[task.table].directory.fetch(keys_of(task));
    if (k + 1 < tasks.size()) tables_[tasks[k + 1].table].directory.fetch(keys_of(tasks[k + 1]));
    tables_[task.table].directory.admit(keys_of(task), tables_[task.table].clock, changes[k]);
  });
  for (size_t k = 0; k < tasks.size(); ++k) {
    KeyChanges& to = result[tasks[k].table];
    to.add(changes[k]);
    to.rows.insert(to.rows.end(), changes[k].rows.begin(), changes[k].rows.end());
  }
  return result;
}

// ---- new rows ------------------------------------------------------------------------------------

std::vector<NewRow> KeyTables::new_rows(std::vector<int64_t>* bounds) const {
  std::vector<NewRow> rows;
  bounds->assign(1, 0);
  for (int64_t t = 0; t < num_tables(); ++t) {
    for (int64_t r = 0; r < num_ranks(); ++r)
      rows.insert(rows.end(), fresh_rows(r) + fresh(r)[t], fresh_rows(r) + fresh(r)[t + 1]);
    bounds->push_back(static_cast<int64_t>(rows.size()));
  }
  return rows;
}

void KeyTables::begin_rows(const Context& context) const {
  std::vector<int64_t> bounds;
  const std::vector<NewRow> rows = new_rows(&bounds);
  std::vector<Task> tasks;
  for (int64_t t = 0; t < num_tables(); ++t)
    for (int64_t at = bounds[t]; at < bounds[t + 1]; at += kRowsAtOnce)
      tasks.push_back({t, at, std::min(bounds[t + 1], at + kRowsAtOnce)});
  run_all(tasks, rows.size() < kSmall / 4, [&](const Task& task) {
    host::begin_rows(context, tables_[task.table].rows, rows.data() + task.begin,
               task.end - task.begin);
  });
}

}  // namespace oper::host
