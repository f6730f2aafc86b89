#include "host/keys/tables.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "host/kernels/kernels.h"
#include "host/memory.h"
#include "host/tasks.h"

namespace oper::host {

namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kTaskKeys = 4096, kTaskIds = 65536;  // that a thread takes at a time
constexpr int64_t kSmall = 4096;     // take less time than waking a thread

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
    std::vector<uint32_t> bounds = directory.row_bounds();
    tables_.push_back({std::move(directory), rules[t].rows, std::move(bounds), 0, {}});
  }
  // Only pages that are there can become huge ones.
  std::memset(arenas_[static_cast<size_t>(rank)], 0,
              static_cast<size_t>(layouts_[static_cast<size_t>(rank)].seen));
}

KeyTables::Layout KeyTables::layout(const std::vector<KeyTableRules>& rules, int64_t world_size,
                                    int64_t rank, int64_t seen_bytes) {
  Layout found;
  const int64_t T = static_cast<int64_t>(rules.size());
  int64_t at = 0, num_rows = 0;
  for (const KeyTableRules& r : rules) {
    found.directories.push_back(at);
    at = round_up(
        at + KeyDirectory::num_bytes(r.num_slots, world_size, rank, r.keys.min_count > 1), kPage);
    num_rows += r.num_slots;
  }
  found.seen = at;
  const int64_t entry = static_cast<int64_t>(sizeof(SeenTable)) + 8 * (world_size + 1);
  found.fresh = at = round_up(at + round_up(T * entry, 64) + seen_bytes, kPage);
  // A row may be lost and given to a new key in one update.
  found.end = at + 8 * (T + 1) + 2 * num_rows * static_cast<int64_t>(sizeof(NewRow));
  return found;
}

int64_t KeyTables::num_bytes(const std::vector<KeyTableRules>& rules, int64_t world_size,
                             int64_t rank, int64_t seen_bytes) {
  return layout(rules, world_size, rank, seen_bytes).end;
}

int64_t KeyTables::num_directory_bytes(const std::vector<KeyTableRules>& rules,
                                       int64_t world_size, int64_t rank) {
  int64_t bytes = 0;
  for (const KeyTableRules& r : rules)
    bytes += KeyDirectory::num_bytes(r.num_slots, world_size, rank, r.keys.min_count > 1);
  return bytes;
}

// ---- lookups -------------------------------------------------------------------------------------

std::vector<KeyPart> KeyTables::find(const KeyBatch& batch, int64_t* rows, bool keeps) {
  std::vector<int64_t> table_of_key(batch.bounds.size(), -1);
  for (size_t f = 0; f < table_of_.size(); ++f)
    if (table_of_[f] >= 0) table_of_key[static_cast<size_t>(batch.key_of[f])] = table_of_[f];
  struct Find {
    int64_t part, begin, end, missed;
  };
  std::vector<KeyPart> parts;
  std::vector<Find> tasks;
  for (size_t key = 0; key + 1 < batch.bounds.size(); ++key) {
    const int64_t begin = batch.bounds[key], end = batch.bounds[key + 1];
    const bool has_keys = table_of_key[key] >= 0 && begin < end;
    if (has_keys) parts.push_back({table_of_key[key], begin, end, 0});
    const int64_t part = has_keys ? static_cast<int64_t>(parts.size()) - 1 : -1;
    for (int64_t at = begin; at < end; at += kTaskIds)
      tasks.push_back({part, at, std::min(end, at + kTaskIds), 0});
  }
  const int64_t n = batch.bounds.back(), width = batch.ids_are_32_bit ? 4 : 8;
  int64_t* missed = keeps ? reinterpret_cast<int64_t*>(missed_buffer_.get(8 * n)) : nullptr;
  const char* ids = static_cast<const char*>(batch.ids);
  const auto body = [&](int64_t k) {
    Find& task = tasks[static_cast<size_t>(k)];
    const char* from = ids + task.begin * width;
    const int64_t count = task.end - task.begin;
    if (task.part >= 0) {
      const KeyTable& table = tables_[static_cast<size_t>(
          parts[static_cast<size_t>(task.part)].table)];
      task.missed = kernels().find_keys(table.directory, from, batch.ids_are_32_bit, count,
                                        table.clock, rows + task.begin,
                                        missed != nullptr ? missed + task.begin : nullptr);
    } else if (batch.ids_are_32_bit) {
      std::copy_n(reinterpret_cast<const int32_t*>(from), count, rows + task.begin);
    } else {
      std::copy_n(reinterpret_cast<const int64_t*>(from), count, rows + task.begin);
    }
  };
  run_all(static_cast<int64_t>(tasks.size()), n < kSmall, body);
  missed_.clear();
  for (const Find& task : tasks) {
    if (task.part < 0) continue;
    KeyPart& part = parts[static_cast<size_t>(task.part)];
    Counts& counts = tables_[static_cast<size_t>(part.table)].counts;
    counts.lookups += task.end - task.begin;
    counts.missed += task.missed;
    if (!keeps) continue;
    part.missed += task.missed;
    missed_.insert(missed_.end(), missed + task.begin, missed + task.begin + task.missed);
  }
  return parts;
}

// ---- what a rank has seen ------------------------------------------------------------------------

std::unique_ptr<KeyTables::Counting> KeyTables::take_counting() {
  std::lock_guard<std::mutex> lock(counting_mutex_);
  if (counting_.empty()) return std::make_unique<Counting>();
  std::unique_ptr<Counting> counting = std::move(counting_.back());
  counting_.pop_back();
  return counting;
}

void KeyTables::give_counting(std::unique_ptr<Counting> counting) {
  std::lock_guard<std::mutex> lock(counting_mutex_);
  counting_.push_back(std::move(counting));
}

KeyTables::Left KeyTables::leave(const std::vector<SeenBatch>& seen, int64_t* table) {
  for (int64_t t = 0; t < num_tables(); ++t)
    if (tables_[static_cast<size_t>(t)].clock >= kLastClock) {
      *table = t;
      return Left::kClockAtEnd;
    }
  int64_t n = 0;
  for (const SeenBatch& batch : seen)
    for (int64_t p = 0; p < batch.num_parts; ++p) n += batch.parts[p].end - batch.parts[p].begin;
  std::atomic<int64_t> cursor{header_bytes()};
  std::atomic<bool> full{false};
  const auto body = [&](int64_t t) {
    if (!leave_table(t, seen, cursor)) full.store(true);
  };
  run_all(num_tables(), n < kSmall, body);
  return full.load() ? Left::kNoRoom : Left::kAll;
}

// Rows are counted without sorting the ids: those that are new to a batch are listed on the way.
bool KeyTables::leave_table(int64_t t, const std::vector<SeenBatch>& seen,
                            std::atomic<int64_t>& cursor) {
  const KeyTable& table = tables_[static_cast<size_t>(t)];
  const size_t num_rows = static_cast<size_t>(table.directory.num_rows());
  size_t most = 0;
  for (const SeenBatch& batch : seen)
    for (int64_t p = 0; p < batch.num_parts; ++p)
      if (batch.parts[p].table == t)
        most += static_cast<size_t>(batch.parts[p].end - batch.parts[p].begin);
  std::unique_ptr<Counting> counting = take_counting();
  counting->counts.resize(std::max(counting->counts.size(), num_rows));
  counting->rows.resize(std::max(counting->rows.size(), std::min(most, num_rows) + 1));
  uint32_t* counts = counting->counts.data();
  uint32_t* rows = counting->rows.data();
  int64_t n = 0;
  std::vector<int64_t> missed;
  for (const SeenBatch& batch : seen) {
    const int64_t* keys = batch.missed;
    for (int64_t p = 0; p < batch.num_parts; ++p) {
      const KeyPart& part = batch.parts[p];
      if (part.table == t) {
        for (int64_t i = part.begin; i < part.end; ++i) {
          const uint32_t row = static_cast<uint32_t>(batch.rows[i]);
          rows[n] = row;
          n += counts[row]++ == 0;
        }
        missed.insert(missed.end(), keys, keys + part.missed);
      }
      keys += part.missed;
    }
  }
  counts[0] = 0;  // the row of those that are missed
  const std::vector<KeyCount> keys =
      table.directory.distinct(missed.data(), static_cast<int64_t>(missed.size()));

  SeenTable* entry = seen_table(rank_, t);
  const int64_t row_bytes = round_up(n * static_cast<int64_t>(sizeof(RowCount)), 64);
  const int64_t key_bytes =
      round_up(static_cast<int64_t>(keys.size() * sizeof(KeyCount)), 64);
  entry->rows_at = cursor.fetch_add(row_bytes + key_bytes);
  entry->keys_at = entry->rows_at + row_bytes;
  entry->num_keys = static_cast<int64_t>(keys.size());
  const bool fits = entry->keys_at + key_bytes <= header_bytes() + seen_bytes_;
  if (fits) {
    std::copy(keys.begin(), keys.end(), reinterpret_cast<KeyCount*>(seen_at(rank_) + entry->keys_at));
    const size_t W = arenas_.size();
    const uint32_t* bounds = table.row_bounds.data();
    const auto owner_of = [=](uint32_t row) {
      size_t owner = 0;
      for (size_t r = 1; r < W; ++r) owner += row >= bounds[r];
      return owner;
    };
    int64_t* begin = seen_begin(entry);
    // Without row 0: 0 - 1 is above all bounds.
    for (size_t r = 0; r <= W; ++r)
      begin[r] = std::count_if(rows, rows + n, [bound = bounds[r] - 1](uint32_t row) {
        return row - 1 < bound;
      });
    std::vector<int64_t> at(begin, begin + W);
    RowCount* to = reinterpret_cast<RowCount*>(seen_at(rank_) + entry->rows_at);
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t row = rows[i];
      if (row != 0) to[at[owner_of(row)]++] = {row, counts[row]};
      counts[row] = 0;
    }
  } else {
    for (int64_t i = 0; i < n; ++i) counts[rows[i]] = 0;
  }
  give_counting(std::move(counting));
  return fits;
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
    Counts& counts = tables_[t].counts;
    counts.admitted += of.admitted;
    counts.evicted += of.evicted;
    counts.expired += of.expired;
    counts.refused += of.refused;
  }
}

// One rank's after the other's: a rank has every row once, so that no two threads meet at a slot.
void KeyTables::count_known(const std::vector<bool>& frozen) {
  for (int64_t r = 0; r < num_ranks(); ++r) {
    std::vector<Task> tasks;
    int64_t n = 0;
    for (int64_t t = 0; t < num_tables(); ++t) {
      if (frozen[static_cast<size_t>(t)]) continue;
      const int64_t* begin = seen_begin(seen_table(r, t));
      const int64_t end = begin[rank_ + 1];
      n += end - begin[rank_];
      for (int64_t at = begin[rank_]; at < end; at += kTaskKeys)
        tasks.push_back({t, at, std::min(end, at + kTaskKeys)});
    }
    const auto body = [&](int64_t k) {
      const Task& task = tasks[static_cast<size_t>(k)];
      const KeyTable& table = tables_[static_cast<size_t>(task.table)];
      const auto* rows = reinterpret_cast<const RowCount*>(
          seen_at(r) + seen_table(r, task.table)->rows_at);
      table.directory.count(rows + task.begin, task.end - task.begin, table.clock);
    };
    run_all(static_cast<int64_t>(tasks.size()), n < kSmall, body);
  }
}

// By table. Buckets have nothing to do with each other; changes are put together in their order.
std::vector<KeyChanges> KeyTables::admit_missed(const std::vector<bool>& frozen) {
  std::vector<KeyChanges> result(tables_.size());
  std::vector<std::vector<KeyCount>> keys(tables_.size());
  int64_t n = 0;
  for (int64_t r = 0; r < num_ranks(); ++r)
    for (int64_t t = 0; t < num_tables(); ++t) n += seen_table(r, t)->num_keys;
  if (n == 0) return result;
  const auto merge = [&](int64_t t) {
    if (frozen[static_cast<size_t>(t)]) return;
    std::vector<const KeyCount*> lists;
    std::vector<int64_t> sizes;
    for (int64_t r = 0; r < num_ranks(); ++r) {
      const SeenTable* entry = seen_table(r, t);
      lists.push_back(reinterpret_cast<const KeyCount*>(seen_at(r) + entry->keys_at));
      sizes.push_back(entry->num_keys);
    }
    keys[static_cast<size_t>(t)] =
        tables_[static_cast<size_t>(t)].directory.merge(lists, sizes);
  };
  run_all(num_tables(), n < kSmall, merge);
  std::vector<Task> tasks;
  for (int64_t t = 0; t < num_tables(); ++t) {
    const std::vector<KeyCount>& of = keys[static_cast<size_t>(t)];
    const KeyDirectory& directory = tables_[static_cast<size_t>(t)].directory;
    const int64_t size = static_cast<int64_t>(of.size());
    for (int64_t begin = 0, end; begin < size; begin = end) {
      end = std::min(size, begin + kTaskKeys / 4);
      while (end < size && directory.bucket_of(of[static_cast<size_t>(end)].hash) ==
                               directory.bucket_of(of[static_cast<size_t>(end) - 1].hash))
        ++end;
      tasks.push_back({t, begin, end});
    }
  }
  std::vector<KeyChanges> changes(tasks.size());
  const auto admit = [&](int64_t k) {
    const Task& task = tasks[static_cast<size_t>(k)];
    const KeyTable& table = tables_[static_cast<size_t>(task.table)];
    const KeyCount* of = keys[static_cast<size_t>(task.table)].data();
    table.directory.admit(of + task.begin, of + task.end, table.clock,
                          changes[static_cast<size_t>(k)]);
  };
  run_all(static_cast<int64_t>(tasks.size()), n < kSmall / 4, admit);
  for (size_t k = 0; k < tasks.size(); ++k)
    result[static_cast<size_t>(tasks[k].table)].add(changes[k]);
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

void KeyTables::begin(const Context& context) const {
  constexpr int64_t kTaskRows = 128;
  std::vector<int64_t> bounds;
  const std::vector<NewRow> rows = new_rows(&bounds);
  std::vector<Task> tasks;
  for (int64_t t = 0; t < num_tables(); ++t)
    for (int64_t at = bounds[static_cast<size_t>(t)]; at < bounds[static_cast<size_t>(t) + 1];
         at += kTaskRows)
      tasks.push_back({t, at, std::min(bounds[static_cast<size_t>(t) + 1], at + kTaskRows)});
  const auto body = [&](int64_t k) {
    const Task& task = tasks[static_cast<size_t>(k)];
    begin_rows(context, tables_[static_cast<size_t>(task.table)].rows, rows.data() + task.begin,
               task.end - task.begin);
  };
  run_all(static_cast<int64_t>(tasks.size()), false, body);
}

}  // namespace oper::host
