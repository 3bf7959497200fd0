// The power codec (formulas: memkern/codec.py). F is float or a vector of floats; codes are whole numbers in F.
#pragma once
#include "scalar.h"
#include "tables.h"

namespace memkern {

// 1 / scale, and whether it can be used; a block where it cannot be holds codes of zero.
MEMKERN_FN bool usable_inverse(float scale, float* inv) {
  *inv = 1.0f / scale;
  return is_finite(*inv);
}

// scale / N^2, once per block.
MEMKERN_FN float power_unit(float scale, int levels) { return scale / static_cast<float>(levels * levels); }

template <bool Signed, class F> MEMKERN_FN F power_decode(F q, F unit) {
  return unit * (q * (Signed ? abs(q) : q));
}

// From c = N * sqrt(|x| / scale) to the code.
template <class F> MEMKERN_FN F power_round_signed(F c, F x) {
  return select(is_finite(x), copysign(rint(c), x), F(0.0f));
}

// u: 1/2 for the nearest code, or the dither.
template <class F> MEMKERN_FN F power_round_unsigned(F c, F x, F u) {
  const F q = min(max(floor(c + u), F(1.0f)), F(kPowerLevelsUnsigned));
  return select(is_finite(x), select(greater(x, F(0.0f)), q, F(0.0f)), F(kPowerLevelsUnsigned));
}

template <class F> MEMKERN_FN F power_encode_signed(F x, F inv) {
  return power_round_signed(F(kPowerLevelsSigned) * sqrt(abs(x) * inv), x);
}

template <class F> MEMKERN_FN F power_encode_unsigned(F x, F inv, F u) {
  return power_round_unsigned(F(kPowerLevelsUnsigned) * sqrt(x * inv), x, u);
}

// Position j of a block at a step: u in [0, 1).
MEMKERN_FN float dither(uint32_t j, uint32_t step) {
  const uint32_t h = j * kDitherJ + step * kDitherStep;
  return static_cast<float>(h >> kDitherShift) * 0x1p-24f;
}

}  // namespace memkern
