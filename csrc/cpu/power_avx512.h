// The power codec's encoder with AVX-512: the codes of csrc/core/power.h, in fewer instructions.
//
// On a Zen 4 core, in cycles per 16 elements: a root occupies the divider for 10 and a division for 6, and nearly
// everything else takes 1/2 to 1 elsewhere. Adam itself needs one root and one division. So the signed moment takes its
// root from the divider, and the unsigned one beside it an estimate from the multipliers.
#pragma once
#include "../core/power.h"
#include "simd_avx512.h"

namespace memkern::avx512 {

struct SignedEncoder {
  F inv;
  MEMKERN_FN explicit SignedEncoder(float inv_) : inv(inv_) {}
  // The conversion rounds to nearest even. What is not finite becomes 0x80000000, whose lowest byte is code 0.
  MEMKERN_FN __m128i encode(F x) {
    const F c = F(kPowerLevelsSigned) * sqrt(abs(x) * inv);
    return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(copysign(c, x).v));
  }
};

struct UnsignedEncoder {
  F inv_n2;                               // N^2 / scale
  __m512 nearest = _mm512_set1_ps(1.0f);  // distance that any value of the block had to a whole number

  MEMKERN_FN explicit UnsignedEncoder(float inv) : inv_n2(inv * (kPowerLevelsUnsigned * kPowerLevelsUnsigned)) {}

  // x >= 0 or not finite. N * sqrt(x / scale) + u by a 14-bit estimate and one Newton step, rounded down. The sum is within 2^-13 of the
  // exact formula's: five roundings to 24 bits of a root of at most 255, and two of a sum of at most 256. What is not
  // finite becomes NaN, which converts to 0x80000000 and as an unsigned number saturates to 255.
  MEMKERN_FN __m128i encode(F x, F u) {
    const __m512 t = _mm512_max_ps(_mm512_set1_ps(1e-30f), (x * inv_n2).v);
    const __m512 r = _mm512_rsqrt14_ps(t), y = _mm512_mul_ps(t, r);
    const __m512 half_r = _mm512_mul_ps(r, _mm512_set1_ps(0.5f));
    const __m512 sum = _mm512_add_ps(_mm512_fmadd_ps(_mm512_fnmadd_ps(y, y, t), half_r, y), u.v);
    nearest = _mm512_range_ps(_mm512_reduce_ps(sum, _MM_FROUND_TO_NEAREST_INT), nearest, 0b1010);
    // At least 1 where x is not 0: min(bits of x, 1) is 0 for 0 alone, and cheaper than a comparison.
    const __m512i one = _mm512_set1_epi32(1), least = _mm512_min_epu32(_mm512_castps_si512(x.v), one);
    return _mm512_cvtusepi32_epi8(_mm512_max_epu32(_mm512_cvttps_epi32(sum), least));
  }

  // Whether every code since the start is surely the exact formula's. About 1 block of 128 in 30 is not.
  MEMKERN_FN bool sure() const { return _mm512_reduce_min_ps(nearest) > 0x1p-13f; }
};

}  // namespace memkern::avx512
