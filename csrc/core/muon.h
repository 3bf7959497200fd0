// Muon's two element-wise parts, the momentum and the parameter's update. Order of operations:
// memkern/reference/muon.py. Unlike all other formulas in core/ they fuse a multiplication and an addition,
// where torch.optim.Muon's operations do.
#pragma once
#include "core/hyperparameters.h"
#include "core/scalar.h"

namespace memkern {

// torch.lerp(start, end, weight) in fp32.
struct Lerp {
  float weight, from_end;  // from_end: weight - 1
  MEMKERN_FN static Lerp with_weight(double weight) {
    const float w = static_cast<float>(weight);
    return {w, static_cast<float>(static_cast<double>(w) - 1.0)};
  }
  // start + weight * (end - start), from the nearer end.
  template <class F> MEMKERN_FN F operator()(F start, F end) const {
    const bool from_start = weight < 0.5f && weight > -0.5f;
    return from_start ? fma(end - start, F(weight), start) : fma(end - start, F(from_end), end);
  }
};

struct MuonScalars {
  float grad_factor;  // gradient_factor(), negative to maximize
  Lerp momentum;      // from the buffer to the gradient
  Lerp update;        // from the gradient to the buffer, with nesterov
  int32_t nesterov;
  float decay;       // 1 - lr * weight_decay
  float minus_rate;  // -(lr * ratio)
};

MEMKERN_FN MuonScalars muon_scalars(double lr, const MuonHyperparameters& h, double grad_factor,
                                    double ratio) {
  MuonScalars s;
  s.grad_factor = static_cast<float>(h.maximize != 0.0 ? -grad_factor : grad_factor);
  s.momentum = Lerp::with_weight(1.0 - h.momentum);
  s.update = Lerp::with_weight(h.momentum);
  s.nesterov = h.nesterov != 0.0;
  s.decay = static_cast<float>(1.0 - lr * h.weight_decay);
  s.minus_rate = static_cast<float>(-(lr * ratio));
  return s;
}

// Updates the momentum; returns what is to be orthogonalized.
template <class F> MEMKERN_FN F muon_momentum(F g, F& m, const MuonScalars& s) {
  g = g * F(s.grad_factor);
  m = s.momentum(m, g);
  return s.nesterov ? s.update(g, m) : m;
}

// The new parameter; o: the orthogonalized update.
template <class F> MEMKERN_FN F muon_parameter(F p, F o, const MuonScalars& s) {
  return fma(o, F(s.minus_rate), p * F(s.decay));
}

}  // namespace memkern
