// The power codec's encoder with AVX-512: the codes of csrc/core/power.h, in fewer instructions.
// Cycles per 16 elements on Zen 4 (Zen 5): a root occupies the divider for 10 (5), a division for 6 (3), and
// most other instructions take 1/2 to 1 (1/4 to 1/2) on other units. Adam itself needs a root and a division.
// So the code of w = sqrt(v) uses the divider's root, and the code of m, at the same time, an estimate by
// multiplications. Not the other way round: under a steady gradient w approaches the boundaries between codes
// slowly, and the estimate would be in doubt in one block of 3 instead of one in 60.
#pragma once
#include "core/power.h"
#include "cpu/simd/avx512.h"

namespace memkern::avx512 {

// The low byte of a whole number, rounded to nearest even. Infinity and NaN convert to 0x80000000: code 0.
MEMKERN_FN __m128i signed_code(F c, F x) {
  return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(copysign(c, x).v));
}

struct SignedEncoder {
  F factor;
  MEMKERN_FN explicit SignedEncoder(float factor_) : factor(factor_) {}
  MEMKERN_FN __m128i encode(F x) { return signed_code(sqrt(abs(x) * factor), x); }
};

// The same codes without the divider, for use beside an UnsignedEncoder.
struct SignedEstimator {
  F quarter;                              // N^2 / scale / 4
  __m512 farthest = _mm512_setzero_ps();  // the largest distance of a root from a whole number

  MEMKERN_FN explicit SignedEstimator(float factor) : quarter(factor * 0.25f) {}

  // sqrt(|x| * factor) by a 14-bit estimate and one Newton step, y (3 - y r), which with a quarter under the
  // root needs no halving. Within 3 units of 2^-24 of the true root, the formula within 1: the two are within
  // 2^-14, as N = 127. The conversion rounds to nearest even. Zero and what is not finite become NaN, and
  // that converts to 0x80000000, whose lowest byte is code 0.
  MEMKERN_FN __m128i encode(F x) {
    const __m512 t = (abs(x) * quarter).v, r = _mm512_rsqrt14_ps(t), y = _mm512_mul_ps(t, r);
    const __m512 c = _mm512_mul_ps(y, _mm512_fnmadd_ps(y, r, _mm512_set1_ps(3.0f)));
    farthest = _mm512_range_ps(farthest, _mm512_reduce_ps(c, _MM_FROUND_TO_NEAREST_INT), 0b1011);
    return signed_code(F(c), x);
  }

  // Whether every code is certainly the formula's: no root was too near the boundary between two codes.
  MEMKERN_FN bool sure() const {
    return _mm512_cmp_ps_mask(farthest, _mm512_set1_ps(0.5f - 0x1p-14f), _CMP_NLT_UQ) == 0;
  }
};

struct UnsignedEncoder {
  F factor;
  MEMKERN_FN explicit UnsignedEncoder(float factor_) : factor(factor_) {}

  // x >= 0 or not finite. What is not finite converts to 0x80000000, and as an unsigned number saturates to
  // 255.
  MEMKERN_FN __m128i encode(F x, F u) {
    const F c = sqrt(x * factor) + u;
    // At least 1 where x is not 0: min(bits of x, 1) is 0 for 0 alone, and cheaper than a comparison.
    const __m512i one = _mm512_set1_epi32(1), least = _mm512_min_epu32(_mm512_castps_si512(x.v), one);
    return _mm512_cvtusepi32_epi8(_mm512_max_epu32(_mm512_cvttps_epi32(c.v), least));
  }
};

}  // namespace memkern::avx512
