// Samples that share bags: each bag is pooled once, and its row stands for all samples that have it.
#include "host/steps/step.h"

namespace oper::host {
namespace {

constexpr int64_t kSmall = 256;  // samples: fewer are not worth waking other threads

SampleJob job_of(const Context& context, const Samples& samples, size_t k, int64_t stride) {
  const Feature& feature = context.features[k];
  return {samples.of(feature), samples.count, stride, context.tables[feature.table].dim};
}

}  // namespace

bool Samples::are_own(const Feature& feature) const {
  const int64_t* bag = of(feature);
  for (int64_t b = 0; b < count; ++b)
    if (bag[b] != b) return false;
  return true;
}

bool Samples::are_in_order() const {
  for (int64_t f = 0; f < num_features; ++f)
    for (int64_t b = 0; b < count; ++b)
      if (bags[f * count + b] > b) return false;
  return true;
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
