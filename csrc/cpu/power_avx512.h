// The power codec's encoder with AVX-512: the codes of csrc/core/power.h, in fewer instructions.
//
// On a Zen 4 core, in cycles per 16 elements: a root occupies the divider for 10 and a division for 6, and nearly
// everything else takes 1/2 to 1 elsewhere. Adam itself needs one root and one division. So the signed moment takes its
// root from the divider, the unsigned one beside it takes an estimate from the multipliers, and the two go in one loop:
// 0.55 ns per parameter and thread for the whole step, where two exact roots in two loops took 1.3.
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

  // N * sqrt(x / scale) + u by a 14-bit estimate and one Newton step, rounded down. The sum is within 2^-13 of the
  // exact formula's: five roundings to 24 bits of a root of at most 255, and two of a sum of at most 256. What is not
  // finite becomes NaN, which converts to 0x80000000 and as an unsigned number saturates to 255.
  MEMKERN_FN __m128i encode(F x, F u) {
    const __m512 t = _mm512_max_ps(_mm512_set1_ps(1e-30f), (x * inv_n2).v);
    const __m512 r = _mm512_rsqrt14_ps(t), y = _mm512_mul_ps(t, r);
    const __m512 half_r = _mm512_mul_ps(r, _mm512_set1_ps(0.5f));
    const __m512 sum = _mm512_add_ps(_mm512_fmadd_ps(_mm512_fnmadd_ps(y, y, t), half_r, y), u.v);
    nearest = _mm512_range_ps(_mm512_reduce_ps(sum, _MM_FROUND_TO_NEAREST_INT), nearest, 0b1010);
    const __mmask16 positive = _mm512_cmp_ps_mask(x.v, _mm512_setzero_ps(), _CMP_GT_OQ);
    const __m512i q = _mm512_cvttps_epi32(sum);
    return _mm512_cvtusepi32_epi8(_mm512_mask_max_epu32(q, positive, q, _mm512_set1_epi32(1)));
  }

  // Whether every code since the start is surely the exact formula's. About 1 block of 128 in 30 is not.
  MEMKERN_FN bool sure() const { return _mm512_reduce_min_ps(nearest) > 0x1p-13f; }
};

}  // namespace memkern::avx512
