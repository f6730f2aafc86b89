// Lookup and DLRM's dot interaction, block of samples by block of samples, so that pooled rows are
// in the cache when they are multiplied.
#pragma once

#include <algorithm>
#include <vector>

#include "host/context.h"

namespace oper::host {

// Looks up a pooled batch of F features of `dim` columns each, for B samples. Writes to
//
// out [B, dim + (F + 1) * F / 2]: the sample's row of `dense` [B, dim]; the dot products of the pairs
// of its F + 1 rows (the dense one, then those of the features), in the order (0, 1), (0, 2), ...,
// (1, 2), ...
//
// Only for read-only tables whose rows this rank can address, without pushed tiers. Throws a Status.
void forward_interaction(Context& context, const Batch& batch, const float* dense, int32_t dim,
                           float* out);

// Consecutive samples that have the bags of some features in common, such as the user's features in
// all candidates of a request. Samples with the same bags are called a user's.
struct SharedBags {
  std::vector<bool> features;   // [F], whether a feature of the collection is shared
  std::vector<int64_t> begins;  // [U + 1], the first sample of each user; then B

  int64_t count() const { return std::count(features.begin(), features.end(), true); }
};

// As `forward_interaction`, with S shared features, whose bags only the first sample of each of U
// users has. Their rows are looked up once per user and block of samples, and their products with
// each other are computed once per user. C = 1 + F - S is the number of rows that a sample has for
// itself (the dense one, then those of the other features). Writes to
//
// users [U, S * (S - 1) / 2]: the products of the pairs of shared rows, in the order above.
//
// out [B, dim + C * S + C * (C - 1) / 2]: the dense row; the products of each of the sample's own
// rows with the S shared rows; the products of the pairs of its own rows.
void forward_shared_interaction(Context& context, const Batch& batch, const SharedBags& shared,
                                  const float* dense, int32_t dim, float* users, float* out);

}  // namespace oper::host
