// What a step multiplies every gradient by.
#pragma once
#include "scalar.h"

namespace memkern {

// Unscaled (grad_scale: a GradScaler's, else 1) and, where `clips`, clipped to a global norm. The formula is
// torch.nn.utils.clip_grad_norm_'s; a norm that is NaN gives NaN.
MEMKERN_FN double gradient_factor(double grad_scale, bool clips, double grad_norm, double max_grad_norm) {
  const double factor = 1.0 / grad_scale;
  if (!clips) return factor;
  const double clip = max_grad_norm / (grad_norm + 1e-6);
  return clip >= 1.0 ? factor : factor * clip;
}

}  // namespace memkern
