// The directories of a collection's dynamic tables, and what ranks tell each other about keys.
//
// A rank's arena has three consecutive areas: its buckets of all tables; the keys that its batch
// has looked up, for the owners of their buckets; and the rows that its buckets have given to new
// keys, for all ranks.
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

constexpr uint32_t kLastClock = 0xfffffffeu;  // after which a table cannot be updated

// A part of a batch: the ids [begin, end), keys of one table. `missed` of them have no row;
// `counted` is the number of PlaceCounts of those that have one, where a key may occur repeatedly
// if `has_repeats`.
struct KeyPart {
  int64_t table, begin, end, missed, counted, has_repeats;
};

// The ids of a batch, a list for each key of its KeyedJaggedTensor. (All other keys in this file
// are raw 64-bit ids.)
struct KeyBatch {
  const void* ids;
  bool ids_are_32_bit;
  const int64_t* key_of;        // [F] from which list each feature of the collection takes its ids
  std::vector<int64_t> bounds;  // [number of lists + 1]: list k is ids [bounds[k], bounds[k + 1])
};

// The keys that a lookup has seen.
struct SeenBatch {
  const PlaceCount* counts;        // those with a row: of each part, from its `begin` on
  std::span<const KeyPart> parts;
  const int64_t* missed;           // those without a row, part after part
};

class KeyTables {
 public:
  // Events of a table's keys in this rank's buckets; ids that this rank has looked up, and those
  // without a row.
  struct Counts : KeyEvents {
    int64_t lookups = 0, missed = 0;
  };
  enum class Left { kAll, kNoRoom, kClockAtEnd };  // results of `leave`

  // `arenas`: by rank, each of `num_bytes`; clears this rank's directories. `seen_bytes`: space for
  // the keys that a rank has seen. `table_of`: the dynamic table of each feature of the collection;
  // -1 = none.
  KeyTables(const std::vector<char*>& arenas, int64_t rank, int64_t seen_bytes,
            const std::vector<KeyTableRules>& rules, std::vector<int64_t> table_of);
  // Bytes of a rank's directories, and of its arena.
  static std::vector<int64_t> num_bytes(const std::vector<KeyTableRules>& rules, int64_t world_size,
                                        int64_t rank, int64_t seen_bytes);

  // ---- lookups, one at a time ----

  // Whether the rows of a batch can be int32; false if it has ids of other tables.
  bool has_short_rows(const KeyBatch& batch) const;
  // Writes the row of each id to `rows` [ids] (int32 if `is_short`, else int64), or the id itself
  // if its table is not dynamic. Unless `counts` [ids] is null, writes SeenBatch::counts to it;
  // `missed()` then returns SeenBatch::missed, until the next call. Returns the parts.
  std::vector<KeyPart> find(const KeyBatch& batch, void* rows, bool is_short, PlaceCount* counts);
  const std::vector<int64_t>& missed() const { return missed_; }

  // ---- updates: called in this order, with barriers after `leave`, after `update`, and at the end ----

  // Lists the keys that lookups have seen for the owners of their buckets. `table`: with
  // kClockAtEnd, which one.
  Left leave(const std::vector<SeenBatch>& seen, int64_t* table);
  // Updates this rank's buckets by the keys that all ranks have listed, except in frozen tables.
  void update(const std::vector<bool>& frozen);
  // The rows that the updates of all ranks have given to new keys; table t has those from bounds[t]
  // to bounds[t + 1].
  std::vector<NewRow> new_rows(std::vector<int64_t>* bounds) const;
  // Initialises these rows where this rank has them.
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
  // The keys that a rank has seen of one table, at byte offsets from `seen_at`: PlaceCounts of
  // those with a row, by owner (begin[W + 1], which follows this), and KeyCount [num_keys] of those
  // without, by hash.
  struct SeenTable {
    int64_t counts_at, keys_at, num_keys;
  };
  struct Counting {
    std::vector<uint32_t> counts;  // by place; all 0 between uses
    std::vector<PlaceCount> keys;  // the distinct ones
  };
  struct Task {  // items [begin, end) of a table
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
  // The new rows of a rank's buckets: int64 begin[T + 1], then NewRows.
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
