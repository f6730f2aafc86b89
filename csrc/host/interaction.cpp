#include "host/interaction.h"

#include <algorithm>
#include <cstring>

#include "host/kernels/kernels.h"
#include "host/memory.h"
#include "host/tasks.h"

namespace oper::host {

Status forward_interaction(Context& context, const Batch& batch, const SharedBags& shared,
                           const float* dense, int32_t dim, float* out, ParallelFor parallel) {
  constexpr int64_t kSamples = 64;  // of a block: its rows stay in the second-level cache
  const int64_t num_samples = batch.features.front().num_bags;
  const int64_t num_rows = context.output_columns / dim + 1;
  const int64_t stride = dim + num_rows * (num_rows - 1) / 2;
  const int64_t block_floats = std::min(kSamples, num_samples) * num_rows * dim;
  Batch inner = batch;
  inner.out_stride = num_rows * dim;
  inner.stream = false;
  std::atomic<int64_t> bad{-1};
  const int64_t count = (num_samples + kSamples - 1) / kSamples;
  run_tasks(context, count, count == 1, parallel, [&](int64_t index, Scratch& scratch) {
    const int64_t begin = index * kSamples, n = std::min(kSamples, num_samples - begin);
    float* rows = scratch.get<float>(1, block_floats);
    for (int64_t s = 0; s < n; ++s)
      std::memcpy(rows + s * inner.out_stride, dense + (begin + s) * dim, sizeof(float) * dim);
    for (size_t f = 0; f < batch.features.size(); ++f) {
      const FeatureBags& all = batch.features[f];
      const Table& table = context.tables[context.features[f].table];
      // Pools the bags [bag, bag + count) into the rows of the block's samples from `s` on.
      const auto pool = [&](int64_t bag, int64_t count, int64_t s) {
        const FeatureBags bags{all.bounds + bag, count, all.out_begin + dim};
        note_bad(bad, kernels().pool(table, BagRange{inner, bags, 0, count, f},
                                     rows + s * inner.out_stride, scratch));
      };
      if (shared.first == nullptr || !shared.features[f]) {
        pool(begin, n, 0);
        continue;
      }
      const int64_t* first = shared.first + begin;
      for (int64_t s = 0, done = 0; s < n; s = done) {
        pool(first[s], 1, s);
        const float* row = rows + s * inner.out_stride + all.out_begin + dim;
        for (done = s + 1; done < n && first[done] == first[s]; ++done)
          std::memcpy(rows + done * inner.out_stride + all.out_begin + dim, row,
                      sizeof(float) * dim);
      }
    }
    if (bad.load() >= 0) return;
    kernels().interact(rows, n, static_cast<int>(num_rows), dim, out + begin * stride, scratch);
  });
  context.count_pass(0);
  if (bad.load() >= 0) return {4, bad.load()};
  return {};
}

}  // namespace oper::host
