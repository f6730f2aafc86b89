// The inner loops of the host back end, compiled once per instruction set (kernels_*.cpp) and
// chosen when the library loads. All variants give bitwise the same numbers: 16 lanes whatever
// the register width, no contraction of multiply and add, fixed reduction trees.
#pragma once

// Headers that kernels.inl needs. They precede the target pragmas, because inline functions must stay
// callable on any processor.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "common/clones.h"
#include "host/context.h"
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

// A lookup reduced to its memory accesses: rows at given addresses are prefetched and summed.
// Benchmarks compare real lookups with it. Bag b sums the rows at addresses[offsets[b] .. offsets[b
// + 1]) and writes `dim` floats at out + destinations[b].
struct GatherJob {
  const int64_t* addresses;     // [N + prefetch]; the surplus must be readable addresses
  const int64_t* offsets;       // [num_bags + 1]
  const int64_t* destinations;  // [num_bags], in floats
  float* out;
  int64_t dim;       // at most 1,024
  int64_t prefetch;  // rows ahead
  bool stream;       // write past the caches; needs dim % 16 == 0 and 64-byte aligned bags
};

// Samples of one feature: sample b has bag bags[b]. Rows of bags and samples are `stride` floats
// apart.
struct SampleJob {
  const int64_t* bags;  // [count]
  int64_t count, stride, dim;
};

// Contiguous rows of numbers to be quantised to rows of codes; see common/elements.h.
struct QuantiseJob {
  const void* rows;  // float32, float16 or bfloat16 [num_rows, dim]
  RowType type;      // of `rows`
  int64_t num_rows, dim;
  bool four_bits;  // then dim is even
  uint8_t* out;    // [num_rows, row_bytes]
  int64_t row_bytes;
};

constexpr int64_t kReduceOk = -1, kReduceFull = -2;

struct Kernels {
  const char* name;
  // Adds lengths up, int32 or int64 [num_keys * batch_size], and leaves the first bound of every
  // kTaskBags bags of a key, and the last one of all, where `offsets`, [num_keys * batch_size + 1], has
  // them. Returns the sum, or -1 when a length is negative.
  int64_t (*start_bounds)(const void* lengths, bool are_32_bit, int64_t num_keys, int64_t batch_size,
                          int64_t* offsets);
  // Pools the bags into `out`. Returns the first bad id's index in the batch, or -1.
  int64_t (*pool)(const Table& table, const BagRange& range, float* out, Scratch& scratch);
  // Per sample of rows [num_samples, num_rows, dim]: its first row, then the dot products of all pairs of
  // its rows; see interaction.h.
  void (*interact)(const float* rows, int64_t num_samples, int num_rows, int dim, float* out,
                   Scratch& scratch);
  // Its gradient for one sample with respect to the first row [dim] and the rest [num_rows - 1,
  // dim].
  void (*interact_gradient)(const float* first, const float* others, const float* gradient,
                            int num_rows, int dim, float* first_out, float* others_out,
                            Scratch& scratch);
  // Of samples that have the rows `shared` [num_shared, dim] in common and, one array per row
  // [num_samples, dim], rows of their own: each sample's first own row and the products of its own rows
  // with the shared ones and with each other; see interaction.h.
  void (*interact_shared)(const float* shared, int num_shared, const float* const* own, int num_own,
                          int num_samples, int dim, float* out, Scratch& scratch);
  // Gradient of the per-sample weights of the bags.
  void (*weight_gradient)(const Table& table, const BagRange& range, const float* grad, float* out,
                          Scratch& scratch);
  // Addresses of the rows of bags. Returns the first bad id's index in the batch, or -1.
  int64_t (*locate)(const Table& table, const BagRange& range, int64_t* addresses);
  // Sorts the ids of one table by home key; its arrays lie in `memory`, or in scratch when that is
  // null. Returns the first bad id's index, or -1.
  int64_t (*arrange)(const Table& table, const Batch& batch, char* base, int64_t memory,
                     Scratch& scratch, TableOrder& order);
  // Reduces the gradients of one table into the outbox. Returns the first bad id's index, or
  // kReduceOk, or kReduceFull when the outbox has no room.
  int64_t (*reduce)(Context& context, int32_t table, const Batch& batch, Scratch& scratch);
  // Sums of squares of the merged gradients of a table split by columns, for clipping and for row-wise
  // optimizers; see Table::rounds_of_squares.
  void (*squares)(const Context& context, int32_t table, float gradient_scale, int32_t round);
  // Merges the gradients that all ranks have left for this rank's rows of one table and keeps the sums
  // for the update, see `leave`.
  void (*keep)(Context& context, int32_t table);
  // Merges such gradients with the kept sums and applies the optimizer.
  void (*update)(const Context& context, int32_t table, float gradient_scale);
  // Push mode, see push.inl. They return false when the outbox is full, `request` a bad id's index
  // or kReduceOk or kReduceFull.
  int64_t (*request)(Context& context, int32_t table, const Batch& batch, Scratch& scratch);
  bool (*pool_for)(Context& context, int32_t table, int32_t reader);
  void (*pool_pushed)(const Context& context, int32_t table, const Batch& batch, float* out,
                      Scratch& scratch);
  bool (*stage)(Context& context, int32_t table, const Batch& batch);
  void (*reduce_pushed)(Context& context, int32_t table, int32_t reader, Scratch& scratch);
  // Finds the rows of other memory domains that a batch needs. Returns the first bad id's index, or
  // -1. They are counted as `kind`.
  int64_t (*remote_rows)(const Table& table, const Batch& batch, Moved kind, bool skip_pushed,
                      RemoteRows& out, Scratch& scratch);
  // De-duplicated pull, see peer_rows.h: the distinct rows of neighbours among a table's ids (returns
  // the first bad id's index, or -1), and the counts of reads of these rows.
  int64_t (*distinct_rows)(const Table& table, const Batch& batch, int32_t rank, DistinctRows& out,
                           Scratch& scratch);
  void (*count)(const Table& table, const DistinctRows& rows, int64_t num_ids, int32_t rank,
                Scratch& scratch);
  // Rows of keys, and the distinct ones among them. Returns how many have no row.
  int64_t (*find_keys)(const KeyDirectory& directory, const FindKeys& job, DistinctKeys& distinct);
  // The slot of a bucket that a new key with this home line takes, given the ages of the slots; -1 if all keys
  // of the bucket have been seen in this update.
  int64_t (*victim)(const KeyRules& rules, const KeyAge* ages, int64_t num_slots, int64_t line,
                    uint32_t clock);
  // Columns [begin, end) of a new row, in [-bound, bound), drawn from seed, key and column and nothing else.
  void (*draw_row)(int64_t key, uint64_t seed, int64_t begin, int64_t end, float bound, float* out);
  // Rows of bags to those of the samples that have them; in place where no sample's bag comes after it.
  void (*spread)(const SampleJob& job, const float* bags, float* samples);
  // Rows of samples to their sums by bag, in the order of the samples.
  void (*add_up)(const SampleJob& job, const float* samples, float* bags, int64_t num_bags,
                 int64_t bags_stride);
  // Scratch: `numbers` and `codes` hold one row each, its dim rounded up to 16. Returns the first row with a
  // number that is not finite or a range that float16 does not have, or -1.
  int64_t (*quantise)(const QuantiseJob& job, float* numbers, uint8_t* codes);
  // Bags [begin, end).
  void (*gather)(const GatherJob& job, int64_t begin, int64_t end);
};

extern const Kernels kKernelsGeneric;
#if defined(__x86_64__)
extern const Kernels kKernelsAvx2;
extern const Kernels kKernelsAvx512;
#endif

const Kernels& kernels();

}  // namespace oper::host
