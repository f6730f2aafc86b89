// torch operators for batches whose samples share bags, see host/steps/samples.cpp.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <tuple>
#include <vector>

#include "bindings/lookup.h"
#include "common/operators.h"

namespace oper::host {
namespace {

const int64_t* rows_of(const Tensor& rows, int64_t features) {
  STD_TORCH_CHECK(rows.scalar_type() == ScalarType::Long && rows.is_contiguous() &&
                      rows.dim() == 2 && rows.size(0) == features,
                  "internal: bags of samples must be int64 [F, B]");
  return int64_data(rows);
}

// Pads the lengths of each key's bags (bags[k] of key k) with zeros to `size` lengths. Returns
// int32 or int64 [num_keys * size], and `bags` as int64 [num_keys].
std::tuple<Tensor, Tensor> pad_lengths(Tensor lengths, std::vector<int64_t> bags, int64_t size) {
  const bool are_32_bit = lengths.scalar_type() == ScalarType::Int;
  STD_TORCH_CHECK((are_32_bit || lengths.scalar_type() == ScalarType::Long) &&
                      lengths.is_contiguous() &&
                      std::ranges::all_of(bags, [&](int64_t k) { return 0 <= k && k <= size; }) &&
                      std::accumulate(bags.begin(), bags.end(), int64_t{0}) == lengths.numel(),
                  "internal: lengths of samples must be int [sum of the keys' bags]");
  Tensor out = pooled_tensor(lengths.scalar_type(), {static_cast<int64_t>(bags.size()) * size});
  const size_t bytes = are_32_bit ? 4 : 8;
  const char* from = static_cast<const char*>(lengths.data_ptr());
  char* to = static_cast<char*>(out.data_ptr());
  for (const int64_t k : bags) {
    const size_t own = bytes * static_cast<size_t>(k), all = bytes * static_cast<size_t>(size);
    std::memcpy(to, from, own);
    std::memset(to + own, 0, all - own);
    from += own;
    to += all;
  }
  Tensor own = pooled_tensor(ScalarType::Long, {static_cast<int64_t>(bags.size())});
  std::ranges::copy(bags, static_cast<int64_t*>(own.data_ptr()));
  return {out, own};
}

// Whether every sample b has bag b of each feature; `rows`: the samples' bags, int64 [F, B].
bool are_own_rows(Tensor rows) {
  const Samples samples{rows_of(rows, rows.size(0)), rows.size(0), rows.size(1)};
  for (int64_t f = 0; f < samples.num_features; ++f)
    if (!samples.kind(f, samples.count).are_own) return false;
  return true;
}

// Sums the gradient of samples, float32 [B, C], by bag: [num_bags, C], 0 for bags without samples.
// Also returns -1, or a feature with a sample whose bag is out of range. `bags`: int64 [num_keys],
// the number of bags of each key.
std::tuple<Tensor, int64_t> sum_by_bag(int64_t handle, Tensor grad, Tensor bags, Tensor samples,
                                       Tensor key_of, int64_t num_bags) {
  const auto context = context_of(handle);
  SampleGradients shared = gradients_of(grad, samples, key_of);
  for (int64_t f = 0; f < shared.samples.num_features; ++f)
    if (shared.samples.kind(f, int64_data(bags)[int64_data(key_of)[f]]).is_outside)
      return {pooled_tensor(ScalarType::Float, {0}), f};
  Tensor out = pooled_tensor(ScalarType::Float, {num_bags, context->output_columns});
  for (const Feature& feature : context->features)
    shared.sums.push_back({float_data(out) + feature.column, num_bags, context->output_columns});
  add_up(*context, shared);
  return {out, -1};
}

}  // namespace

Samples samples_of(const Tensor& samples, const Tensor& key_of) {
  return {rows_of(samples, key_of.numel()), samples.size(0), samples.size(1)};
}

SampleGradients gradients_of(const Tensor& grad, const Tensor& samples, const Tensor& key_of) {
  return {samples_of(samples, key_of), float_data(grad), grad.stride(0), {}};
}

int64_t place_sums(const Context& context, const Tensor& bags, const Tensor& key_of,
                   SampleGradients& shared, Batch& batch, Tensor* memory) {
  int64_t floats = 0;
  for (const Feature& feature : context.features) {
    const int64_t dim = context.tables[feature.table].dim;
    const int64_t n = int64_data(bags)[int64_data(key_of)[feature.logical]];
    const Samples::Kind kind = shared.samples.kind(feature.logical, n);
    if (kind.is_outside) return feature.logical;
    shared.sums.push_back({nullptr, kind.are_own && n == shared.samples.count ? 0 : n, dim});
    floats += shared.sums.back().num_bags * dim;
  }
  *memory = pooled_tensor(ScalarType::Float, {floats});
  float* at = float_data(*memory);
  for (size_t k = 0; k < shared.sums.size(); ++k) {
    BagSums& sums = shared.sums[k];
    if (sums.num_bags == 0) continue;
    batch.features[k].gradients = sums.data = at;
    batch.features[k].gradient_stride = sums.stride;
    at += sums.num_bags * sums.stride;
  }
  batch.shared = &shared;
  return -1;
}

STABLE_TORCH_LIBRARY_FRAGMENT(oper, m) {
  OPER_OPERATOR(pad_lengths, "(Tensor lengths, int[] bags, int size) -> (Tensor, Tensor)");
  OPER_OPERATOR(are_own_rows, "(Tensor rows) -> bool");
  OPER_OPERATOR(sum_by_bag,
                "(int handle, Tensor grad, Tensor bags, Tensor samples, Tensor key_of, int num_bags) "
                "-> (Tensor, int)");
}

}  // namespace oper::host
