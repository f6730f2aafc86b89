// The device back end: data structures of kernels, and the steps that operators launch.
//
// Phases, order of sums and optimizer arithmetic are those of the host back end. No function waits
// for the device: sizes known only to the device stay there, launches cover the host's upper
// bounds, and kernels store errors in a word of host memory that the next call reads. Every step
// can therefore be captured in a CUDA graph.
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

// Throws with the name of `what` when a CUDA call has failed.
void check(cudaError_t status, const char* what);

// Rows that one instance of a kernel handles, with `lanes` lanes of `vectors` parts of 16 bytes
// each. lanes = 0: rows whose size is not a multiple of 16 bytes, processed element by element.
struct RowClass {
  RowType type;
  int32_t lanes, vectors;
  int32_t index;                   // of this class; Table::row_class
  int32_t table_begin, table_end;  // in the order of keys
  int32_t dim;                     // columns of all its tables, or 0 if they differ
  bool has_push, has_pieces;       // whether any of its tables does
  std::vector<int32_t> features;
  const int32_t* device_features;

  int32_t group_lanes() const { return lanes > 0 ? lanes : 32; }
};

// As HomeTier in csrc/common/home_tiers.h.
struct HomePart {
  int64_t slot_begin, slot_end, start, period;
  const int64_t* offsets;
  uint32_t num_offsets;
};

// Masters of replicated rows that a rank of another domain has updated in this step and sent:
// slots, and contiguous rows. `masters` of their Refresh is null.
struct FarMasters {
  const uint32_t* slots;
  const char* rows;
  int64_t count;
};

// A table, or a column piece of one. Keys (64 bits) number the rows of all tables on all ranks: by
// table, then by owner, then by slot.
struct Table {
  TableMap read;  // id -> address of the row to read
  TableMap home;  // id -> home key
  int64_t key_begin;
  const int64_t* owner_begin;  // [W + 1] home keys of owner r: [owner_begin[r], [r + 1])
  const HomePart* home_parts;  // [num_home_parts] this rank's part of each tier
  int32_t num_home_parts;
  char* rows;  // this rank's shard
  float* momentum1;
  float* momentum2;
  float* const* squares;          // [W] sums of squares by slot, for column pieces, or null
  uint32_t* const* touched;       // [W] count, then updated replicated slots; null without replicas
  const FarMasters* far_masters;  // [W]
  const uint8_t* pushes;          // per tier
  const int32_t* pieces;          // [num_pieces] of the same row, in column order, or null
  int32_t num_pieces;
  HeadIds head_ids;  // maps a position back to its id
  int32_t dim, row_columns, piece_start;
  int32_t mean;
  int32_t row_class;
  RowType type;
  bool has_push, has_replicas;
};

// Arguments of a table's update in one step.
struct UpdateArgs {
  OptimizerArgs optimizer;
  RoundingKey rounding;  // for rows of 16-bit elements
};

struct Feature {
  int32_t table, logical;
  int64_t column;
};

// The error of a batch, in host memory mapped to the device; `code` is written last.
struct ErrorWord {
  // 0 ok, 2 deadline, 3 outbox full, 4 id out of range, 5 bag lengths, 8 ranks are not at the same
  // exchange, 13 a peer has refused its batch, 15 ranks update with different settings, 16 the batch
  // was refused in its lookup, whose error was not stored or has been raised, 17 the keys of a batch do
  // not fit
  int32_t code;
  int32_t rank;    // rank that failed; 4: index of the feature
  int64_t detail;  // 3: bytes, 4: the id, 5: a negative length, or the sum of all, 17: distinct keys
};

// Destination of kernels' errors: the first thread to set `claimed` writes the word.
struct ErrorSink {
  ErrorWord* word;
  int* claimed;  // device memory: 0; 1 once an error is stored; kLost if a peer has not arrived
};
constexpr int kLost = 2;

// One batch; all pointers are to device memory. Unpooled: every id is a separate bag.
//
// If lengths do not fit the ids, all bounds are kRefusedBound, so that no kernel reads an id.
constexpr int64_t kRefusedBound = 1;
struct Batch {
  const void* ids;
  bool ids_are_32_bit;
  int64_t num_ids;
  const int64_t* bounds;  // [num_keys * batch_size + 1]
  int64_t num_bounds;
  const int32_t* key_of;       // [F of the collection]
  const int32_t* users_begin;  // [num_used_keys + 1] where each key's features (pieces too) begin
  const int32_t* users;        // among these
  int64_t num_used_keys;
  const float* weights;  // per id, or null
  int64_t batch_size;
  bool pooled;
  bool by_pair;       // payloads of the plan are numbers of pairs; always so with weights
  int64_t max_pairs;  // bound on the sum over the features (pieces too) of their ids
};

// A rank's outbox: this header, then T * W + 1 bounds (uint32, in runs), then T row offsets (int64,
// floats from `rows_offset`), then slots and rows.
struct OutboxHeader {
  int64_t slots_offset, rows_offset;  // bytes from the start
  int64_t num_runs;                   // < 0: the rank refuses its batch, so that no rank updates
  int64_t settings;                   // hash of the rank's optimizers' arguments
};
OPER_HD constexpr int64_t segment_bytes(int64_t num_tables, int64_t world_size) {
  return (4 * (num_tables * world_size + 1) + 7) / 8 * 8;
}
OPER_HD constexpr int64_t outbox_header_bytes(int64_t num_tables, int64_t world_size) {
  return static_cast<int64_t>(sizeof(OutboxHeader)) + segment_bytes(num_tables, world_size) +
         8 * num_tables;
}

// Descriptions of a rank's tables for kernels, in device memory.
struct View {
  const Table* tables;        // [T] in the order of keys
  const Feature* features;    // [F]
  const int64_t* table_keys;  // [T + 1] first key of each table
  const int64_t* own_begin;   // [T + 1] first of this rank's rows of each table, among all its rows
  const Refresh* refreshes;
  char* const* outboxes;  // [W]
  int64_t outbox_bytes;
  const char *arena_begin, *arena_end;  // this rank's memory
  int64_t* duplication;                 // [2] pairs and runs of the last plan; host memory, mapped
  int32_t num_tables, num_features, num_refreshes, rank, world_size;
  const uint32_t* settings;  // hash of the optimizers' arguments, which must be equal on all ranks
  // A bit for each of this rank's rows, set if an update has changed it; null = not marked. Those of
  // table t begin at word own_begin[t] / 32 + t.
  uint32_t* changed;
  // Errors of this rank's batches, and errors that other ranks report, which are raised only if there
  // is none of its own.
  ErrorSink error, peers;
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

// Sorted keys with their payloads, and the runs of equal keys.
struct SortedPairs {
  // Sorting may leave its result in the spare arrays.
  void swap_spare() {
    std::swap(keys, spare_keys);
    std::swap(payloads, spare_payloads);
    is_swapped = !is_swapped;
  }
  Keys keys;            // [max_pairs] ascending; past the last pair: above all of them
  uint32_t* payloads;   // [max_pairs]
  uint32_t* run_begin;  // [max_pairs + 1]
  int64_t* num_runs;    // [1]
  Keys spare_keys;      // sorting
  uint32_t* spare_payloads;
  void* sort_scratch;
  int64_t sort_scratch_bytes;
  bool is_swapped;  // the arrays have changed places with the spare ones
};

// Device memory of one batch plan: ids resolved, sorted, and divided into runs of equal rows.
// Computed once per batch, possibly in advance on another stream; used by the forward and backward
// passes.
struct BatchPlan : SortedPairs {
  int64_t* feature_begin;  // [F + 1] first pair of each feature
  int64_t* output_begin;   // [F] unpooled: first output row
  int32_t* tile_begin;     // [F + 1] first tile of 32 bags (pooled) or ids
  uint32_t* pair_bags;     // [max_pairs] by pair only
  float* pair_weights;     // [max_pairs] with weights only
  uint32_t* places;        // [max_pairs] by pair only: where the pair's row is staged, see stage.cu
  uint32_t* staged;        // [1] by pair only: units of kStagingUnit that are taken
  uint32_t* segments;      // [T * W + 1] first run of each table and owner
  uint32_t* refused;       // [1] not 0 if lengths or an id are invalid, or a request does not fit
  int32_t bag_bits;        // payload = feature << bag_bits | bag
};

// Buffers for the reduction of long runs, those of more than kLongRun pairs. Runs of more than kChunk
// pairs are cut into chunks of kChunk, whose sums a further kernel adds; others are a single chunk.
constexpr int kChunk = 256, kLongRun = 32;
struct Chunk {
  uint32_t run, number;  // number within the run
  uint32_t partial;      // of a cut run: index of its sum
};
struct LongRuns {
  Chunk* chunks;     // [max_chunks]
  uint32_t* runs;    // [max_partials] cut runs
  uint32_t* first;   // [max_partials] first partial sum of each
  float* partials;   // [max_partials, stride]
  uint32_t* counts;  // [3] chunks, cut runs, partial sums
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
  float scale;     // applied to the exact gradient of a row
};

struct Output {
  float* data;
  int64_t stride;  // elements between rows
  int64_t rows;
};

// ---- steps; they throw if a launch fails --------------------------------------------------------

// Arguments of all steps of a rank.
struct Launch {
  const View& view;
  const std::vector<RowClass>& classes;
  const UpdateArgs* optimizers;  // [T] in the order of keys
  cudaStream_t stream;
  bool all_row_wise_adagrad = false;  // all optimizers are, for which there is a separate kernel
  bool rows_repeat = false;           // most rows of a batch get several gradients
};

// Copies of the distinct rows of peers that a batch reads; `plan.places` maps pairs to copies.
struct Staging {
  char* data;     // null: none
  int64_t bytes;  // capacity; rows beyond it are read in place
};
constexpr int64_t kStagingUnit = 16;
constexpr uint32_t kNotStaged = ~0u;
// Marks all rows as not staged; must precede `stage` and `place_far_rows`.
void clear_staging(const Batch& batch, const BatchPlan& plan, cudaStream_t stream);
void stage(const Launch& on, const Batch& batch, const BatchPlan& plan, const Staging& staging,
           bool skip_pushed);

// Rows of other memory domains, as they were received: ranges of runs of the batch plan.
struct FarRows {
  enum Column { kBegin, kRun, kBytes, kUnit, kTableIndex, kWidth };
  const int64_t* ranges;  // [num_ranges, kWidth]: rows before it, first run, where its rows
                          // begin in `rows` (bytes) and in the staging memory (units), table
  int64_t num_ranges, num_rows;
  const char* rows;
};
// Copies far rows into the staging memory, where loads are aligned.
void place_far_rows(const Launch& on, const BatchPlan& plan, const FarRows& far,
                    const Staging& staging);

// Arrays of numbers to pack into a message or unpack from it, contiguous in the message. In this
// rank's memory their entries are contiguous, or at the indices of `kRows`.
struct WireParts {
  enum Column { kFirst, kMemory, kRows, kWire, kPerEntry, kKind, kLimit, kWidth };
  enum Kind : int64_t {
    kWords,    // of 4 bytes
    kHalves,   // of 2 bytes
    kRounded,  // float32 that travel as bfloat16
    kSlots     // uint32 in so many bits each as `kPerEntry` says, below `kLimit`
  };
  // [num_parts, kWidth]: numbers before the part; addresses of its memory, of the uint32 numbers of
  // its entries (or 0: 0, 1, ...) and in the message; numbers of an entry; kind; end of entries or of
  // slots. Of slots that are packed: bits of each; their number. They count as the words that they
  // become.
  const int64_t* parts;
  int64_t num_parts, num_numbers;
};
void move_parts(const View& view, const WireParts& parts, bool packs, cudaStream_t stream);

// Pools every bag. `skip_pushed`: leave out rows of pushed tiers, and do not divide the means of
// tables that have such tiers.
void pool(const Launch& on, const Batch& batch, const BatchPlan& plan, const Output& out,
          const Staging& staging, bool skip_pushed);
// Computes only feature_begin, output_begin and tile_begin, which `pool` of an unpooled batch
// needs.
void lay_out_features(const Launch& on, const Batch& batch, const BatchPlan& plan);
// Gradient of the per-sample weights, float [num_ids].
void weight_gradient(const Launch& on, const Batch& batch, const BatchPlan& plan,
                     const Gradient& grad, float* out, const Staging& staging);

void make_plan(const Launch& on, int64_t num_keys, const Batch& batch, BatchPlan& plan);

// Sums gradients by row: with one rank into the update, otherwise into the outbox.
void reduce(const Launch& on, const Batch& batch, const BatchPlan& plan, const Gradient& grad,
            const LongRuns& long_runs, bool update_at_once);

// Gradients from all ranks for this rank's rows: entries, linked into one list per row. Entry
// r * capacity + i is the i-th of rank r.
constexpr uint32_t kNoEntry = ~0u;
struct Inbox {
  int64_t* list_begin;  // [W, T + 1] first entry of each table in each rank's list
  uint32_t* rows;       // [W * capacity] number of the row among all of this rank
  uint32_t* next;       // [W * capacity] another entry of the same row, or kNoEntry
  uint32_t* heads;      // [own rows] an entry of the row; kNoEntry between steps
  int64_t capacity;     // entries of one rank
  int64_t bytes;        // of all this
};
// All lists are empty if a rank has refused its batch or updates with other settings, or if a peer
// is lost: then no kernel of the update finds a row.
void collect(const Launch& on, const Inbox& inbox);
// Sums of squares of merged gradients, for column pieces under row-wise optimizers.
// `round`: row-wise clipping needs them of the gradients as merged (round 0) before the optimizer
// needs them of the clipped ones.
void merge_squares(const Launch& on, const Inbox& inbox, float gradient_scale, int32_t round);
void merge_and_update(const Launch& on, const Inbox& inbox, float gradient_scale);
// Marks the rows that `merge_and_update` or, with one rank, `reduce` changes, see View::changed.
void mark_merged(const Launch& on, const Inbox& inbox);
void mark_runs(const Launch& on, const Batch& batch, const BatchPlan& plan);
// Copies updated rows of replicated tiers into this rank's copies.
void refresh(const Launch& on);

// Waits until all ranks have arrived as often as this one. `pads`: [W] each rank's W words, of which
// rank r writes word r; `epoch`: this rank's number of arrivals, in its memory.
void arrive_and_wait(uint32_t* const* pads, uint32_t* epoch, int32_t rank, int32_t world_size,
                     int64_t deadline_ms, const ErrorSink& error, cudaStream_t stream);

// Push: a reader's request to the owners, in the reader's symmetric memory.
struct RequestHeader {
  int64_t num_runs;
  int64_t slots_offset, run_begin_offset, run_bags_offset, weights_offset;  // bytes
};
struct PushPlan : SortedPairs {  // keys of 64 bits
  char* const* requests;  // [W] header, segments (uint32 [T * W + 1]), offsets (int64 [T * W])
  char* const* partials;  // [W] the owners' sums; a W-th of it for each reader
  int64_t request_bytes, partial_bytes;
  uint32_t* slots;
};
// If the request does not fit, the batch is refused: `refused`, the flag of its own plan, is set, and
// its `bounds` become kRefusedBound, so that a plan that is made later is refused as well.
void publish_requests(const Launch& on, const Batch& batch, const BatchPlan& plan, PushPlan& push,
                      int64_t* bounds, uint32_t* refused);
void pool_for_readers(const Launch& on, const PushPlan& push);
void add_partials(const Launch& on, const Batch& batch, const BatchPlan& plan, const PushPlan& push,
                  const Output& out);

// ---- sort.cu ------------------------------------------------------------------------------------

// Sorts the first `count` keys by the bits [first_bit, last_bit), stably, with their payloads, and
// finds the positions p with p = 0 or keys[p] != keys[p - 1], ascending. May swap the spare arrays in.
void sort_into_runs(SortedPairs& pairs, int64_t count, int first_bit, int last_bit,
                    cudaStream_t stream);
int64_t sort_scratch_bytes(int64_t count);
// bounds[k + 1] = sum of the first k + 1 lengths; bounds[0] = 0. A negative length or a sum other than
// num_ids is an error, after which all bounds are kRefusedBound. `count` > 0.
struct Lengths {
  const void* data;
  bool are_32_bit;
  int64_t count, num_ids;
};
void sum_lengths(const Lengths& lengths, int64_t* bounds, void* scratch, const ErrorSink& error,
                 cudaStream_t stream);
int64_t sum_scratch_bytes(int64_t count);

// Number of blocks of `per_block` groups for `groups` groups, limited to those that fill the
// device.
int blocks_for(int64_t groups, int64_t per_block);
// Whether a kernel may be launched before its predecessor on the stream has finished.
bool kernels_overlap();
// Threads that the device holds at once when each takes 128 registers; the hot kernels take 60 to 128.
int64_t resident_threads();

inline int bits_for(uint64_t count) { return count <= 1 ? 0 : 64 - __builtin_clzll(count - 1); }

}  // namespace oper::device
