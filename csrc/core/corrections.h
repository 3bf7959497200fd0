// beta^step, for bias corrections, and the factor that gradients are multiplied by. Both are computed in
// fp64, with the same bits on every backend.
#pragma once
#include "core/scalar.h"

namespace memkern {

// beta^step by binary exponentiation: multiplications only.
MEMKERN_FN double power_of(double beta, uint64_t step) {
  double result = 1.0, square = beta;
  for (; step; step >>= 1) {
    if (step & 1) result *= square;
    square *= square;
  }
  return result;
}

// What gradients are multiplied by: 1 / grad_scale and, if `clips`, the factor that clips their global norm
// grad_norm to max_grad_norm, by torch.nn.utils.clip_grad_norm_'s formula. grad_scale: the GradScaler's, or
// 1 without one. If grad_norm is NaN, the result is NaN.
MEMKERN_FN double gradient_factor(double grad_scale, bool clips, double grad_norm, double max_grad_norm) {
  const double factor = 1.0 / grad_scale;
  if (!clips) return factor;
  const double clip = max_grad_norm / (grad_norm + 1e-6);
  return clip >= 1.0 ? factor : factor * clip;
}

}  // namespace memkern
