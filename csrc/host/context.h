// The state of one rank in the host back end (tables, features, addresses in all ranks' arenas,
// scratch memory), the contents of a batch, and the steps of a batch.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "common/directory.h"
#include "common/elements.h"
#include "common/exchange.h"
#include "common/home_tiers.h"
#include "common/optimizer.h"
#include "common/philox.h"
#include "host/barrier.h"
#include "host/counters/phases.h"
#include "host/counters/traffic.h"
#include "host/memory.h"

namespace oper::host {

// One feature of one table, in output order. A table that is split by columns is several tables
// here, each with its own features.
struct Feature {
  int32_t table;
  int64_t column;   // first output column (pooled)
  int32_t logical;  // number of the feature in the collection
  int64_t start;    // first column of the table's piece
};

// The constants of up to eight tiers (see TierMap), so that each array fits one vector register.
// Unused tiers start after all positions. `base` and `step` have the entries of all tiers, those of
// tier k from `first[k]` on.
struct FlatTiers {
  static constexpr int kTiers = 8, kInRegisters = 16;  // entries that fit two registers
  int64_t start[kTiers];
  double inverse[kTiers];  // 1 / period
  int64_t period[kTiers];
  int64_t first[kTiers];
  int64_t num_entries;
  std::vector<int64_t> base, step;  // [num_entries], padded to kInRegisters
};

// Null if the map has more than kTiers tiers.
std::unique_ptr<FlatTiers> flatten(const TableMap& map);

// Gradients of distinct rows of this rank, by ascending slot: those that one rank has pushed, or
// the sums over all ranks for one micro-batch.
struct PushedRows {
  std::vector<uint32_t> slots;
  std::vector<float> rows;
};

// An entry of the read map of a table with rows of several types: the address in the lower 48 bits,
// the row's type and size in the upper 16, which are zero in the addresses of other tables.
struct RowPlace {
  static constexpr int kBytesAt = 48, kTypeAt = 60;
  static constexpr int64_t kAddress = (int64_t{1} << kBytesAt) - 1;

  int64_t place;

  static int64_t mark_of(RowType type, int64_t row_bytes) {
    return (row_bytes - 1) << kBytesAt | static_cast<int64_t>(type) << kTypeAt;
  }
  const char* row() const { return reinterpret_cast<const char*>(place & kAddress); }
  int64_t last_byte() const { return place >> kBytesAt & ((1 << (kTypeAt - kBytesAt)) - 1); }
  RowType type() const { return static_cast<RowType>(place >> kTypeAt); }
};

struct Table {
  int32_t dim;
  RowType row_type;
  std::vector<RowType> types;  // see RowPlace; empty: all rows are of `row_type`, the widest
  int32_t mean;  // 1: mean pooling
  TableMap read;  // id -> byte address of the row to read, or its RowPlace
  TableMap home;  // id -> linear index, see common/directory.h
  // [W + 1]: owner r has linear indices [owner_begin[r], owner_begin[r + 1]).
  std::vector<int64_t> owner_begin;
  char* rows;                        // this rank's shard [slots, dim], elements of `row_type`
  float* momentum1;                  // optimizer state [slots, dim or 1], or null
  float* momentum2;                  // as momentum1
  OptimizerArgs optimizer;           // set for every update
  RoundingKey rounding;              // set for every update of 16-bit rows
  std::vector<int32_t> features;     // features that look up here
  std::vector<uint8_t> pushes;       // per tier: exchange mode push
  bool is_pushed;                    // at least one tier is
  // Whether this rank requests partial sums from owners. False if all tiers are pushed and it owns
  // all rows: it then looks them up as in a pulled table, with bitwise equal results.
  bool has_push;
  bool all_pushed;  // every tier is, so that ids need not be checked one by one
  std::vector<std::pair<uint32_t, uint32_t>>
      pushed_keys;  // ranges of linear indices in pushed tiers
  // The pieces of a table that is split by columns, in column order, this one included; else empty.
  // Where the optimizer or clipping needs the sum of squares of a whole row, the owner of each
  // piece writes the sum over its columns to `squares`, of each rank [rounds_of_squares(), slots].
  // In a single domain all owners add up the sums of all pieces. Otherwise one of them does, and
  // the row's total replaces its own sum and those of owners in other domains, see summing_piece.
  std::vector<int32_t> pieces;
  std::vector<float*> squares;
  int32_t row_columns;   // columns of the entire row
  int32_t first_column;  // of this piece in the entire row
  HeadIds head_ids;      // maps a position back to its id
  std::vector<HomeTier> home_tiers;
  std::vector<PushedRows> pushed;  // [W], gradients for this rank's rows in pushed tiers, by sender
  // Gradients that `leave` has collected for this rank's rows since the last update: [0] of pulled
  // tiers, [1] of pushed tiers; one entry per micro-batch. Entries from Context::num_left on are
  // unused memory.
  std::vector<PushedRows> left[2];
  bool has_replicas = false;
  std::vector<uint32_t*> touched;  // [W]: each rank's replicated slots that its last update has
                                   // changed, ascending, after their number
  std::vector<std::pair<uint32_t, uint32_t>> replicated_slots;  // ranges on this rank
  int32_t index;  // in the context
  // A bit per slot of this rank, set if an update has changed its row since take_changes(); null =
  // changes are not tracked.
  uint64_t* changed = nullptr;
  TableCounters counters;
  const Arenas* arenas;
  // [W]: copies of the rows of the slots in `touched`, one after the other, received from a rank of
  // another memory domain; null if this rank can address the rows. Empty in a single domain.
  std::vector<const char*> packed_masters;
  int64_t row_bytes() const { return bytes_of_row(row_type, dim); }
  bool is_pushed_key(uint32_t key) const {
    bool found = false;
    for (const auto& range : pushed_keys) found |= key >= range.first && key < range.second;
    return found;
  }
  // Gradients, pooled rows and partial sums are fp32 for every row type.
  int64_t gradient_bytes() const { return static_cast<int64_t>(dim) * 4; }
  template <class E>
  E* row(int64_t slot) const {
    return reinterpret_cast<E*>(rows) + slot * dim;
  }
  // The rank that owns the row with this linear index.
  int32_t owner_of(int64_t key) const {
    // Without branches: the owners of a stripe alternate, which a branch predictor cannot learn.
    int32_t owner = 0;
    for (size_t r = 1; r + 1 < owner_begin.size(); ++r) owner += key >= owner_begin[r];
    return owner;
  }
  // Position in hotness order of the row in a slot of this rank.
  int64_t position_at(int64_t slot) const {
    for (const HomeTier& tier : home_tiers) {
      if (slot < tier.slot_begin || slot >= tier.slot_end) continue;
      const int64_t n = static_cast<int64_t>(tier.offsets.size());
      const int64_t k = slot - tier.slot_begin;
      return tier.start + k / n * tier.period + tier.offsets[k % n];
    }
    return -1;
  }
  // How many times the owners of a row's pieces exchange sums of squares before the update: once
  // for the gradient's norm if it is clipped, once for a row-wise optimizer.
  int32_t rounds_of_squares() const {
    return pieces.empty() ? 0 : (clips() ? 1 : 0) + (is_row_wise(optimizer.kind) ? 1 : 0);
  }
  bool clips() const { return optimizer.max_norm > 0.0f; }
};

// Memory for a thread's intermediate results; it only grows. One thread uses it at a time.
class Scratch {
 public:
  template <class T>
  T* get(int slot, int64_t count) {
    return reinterpret_cast<T*>(
        blocks_[slot].get(count * static_cast<int64_t>(sizeof(T)) + 64));
  }
  // Counters [W] of the rows of a table that were read with this scratch, by the rank from whose
  // memory; `kind` is kRows or kWeightRows.
  int64_t* rows_read(Moved kind, int32_t table) {
    return rows_read_.data() + ((kind == kRows ? 0 : num_tables_) + table) * world_size_;
  }

  Scratch(int64_t num_tables, int64_t world_size)
      : num_tables_(num_tables),
        world_size_(world_size),
        rows_read_(static_cast<size_t>(2 * num_tables * world_size)) {}

 private:
  Buffer blocks_[6];
  int64_t num_tables_, world_size_;
  std::vector<int64_t> rows_read_;
};

// The headers of a rank's send buffer. Its peers read them to find the data that it has left for
// them.
struct SendBufferHeader {
  int64_t used_bytes;  // most bytes that a batch has used, which readers want in huge pages
  int64_t reserved[7];
};

// A rank's reduced gradients of one table: slots at the owners and gradient rows, by owner.
struct SendBufferTable {
  int64_t slots_offset;  // bytes from the start of the send buffer, uint32 [n]
  int64_t rows_offset;   // bytes from the start of the send buffer, float [n, dim]
  // int64 [W + 1], stored after this: entries of owner r are [begin[r], begin[r + 1]).
  int64_t* begin() { return reinterpret_cast<int64_t*>(this + 1); }
};

// A rank's requests to the owners of pushed rows of one table: the slots of its ids and the bags to
// which they belong, by owner, in input order. Offsets are bytes from the start of the send buffer.
struct RequestTable {
  int64_t slots_offset, bags_offset;  // uint32 [n]
  int64_t weights_offset;             // float [n], 0 = none
  int64_t gradients_offset;           // float [bags, dim], backward only
  int64_t* begin() { return reinterpret_cast<int64_t*>(this + 1); }  // as in SendBufferTable
};

// The partial sums that an owner has pooled for one reader: the bags that contain rows of this
// owner, ascending, and the sums.
struct PartialTable {
  int64_t count;
  int64_t bags_offset, rows_offset;  // uint32 [count], float [count, dim]
};

class Exchange;
class PeerRows;

struct Context {
  int32_t rank = 0;
  int32_t world_size = 1;
  std::vector<Table> tables;
  std::vector<Feature> features;
  std::vector<Refresh> refreshes;
  int64_t output_columns = 0;
  uint32_t settings = 0;  // hash of the optimizers' constants in this update; ranks compare it
  std::vector<char*> send_buffer;  // [W]
  int64_t send_buffer_bytes = 0;
  std::unique_ptr<Barrier> barrier;  // of this memory domain; null: single rank
  std::vector<int32_t> domain;       // by index in the barrier: the rank
  std::shared_ptr<Exchange> exchange;  // with ranks of other memory domains; null: there are none
  PhaseTimes times;
  // Bytes sent to other memory domains so far if phases are traced, otherwise 0.
  int64_t traced_bytes() const;
  // This rank's reads since the start or the last reset, [kNumMoved][T][W] by kind, table and the
  // rank whose memory was read; see Moved. No batch may be running.
  std::vector<int64_t> moved();
  void reset_moved();
  std::atomic<int64_t> num_passes[2] = {};  // forward and backward passes since then
  void count_pass(int kind) { num_passes[kind].fetch_add(1, std::memory_order_relaxed); }
  // Memory behind the pointers of the tables' maps and marks.
  std::vector<std::vector<TierMap>> tier_storage;
  std::vector<std::unique_ptr<FlatTiers>> flat_storage;
  std::vector<int64_t> map_storage;
  std::vector<std::vector<uint64_t>> changed_storage;
  Arenas arenas;

  int64_t slots_of(int64_t table) const {
    const std::vector<int64_t>& begin = tables[table].owner_begin;
    return begin[rank + 1] - begin[rank];
  }
  // Starts (without any marks) or stops marking the rows that updates change.
  void mark_changes(bool on);
  // Number of marked slots of this rank.
  int64_t num_changes(int64_t table) const;
  // Writes the marked slots to `slots` [num_changes], ascending, and clears the marks.
  void take_changes(int64_t table, uint32_t* slots);
  // Sets up the counters; called once, when tables and send buffers are complete.
  void start_counting();
  auto borrow_scratch() { return scratches_.borrow(num_tables(), int64_t{world_size}); }
  // The send buffer is one range of addresses: headers; data written before an exchange (reduced
  // rows, requests); and, in its second half, partial sums, which a slow reader may still read
  // while the next backward pass fills the first half.
  template <class T>
  T* in_send_buffer(int32_t owner_rank, int64_t bytes) const {
    return reinterpret_cast<T*>(send_buffer[owner_rank] + bytes);
  }
  // Byte sizes of the send buffer's headers: a SendBufferHeader; then of each table a
  // SendBufferTable, a RequestTable and PartialTable [W].
  int64_t header_bytes(int64_t send_buffers, int64_t requests, int64_t partials) const {
    constexpr int64_t kHeader = sizeof(SendBufferHeader), kSendBuffer = sizeof(SendBufferTable),
                      kRequest = sizeof(RequestTable), kPartial = sizeof(PartialTable);
    const int64_t bounds = 8 * (world_size + 1);
    return kHeader + send_buffers * (kSendBuffer + bounds) + requests * (kRequest + bounds) +
           partials * kPartial;
  }
  int64_t num_tables() const { return static_cast<int64_t>(tables.size()); }
  int64_t header_bytes() const {
    return header_bytes(num_tables(), num_tables(), num_tables() * world_size);
  }
  SendBufferHeader* send_buffer_header(int32_t owner_rank) const {
    return in_send_buffer<SendBufferHeader>(owner_rank, 0);
  }
  SendBufferTable* send_buffer_table(int32_t owner_rank, int64_t table) const {
    return in_send_buffer<SendBufferTable>(owner_rank, header_bytes(table, 0, 0));
  }
  RequestTable* request_table(int32_t owner_rank, int64_t table) const {
    return in_send_buffer<RequestTable>(owner_rank, header_bytes(num_tables(), table, 0));
  }
  PartialTable* partial_table(int32_t owner_rank, int64_t table, int32_t reader) const {
    return in_send_buffer<PartialTable>(
        owner_rank, header_bytes(num_tables(), num_tables(), table * world_size + reader));
  }
  // Allocate space in the first (take_bytes) or second half: return its offset, or -1 if it is
  // full.
  int64_t take_bytes(int64_t bytes) {
    return take_from(send_buffer_cursor_, send_buffer_half(), bytes);
  }
  int64_t take_partial_bytes(int64_t bytes) {
    return take_from(partial_cursor_, send_buffer_bytes, bytes);
  }
  int64_t send_buffer_half() const {
    return has_push ? send_buffer_bytes / 2 / 4096 * 4096 : send_buffer_bytes;
  }
  bool has_push = false;  // a table has pushed tiers
  // Work on dynamic tables during the update of the next backward pass: `first` before any row
  // changes; `last` after the rows of this rank have changed and all ranks of this memory domain
  // have done `first`.
  struct BesideUpdate {
    std::function<void()> first, last;
  };
  BesideUpdate beside_update;
  size_t num_left = 0;    // micro-batches that `leave` has collected since the last update
  int64_t unpooled_columns = 0;
  std::shared_ptr<PeerRows> peer_rows;

  // Frees the send buffer for another batch.
  void reset_send_buffer();
  // Allocates `count` gradient rows and slots of a table; false if the send buffer is full.
  bool take_send_buffer(const Table& table, int64_t count, SendBufferTable* entry);
  // Requests huge pages for the used part of a rank's send buffer, if not requested before.
  void collapse_send_buffer(int32_t owner_rank);

 private:
  Spares<Scratch> scratches_;
  std::vector<int64_t> moved_;
  static int64_t take_from(std::atomic<int64_t>& cursor, int64_t end, int64_t bytes) {
    const int64_t at = cursor.fetch_add((bytes + 63) / 64 * 64);
    return at + bytes <= end ? at : -1;
  }
  std::atomic<int64_t> send_buffer_cursor_{0};
  std::atomic<int64_t> partial_cursor_{0};
  std::vector<int64_t> send_buffer_collapsed_;  // [W] bytes for which huge pages were requested
};

// Measures consecutive phases of a pass, the first of which starts at construction.
class PhaseClock {
 public:
  explicit PhaseClock(Context& context)
      : context_(context), begin_ns_(PhaseTimes::now_ns()), sent_(context.traced_bytes()) {}
  // Ends a phase: records the time since the preceding one ended.
  void end(Phase phase) {
    const int64_t now_ns = PhaseTimes::now_ns(), sent = context_.traced_bytes();
    context_.times.note(phase, begin_ns_, now_ns, sent - sent_);
    begin_ns_ = now_ns;
    sent_ = sent;
  }

 private:
  Context& context_;
  int64_t begin_ns_, sent_;
};

// The bags of one feature in a batch. Bag b holds the ids [bounds[b], bounds[b + 1]) and its
// pooled row is at out[out_begin + b * out_stride].
struct FeatureBags {
  const int64_t* bounds;  // [num_bags + 1]
  int64_t num_bags;
  int64_t out_begin;  // floats
  // Addresses of the rows of the ids from bounds[0] on if already resolved, else null.
  const int64_t* rows = nullptr;
  // In a backward pass: the gradient of bag b is at gradients[b * gradient_stride].
  const float* gradients = nullptr;
  int64_t gradient_stride = 0;
  int64_t num_ids() const { return bounds[num_bags] - bounds[0]; }
};

// One table's ids of a batch in the order of their linear indices, in which the backward pass
// processes them. Arrays are given by byte offsets from a common base, see `at`.
struct TableOrder {
  int64_t n;          // ids that this rank reduces: those outside pushed tiers
  int64_t num_bags;   // of all features of the table, numbered consecutively
  int64_t num_rows;   // distinct keys
  int32_t key_bits, payload_bits;
  int32_t pair_bytes;  // 4 or 8: sorted pairs (key, payload); 0: keys in input order
  int32_t reserved;
  // [n]; the payload is the bag or, with weights, an index in bags and positions.
  int64_t pairs;
  int64_t keys;       // uint32 [n], without pairs
  int64_t bags;       // uint32 [n], without pairs or with weights
  int64_t positions;  // int64 [n], index of each id in the batch, with weights
  static constexpr int64_t kNone = -1;
  template <class T>
  static T* at(char* base, int64_t place) {
    return place == kNone ? nullptr : reinterpret_cast<T*>(base + place);
  }
};

// Entries after the last address, which are prefetched, too.
constexpr int64_t kAddressesAhead = 64;

// Data computed from the ids of a batch before its forward pass.
struct Resolved {
  const int64_t* addresses;             // of the rows of all features, in order
  std::vector<int64_t> first;           // [F] index of each feature's first address
  char* order;                          // TableOrder [T] and their arrays, or null
};

// For batches whose samples share bags: the bag of each of `count` samples, by feature of the
// collection.
struct Samples {
  const int64_t* bags;  // [num_features, count]
  int64_t num_features, count;
  // Of one feature's bags. is_outside: a bag is not in [0, limit). are_in_order: no sample's bag
  // exceeds the sample's index, as is the case if bags are numbered in the order of their first
  // samples. are_own: sample b has bag b.
  struct Kind {
    bool is_outside, are_in_order, are_own;
  };
  const int64_t* of(const Feature& feature) const { return bags + feature.logical * count; }
  Kind kind(int64_t feature, int64_t limit) const;
};

// Where the sums of a feature's gradients by bag are written; null `data`: they are not needed.
struct BagSums {
  float* data;
  int64_t num_bags, stride;
};

// Gradients of samples, in rows `stride` floats apart, and where their sums by bag are written.
struct SampleGradients {
  Samples samples;
  const float* data;
  int64_t stride;
  std::vector<BagSums> sums;  // [F]
};

// One batch of lookups; the caller owns the memory of all pointers. An unpooled lookup has one bag
// per id.
struct Batch {
  const void* ids;
  bool ids_are_32_bit;
  const float* weights;               // per id, or null
  std::vector<FeatureBags> features;  // [F]
  int64_t num_rows = 0;               // of the output
  int64_t out_stride;                 // floats between pooled rows
  bool stream = false;                 // write the output past the caches
  const Resolved* resolved = nullptr;  // null: ids are resolved during the pass
  // If `lengths` is not null, only every kTaskBags-th bound of each key in `offsets` is known;
  // pooling computes the rest from the lengths.
  const void* lengths = nullptr;
  bool lengths_are_32_bit = false;
  int64_t* offsets = nullptr;
  // Gradients of samples that share bags; a bag's gradient is the sum over its samples. Null: no bag
  // is shared.
  const SampleGradients* shared = nullptr;
  int64_t num_ids(const Table& table) const {  // through its features
    int64_t n = 0;
    for (int32_t f : table.features) n += features[f].num_ids();
    return n;
  }
  int64_t num_bags(const Table& table) const {
    int64_t n = 0;
    for (int32_t f : table.features) n += features[f].num_bags;
    return n;
  }
};

constexpr int64_t kTaskBags = 1024;  // bags of a feature per task

// Rows of one table in a batch that this rank cannot address.
struct RemoteRows {
  // For each id of the table's features: the row's address, or -1 - its index in `keys`, or 0 if
  // the owner pools it. Null: no rows are needed.
  int64_t* places;
  uint32_t* keys;  // distinct linear indices, ascending
  int64_t num_keys;
};

// The distinct rows of other ranks of this memory domain that one table's ids need.
struct DistinctRows {
  int64_t* places;   // for each id of the table's features: address, or -1 - index in `sources`
  int64_t* sources;  // addresses of the distinct rows, in the order of their first ids
  int64_t num_ids;   // number of ids of such rows
  int64_t num_rows;  // number of sources
};

// ---- the steps of a batch; an error is thrown as a Status ----

// Writes pooled rows to `out`, or the rows of all ids if the lookup is not pooled. `collective`:
// owners pool the rows of pushed tiers, so that all ranks must take part; otherwise all rows are
// pulled.
void forward(Context& context, const Batch& batch, float* out, bool collective);

// Called instead of `forward` by a rank whose batch is invalid: then no rank looks up this batch.
void refuse_forward(Context& context, bool collective);

// Called by all ranks of a memory domain after one of them has refused a batch in another
// collection of the model, so that a rank that already waits in this collection gets kRefused,
// whatever its phase. Does not wait. Does nothing if there are several memory domains, where no
// rank continues after a refusal.
void skip(Context& context);

// Copies the pooled rows of bags, which `forward` has written, to the rows of the samples that have
// them. `out` may equal `pooled` if Kind::are_in_order holds for all features.
void spread(Context& context, const Samples& samples, const float* pooled, float* out);

// Sums gradients of samples by bag, in the order of the samples.
void add_up(Context& context, const SampleGradients& shared);

// The work on a batch that depends on its ids only; it may be done earlier and on another thread.
// Writes the addresses of the rows to `addresses`, [number of ids], and the order of the backward
// pass to `resolved.order`, [order_bytes(context, batch)] bytes, unless that is null.
int64_t order_bytes(const Context& context, const Batch& batch);
void resolve(Context& context, const Batch& batch, int64_t* addresses, const Resolved& resolved);

// Gradient of the per-sample weights: for every id the dot product of its row with the gradient of
// its bag. `grad` is laid out as the output of `forward`.
void weight_gradient(Context& context, const Batch& batch, const float* grad, float* out);

// Reduces the gradients of a micro-batch by row and exchanges them; the owners keep the sums over
// all ranks for the next `backward`. Collective.
void leave(Context& context, const Batch& batch);

// Called instead of `leave` or `backward` by a rank with an error: then no rank updates.
void refuse_backward(Context& context);

// As `leave`, then applies the optimizer to the sums over all micro-batches times `gradient_scale`,
// and refreshes replicas. Collective.
void backward(Context& context, const Batch& batch, float gradient_scale);

}  // namespace oper::host
