// Lookup and DLRM's dot interaction in one pass over blocks of samples, so that pooled rows are used
// where they lie, in the processor's cache.
#pragma once

#include "host/context.h"

namespace oper::host {

// Samples that have bags in common: the candidates of a request have their user's.
struct SharedBags {
  const int64_t* first = nullptr;  // [B], the sample whose bags a sample has; null: its own
  std::vector<bool> features;      // [F], which features that is about
};

// Looks up a pooled batch of F features of `dim` columns each and, beside them, takes one dense row per
// sample. out [B, dim + (F + 1) * F / 2]: the dense row, then the dot products of the pairs (i, j),
// i < j, of the rows dense, feature 0, feature 1, ...: (0, 1), (0, 2), ..., (1, 2), ...
//
// Bags of the features that `shared` names are looked up once for all samples that have them, per
// block of samples, and are not read elsewhere.
//
// For tables that are only read: rows in reach, none pushed.
Status forward_interaction(Context& context, const Batch& batch, const SharedBags& shared,
                           const float* dense, int32_t dim, float* out, ParallelFor parallel);

}  // namespace oper::host
