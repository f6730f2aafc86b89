// torch operators for samples that share bags: each distinct bag is pooled once, and its row then stands for
// all samples that have it.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <tuple>
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
  int64_t row(int64_t feature, int64_t sample) const { return rows[feature * count + sample]; }

  // Whether sample b has row b of the feature.
  bool are_own(int64_t feature) const {
    const int64_t* row = rows + feature * count;
    for (int64_t b = 0; b < count; ++b)
      if (row[b] != b) return false;
    return true;
  }
};

const int64_t* rows_of(const Tensor& rows, size_t features) {
  STD_TORCH_CHECK(rows.scalar_type() == ScalarType::Long && rows.is_contiguous() &&
                      rows.dim() == 2 && rows.size(0) == static_cast<int64_t>(features),
                  "internal: rows of samples must be int64 [F, B]");
  return int64_data(rows);
}

Samples samples_of(const Tensor& data, const Tensor& rows, std::vector<int64_t> ends) {
  STD_TORCH_CHECK(data.scalar_type() == ScalarType::Float && data.is_contiguous() &&
                      data.dim() == 2 && !ends.empty() && data.size(1) == ends.back(),
                  "internal: values of samples must be float32 [n, C]");
  return {rows_of(rows, ends.size() - 1), rows.size(1), std::move(ends)};
}

// Lengths of num_keys keys, bags[k] of each, as those of `size` bags each: int [num_keys * size], others empty.
// And bags, int64 [num_keys].
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

// What rows int64 [F, B] say: F + 1 where sample b has row b of every feature; F where not; before F, a feature
// that has a row outside [0, limits[f]).
int64_t kind_of_rows(Tensor rows, std::vector<int64_t> limits) {
  constexpr int64_t kAhead = 256;  // nobody has read them since the batch was made
  const int64_t* row = rows_of(rows, limits.size());
  const int64_t features = rows.size(0), count = rows.size(1);
  const int64_t* end = row + features * count;
  bool are_own = true;
  for (int64_t f = 0; f < features; ++f, row += count) {
    const auto limit = static_cast<uint64_t>(limits[f]);
    bool is_outside = false;
    for (int64_t b = 0, next; b < count; b = next) {
      next = std::min(count, b + 8);
      __builtin_prefetch(std::min(row + b + kAhead, end - 1));
      for (int64_t i = b; i < next; ++i) {
        is_outside |= static_cast<uint64_t>(row[i]) >= limit;
        are_own &= row[i] == i;
      }
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
      for (int64_t f = 0, next; f < samples.features(); f = next) {
        // Neighbours with the same row, as features of a session usually have, are one copy.
        const int64_t row = samples.row(f, b), column = samples.ends[f];
        for (next = f + 1; next < samples.features() && samples.row(next, b) == row;) ++next;
        std::memcpy(to + b * columns + column, from + row * columns + column,
                    sizeof(float) * static_cast<size_t>(samples.ends[next] - column));
      }
  });
  return out;
}

// The gradient of `spread_rows`: gradient float32 [B, C] to [num_rows, C], added up in the order of the
// samples whatever the number of threads. Feature f has limits[f] rows; those behind them are cleared only
// where somebody `reads_all`.
Tensor gather_rows(Tensor gradient, Tensor rows, std::vector<int64_t> ends, int64_t num_rows,
                   std::vector<int64_t> limits, bool reads_all) {
  const Samples samples = samples_of(gradient, rows, std::move(ends));
  const int64_t columns = samples.columns();
  Tensor out = pooled_tensor(ScalarType::Float, {num_rows, columns});
  const float* from = float_data(gradient);
  float* to = float_data(out);
  STD_TORCH_CHECK(
      static_cast<int64_t>(limits.size()) == samples.features() &&
          std::ranges::all_of(limits, [&](int64_t n) { return 0 <= n && n <= num_rows; }),
      "internal: features with more rows than there are");
  const int64_t grain = samples.count < kSamples ? samples.features() : 1;
  const auto clear = [&](int64_t f, int64_t first) {
    const size_t bytes = sizeof(float) * static_cast<size_t>(samples.ends[f + 1] - samples.ends[f]);
    for (int64_t n = first, end = reads_all ? num_rows : limits[f]; n < end; ++n)
      std::memset(to + n * columns + samples.ends[f], 0, bytes);
  };
  torch::stable::parallel_for(0, samples.features(), grain, [&](int64_t begin, int64_t end) {
    std::vector<char> are_own;
    for (int64_t f = begin; f < end; ++f) {
      are_own.push_back(samples.are_own(f));
      clear(f, are_own.back() ? samples.count : 0);
    }
    for (int64_t b = 0; b < samples.count; ++b)
      for (int64_t f = begin; f < end; ++f) {
        const int64_t first = samples.ends[f], last = samples.ends[f + 1];
        const float* more = from + b * columns;
        float* sum = to + samples.row(f, b) * columns;
        if (are_own[f - begin]) {
          std::copy(more + first, more + last, sum + first);
        } else {
          for (int64_t c = first; c < last; ++c) sum[c] += more[c];
        }
      }
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oper, m) {
  OPER_OPERATOR(pad_lengths, "(Tensor lengths, int[] bags, int size) -> (Tensor, Tensor)");
  OPER_OPERATOR(kind_of_rows, "(Tensor rows, int[] limits) -> int");
  OPER_OPERATOR(spread_rows, "(Tensor pooled, Tensor rows, int[] ends) -> Tensor");
  OPER_OPERATOR(
      gather_rows,
      "(Tensor gradient, Tensor rows, int[] ends, int num_rows, int[] limits, bool reads_all)"
      " -> Tensor");
}

}  // namespace oper::host
