// LARS, in the form of the LAMB paper and in its classic one. Order of operations: memkern/reference/lars.py.
#pragma once
#include "core/hyperparameters.h"
#include "core/trust_ratio.h"

namespace memkern {

struct LarsScalars {
  float grad_factor;  // gradient_factor(), negative to maximize
  float weight_decay;
  float grad_ratio;  // classic: the trust ratio, else 1
  float momentum;
  float weight;  // of the gradient in the moment
  float rate;    // lr, not classic: times the trust ratio
  bool nesterov, classic;
};

MEMKERN_FN LarsScalars lars_scalars(double lr, const LarsHyperparameters& h, double grad_factor,
                                    uint64_t step) {
  const bool classic = h.trust_coeff != 0.0;
  LarsScalars s;
  s.grad_factor = static_cast<float>(h.maximize != 0.0 ? -grad_factor : grad_factor);
  s.weight_decay = static_cast<float>(h.weight_decay);
  s.grad_ratio = 1.0f;
  s.momentum = static_cast<float>(h.momentum);
  // As in torch.optim.SGD, the first step's gradient is not dampened.
  s.weight = static_cast<float>(!classic ? 1.0 - h.momentum : step == 1 ? 1.0 : 1.0 - h.dampening);
  s.rate = static_cast<float>(lr);
  s.nesterov = h.nesterov != 0.0;
  s.classic = classic;
  return s;
}

MEMKERN_FN bool adapts(const LarsHyperparameters& h) {
  return h.weight_decay != 0.0 || h.always_adapt != 0.0;
}

MEMKERN_FN TrustRule trust_rule(double lr, const LarsHyperparameters& h) {
  return {adapts(h), h.trust_clip != 0.0, h.trust_coeff, h.weight_decay, h.eps, lr};
}

MEMKERN_FN void set_trust_ratio(LarsScalars& s, double lr, float ratio) {
  if (s.classic)
    s.grad_ratio = ratio;
  else
    s.rate = static_cast<float>(lr * ratio);
}

template <class F> MEMKERN_FN F lars_gradient(F g, const LarsScalars& s) {
  return s.grad_factor != 1.0f ? g * F(s.grad_factor) : g;
}

// The moment after the step, from the moment before; d becomes the decayed, adapted gradient.
template <class F> MEMKERN_FN F lars_moment(F p, F& d, F m, const LarsScalars& s) {
  if (s.weight_decay != 0.0f) d = d + F(s.weight_decay) * p;
  d = F(s.grad_ratio) * d;
  return F(s.momentum) * m + F(s.weight) * d;
}

template <class F> MEMKERN_FN void lars_update(F& p, F g, F& m, const LarsScalars& s) {
  F d = lars_gradient(g, s);
  m = lars_moment(p, d, m, s);
  p = p - F(s.rate) * (s.nesterov ? d + F(s.momentum) * m : m);
}

}  // namespace memkern
