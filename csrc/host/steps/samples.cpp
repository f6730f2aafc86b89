// Batches whose samples share bags: a bag is pooled once, and all samples that have it get its row.
#include "host/steps/step.h"

namespace oper::host {
namespace {

constexpr int64_t kSmall = 256;  // samples; fewer are not worth waking threads

SampleJob job_of(const Context& context, const Samples& samples, size_t k, int64_t stride) {
  const Feature& feature = context.features[k];
  return {samples.of(feature), samples.count, stride, context.tables[feature.table].dim};
}

}  // namespace

Samples::Kind Samples::kind(int64_t feature, int64_t limit) const {
  constexpr int64_t kAhead = 256;  // the bags may not be in the cache
  const int64_t* bag = bags + feature * count;
  const int64_t* last = bags + num_features * count - 1;
  // Signs of differences instead of comparisons, since these do not vectorise on every processor.
  uint64_t outside = 0, above = 0, other = 0;
  for (int64_t b = 0, next; b < count; b = next) {
    next = std::min(count, b + 8);
    __builtin_prefetch(std::min(bag + b + kAhead, last));
    for (int64_t i = b; i < next; ++i) {
      const uint64_t number = static_cast<uint64_t>(bag[i]), own = static_cast<uint64_t>(i);
      outside |= number | (static_cast<uint64_t>(limit) - 1 - number);
      above |= own - number;
      other |= own ^ number;
    }
  }
  return {outside >> 63 != 0, above >> 63 == 0, other == 0};
}

void spread(Context& context, const Samples& samples, const float* pooled, float* out) {
  const int64_t n = static_cast<int64_t>(context.features.size());
  run_tasks(context, n, samples.count < kSmall, [&](int64_t k, Scratch&) {
    const int64_t column = context.features[k].column;
    kernels().spread(job_of(context, samples, k, context.output_columns), pooled + column,
                     out + column);
  });
}

void add_up(Context& context, const SampleGradients& shared) {
  const bool small = shared.samples.count < kSmall;
  run_tasks(context, std::ssize(shared.sums), small, [&](int64_t k, Scratch&) {
    const BagSums& to = shared.sums[k];
    if (to.data == nullptr) return;
    kernels().add_up(job_of(context, shared.samples, k, shared.stride),
                     shared.data + context.features[k].column, to.data, to.num_bags, to.stride);
  });
}

}  // namespace oper::host
