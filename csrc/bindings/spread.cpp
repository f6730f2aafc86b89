// torch operators for samples that share bags: each distinct bag is pooled once, and its row then stands for
// all samples that have it.
#include <cstring>
#include <vector>

#include "bindings/lookup.h"
#include "common/operators.h"

namespace oper::host {
namespace {

constexpr int64_t kSamples = 256;  // of a thread's share: fewer are not worth waking another

// Which pooled row each of B samples has, by feature, and the columns of the features.
struct Samples {
  const int64_t* rows;        // [F, B]
  int64_t count;              // B
  std::vector<int64_t> ends;  // [F + 1], where each feature's columns begin; then C

  int64_t features() const { return static_cast<int64_t>(ends.size()) - 1; }
  int64_t columns() const { return ends.back(); }

  // Calls `each(row, begin, end)` for the columns of features [first, last) of one sample; neighbours with
  // the same row, as features of a session usually have, are one call.
  template <class Each>
  void for_rows_of(int64_t sample, int64_t first, int64_t last, Each each) const {
    for (int64_t f = first, next; f < last; f = next) {
      const int64_t row = rows[f * count + sample];
      for (next = f + 1; next < last && rows[next * count + sample] == row;) ++next;
      each(row, ends[f], ends[next]);
    }
  }
};

const int64_t* rows_of(const Tensor& rows, size_t features) {
  STD_TORCH_CHECK(rows.scalar_type() == ScalarType::Long && rows.is_contiguous() && rows.dim() == 2 &&
                      rows.size(0) == static_cast<int64_t>(features),
                  "internal: rows of samples must be int64 [F, B]");
  return int64_data(rows);
}

Samples samples_of(const Tensor& data, const Tensor& rows, std::vector<int64_t> ends) {
  STD_TORCH_CHECK(data.scalar_type() == ScalarType::Float && data.is_contiguous() && data.dim() == 2 &&
                      !ends.empty() && data.size(1) == ends.back(),
                  "internal: values of samples must be float32 [n, C]");
  return {rows_of(rows, ends.size() - 1), rows.size(1), std::move(ends)};
}

// What rows int64 [F, B] say: F + 1 where sample b has row b of every feature; F where not; before F, a feature
// that has a row outside [0, limits[f]).
int64_t kind_of_rows(Tensor rows, std::vector<int64_t> limits) {
  const int64_t* row = rows_of(rows, limits.size());
  const int64_t features = rows.size(0), count = rows.size(1);
  bool are_own = true;
  for (int64_t f = 0; f < features; ++f, row += count) {
    const auto limit = static_cast<uint64_t>(limits[f]);
    bool is_outside = false;
    for (int64_t b = 0; b < count; ++b) {
      is_outside |= static_cast<uint64_t>(row[b]) >= limit;
      are_own &= row[b] == b;
    }
    if (is_outside) return f;
  }
  return features + (are_own ? 1 : 0);
}

// pooled float32 [n, C] and rows int64 [F, B], which are in [0, n), to float32 [B, C].
Tensor spread_rows(Tensor pooled, Tensor rows, std::vector<int64_t> ends) {
  const Samples samples = samples_of(pooled, rows, std::move(ends));
  const int64_t columns = samples.columns();
  Tensor out = pooled_tensor(ScalarType::Float, {samples.count, columns});
  const float* from = float_data(pooled);
  float* to = float_data(out);
  torch::stable::parallel_for(0, samples.count, kSamples, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b)
      samples.for_rows_of(b, 0, samples.features(), [&](int64_t row, int64_t first, int64_t last) {
        std::memcpy(to + b * columns + first, from + row * columns + first,
                    sizeof(float) * static_cast<size_t>(last - first));
      });
  });
  return out;
}

// The gradient of `spread_rows`: gradient float32 [B, C] to [num_rows, C], added up in the order of the
// samples whatever the number of threads.
Tensor gather_rows(Tensor gradient, Tensor rows, std::vector<int64_t> ends, int64_t num_rows) {
  const Samples samples = samples_of(gradient, rows, std::move(ends));
  const int64_t columns = samples.columns();
  Tensor out = pooled_tensor(ScalarType::Float, {num_rows, columns});
  const float* from = float_data(gradient);
  float* to = float_data(out);
  std::memset(to, 0, sizeof(float) * static_cast<size_t>(num_rows * columns));
  const int64_t grain = samples.count < kSamples ? samples.features() : 1;
  torch::stable::parallel_for(0, samples.features(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t b = 0; b < samples.count; ++b)
      samples.for_rows_of(b, begin, end, [&](int64_t row, int64_t first, int64_t last) {
        for (int64_t c = first; c < last; ++c) to[row * columns + c] += from[b * columns + c];
      });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oper, m) {
  OPER_OPERATOR(kind_of_rows, "(Tensor rows, int[] limits) -> int");
  OPER_OPERATOR(spread_rows, "(Tensor pooled, Tensor rows, int[] ends) -> Tensor");
  OPER_OPERATOR(gather_rows, "(Tensor gradient, Tensor rows, int[] ends, int num_rows) -> Tensor");
}

}  // namespace oper::host
