// Few-bit activations: the thresholds that make codes, the size of bit planes, and the derivative from the
// activation's output. Explained in memkern/fewbit/levels.py and memkern/reference/activation.py.
#pragma once
#include "core/scalar.h"
#include "core/tables.h"

namespace memkern {

// Elements whose bits fill kPlaneAlignment bytes of each plane. Planes are whole groups of them.
constexpr int kGroup = 8 * kPlaneAlignment;

MEMKERN_FN int64_t plane_bytes(int64_t numel) { return (numel + kGroup - 1) / kGroup * kPlaneAlignment; }

// A code is the XOR of the flips of all thresholds under u; u = x, or |x| where the derivative is symmetric.
struct Thresholds {
  int bits, symmetry, count;
  float threshold[kMaxThresholds];
  uint8_t flip[kMaxThresholds];
};

// The derivative of an activation with one minimum, from its output: a polynomial on each side of the
// minimum, [0] falling, [1] rising, in z = 2 / reach * sqrt(output - minimum) - 1.
struct TwoBranch {
  int coefficients;                   // of each polynomial
  float minimum, reach[2], scale[2];  // a root above reach counts as reach; scale = 2 / reach
  float polynomial[2][kMaxCoefficients];
};

template <class F, class M> MEMKERN_FN F two_branch_derivative(F output, M rising, const TwoBranch& v) {
  const F above = output - F(v.minimum);
  const F root = sqrt(select(greater(above, F(0.0f)), above, F(0.0f)));
  const F reach = select(rising, F(v.reach[1]), F(v.reach[0]));
  const F scale = select(rising, F(v.scale[1]), F(v.scale[0]));
  const F z = min(root, reach) * scale - F(1.0f);
  F d = select(rising, F(v.polynomial[1][0]), F(v.polynomial[0][0]));
  for (int i = 1; i < v.coefficients; ++i)
    d = d * z + select(rising, F(v.polynomial[1][i]), F(v.polynomial[0][i]));
  return d;
}

}  // namespace memkern
