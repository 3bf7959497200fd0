// What a GradScaler and a clipped norm leave to a step on the CPU.
#pragma once
#include "../core/gradient.h"
#include "../step.h"

namespace memkern {

inline bool skipped(const std::optional<Tensor>& found_inf) {
  return found_inf && read_number(*found_inf, "found_inf") != 0;
}

inline double gradient_factor(const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& grad_norm,
                              double max_grad_norm) {
  const double scale = grad_scale ? read_number(*grad_scale, "grad_scale") : 1.0;
  const double norm = grad_norm ? read_number(*grad_norm, "grad_norm") : 0.0;
  return gradient_factor(scale, grad_norm.has_value(), norm, max_grad_norm);
}

}  // namespace memkern
