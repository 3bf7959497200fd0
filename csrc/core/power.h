// The power codec (formulas: memkern/quant/codec.py). F is float or a vector of floats; codes are whole
// numbers in F.
#pragma once
#include "core/scalar.h"
#include "core/tables.h"

namespace memkern {

// Once per block: the factor under the root, N^2 / scale, or 0 where that overflows (a block of zeros, or
// nearly): all codes of the block are then 0.
MEMKERN_FN float power_factor(float scale, int levels) {
  const float factor = static_cast<float>(levels * levels) / scale;
  return is_finite(factor) ? factor : 0.0f;
}

// Once per block: what q * |q| is multiplied by, decay * scale / N^2. decay: the factor by which an
// optimizer's moment decays in a step (beta1, say), or 1 where codes are decoded alone.
MEMKERN_FN float power_unit(float scale, float decay, int levels) {
  return decay * scale / static_cast<float>(levels * levels);
}

template <bool Signed, class F> MEMKERN_FN F power_decode(F q, F unit) {
  return unit * (q * (Signed ? abs(q) : q));
}

// The nearest signed code. An x that is not finite has code 0.
template <class F> MEMKERN_FN F power_encode_signed(F x, F factor) {
  return select(is_finite(x), copysign(rint(sqrt(abs(x) * factor)), x), F(0.0f));
}

// One of the two codes around x, q or q + 1, so that the average of the decoded values over the steps has no
// bias. one_minus_u: one_minus_dither() of the dither. The difference a - q^2 is exact.
//
// A root that is off by up to 3 units of 2^-23 gives the same code. Only where a is next to a square k^2 can
// q be k where it should be k - 1, or the reverse. With q = k, a - q^2 is next to 0; with q = k - 1, it is
// next to 2 q + 1. As one_minus_u is kept away from 0 and 1, the comparison gives the code k in both cases.
template <class F> MEMKERN_FN F power_encode_signed(F x, F factor, F one_minus_u) {
  const F a = abs(x) * factor, q = floor(sqrt(a));
  const F code = select(greater(one_minus_u * (q + q + F(1.0f)), a - q * q), q, q + F(1.0f));
  return select(is_finite(x), copysign(code, x), F(0.0f));
}

// The unsigned code, 0 only for x <= 0. u: 1/2 for the nearest code, or the dither. NaN and infinity have the
// largest code: as a second moment it makes steps small.
template <int Levels, class F> MEMKERN_FN F power_encode_unsigned(F x, F factor, F u) {
  const F q = min(max(floor(sqrt(x * factor) + u), F(1.0f)), F(Levels));
  return select(is_finite(x), select(greater(x, F(0.0f)), q, F(0.0f)), F(Levels));
}

// The dither of position j of a block at a step, in units of 2^-24.
MEMKERN_FN uint32_t dither_bits(uint32_t j, uint32_t step) {
  return (j * kDitherJ + step * kDitherStep) >> kDitherShift;
}

// The dither as a number u in [0, 1).
MEMKERN_FN float dither(uint32_t j, uint32_t step) {
  return static_cast<float>(dither_bits(j, step)) * 0x1p-24f;
}

// 1 - u, kept away from 0 and 1 (power_encode_signed says why).
MEMKERN_FN float one_minus_dither(float u) { return min(max(1.0f - u, kDitherClamp), 1.0f - kDitherClamp); }

}  // namespace memkern
