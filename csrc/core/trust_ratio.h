// The formula of a layer's trust ratio (LAMB, LARS), from its sums of squares. The reference:
// memkern/reference/trust.py, lamb.py and lars.py. common/trust_ratios.h has the arguments of such steps.
#pragma once
#include "core/scalar.h"
#include "core/tables.h"

namespace memkern {

// Sums of squares over a layer, in fp64: a row of StepArgs' squares.
struct Squares {
  double param, update;  // update: of the vector whose norm the ratio divides by
};

// How the trust ratio of a layer is computed.
struct TrustRule {
  bool adapt;  // whether the formula applies; else the ratio is 1, and callers do not compute it
  bool clip;
  double coeff;  // of LARS's classic form, whose ratio takes the three below; else 0
  double weight_decay, eps, lr;
};

// The trust ratio; 1 where the weight's norm is at most kLeastNorm, which counts as 0, or a norm is 0 or NaN.
MEMKERN_FN float trust_ratio(const Squares& squares, const TrustRule& rule) {
  const double p_norm = ::sqrt(squares.param), u_norm = ::sqrt(squares.update);
  double ratio = 1.0;
  if (p_norm > kLeastNorm && u_norm > 0.0)
    ratio = rule.coeff != 0.0 ? rule.coeff * p_norm / (u_norm + p_norm * rule.weight_decay + rule.eps)
                              : p_norm / u_norm;
  if (rule.clip) {
    if (rule.coeff != 0.0) ratio = ratio / rule.lr;
    if (ratio > 1.0) ratio = 1.0;
  }
  return static_cast<float>(ratio);
}

}  // namespace memkern
