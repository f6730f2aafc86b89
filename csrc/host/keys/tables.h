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

struct KeyTableRules {
  int64_t num_slots;
  KeyRules keys;
  RowRules rows;
};

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

// What a lookup has found: how often it has the keys with a row, each part's from its begin on; the keys
// without one, part after part.
struct SeenBatch {
  const PlaceCount* counts;
  std::span<const KeyPart> parts;
  const int64_t* missed;
};

class KeyTables {
 public:
  // What has happened to a table's keys: of this rank's buckets, and of its lookups.
  struct Counts : KeyEvents {
    int64_t lookups = 0, missed = 0;
  };
  enum class Left { kAll, kNoRoom, kClockAtEnd };

  // `arenas`: by rank, `num_bytes` large; this rank's directories are cleared. `seen_bytes`: space for
  // what a rank has seen.
  // `table_of`: by feature of the collection, -1 = none of these.
  KeyTables(const std::vector<char*>& arenas, int64_t rank, int64_t seen_bytes,
            const std::vector<KeyTableRules>& rules, std::vector<int64_t> table_of);
  // Of a rank: bytes of its directories, and of its arena.
  static std::vector<int64_t> num_bytes(const std::vector<KeyTableRules>& rules, int64_t world_size,
                                        int64_t rank, int64_t seen_bytes);

  // ---- lookups; one at a time ----

  // Whether rows of all ids of a batch have 31 bits, since none are of other tables.
  bool has_short_rows(const KeyBatch& batch) const;
  // `rows` [ids], int32 with `is_short`, else int64: those of keys, and ids of other tables as they are.
  // Unless `counts` [ids] is null, it takes what SeenBatch has there, and the keys without a row are in
  // `missed`, until the next call.
  std::vector<KeyPart> find(const KeyBatch& batch, void* rows, bool is_short, PlaceCount* counts);
  const std::vector<int64_t>& missed() const { return missed_; }

  // ---- updates; in this order, with a barrier after the first and after the second; and one before the
  // ---- next update ----

  // Leaves for the other ranks what lookups have seen. `table`: whose clock is at its end.
  Left leave(const std::vector<SeenBatch>& seen, int64_t* table);
  // Takes in, for this rank's buckets, what all ranks have left. Tables that are frozen stay as they are.
  void update(const std::vector<bool>& frozen);
  // What all ranks' updates have given to new keys, table by table; `bounds` [T + 1].
  std::vector<NewRow> new_rows(std::vector<int64_t>* bounds) const;
  // Gives those rows their first values where this rank has them.
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
  // Where lists are in an arena, in bytes from its beginning.
  struct Layout {
    std::vector<int64_t> directories;  // by table
    int64_t seen, fresh, end;
  };
  // What a rank has seen of one table, at so many bytes from `seen`: PlaceCount by owner of their buckets,
  // whose begin[W + 1] follows, and KeyCount [num_keys] by hash.
  struct SeenTable {
    int64_t counts_at, keys_at, num_keys;
  };
  struct Counting {
    std::vector<uint32_t> counts;  // by place; 0 in between
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
