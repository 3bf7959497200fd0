// Lion. Order of operations: memkern/reference/lion.py.
#pragma once
#include "core/hyperparameters.h"
#include "core/scalar.h"

namespace memkern {

struct LionScalars {
  float grad_factor;  // gradient_factor(), negative to maximize
  float beta1, one_minus_beta1, beta2, one_minus_beta2, lr;
  float decay;  // 1 - lr * weight_decay
};

MEMKERN_FN LionScalars lion_scalars(double lr, const LionHyperparameters& h, double grad_factor) {
  LionScalars s;
  s.grad_factor = static_cast<float>(h.maximize != 0.0 ? -grad_factor : grad_factor);
  s.beta1 = static_cast<float>(h.beta1);
  s.one_minus_beta1 = static_cast<float>(1.0 - h.beta1);
  s.beta2 = static_cast<float>(h.beta2);
  s.one_minus_beta2 = static_cast<float>(1.0 - h.beta2);
  s.lr = static_cast<float>(lr);
  s.decay = static_cast<float>(1.0 - lr * h.weight_decay);
  return s;
}

// -1, 0 or 1; NaN stays NaN.
template <class F> MEMKERN_FN F sign(F x) {
  return select(greater(abs(x), F(0.0f)), copysign(F(1.0f), x), x);
}

template <class F> MEMKERN_FN void lion_update(F& p, F g, F& m, const LionScalars& s) {
  if (s.grad_factor != 1.0f) g = g * F(s.grad_factor);
  const F update = sign(F(s.beta1) * m + F(s.one_minus_beta1) * g);
  p = p * F(s.decay) - F(s.lr) * update;
  m = F(s.beta2) * m + F(s.one_minus_beta2) * g;
}

}  // namespace memkern
