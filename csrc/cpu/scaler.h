// What rides on tensors of one number in a step on the CPU: a GradScaler's, a clipped norm, lr, step
// counters.
#pragma once
#include "../core/gradient.h"
#include "../step.h"

namespace memkern {

inline bool skipped(const StepArgs& args) {
  return args.found_inf && read_number(*args.found_inf, "found_inf") != 0;
}

inline double gradient_factor(const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& grad_norm,
                              double max_grad_norm) {
  const double scale = grad_scale ? read_number(*grad_scale, "grad_scale") : 1.0;
  const double norm = grad_norm ? read_number(*grad_norm, "grad_norm") : 0.0;
  return gradient_factor(scale, grad_norm.has_value(), norm, max_grad_norm);
}

inline double gradient_factor(const StepArgs& args) {
  return gradient_factor(args.grad_scale, args.grad_norm, args.max_grad_norm);
}

inline std::vector<double> read_rates(const StepArgs& args) {
  std::vector<double> rates;
  for (const TensorRef t : args.lr) rates.push_back(read_number(t, "lr"));
  return rates;
}

// Counts a step, and returns its number.
inline uint64_t next_step(TensorRef step) {
  return static_cast<uint64_t>(*static_cast<float*>(step.data_ptr()) += 1.0f);
}

}  // namespace memkern
