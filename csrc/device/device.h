// The device back end: data structures of kernels, and the steps that operators launch.
//
// Phases, the order of sums and the optimizers' arithmetic are those of the host back end. No
// function waits for the device: sizes that only the device knows stay there, launches cover the
// upper bounds that the host knows, and kernels store errors in a word of host memory that the next
// call reads. Every step can therefore be captured in a CUDA graph.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "common/directory.h"
#include "common/elements.h"
#include "common/optimizer.h"
#include "common/philox.h"

#if defined(OPER_EMULATED)
#include "emulation.h"
#else
#include <cuda_runtime_api.h>
#endif

namespace oper::device {

// Throws an error that begins with `what` if a CUDA call has failed.
void check(cudaError_t status, const char* what);

// A class of rows: those that the same instance of a kernel template handles. A row is spread over
// `lanes` lanes of a warp with `vectors` parts of 16 bytes each; lanes = 0: rows whose size is not
// a multiple of 16 bytes are processed element by element by whole warps.
struct RowClass {
  RowType type;
  int32_t lanes, vectors;
  int32_t index;                   // of this class; Table::row_class
  int32_t table_begin, table_end;  // its tables, in the order of keys
  int32_t dim;                     // columns of all its tables, or 0 if they differ
  bool has_push, has_pieces;       // whether a table has pushed tiers, or is a column piece
  std::vector<int32_t> features;   // that look up in its tables
  const int32_t* device_features;  // a copy in device memory

  int32_t group_lanes() const { return lanes > 0 ? lanes : 32; }
};

// As HomeTier in csrc/common/home_tiers.h.
struct HomePart {
  int64_t slot_begin, slot_end, start, period;
  const int64_t* offsets;
  uint32_t num_offsets;
};

// Master copies of replicated rows that a remote rank has updated in this step and sent.
// Refresh::masters is null for its rows.
struct RemoteMasters {
  const uint32_t* slots;  // [count]
  const char* rows;       // one after the other
  int64_t count;
};

// A table, or a column piece of one. A row's key is its number among the rows of all tables on all
// ranks, ordered by table, then by owner, then by slot: the table's key_begin plus its linear
// index.
struct Table {
  TableMap read;  // id -> address of the row to read
  TableMap home;  // id -> linear index
  int64_t key_begin;
  // [W + 1]: owner r has linear indices [owner_begin[r], owner_begin[r + 1]).
  const int64_t* owner_begin;
  const HomePart* home_parts;  // [num_home_parts] this rank's rows of each tier
  int32_t num_home_parts;
  char* rows;  // this rank's shard
  float* momentum1;
  float* momentum2;
  // [W] sums of squares by slot, for column pieces, else null; entries of other domains are null
  float* const* squares;
  // [W] number of updated replicated slots, then the slots; else null.
  uint32_t* const* touched;
  const RemoteMasters* remote_masters;  // [W]
  const uint8_t* pushes;          // per tier
  const int32_t* pieces;          // [num_pieces] of the same table, in column order; else null
  int32_t num_pieces;
  HeadIds head_ids;  // maps a position back to its id
  int32_t dim, row_columns, piece_start;
  int32_t mean;
  int32_t row_class;
  RowType type;
  int32_t refresh_begin, refresh_end;  // its entries of View::refreshes
  bool has_push, has_replicas;
};

// Arguments of a table's update in one step.
struct UpdateArgs {
  OptimizerArgs optimizer;
  RoundingKey rounding;  // for rows of 16-bit elements
};

struct Feature {
  int32_t table, logical;  // logical: number of the feature in the collection
  int64_t column;          // first output column (pooled)
};

// The error of a batch, in host memory mapped to the device; `code` is written last.
struct ErrorWord {
  // 0 ok, 2 a peer is late, 3 the send buffer is full, 4 an id is out of range, 5 lengths do not
  // fit the ids, 8 ranks are not at the same exchange, 13 a peer has refused its batch, 15 ranks
  // update with different settings, 16 the batch was refused in its lookup, whose error was not
  // stored or has been raised, 17 the keys of a batch do not fit
  int32_t code;
  int32_t rank;    // the rank that failed; 4: number of the feature
  int64_t detail;  // 3: bytes, 4: the id, 5: a negative length, or the sum of all, 17: distinct keys
};

// Where kernels store errors: the first thread that sets `claimed` writes the word.
struct ErrorSink {
  ErrorWord* word;
  int* claimed;  // in device memory: 0; 1 once an error is stored; kLost once a peer is late
};
constexpr int kLost = 2;

// One batch; all pointers are to device memory. In an unpooled lookup, every id is a bag of its
// own.
//
// If the batch is refused, because lengths do not fit the ids or a request does not fit, all bounds
// are kRefusedBound, so that no kernel reads an id.
constexpr int64_t kRefusedBound = 1;
struct Batch {
  const void* ids;
  bool ids_are_32_bit;
  int64_t num_ids;
  const int64_t* bounds;  // [num_keys * batch_size + 1]
  int64_t num_bounds;
  const int32_t* key_of;       // [F of the collection]
  const int32_t* users_begin;  // [num_used_keys + 1]: key k is used by the features
  const int32_t* users;        // users[users_begin[k], users_begin[k + 1]), column pieces included
  int64_t num_used_keys;
  const float* weights;  // per id, or null
  int64_t batch_size;
  bool pooled;
  // Payloads of the plan are numbers of pairs, see resolve.cu; always with weights.
  bool by_pair;
  int64_t max_pairs;  // upper bound of the number of pairs
};

// A rank's send buffer: this header; T * W + 1 bounds (uint32): first run of each table and owner;
// T offsets (int64) of the tables' rows, floats from `rows_offset`; then slots and rows. A run is a
// row with gradients, see BatchPlan.
struct SendBufferHeader {
  int64_t slots_offset, rows_offset;  // bytes from the start
  int64_t num_runs;                   // < 0: the rank refuses its batch, so that no rank updates
  int64_t settings;                   // View::settings of the rank
};
OPER_HD constexpr int64_t segment_bytes(int64_t num_tables, int64_t world_size) {
  return (4 * (num_tables * world_size + 1) + 7) / 8 * 8;
}
OPER_HD constexpr int64_t send_buffer_header_bytes(int64_t num_tables, int64_t world_size) {
  return static_cast<int64_t>(sizeof(SendBufferHeader)) + segment_bytes(num_tables, world_size) +
         8 * num_tables;
}

// Descriptions of a rank's tables for kernels, in device memory.
struct View {
  const Table* tables;        // [T] in the order of keys
  const Feature* features;    // [F], by their number in the collection
  // [features of the collection + 1]: the column pieces of number l are [first_piece[l],
  // first_piece[l + 1]) of `features`.
  const int32_t* first_piece;
  const int64_t* table_keys;  // [T + 1] first key of each table
  // [T + 1]: this rank's rows are numbered from own_begin[t] on in table t.
  const int64_t* own_begin;
  const Refresh* refreshes;
  char* const* send_buffers;  // [W]
  // [W] 1 = a rank of this memory domain; null if all are.
  const uint8_t* local;
  int64_t send_buffer_bytes;
  const char *arena_begin, *arena_end;  // this rank's memory
  int64_t* duplication;                 // [2] pairs and runs of the last batch plan, in host memory
  int32_t num_tables, num_features, num_refreshes, rank, world_size;
  const uint32_t* settings;  // hash of the optimizers' constants, which ranks compare
  // A bit for each of this rank's rows, set if an update has changed it; null = not marked. Those of
  // table t begin at word own_begin[t] / 32 + t.
  uint32_t* changed;
  ErrorSink error;           // errors of this rank
  ErrorSink peers;           // errors that other ranks report; raised only if this rank has none
};

// Keys have 32 bits if the total number of rows allows it, which halves the traffic of sorting.
struct Keys {
  void* data;
  bool wide;  // 64 bits
  OPER_HD int64_t at(int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i]
                : static_cast<int64_t>(static_cast<const uint32_t*>(data)[i]);
  }
  OPER_HD void set(int64_t i, int64_t key) const {
    if (wide) {
      static_cast<int64_t*>(data)[i] = key;
    } else {
      static_cast<uint32_t*>(data)[i] = static_cast<uint32_t>(key);
    }
  }
};

// Pairs (key, payload) sorted by key, and the runs of pairs with equal keys.
struct SortedPairs {
  // For sorting, whose result may be in the spare arrays.
  void swap_spare() {
    std::swap(keys, spare_keys);
    std::swap(payloads, spare_payloads);
    is_swapped = !is_swapped;
  }
  Keys keys;            // [max_pairs] ascending; after the last pair, larger ones
  uint32_t* payloads;   // [max_pairs]
  uint32_t* run_begin;  // [max_pairs + 1] first pair of each run, then the end
  int64_t* num_runs;    // [1]
  Keys spare_keys;      // the rest is for sorting
  uint32_t* spare_payloads;
  void* sort_scratch;
  int64_t sort_scratch_bytes;
  bool is_swapped;  // whether arrays and spare arrays are swapped
};

// A batch plan, in device memory: the batch's pairs sorted by key, see resolve.cu. A run is a
// distinct row, with all its pairs. Computed once per batch, possibly in advance on another stream,
// and used by forward and backward pass.
struct BatchPlan : SortedPairs {
  int64_t* feature_begin;  // [F + 1] first pair of each feature
  int64_t* output_begin;   // [F] unpooled: first output row of each feature
  int32_t* tile_begin;     // [F + 1] first tile of each feature; a tile is 32 bags (pooled) or ids
  uint32_t* pair_bags;     // [max_pairs] with Batch::by_pair
  float* pair_weights;     // [max_pairs] with weights
  // [max_pairs] with Batch::by_pair: where the pair's row is staged, see stage.cu.
  uint32_t* places;
  // [1] with Batch::by_pair: number of kStagingUnits of the rows to stage, also of those that do not fit.
  unsigned long long* staged;
  uint32_t* segments;      // [T * W + 1] first run of each table and owner
  uint32_t* refused;       // [1] not 0 if lengths or an id are invalid, or a request does not fit
  int32_t bag_bits;        // payload = feature << bag_bits | bag
};

// Buffers for the sums of long runs, those of more than kLongRun pairs. Runs of more than kChunk
// pairs are divided into chunks of kChunk pairs, whose sums another kernel adds; the others are one
// chunk.
constexpr int kChunk = 256, kLongRun = 32;
struct Chunk {
  uint32_t run, number;  // number: of the chunk within the run
  uint32_t partial;      // of a divided run: index of the chunk's sum
};
struct LongRuns {
  Chunk* chunks;     // [max_chunks]
  uint32_t* runs;    // [max_partials] the divided runs
  uint32_t* first;   // [max_partials] index of each one's first partial sum
  float* partials;   // [max_partials, stride] sums of chunks
  uint32_t* counts;  // [3] numbers of chunks, divided runs and partial sums
  int64_t max_chunks, max_partials;
  int64_t stride;  // floats
};
inline int64_t most_partials(int64_t max_pairs) { return 2 * (max_pairs / kChunk) + 2; }
inline int64_t most_chunks(int64_t max_pairs) {
  return most_partials(max_pairs) + max_pairs / kLongRun;
}

struct Gradient {
  const float* data;
  int64_t stride;  // elements between rows
  float scale;     // factor of the summed gradient of a row
};

struct Output {
  float* data;
  int64_t stride;  // elements between rows
  int64_t rows;
};

// ---- steps of a batch; they throw if a launch fails ---------------------------------------------

// Arguments that all steps need.
struct Launch {
  const View& view;
  const std::vector<RowClass>& classes;
  const UpdateArgs* optimizers;  // [T] in the order of keys
  cudaStream_t stream;
  bool all_row_wise_adagrad = false;  // all optimizers are: there is a separate kernel for this
  bool rows_repeat = false;           // see Context::rows_repeat
};

// Memory for copies of rows, so that each distinct row is fetched only once. `plan.places` has the
// place of each pair's row, in kStagingUnits, or kNotStaged.
struct Staging {
  char* data;     // null: no rows are copied
  int64_t bytes;  // capacity; rows beyond it are read in place
};
constexpr int64_t kStagingUnit = 16;  // bytes
constexpr uint32_t kNotStaged = ~0u;
// Marks all rows as not staged; called before `stage` and `place_remote_rows`.
void clear_staging(const Batch& batch, const BatchPlan& plan, cudaStream_t stream);
// Copies the rows of other ranks of this memory domain that a batch reads. `skip_pushed`: see
// `pool`.
void stage(const Launch& on, const Batch& batch, const BatchPlan& plan, const Staging& staging,
           bool skip_pushed);

// Rows that were received from remote ranks, those of other memory domains. Each range has the rows
// of consecutive runs of the batch plan.
struct RemoteRows {
  enum Column {
    kBegin,  // number of rows in the ranges before
    kRun,    // first run
    kBytes,  // byte offset of its rows in `rows`
    kUnit,   // offset in the staging memory, in kStagingUnits
    kTableIndex,
    kWidth
  };
  const int64_t* ranges;  // [num_ranges, kWidth]
  int64_t num_ranges, num_rows;
  const char* rows;
};
// Copies them to the staging memory, where they are aligned.
void place_remote_rows(const Launch& on, const BatchPlan& plan, const RemoteRows& remote,
                       const Staging& staging);

// Arrays of numbers (parts) to pack into a message or unpack from it. In the message a part is
// contiguous; in this rank's memory its entries are contiguous, or rows of a matrix.
struct WireParts {
  enum Column {
    kFirst,   // how many numbers all earlier parts have together
    kMemory,  // address in this rank's memory
    // Address of the indices (uint32) of the matrix's rows that are its entries; 0 = 0, 1, ...
    kRows,
    kWire,      // address in the message
    kPerEntry,  // numbers of an entry; of kSlots: bits of a slot in the message
    kKind,
    // Of kSlots: the exclusive upper bound of slots when they are unpacked, the number of slots when
    // they are packed.
    kLimit,
    kWidth
  };
  enum Kind : int64_t {
    kWords,    // numbers of 4 bytes
    kHalves,   // of 2 bytes
    kRounded,  // float32 in memory, bfloat16 in the message
    // uint32 in memory, kPerEntry bits in the message; packed, they count as the words there.
    kSlots
  };
  const int64_t* parts;  // [num_parts, kWidth]
  int64_t num_parts, num_numbers;
};
// Packs the parts if `packs`, otherwise unpacks them.
void move_parts(const View& view, const WireParts& parts, bool packs, cudaStream_t stream);

// n sums of float32 numbers, added in the order of their terms.
struct Sums {
  const int64_t* out;    // [n] addresses of the sums
  const int64_t* first;  // [n + 1] index of each sum's first term
  const int64_t* terms;  // addresses
  int64_t n;
};
void add_up(const Sums& sums, cudaStream_t stream);

// Pools every bag. `skip_pushed`: without rows of pushed tiers; for mean pooling, tables with such
// tiers get sums, which `add_partials` divides.
void pool(const Launch& on, const Batch& batch, const BatchPlan& plan, const Output& out,
          const Staging& staging, bool skip_pushed);
// Computes a plan's feature_begin, output_begin and tile_begin only, which suffice for `pool`
// without staged rows.
void lay_out_features(const Launch& on, const Batch& batch, const BatchPlan& plan);
// Gradient of the per-sample weights, float [num_ids].
void weight_gradient(const Launch& on, const Batch& batch, const BatchPlan& plan,
                     const Gradient& grad, float* out, const Staging& staging);

// Computes a batch plan. `num_keys`: Context::num_keys.
void make_plan(const Launch& on, int64_t num_keys, const Batch& batch, BatchPlan& plan);

// Sums gradients by row. `update_at_once`: applies the optimizer to each sum, which is possible on
// a single rank only; otherwise writes the sums to the send buffer.
void reduce(const Launch& on, const Batch& batch, const BatchPlan& plan, const Gradient& grad,
            const LongRuns& long_runs, bool update_at_once);

// The gradients (entries) that all ranks have for this rank's rows, linked into one list per row.
// Entry r * capacity + i is the i-th of rank r.
constexpr uint32_t kNoEntry = ~0u;
struct ReceiveLists {
  int64_t* list_begin;  // [W, T + 1] first entry of each table in each rank's list
  uint32_t* rows;       // [W * capacity] number of the entry's row, see View::own_begin
  uint32_t* next;       // [W * capacity] another entry of the same row, or kNoEntry
  uint32_t* heads;      // [own rows] first entry of the row's list; kNoEntry between steps
  int64_t capacity;     // entries of one rank
  int64_t bytes;        // total size of the arrays
};
// Lists the entries of all send buffers. None if a rank has refused its batch or updates with other
// settings, or if a peer is lost: then no kernel of the update finds a row.
void collect(const Launch& on, const ReceiveLists& lists);
// Sums the gradients of each row of column pieces, and writes the sums of squares. In several
// domains, oper/shmem/exchange/device_squares.py then replaces them by the rows' totals.
// `round`: with clipping, round 0 is before it; the last round is for row-wise optimizers.
void merge_squares(const Launch& on, const ReceiveLists& lists, float gradient_scale,
                   int32_t round);
// Sums the gradients of each row and applies the optimizer.
void merge_and_update(const Launch& on, const ReceiveLists& lists, float gradient_scale);
// Marks the rows that `merge_and_update` or, with one rank, `reduce` changes, see View::changed.
void mark_merged(const Launch& on, const ReceiveLists& lists);
void mark_runs(const Launch& on, const Batch& batch, const BatchPlan& plan);
// Copies updated rows of replicated tiers into this rank's replicas.
void refresh(const Launch& on);

// The barrier: waits until all ranks of the memory domain have arrived as often as this one.
// `pads`: [W] each rank's signal pad, W words; rank r writes word r (null: a remote rank); `epoch`:
// this rank's number of arrivals, in device memory.
void arrive_and_wait(uint32_t* const* pads, uint32_t* epoch, int32_t rank, int32_t world_size,
                     int64_t deadline_ms, const ErrorSink& error, cudaStream_t stream);

// ---- exchange mode push, see push.cu ----

// A reader's request to the owners, in memory that these can read.
struct RequestHeader {
  int64_t num_runs;  // a run here: the ids of one bag that one owner has
  int64_t slots_offset, run_begin_offset, run_bags_offset, weights_offset;  // bytes from the start
};
struct PushPlan : SortedPairs {  // keys have 64 bits
  char* const* requests;         // [W] the readers' requests
  // [W] the owners' partial sums; each reader has 1 / W of the space.
  char* const* partials;
  int64_t request_bytes, partial_bytes;  // of each rank
  uint32_t* slots;                       // [max_pairs]
};
// Writes this rank's request. If it does not fit, the batch is refused: `refused`, the flag of the
// batch's own plan, is set, and its `bounds` become kRefusedBound, so that a plan that is made
// later is refused, too.
void publish_requests(const Launch& on, const Batch& batch, const BatchPlan& plan, PushPlan& push,
                      int64_t* bounds, uint32_t* refused);
// Pools this owner's rows for all readers.
void pool_for_readers(const Launch& on, const PushPlan& push);
// Adds the owners' partial sums to the output.
void add_partials(const Launch& on, const Batch& batch, const BatchPlan& plan, const PushPlan& push,
                  const Output& out);

// ---- sort.cu ------------------------------------------------------------------------------------

// Sorts the first `count` pairs by the bits [first_bit, last_bit) of their keys, stably, and finds
// the runs of equal keys. May swap arrays and spare arrays.
void sort_into_runs(SortedPairs& pairs, int64_t count, int first_bit, int last_bit,
                    cudaStream_t stream);
int64_t sort_scratch_bytes(int64_t count);
// Writes bounds[k] = sum of the first k lengths, for k in [0, count]; `count` > 0. A negative
// length, or a sum other than num_ids, is an error: all bounds are kRefusedBound then.
struct Lengths {
  const void* data;
  bool are_32_bit;
  int64_t count, num_ids;
};
void sum_lengths(const Lengths& lengths, int64_t* bounds, void* scratch, const ErrorSink& error,
                 cudaStream_t stream);
int64_t sum_scratch_bytes(int64_t count);

// The number of blocks of `per_block` groups to launch for `groups` groups: at most a few times as
// many as the device can hold at the same time, since kernels loop.
int blocks_for(int64_t groups, int64_t per_block);
// Whether kernels may start before their predecessor on the stream has finished, see
// OPER_LAUNCH_EARLY.
bool kernels_overlap();
// Threads that the device can hold at the same time if each takes 128 registers; most kernels take
// 60 to 128.
int64_t resident_threads();

inline int bits_for(uint64_t count) { return count <= 1 ? 0 : 64 - __builtin_clzll(count - 1); }

}  // namespace oper::device
