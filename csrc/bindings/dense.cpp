// torch operator for perceptrons in a row: libtorch's own linear and relu, with nobody between them who
// needs the interpreter.
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <vector>

#include "common/operators.h"

using torch::stable::Tensor;

namespace oper::host {
namespace {

template <size_t N>
Tensor call(const char* name, std::array<StableIValue, N> stack) {
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// x [B, I] through layer k: x @ weights[k]^T + biases[k], and relu where relu[k] is not 0.
Tensor perceptrons(Tensor x, std::vector<Tensor> weights, std::vector<Tensor> biases,
                   std::vector<int64_t> relu) {
  STD_TORCH_CHECK(weights.size() == biases.size() && weights.size() == relu.size(),
                  "perceptrons: as many biases and activations as weights");
  using torch::stable::detail::from;
  for (size_t k = 0; k < weights.size(); ++k) {
    x = call<3>("aten::linear", {from(x), from(weights[k]), from(std::optional(biases[k]))});
    if (relu[k] != 0) x = call<1>("aten::relu_", {from(x)});
  }
  return x;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oper, m) {
  OPER_OPERATOR(perceptrons, "(Tensor x, Tensor[] weights, Tensor[] biases, int[] relu) -> Tensor");
}

}  // namespace oper::host
