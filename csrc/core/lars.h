// LARS in two forms, the LAMB paper's and the classic one. Order of operations: memkern/reference/lars.py.
#pragma once
#include "core/sgd.h"
#include "core/trust_ratio.h"

namespace memkern {

struct LarsScalars : SgdScalars {  // rate: lr; in the LAMB paper's form, times the trust ratio
  float grad_ratio;                // classic: the trust ratio, else 1
  int32_t classic;
};

MEMKERN_FN LarsScalars lars_scalars(double lr, const LarsHyperparameters& h, double grad_factor,
                                    uint64_t step) {
  LarsScalars s{sgd_scalars(lr, h, grad_factor, step), 1.0f, h.trust_coeff != 0.0};
  if (!s.classic) s.weight = static_cast<float>(1.0 - h.momentum);
  return s;
}

// Whether layers have trust ratios; else each is 1.
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

// The moment after the step, from the moment before; d becomes the decayed, adapted gradient.
template <class F> MEMKERN_FN F lars_moment(F p, F& d, F m, const LarsScalars& s) {
  d = F(s.grad_ratio) * sgd_decayed(p, d, s);
  return sgd_momentum(d, m, s);
}

template <class F> MEMKERN_FN void lars_update(F& p, F g, F& m, const LarsScalars& s) {
  F d = sgd_gradient(g, s);
  m = lars_moment(p, d, m, s);
  p = sgd_parameter(p, d, m, s);
}

}  // namespace memkern
