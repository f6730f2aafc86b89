// Lookup fused with DLRM's dot interaction over blocks of samples, so that pooled rows are still in
// the cache.
#pragma once

#include <algorithm>
#include <vector>

#include "host/context.h"

namespace oper::host {

// Looks up a pooled batch of F features of `dim` columns each, and combines it with one dense row
// per sample. out [B, dim + (F + 1) * F / 2]: the dense row, then the dot products of the pairs
// (i, j), i < j, of the rows dense, feature 0, feature 1, ...: (0, 1), (0, 2), ..., (1, 2), ...
//
// Only for read-only tables whose rows this rank can address, without pushed tiers.
void forward_interaction(Context& context, const Batch& batch, const float* dense, int32_t dim,
                           float* out);

// Consecutive samples with equal bags of some features, such as a user's in the candidates of a
// request.
struct SharedBags {
  std::vector<bool> features;   // [F], whether a feature of the collection is shared
  std::vector<int64_t> begins;  // [U + 1], the first sample of each user; then B

  int64_t count() const { return std::count(features.begin(), features.end(), true); }
};

// As `forward_interaction`, with S shared features, whose bags only each user's first sample has.
// These are looked up once per user and block of samples, and products among them are computed once
// per user:
//
// users [U, S * (S - 1) / 2]: the products of the pairs of shared features, in order.
// out [B, dim + C * S + C * (C - 1) / 2]: the dense row; the products of each of the sample's C own
// rows (dense, then the unshared features) with the S shared rows; the products of pairs of own
// rows, in order.
void forward_shared_interaction(Context& context, const Batch& batch, const SharedBags& shared,
                                  const float* dense, int32_t dim, float* users, float* out);

}  // namespace oper::host
