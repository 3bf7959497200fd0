// SGD with momentum. Order of operations: memkern/reference/sgd.py.
#pragma once
#include "core/hyperparameters.h"
#include "core/scalar.h"

namespace memkern {

struct SgdScalars {
  float grad_factor;  // gradient_factor(), negative to maximize
  float weight_decay;
  float momentum;
  float weight;  // of the gradient in the momentum; 1 - dampening from the second step on
  float rate;
  int32_t nesterov;  // not bool: kernels load four bytes
};

// Hyperparameters: SGD's, or those of an optimizer that has the same and others (LARS).
template <class Hyperparameters>
MEMKERN_FN SgdScalars sgd_scalars(double lr, const Hyperparameters& h, double grad_factor, uint64_t step) {
  SgdScalars s;
  s.grad_factor = static_cast<float>(h.maximize != 0.0 ? -grad_factor : grad_factor);
  s.weight_decay = static_cast<float>(h.weight_decay);
  s.momentum = static_cast<float>(h.momentum);
  // As in torch.optim.SGD, the first step's gradient is not dampened.
  s.weight = static_cast<float>(step == 1 ? 1.0 : 1.0 - h.dampening);
  s.rate = static_cast<float>(lr);
  s.nesterov = h.nesterov != 0.0;
  return s;
}

template <class F> MEMKERN_FN F sgd_gradient(F g, const SgdScalars& s) {
  return s.grad_factor != 1.0f ? g * F(s.grad_factor) : g;
}

template <class F> MEMKERN_FN F sgd_decayed(F p, F d, const SgdScalars& s) {
  return s.weight_decay != 0.0f ? d + F(s.weight_decay) * p : d;
}

// The momentum after the step, from the one before and the decayed gradient.
template <class F> MEMKERN_FN F sgd_momentum(F d, F m, const SgdScalars& s) {
  return F(s.momentum) * m + F(s.weight) * d;
}

template <class F> MEMKERN_FN F sgd_parameter(F p, F d, F m, const SgdScalars& s) {
  return p - F(s.rate) * (s.nesterov ? d + F(s.momentum) * m : m);
}

template <class F> MEMKERN_FN void sgd_update(F& p, F g, F& m, const SgdScalars& s) {
  const F d = sgd_decayed(p, sgd_gradient(g, s), s);
  m = sgd_momentum(d, m, s);
  p = sgd_parameter(p, d, m, s);
}

}  // namespace memkern
