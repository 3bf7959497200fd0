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
  double coeff;  // of LARS's classic form, which takes the three below, else 0
  double weight_decay, eps, lr;
};

// The trust ratio; 1 where the weight's norm is at most kLeastNorm, which counts as 0, or a norm is 0 or NaN.
MEMKERN_FN float trust_ratio(const Squares& squares, const TrustRule& t) {
  const double p = ::sqrt(squares.param), u = ::sqrt(squares.update);
  double ratio = 1.0;
  if (p > kLeastNorm && u > 0.0)
    ratio = t.coeff != 0.0 ? t.coeff * p / (u + p * t.weight_decay + t.eps) : p / u;
  if (t.clip) {
    if (t.coeff != 0.0) ratio = ratio / t.lr;
    if (ratio > 1.0) ratio = 1.0;
  }
  return static_cast<float>(ratio);
}

}  // namespace memkern
