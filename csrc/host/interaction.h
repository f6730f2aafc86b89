// Lookup and DLRM's dot interaction in one pass over blocks of samples, so that pooled rows are used
// where they lie, in the processor's cache.
#pragma once

#include "host/context.h"

namespace oper::host {

// Looks up a pooled batch of F features of `dim` columns each and, beside them, takes one dense row per
// sample. out [B, dim + (F + 1) * F / 2]: the dense row, then the dot products of the pairs (i, j),
// i < j, of the rows dense, feature 0, feature 1, ...: (0, 1), (0, 2), ..., (1, 2), ...
//
// For tables that are only read: rows in reach, none pushed.
Status forward_interaction(Context& context, const Batch& batch, const float* dense, int32_t dim,
                           float* out, ParallelFor parallel);

}  // namespace oper::host
