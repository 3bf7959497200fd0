// Adam and AdamW, and the moments and direction that LAMB shares. Order of operations:
// memkern/reference/adam.py.
#pragma once
#include "core/corrections.h"
#include "core/hyperparameters.h"

namespace memkern {

// The scalars of one tensor's step: computed in fp64 and rounded once to fp32.
struct AdamScalars {
  float grad_factor;  // gradient_factor(), negative to maximize
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
  float root_beta2;     // sqrt(beta2): what w = sqrt(v) decays by
  float eps;            // eps * sqrt(1 - beta2^step)
  float step_size;      // lr * sqrt(1 - beta2^step) / (1 - beta1^step)
  float decay;          // 1 - lr * weight_decay where decoupled, else 1
  float coupled_decay;  // weight_decay where coupled, else 0
};

MEMKERN_FN AdamScalars adam_scalars(double lr, const AdamHyperparameters& h, double grad_factor,
                                    uint64_t step) {
  const double root2 = ::sqrt(1.0 - power_of(h.beta2, step));
  const bool decoupled = h.decoupled_weight_decay != 0.0;
  AdamScalars s;
  s.grad_factor = static_cast<float>(h.maximize != 0.0 ? -grad_factor : grad_factor);
  s.beta1 = static_cast<float>(h.beta1);
  s.one_minus_beta1 = static_cast<float>(1.0 - h.beta1);
  s.beta2 = static_cast<float>(h.beta2);
  s.one_minus_beta2 = static_cast<float>(1.0 - h.beta2);
  s.root_beta2 = static_cast<float>(::sqrt(h.beta2));
  s.eps = static_cast<float>(h.eps * root2);
  s.step_size = static_cast<float>(lr * root2 / (1.0 - power_of(h.beta1, step)));
  s.decay = decoupled ? static_cast<float>(1.0 - lr * h.weight_decay) : 1.0f;
  s.coupled_decay = decoupled ? 0.0f : static_cast<float>(h.weight_decay);
  return s;
}

// The gradient that the moments see: unscaled, with coupled decay.
template <class F> MEMKERN_FN F adam_gradient(F g, F p, const AdamScalars& s) {
  if (s.grad_factor != 1.0f) g = g * F(s.grad_factor);
  return s.coupled_decay != 0.0f ? g + F(s.coupled_decay) * p : g;
}

// Adds the gradient to the moments. m and v are multiplied by beta1 and beta2 already.
template <class F> MEMKERN_FN void adam_moments(F& m, F& v, F g, const AdamScalars& s) {
  m = m + F(s.one_minus_beta1) * g;
  v = v + (F(s.one_minus_beta2) * g) * g;
}

// w = sqrt(v)
template <class F> MEMKERN_FN F adam_direction(F m, F w, const AdamScalars& s) { return m / (w + F(s.eps)); }

template <class F> MEMKERN_FN F adam_param(F p, F m, F w, const AdamScalars& s) {
  return p * F(s.decay) - F(s.step_size) * adam_direction(m, w, s);
}

}  // namespace memkern
