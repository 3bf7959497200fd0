// What a step multiplies every gradient by.
#pragma once
#include "scalar.h"

namespace memkern {

// Unscaled (grad_scale: a GradScaler's, else null) and clipped to a global norm (grad_norm: null where
// nothing is clipped). The formula is torch.nn.utils.clip_grad_norm_'s; a norm that is NaN gives NaN.
MEMKERN_FN double gradient_factor(const double* grad_scale, const double* grad_norm, double max_grad_norm) {
  const double factor = grad_scale ? 1.0 / *grad_scale : 1.0;
  if (!grad_norm) return factor;
  const double clip = max_grad_norm / (*grad_norm + 1e-6);
  return clip >= 1.0 ? factor : factor * clip;
}

}  // namespace memkern
