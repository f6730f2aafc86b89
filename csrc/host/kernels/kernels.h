// The inner loops of the host back end, compiled once per instruction set (kernels_*.cpp).
// `kernels()` chooses one when it is first called. All variants give bitwise the same numbers: they
// compute in 16 lanes whatever the width of registers, never fuse a multiplication and an addition
// on their own, and sum lanes in a fixed order.
//
// In this file and in *.inl, a bad id is one outside [0, number of rows).
#pragma once

// The headers that kernels.inl needs. They must precede the target pragmas of kernels_*.cpp: the
// linker keeps one copy of an inline function, which must run on any processor.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "common/clones.h"
#include "host/context.h"
#include "host/exchange/squares.h"
#include "host/keys/directory.h"
#include "host/memory.h"

namespace oper::host {

// Bags [begin, end) of one feature of a batch.
struct BagRange {
  const Batch& batch;
  const FeatureBags& bags;
  int64_t begin, end;
  size_t feature;
};

// A lookup reduced to its memory accesses, with which benchmarks compare real lookups: prefetches
// and sums rows at given addresses. Bag b sums the float32 rows at the addresses number offsets[b]
// to offsets[b + 1] and writes `dim` floats to out + destinations[b].
struct GatherJob {
  const int64_t* addresses;     // [N + prefetch]; the last ones are only prefetched
  const int64_t* offsets;       // [num_bags + 1]
  const int64_t* destinations;  // [num_bags], in floats
  float* out;
  int64_t dim;       // at most 1,024
  int64_t prefetch;  // how many rows before its use a row is prefetched
  bool stream;       // bypass the caches when writing; needs dim % 16 == 0 and 64-byte aligned bags
};

// Which bags the samples of one feature have: sample b has bag bags[b]. Rows of samples are
// `stride` floats apart.
struct SampleJob {
  const int64_t* bags;  // [count]
  int64_t count, stride, dim;
};

// Rows of numbers to be quantised to rows of codes, see common/elements.h.
struct QuantiseJob {
  const void* rows;  // float32, float16 or bfloat16 [num_rows, dim]
  RowType type;      // type of `rows`
  int64_t num_rows, dim;
  bool four_bits;  // then dim is even
  uint8_t* out;    // [num_rows, row_bytes]
  int64_t row_bytes;
};

// Results of kernels that write to the send buffer, which otherwise return the index of a bad id.
constexpr int64_t kReduceOk = -1, kReduceFull = -2;

struct Kernels {
  const char* name;
  // Adds up `lengths`, int32 or int64 [num_keys * batch_size]. Of the bounds of bags it writes to
  // `offsets` [num_keys * batch_size + 1] only that of every kTaskBags-th bag of each key, and the
  // last one. Returns the sum, or -1 if a length is negative or at least 2^32.
  int64_t (*start_bounds)(const void* lengths, bool are_32_bit, int64_t num_keys, int64_t batch_size,
                          int64_t* offsets);
  // Pools the bags into `out`. Returns the first bad id's index in the batch, or -1.
  int64_t (*pool)(const Table& table, const BagRange& range, float* out, Scratch& scratch);
  // Writes, for each sample in rows [num_samples, num_rows, dim], its first row and then the dot
  // products of all pairs of its rows, see `forward_interaction` in interaction.h.
  void (*interact)(const float* rows, int64_t num_samples, int num_rows, int dim, float* out,
                   Scratch& scratch);
  // The gradient of `interact` for one sample, with respect to its first row [dim] and its others
  // [num_rows - 1, dim].
  void (*interact_gradient)(const float* first, const float* others, const float* gradient,
                            int num_rows, int dim, float* first_out, float* others_out,
                            Scratch& scratch);
  // For samples that have the rows `shared` [num_shared, dim] in common and their own rows, `own`:
  // num_own arrays [num_samples, dim]. Writes, for each sample, its first own row and then the dot
  // products of its own rows with the shared ones and with each other, see
  // `forward_shared_interaction`.
  void (*interact_shared)(const float* shared, int num_shared, const float* const* own, int num_own,
                          int num_samples, int dim, float* out, Scratch& scratch);
  // Adds the gradients of the ids' weights to `out` [ids]: dot products of their rows with the
  // gradients of their bags.
  void (*weight_gradient)(const Table& table, const BagRange& range, const float* grad, float* out,
                          Scratch& scratch);
  // Writes the places (read map) of the bags' ids. Returns the first bad id's index in the batch,
  // or -1.
  int64_t (*locate)(const Table& table, const BagRange& range, int64_t* addresses);
  // Sorts the ids of one table by linear index. The order's arrays are stored from base + memory on
  // or, if base is null, in scratch. Returns the first bad id's index, or -1.
  int64_t (*arrange)(const Table& table, const Batch& batch, char* base, int64_t memory,
                     Scratch& scratch, TableOrder& order);
  // Sums the gradients of one table by row and writes the sums to the send buffer. Returns the
  // first bad id's index, kReduceOk or kReduceFull.
  int64_t (*reduce)(Context& context, int32_t table, const Batch& batch, Scratch& scratch);
  // Writes the sums of squares of the gradients (summed over ranks) of a column piece's rows, for
  // clipping and row-wise optimizers. `round`: see Table::rounds_of_squares.
  void (*squares)(const Context& context, int32_t table, float gradient_scale, int32_t round);
  // Sums the gradients that all ranks have for this rank's rows of one table and keeps the sums for
  // the next update, see `leave`.
  void (*keep)(Context& context, int32_t table);
  // Sums such gradients and those that were kept, and applies the optimizer.
  void (*update)(const Context& context, int32_t table, float gradient_scale);
  // Exchange mode push, in the order of the calls, see push.inl. `request` returns like `reduce`;
  // `pool_for` and `stage` return false if the send buffer is full.
  int64_t (*request)(Context& context, int32_t table, const Batch& batch, Scratch& scratch);
  bool (*pool_for)(Context& context, int32_t table, int32_t reader);
  void (*pool_pushed)(const Context& context, int32_t table, const Batch& batch, float* out,
                      Scratch& scratch);
  bool (*stage)(Context& context, int32_t table, const Batch& batch);
  void (*reduce_pushed)(Context& context, int32_t table, int32_t reader, Scratch& scratch);
  // Finds the rows of other memory domains that a batch needs, without those in pushed tiers if
  // `skip_pushed`, and counts all rows read as `kind`. Returns the first bad id's index, or -1.
  int64_t (*remote_rows)(const Table& table, const Batch& batch, Moved kind, bool skip_pushed,
                         RemoteRows& out, Scratch& scratch);
  // De-duplicated pull, see peer_rows.h. `distinct_rows` finds the distinct rows of peers that a
  // table's ids need and returns the first bad id's index, or -1; `count` counts the rows read.
  int64_t (*distinct_rows)(const Table& table, const Batch& batch, int32_t rank, DistinctRows& out,
                           Scratch& scratch);
  void (*count)(const Table& table, const DistinctRows& rows, int64_t num_ids, int32_t rank,
                Scratch& scratch);
  // Finds the rows of keys, and the distinct ones among these. Returns how many keys have no row.
  int64_t (*find_keys)(const KeyDirectory& directory, const FindKeys& job, DistinctKeys& distinct);
  // The slot of a full bucket whose key is evicted for a new key with home line `line`, given the
  // ages of the slots; -1 if all keys of the bucket have been seen in this update.
  int64_t (*victim)(const KeyRules& rules, const KeyAge* ages, int64_t num_slots, int64_t line,
                    uint32_t clock);
  // Columns [begin, end) of a new key's row: uniform in [-bound, bound), a function of seed, key
  // and column.
  void (*draw_row)(int64_t key, uint64_t seed, int64_t begin, int64_t end, float bound, float* out);
  // Copies rows of bags, `stride` floats apart, to the samples that have them. `samples` may equal
  // `bags` if no sample's bag has a larger index than the sample.
  void (*spread)(const SampleJob& job, const float* bags, float* samples);
  // Sums rows of samples by bag, in the order of the samples.
  void (*add_up)(const SampleJob& job, const float* samples, float* bags, int64_t num_bags,
                 int64_t bags_stride);
  // `numbers`, `codes`: scratch for one row, its dim rounded up to 16. Returns the first row that
  // has a number that is not finite or a scale or bias beyond float16's range, or -1.
  int64_t (*quantise)(const QuantiseJob& job, float* numbers, uint8_t* codes);
  // Of bags [begin, end).
  void (*gather)(const GatherJob& job, int64_t begin, int64_t end);
};

extern const Kernels kKernelsGeneric;
#if defined(__x86_64__)
extern const Kernels kKernelsAvx2;
extern const Kernels kKernelsAvx512;
#endif

const Kernels& kernels();

}  // namespace oper::host
