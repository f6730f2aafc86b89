// The optimizers' arithmetic on a row, as FBGEMM defines it (its EXACT optimizers). Shared by host
// and device.
//
// The gradients of all occurrences of a row in the global batch are summed before its one update,
// and rows that do not occur do not change. In row w with columns d: g is the gradient, s and m are
// states, lr the learning rate, wd the weight decay, b1 and b2 beta1 and beta2.
//   SGD:                   w -= lr * g
//   row-wise Adagrad:      s += mean_d(g_d^2);  w -= lr / (sqrt(s) + eps) * g
//                          L2 decay: g += wd * w first; decoupled: w *= 1 - lr * wd before
//   Adagrad:               s_d += g_d^2;  w_d -= lr * g_d / (sqrt(s_d) + eps)
//   Adam:                  m = b1 m + (1 - b1) g;  s = b2 s + (1 - b2) g^2
//                          w -= lr * (m / (1 - b1^t) / (sqrt(s / (1 - b2^t)) + eps) + wd * w)
//   partial row-wise Adam: the same with s = b2 s + (1 - b2) mean_d(g_d^2), one per row
//   LAMB, partial row-wise LAMB: m and s of Adam, of partial row-wise Adam
//                          r = m / (1 - b1^t) / (sqrt(s / (1 - b2^t)) + eps) + wd * w
//                          w -= lr * |w| / |r| * r
//   momentum SGD:          m = b1 m + g;  w -= lr * m  (torch's; L2 decay: g += wd * w first)
//   LARS-SGD:              m = b1 m + lr * |w| / (|g| + wd * |w|) * (g + wd * w);  w -= m
//                          (lr: the learning rate times eta)
// t is the number of the optimizer's step, also for rows that do not occur in every batch. Norms
// |.| are those of the whole row.
//
// First, if max_norm is given, the row's gradient is clipped as torch.nn.utils.clip_grad_norm_
// clips a parameter's:  g *= min(1, max_norm / (|g| + 1e-6))
#pragma once

#include <cmath>

#include "common/platform.h"

namespace oper {

enum class Optimizer : int32_t {
  kNone = 0,
  kSgd = 1,
  kRowWiseAdagrad = 2,
  kAdagrad = 3,
  kAdam = 4,
  kPartialRowWiseAdam = 5,
  kMomentumSgd = 6,
  kLarsSgd = 7,
  kLamb = 8,
  kPartialRowWiseLamb = 9,
};

// Whether a step needs the sum of squares of a row's gradient over all its columns.
OPER_HD bool is_row_wise(Optimizer kind) {
  return kind == Optimizer::kRowWiseAdagrad || kind == Optimizer::kPartialRowWiseAdam ||
         kind == Optimizer::kLarsSgd || kind == Optimizer::kPartialRowWiseLamb;
}

// Whether `kind` is momentum SGD, LARS-SGD or a LAMB. Kernels handle these in separate loops, so that
// the loops of the remaining optimizers stay short.
OPER_HD bool has_velocity_or_trust(Optimizer kind) { return kind >= Optimizer::kMomentumSgd; }

enum class Decay : int32_t { kNone = 0, kL2 = 1, kDecoupled = 2 };

struct OptimizerArgs {
  Optimizer kind = Optimizer::kNone;
  Decay decay = Decay::kNone;
  float learning_rate = 0.0f;
  float eps = 0.0f;
  float weight_decay = 0.0f;
  float beta1 = 0.0f, beta2 = 0.0f;
  float correction1 = 1.0f, correction2 = 1.0f;  // 1 - beta^t
  float max_norm = 0.0f;  // limit of the norm of a gradient row; 0 = none
};

// Factor that clips a gradient with this sum of squares; 1 if the norm is below max_norm.
OPER_HD float clip_factor(float sum_of_squares, float max_norm) {
  const float factor = max_norm / (sqrtf(sum_of_squares) + 1e-6f);
  return factor < 1.0f ? factor : 1.0f;
}

// Row-wise Adagrad: updates the row's state and returns the factor of the gradient, lr / (sqrt(s) +
// eps). `dim`: columns of the whole row.
OPER_HD float rowwise_adagrad_multiplier(float* state, float sum_of_squares, int32_t dim,
                                         const OptimizerArgs& args) {
  const float sum = *state + sum_of_squares / static_cast<float>(dim);
  *state = sum;
  return args.learning_rate / (sqrtf(sum) + args.eps);
}

// Partial row-wise Adam and LAMB: updates the row's second moment and returns the denominator of
// the step, sqrt(s / (1 - b2^t)) + eps.
OPER_HD float partial_adam_root(float* state, float sum_of_squares, int32_t dim,
                                const OptimizerArgs& args) {
  const float mean = sum_of_squares / static_cast<float>(dim);
  const float moment = *state * args.beta2 + mean * (1.0f - args.beta2);
  *state = moment;
  return sqrtf(moment / args.correction2) + args.eps;
}

// LARS-SGD: the factor of g + wd * w, from the sums of squares of the row (`weights`) and of its
// gradient. 0 where FBGEMM divides by 0, e.g. for a gradient of 0 without weight decay.
OPER_HD float lars_rate(float weights, float gradient, const OptimizerArgs& args) {
  const float norm = sqrtf(weights);
  const float below = sqrtf(gradient) + args.weight_decay * norm;
  return below > 0.0f ? args.learning_rate * norm / below : 0.0f;
}

// LAMB: the factor lr * |w| / |r| of the step r, from the sums of squares of the row (`weights`)
// and of the step. 0 where FBGEMM divides by 0, where the step is 0, too.
OPER_HD float lamb_rate(float weights, float step, const OptimizerArgs& args) {
  return step > 0.0f ? args.learning_rate * (sqrtf(weights) / sqrtf(step)) : 0.0f;
}

}  // namespace oper
