// Optimizer arithmetic per row, in FBGEMM's definitions. Shared by host and device.
//
// EXACT optimizers: duplicates of a row within a global batch are summed before one update.
//   SGD:              w -= lr * g
//   row-wise Adagrad: s += mean_d(g_d^2);  w -= lr / (sqrt(s) + eps) * g
#pragma once

#include <cmath>

#include "oper/platform.h"

namespace oper {

enum class Optimizer : int32_t { kNone = 0, kSgd = 1, kRowWiseAdagrad = 2 };

struct OptimizerArgs {
  Optimizer kind;
  float learning_rate;
  float eps;
  float gradient_scale;  // 1 / world size where gradients are averaged over ranks
};

// Factor that multiplies the gradient; updates the row's state.
OPER_HD float rowwise_adagrad_multiplier(float* state, float sum_of_squares, int32_t dim,
                                         const OptimizerArgs& args) {
  const float sum = *state + sum_of_squares / static_cast<float>(dim);
  *state = sum;
  return args.learning_rate / (sqrtf(sum) + args.eps);
}

}  // namespace oper
