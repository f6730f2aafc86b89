#include "host/interaction.h"

#include <algorithm>
#include <cstring>

#include "host/kernels/kernels.h"
#include "host/memory.h"
#include "host/tasks.h"

namespace oper::host {
namespace {

constexpr int64_t kSamples = 64;  // per block, whose rows stay in the second-level cache

// Pools bags [bag, bag + count) of one feature into rows of `batch.out_stride` floats at `to`.
void pool_bags(const Context& context, const Batch& batch, size_t feature, int64_t bag, int64_t count,
               float* to, Scratch& scratch, Found& found) {
  const FeatureBags bags{batch.features[feature].bounds + bag, count, 0};
  const Table& table = context.tables[context.features[feature].table];
  found.note(kernels().pool(table, BagRange{batch, bags, 0, count, feature}, to, scratch));
}

void finish(Context& context, const Found& found) {
  context.count_pass(0);
  raise(found.status());
}

}  // namespace

void forward_interaction(Context& context, const Batch& batch, const float* dense, int32_t dim,
                           float* out) {
  const int64_t num_samples = batch.features.front().num_bags;
  const int64_t num_rows = context.output_columns / dim + 1;
  const int64_t stride = dim + num_rows * (num_rows - 1) / 2;
  const int64_t block_floats = std::min(kSamples, num_samples) * num_rows * dim;
  Batch inner = batch;
  inner.out_stride = num_rows * dim;
  inner.stream = false;
  Found found;
  const int64_t count = (num_samples + kSamples - 1) / kSamples;
  run_tasks(context, count, count == 1, [&](int64_t index, Scratch& scratch) {
    const int64_t begin = index * kSamples, n = std::min(kSamples, num_samples - begin);
    float* rows = scratch.get<float>(1, block_floats);
    for (int64_t s = 0; s < n; ++s)
      std::memcpy(rows + s * inner.out_stride, dense + (begin + s) * dim, sizeof(float) * dim);
    for (size_t f = 0; f < batch.features.size(); ++f)
      pool_bags(context, inner, f, begin, n, rows + dim + batch.features[f].out_begin, scratch, found);
    if (found.bad.load() >= 0) return;
    kernels().interact(rows, n, static_cast<int>(num_rows), dim, out + begin * stride, scratch);
  });
  finish(context, found);
}

void forward_shared_interaction(Context& context, const Batch& batch, const SharedBags& shared,
                                  const float* dense, int32_t dim, float* users, float* out) {
  // A user's samples, or a block of them.
  struct Block {
    int64_t user, begin, count;
  };
  std::vector<Block> blocks;
  for (size_t u = 0; u + 1 < shared.begins.size(); ++u)
    for (int64_t begin = shared.begins[u]; begin < shared.begins[u + 1]; begin += kSamples)
      blocks.push_back({static_cast<int64_t>(u), begin,
                        std::min(kSamples, shared.begins[u + 1] - begin)});
  const int64_t num_shared = shared.count();
  const int64_t num_own = static_cast<int64_t>(shared.features.size()) - num_shared + 1;
  const int64_t user_pairs = num_shared * (num_shared - 1) / 2;
  const int64_t stride = dim + num_own * num_shared + num_own * (num_own - 1) / 2;
  // Index of each feature's rows, among the shared rows or among the samples' own ones.
  std::vector<int64_t> place;
  for (int64_t is_own = 0, is_shared = 0; const bool in_common : shared.features)
    place.push_back(in_common ? is_shared++ : is_own++);
  Batch inner = batch;
  inner.out_stride = dim;
  inner.stream = false;
  Found found;
  const int64_t count = static_cast<int64_t>(blocks.size());
  run_tasks(context, count, count == 1, [&](int64_t index, Scratch& scratch) {
    const auto [user, begin, n] = blocks[index];
    // Shared rows [num_shared, dim]; the results of `interact` for them [dim + user_pairs]; rows of
    // the samples' own features [num_own - 1, n, dim].
    float* common = scratch.get<float>(1, (num_shared + 1) * dim + user_pairs + (num_own - 1) * n * dim);
    float* products = common + num_shared * dim;
    float* own = products + dim + user_pairs;
    for (size_t f = 0; f < batch.features.size(); ++f) {
      const Feature& feature = context.features[f];
      const int64_t at = place[feature.logical], column = feature.column % dim;
      if (shared.features[feature.logical]) {
        pool_bags(context, inner, f, shared.begins[user], 1, common + at * dim + column, scratch, found);
      } else {
        pool_bags(context, inner, f, begin, n, own + at * n * dim + column, scratch, found);
      }
    }
    if (found.bad.load() >= 0) return;
    if (begin == shared.begins[user]) {
      kernels().interact(common, 1, static_cast<int>(num_shared), dim, products, scratch);
      std::copy_n(products + dim, user_pairs, users + user * user_pairs);
    }
    std::vector<const float*> rows{dense + begin * dim};
    for (int64_t c = 0; c + 1 < num_own; ++c) rows.push_back(own + c * n * dim);
    kernels().interact_shared(common, static_cast<int>(num_shared), rows.data(),
                              static_cast<int>(num_own), static_cast<int>(n), dim,
                              out + begin * stride, scratch);
  });
  finish(context, found);
}

}  // namespace oper::host
