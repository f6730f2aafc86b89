// Directories of dynamic tables in device memory, see common/keys.h; equal to those of the host back end
// for equal batches.
//
// A rank's arena has three consecutive areas: its buckets of every table; which of their slots the last
// update has given to other keys, for all ranks; and the distinct keys of its batch, sorted by table and
// hash and so by the owner of their bucket.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "common/keys.h"
#include "device/context.h"

namespace oper::device {

// One dynamic table. All pointers are to device memory.
struct KeyTable {
  KeyRules rules;
  RowRules rows;
  int64_t num_buckets;
  Shares slots;
  const int64_t* first_bucket;  // [W + 1] of each rank
  const DirectoryPart* parts;   // [W]
};

// The slots of a bucket that the last update has given to other keys, and those that keys have lost
// without a successor; a bit each.
struct ChangedBucket {
  uint64_t given, lost;
  int64_t number;
};

// The lists in a rank's arena.
struct KeyLists {
  uint32_t* begin;   // [T * W + 1] first seen key of each table and owner
  uint64_t* hashes;  // [capacity] of the seen keys
  uint32_t* counts;  // [capacity] their occurrences; kFound: a lookup has found the key's row
  uint32_t* num_changed;           // [T]
  ChangedBucket* const* changed;  // [T] in any order
};
constexpr int64_t kSeenKeyBytes = sizeof(uint64_t) + sizeof(uint32_t);  // in `hashes` and `counts`
constexpr uint32_t kFound = 1u << 31;

// Numbers of a table's keys that kernels count: admitted, evicted, expired, refused in this rank's
// buckets, lookups by this rank, and those that found no row.
enum KeyCounter { kAdmitted, kEvicted, kExpired, kRefused, kLookups, kMissed, kNumKeyCounters };
using Counter = unsigned long long;

struct KeyView {
  const KeyTable* tables;  // [T]
  const KeyLists* lists;   // [W]
  uint32_t* clocks;        // [T] this rank's; equal on all ranks
  Counter* counters;       // [T, kNumKeyCounters]
  int64_t capacity;
  int32_t num_tables, rank, world_size;
};

// Ids of a lookup, of dynamic and of other tables.
struct KeyLookup {
  const void* ids;
  bool ids_are_32_bit;
  int64_t num_ids;
  const int64_t* bounds;  // [num_keys * batch_size + 1]
  int64_t num_keys, batch_size;
  const int32_t* table_of;  // [num_keys] by key of the batch; -1 = no dynamic table
};

// Data on the ids of a lookup that an update needs.
struct ListedIds {
  uint64_t* hashes;  // [n] of keys
  uint32_t* where;   // [n] 2 * table, or 2 * T for ids of other tables; + 1 if the key had a row
  int64_t num_ids;
};

// Memory for the keys that a rank has seen.
struct SeenKeys : ListedIds {
  SortedPairs pairs;
  int64_t bytes;
};
SeenKeys lay_out_seen(int64_t num_ids, void* block);

// Memory for the keys of all ranks that belong to this rank's buckets.
struct ReceivedKeys {
  int64_t* begin;      // [T * W + 1] by table and source, then the number of keys
  uint64_t* unmerged;  // [W * capacity], and their counts
  uint32_t* counts;
  uint64_t* hashes;    // [W * capacity] merged: by table and hash
  uint64_t* totals;    // their occurrences; kKnown: a lookup has found the row; 0: seen by a lower rank too
  int64_t bytes;
};
constexpr uint64_t kKnown = uint64_t{1} << 63;
ReceivedKeys lay_out_received_keys(const KeyView& keys, void* block);

// Writes the row of each id, or the id itself if its table is not dynamic; and lists the ids, unless
// `listed.hashes` is null.
void find_keys(const KeyView& keys, const KeyLookup& lookup, int64_t* rows, const ListedIds& listed,
               cudaStream_t stream);
// Appends a lookup's ids to the `first` ids that `seen` already has.
void add_keys(const ListedIds& lookup, int64_t first, const SeenKeys& seen, cudaStream_t stream);
// Lists the seen keys for the owners of their buckets. If they do not fit, the batch is refused by
// `refused`, see BatchPlan. `found_varies`: directories have changed between the lookups, so that
// the same key may have been found and not found. `is_mixed`: ids belong to several dynamic tables,
// or also to other tables.
void leave_keys(const View& view, const KeyView& keys, SeenKeys& seen, bool found_varies,
                bool is_mixed, uint32_t* refused, cudaStream_t stream);
// Updates this rank's buckets by the keys that all ranks have listed, unless a rank has refused its
// batch. `refused`: see BatchPlan, for a single rank that does not exchange gradients; else null.
void update_keys(const Launch& on, const KeyView& keys, const ReceivedKeys& received,
                 const uint32_t* refused);
// Initialises the rows that all ranks have given to new keys, where this rank has them.
void begin_rows(const Launch& on, const KeyView& keys);

// The directories of a collection's dynamic tables.
class KeyTables {
 public:
  struct OwnBuckets {
    char* memory;
    int64_t first, end;
  };
  // `arenas`: by rank, each of `num_bytes` cleared bytes. `table_of`: by feature of the collection, -1
  // = none.
  KeyTables(const std::vector<int64_t>& arenas, int32_t rank, int64_t seen_bytes,
            const std::vector<KeyTableRules>& rules, std::vector<int64_t> table_of,
            cudaStream_t stream);
  // Bytes of a rank's directories; of these and the lists of changed buckets; and of its arena.
  static std::vector<int64_t> num_bytes(const std::vector<KeyTableRules>& rules, int64_t world_size,
                                        int64_t rank, int64_t seen_bytes);

  KeyView view{};
  std::vector<KeyTableRules> rules;
  std::vector<KeyLists> lists;  // [W]
  std::vector<OwnBuckets> own;  // by table
  std::atomic<bool> is_mixed;  // some batch had ids of several tables, or of no table
  int64_t device = 0;          // on which they are

  // See KeyLookup::table_of.
  const int32_t* table_of_keys(const int64_t* key_of, int64_t num_features, int64_t num_keys);

 private:
  struct Layout {
    int64_t seen, hashes, counts, num_changed, end;  // offsets of areas and lists
    std::vector<int64_t> directories, changed;  // by table
    std::vector<int64_t> first_bucket, end_bucket;
  };
  static Layout layout(const std::vector<KeyTableRules>& rules, int64_t world_size, int64_t rank,
                       int64_t seen_bytes);
  struct Known {
    std::vector<int64_t> key_of;
    int64_t num_keys;
    int32_t* tables;
  };
  std::vector<int64_t> table_of_;
  std::mutex lock_;
  std::deque<Known> known_;
  DeviceMemory memory_;
};

}  // namespace oper::device
