// torch operators of a model's dense part: all layers of an MLP (libtorch's linear and relu) in one
// call from Python, and DLRM's dot interaction.
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstring>
#include <vector>

#include "bindings/lookup.h"
#include "common/operators.h"
#include "host/kernels/kernels.h"

using torch::stable::Tensor;

namespace oper::host {
namespace {

// Calls a torch operator that returns one tensor; `stack`: its N arguments.
template <size_t N>
Tensor call(const char* name, std::array<StableIValue, N> stack) {
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Applies all layers to x [B, I]: x @ weights[k]^T + biases[k], then relu if relu[k] is not 0.
Tensor perceptrons(Tensor x, std::vector<Tensor> weights, std::vector<Tensor> biases,
                   std::vector<int64_t> relu) {
  STD_TORCH_CHECK(weights.size() == biases.size() && weights.size() == relu.size(),
                  "perceptrons: expected as many biases and activations as weights");
  using torch::stable::detail::from;
  for (size_t k = 0; k < weights.size(); ++k) {
    x = call<3>("aten::linear", {from(x), from(weights[k]), from(std::optional(biases[k]))});
    if (relu[k] != 0) x = call<1>("aten::relu_", {from(x)});
  }
  return x;
}

// The rows of samples: dense [B, D] and sparse [B, F, D], float32.
struct Rows {
  const float* dense;
  const float* sparse;
  int64_t samples, others, dim;

  int num_rows() const { return static_cast<int>(others) + 1; }
  int64_t columns() const { return dim + (others + 1) * others / 2; }  // of a result
};

Rows rows_of(const Tensor& dense, const Tensor& sparse) {
  STD_TORCH_CHECK(
      dense.dim() == 2 && sparse.dim() == 3 && dense.is_contiguous() && sparse.is_contiguous() &&
          sparse.size(0) == dense.size(0) && sparse.size(2) == dense.size(1) &&
          sparse.size(1) > 0 && dense.size(1) > 0,
      "dot_interaction: expected contiguous dense [B, D] and sparse [B, F, D] with F and D "
      "above 0");
  return {float_data(dense), float_data(sparse), dense.size(0), sparse.size(1), dense.size(1)};
}

// Calls body(sample, scratch) for all samples; each thread takes a contiguous part of them.
template <class Body>
void for_samples(const Rows& rows, const Body& body) {
  constexpr int64_t kSamples = 32;  // fewer are not worth waking another thread
  torch::stable::parallel_for(0, rows.samples, kSamples, [&](int64_t begin, int64_t end) {
    Scratch scratch(0, 0);
    for (int64_t s = begin; s < end; ++s) body(s, scratch);
  });
}

// float32 [B, D + (F + 1) * F / 2], see `forward_interaction`.
Tensor dot_interaction(Tensor dense, Tensor sparse) {
  const Rows rows = rows_of(dense, sparse);
  Tensor out = pooled_tensor(ScalarType::Float, {rows.samples, rows.columns()});
  float* to = float_data(out);
  for_samples(rows, [&](int64_t s, Scratch& scratch) {
    const int64_t others = rows.others * rows.dim;
    float* all = scratch.get<float>(1, rows.dim + others);
    std::memcpy(all, rows.dense + s * rows.dim, sizeof(float) * static_cast<size_t>(rows.dim));
    std::memcpy(all + rows.dim, rows.sparse + s * others, sizeof(float) * static_cast<size_t>(others));
    kernels().interact(all, 1, rows.num_rows(), static_cast<int>(rows.dim), to + s * rows.columns(),
                       scratch);
  });
  return out;
}

// Gradients with respect to `dense` and `sparse`, given that of the result of `dot_interaction`.
std::tuple<Tensor, Tensor> dot_interaction_gradient(Tensor gradient, Tensor dense, Tensor sparse) {
  const Rows rows = rows_of(dense, sparse);
  STD_TORCH_CHECK(gradient.is_contiguous() && gradient.numel() == rows.samples * rows.columns(),
                  "internal: expected a gradient of every output of dot_interaction");
  Tensor of_dense = pooled_tensor(ScalarType::Float, {rows.samples, rows.dim});
  Tensor of_sparse = pooled_tensor(ScalarType::Float, {rows.samples, rows.others, rows.dim});
  const float* from = float_data(gradient);
  float *first = float_data(of_dense), *others = float_data(of_sparse);
  for_samples(rows, [&](int64_t s, Scratch& scratch) {
    const int64_t at = s * rows.dim, behind = at * rows.others;
    kernels().interact_gradient(rows.dense + at, rows.sparse + behind, from + s * rows.columns(),
                                rows.num_rows(), static_cast<int>(rows.dim), first + at,
                                others + behind, scratch);
  });
  return {of_dense, of_sparse};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oper, m) {
  OPER_OPERATOR(perceptrons, "(Tensor x, Tensor[] weights, Tensor[] biases, int[] relu) -> Tensor");
  OPER_OPERATOR(dot_interaction, "(Tensor dense, Tensor sparse) -> Tensor");
  OPER_OPERATOR(dot_interaction_gradient,
                "(Tensor gradient, Tensor dense, Tensor sparse) -> (Tensor, Tensor)");
}

}  // namespace oper::host
