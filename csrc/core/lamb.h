// LAMB: Adam's moments and direction, a trust ratio for each layer. Order of operations:
// memkern/reference/lamb.py.
#pragma once
#include "core/adam.h"
#include "core/trust_ratio.h"

namespace memkern {

// Adam's step_size is sqrt(1 - beta2^step) / (1 - beta1^step) here, without lr: the norm needs the
// direction's true scale.
struct LambScalars : AdamScalars {
  float update_decay;  // weight_decay where it is part of the update, else 0
  float rate;          // lr * trust ratio
};

MEMKERN_FN LambScalars lamb_scalars(double lr, const LambHyperparameters& h, double grad_factor,
                                    uint64_t step) {
  const bool decoupled = h.decoupled_decay != 0.0;
  const AdamHyperparameters adam{h.beta1, h.beta2, h.eps, 0.0, 0.0, h.maximize};
  LambScalars s;
  static_cast<AdamScalars&>(s) = adam_scalars(1.0, adam, grad_factor, step);
  if (h.bias_correction == 0.0) {
    s.eps = static_cast<float>(h.eps);
    s.step_size = 1.0f;
  }
  s.decay = decoupled ? static_cast<float>(1.0 - lr * h.weight_decay) : 1.0f;
  s.update_decay = decoupled ? 0.0f : static_cast<float>(h.weight_decay);
  s.rate = static_cast<float>(lr);
  return s;
}

// Whether layers have trust ratios; else each is 1.
MEMKERN_FN bool adapts(const LambHyperparameters& h) {
  return h.weight_decay != 0.0 || h.always_adapt != 0.0;
}

MEMKERN_FN TrustRule trust_rule(double lr, const LambHyperparameters& h) {
  return {adapts(h), h.trust_clip != 0.0, 0.0, 0.0, 0.0, lr};
}

MEMKERN_FN void set_trust_ratio(LambScalars& s, double lr, float ratio) {
  s.rate = static_cast<float>(lr * ratio);
}

// The parameter whose norm is in the trust ratio: after weight decay, where that is decoupled.
template <class F> MEMKERN_FN F lamb_decayed(F p, const LambScalars& s) { return p * F(s.decay); }

// The direction of the step: the parameter changes by -rate times it.
template <class F> MEMKERN_FN F lamb_update(F p, F m, F w, const LambScalars& s) {
  const F update = F(s.step_size) * adam_direction(m, w, s);
  return s.update_decay != 0.0f ? update + F(s.update_decay) * p : update;
}

template <class F> MEMKERN_FN F lamb_param(F p, F m, F w, const LambScalars& s) {
  p = lamb_decayed(p, s);
  return p - F(s.rate) * lamb_update(p, m, w, s);
}

}  // namespace memkern
