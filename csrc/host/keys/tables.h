// The directories of a collection's dynamic tables, and the data that ranks exchange about keys.
//
// A rank's arena has three consecutive areas: its buckets of every table; the keys of its batch,
// for the owners of their buckets; and the rows that its buckets have assigned to new keys, for all
// ranks.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <ranges>
#include <span>
#include <vector>

#include "host/context.h"
#include "host/keys/directory.h"
#include "host/keys/rows.h"
#include "host/memory.h"

namespace oper::host {

constexpr uint32_t kLastClock = 0xfffffffeu;

// Keys [begin, end) of one table in a batch; `missed` of them had no row, and `counted` distinct
// keys had one. With `has_repeats`, `counted` is the number of entries of such keys.
struct KeyPart {
  int64_t table, begin, end, missed, counted, has_repeats;
};

// Ids of a batch, key-major.
struct KeyBatch {
  const void* ids;
  bool ids_are_32_bit;
  const int64_t* key_of;         // [F] of the collection's features
  std::vector<int64_t> bounds;   // [num_keys + 1] of each key's ids
};

// The keys that a lookup has seen: PlaceCounts of those with a row, each part's from its `begin`
// on; those without a row, part after part.
struct SeenBatch {
  const PlaceCount* counts;
  std::span<const KeyPart> parts;
  const int64_t* missed;
};

class KeyTables {
 public:
  // Events of a table's keys, in this rank's buckets and in its lookups.
  struct Counts : KeyEvents {
    int64_t lookups = 0, missed = 0;
  };
  enum class Left { kAll, kNoRoom, kClockAtEnd };

  // `arenas`: by rank, of `num_bytes`; clears this rank's directories. `seen_bytes`: space for the
  // keys that a rank has seen. `table_of`: by feature of the collection; -1 = none.
  KeyTables(const std::vector<char*>& arenas, int64_t rank, int64_t seen_bytes,
            const std::vector<KeyTableRules>& rules, std::vector<int64_t> table_of);
  // Bytes of a rank's directories, and of its arena.
  static std::vector<int64_t> num_bytes(const std::vector<KeyTableRules>& rules, int64_t world_size,
                                        int64_t rank, int64_t seen_bytes);

  // ---- lookups; one at a time ----

  // Whether all rows of a batch fit 31 bits; never if it has ids of other tables.
  bool has_short_rows(const KeyBatch& batch) const;
  // Writes the row of each key to `rows` [ids] (int32 if `is_short`, else int64); copies the ids of
  // tables without keys unchanged. Unless `counts` [ids] is null, writes SeenBatch's `counts` to
  // it; `missed()` then returns the keys without a row until the next call.
  std::vector<KeyPart> find(const KeyBatch& batch, void* rows, bool is_short, PlaceCount* counts);
  const std::vector<int64_t>& missed() const { return missed_; }

  // ---- updates; in this order, with barriers after `leave` and `update`, and before the next
  // ---- round ----

  // Leaves the keys that lookups have seen for their owners. `table`: the one with kClockAtEnd.
  Left leave(const std::vector<SeenBatch>& seen, int64_t* table);
  // Updates this rank's buckets by the keys that all ranks have left, except in frozen tables.
  void update(const std::vector<bool>& frozen);
  // The rows that all ranks' updates have given to new keys, by table; `bounds` [T + 1].
  std::vector<NewRow> new_rows(std::vector<int64_t>* bounds) const;
  // Initialises those rows where this rank holds them.
  void begin_rows(const Context& context) const;

  // ---- state ----

  int64_t num_tables() const { return static_cast<int64_t>(tables_.size()); }
  KeyDirectory& directory(int64_t table) { return tables_.at(static_cast<size_t>(table)).directory; }
  uint32_t& clock(int64_t table) { return tables_.at(static_cast<size_t>(table)).clock; }
  const Counts& counts(int64_t table) const { return tables_.at(static_cast<size_t>(table)).counts; }

 private:
  struct KeyTable {
    KeyDirectory directory;
    RowRules rows;
    std::vector<int64_t> place_bounds;  // [W + 1] of each rank's buckets
    uint32_t clock = 0;
    Counts counts;
  };
  // Offsets of the lists in an arena, in bytes.
  struct Layout {
    std::vector<int64_t> directories;  // by table, then their end
    int64_t seen, fresh, end;
  };
  // Keys that a rank has seen of one table, as offsets from `seen` (bytes): PlaceCounts by owner of
  // the buckets, whose begin[W + 1] follows this, and KeyCount [num_keys] by hash.
  struct SeenTable {
    int64_t counts_at, keys_at, num_keys;
  };
  struct Counting {
    std::vector<uint32_t> counts;  // by place; all 0 between calls
    std::vector<PlaceCount> keys;  // distinct ones
  };
  struct Task {  // entries [begin, end) of a table
    int64_t table, begin, end;
  };

  static Layout layout(const std::vector<KeyTableRules>& rules, int64_t world_size, int64_t rank,
                       int64_t seen_bytes);
  int64_t num_ranks() const { return static_cast<int64_t>(arenas_.size()); }
  auto all_tables() const { return std::views::iota(int64_t{0}, num_tables()); }
  int64_t seen_entry_bytes() const { return static_cast<int64_t>(sizeof(SeenTable)) + 8 * (num_ranks() + 1); }
  char* seen_at(int64_t rank) const {
    return arenas_[rank] + layouts_[rank].seen;
  }
  SeenTable* seen_table(int64_t rank, int64_t table) const {
    return reinterpret_cast<SeenTable*>(seen_at(rank) + table * seen_entry_bytes());
  }
  static int64_t* seen_begin(SeenTable* entry) { return reinterpret_cast<int64_t*>(entry + 1); }
  // int64 begin[T + 1], then the rows.
  int64_t* fresh(int64_t rank) const {
    return reinterpret_cast<int64_t*>(arenas_[rank] +
                                      layouts_[rank].fresh);
  }
  const NewRow* fresh_rows(int64_t rank) const {
    return reinterpret_cast<const NewRow*>(fresh(rank) + num_tables() + 1);
  }
  int64_t header_bytes() const { return (num_tables() * seen_entry_bytes() + 63) / 64 * 64; }
  std::vector<int64_t> tables_of_keys(const KeyBatch& batch) const;
  bool leave_table(int64_t table, const std::vector<SeenBatch>& seen,
                   std::atomic<int64_t>& cursor);
  void count_known(const std::vector<bool>& frozen);
  std::vector<KeyChanges> admit_missed(const std::vector<bool>& frozen);

  std::vector<char*> arenas_;
  int64_t rank_, seen_bytes_;
  std::vector<Layout> layouts_;  // by rank
  std::vector<KeyTable> tables_;
  std::vector<int64_t> table_of_;
  std::vector<int64_t> missed_;
  Buffer missed_buffer_;
  Spares<Counting> countings_;
  Spares<DistinctKeys> distinct_;
};

}  // namespace oper::host
