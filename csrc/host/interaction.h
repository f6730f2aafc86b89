// Lookup and DLRM's dot interaction in one pass over blocks of samples, so that pooled rows are used
// where they lie, in the processor's cache.
#pragma once

#include <algorithm>
#include <vector>

#include "host/context.h"

namespace oper::host {

// Looks up a pooled batch of F features of `dim` columns each and, beside them, takes one dense row per
// sample. out [B, dim + (F + 1) * F / 2]: the dense row, then the dot products of the pairs (i, j),
// i < j, of the rows dense, feature 0, feature 1, ...: (0, 1), (0, 2), ..., (1, 2), ...
//
// For tables that are only read: rows in reach, none pushed.
void forward_interaction(Context& context, const Batch& batch, const float* dense, int32_t dim,
                           float* out);

// Samples in a row that have the bags of some features in common: the candidates of a request have
// their user's.
struct SharedBags {
  std::vector<bool> features;   // [F], which features of the collection that is about
  std::vector<int64_t> begins;  // [U + 1], the samples that each user begins with; then B

  int64_t count() const { return std::count(features.begin(), features.end(), true); }
};

// As `forward_interaction`, with S features whose bags only each user's first sample has; these are
// looked up once per user and block of samples. What a user's samples have in common is computed once:
//
// users [U, S * (S - 1) / 2]: the products of the pairs of shared features, in order.
// out [B, dim + C * S + C * (C - 1) / 2]: the dense row; the products of each of the sample's own C rows
// (dense, then the other features) with the S shared ones; those of the pairs of its own rows, in order.
void forward_shared_interaction(Context& context, const Batch& batch, const SharedBags& shared,
                                  const float* dense, int32_t dim, float* users, float* out);

}  // namespace oper::host
