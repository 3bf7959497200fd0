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

MEMKERN_FN __m128i nearest_signed(F x, F factor) { return signed_code(sqrt(abs(x) * factor), x); }

// power_encode_signed(x, factor, rest) from a = |x| * factor and a root of it, which may be 6 units of 2^-24
// off. rest * (2 q + 1) is rounded once, as in the formula. A root that is NaN gives code 0.
MEMKERN_FN __m128i dithered_code(F a, F root, F rest, F x) {
  const __m512 q = floor(root).v, bound = _mm512_fmadd_ps((rest + rest).v, q, rest.v);
  const __mmask16 up = _mm512_cmp_ps_mask(_mm512_fnmadd_ps(q, q, a.v), bound, _CMP_GE_OQ);
  return signed_code(F(_mm512_mask_add_ps(q, up, q, _mm512_set1_ps(1.0f))), x);
}

struct SignedEncoder {
  F factor;
  MEMKERN_FN explicit SignedEncoder(float factor_) : factor(factor_) {}
  MEMKERN_FN __m128i encode(F x, F rest) {
    const F a = abs(x) * factor;
    return dithered_code(a, sqrt(a), rest, x);
  }
};

// The same codes without the divider, for use beside an UnsignedEncoder.
struct SignedEstimator {
  F factor, quarter;  // N^2 / scale, and a quarter of it
  MEMKERN_FN explicit SignedEstimator(float factor_) : factor(factor_), quarter(factor_ * 0.25f) {}

  // sqrt(a) by a 14-bit estimate and one Newton step, y (3 - y r), which with a quarter of a under the root
  // needs no halving: within 3 units of 2^-24. Zero and what is not finite become NaN.
  MEMKERN_FN __m128i encode(F x, F rest) {
    const F magnitude = abs(x);
    const __m512 t = (magnitude * quarter).v, r = _mm512_rsqrt14_ps(t), y = _mm512_mul_ps(t, r);
    const __m512 root = _mm512_mul_ps(y, _mm512_fnmadd_ps(y, r, _mm512_set1_ps(3.0f)));
    return dithered_code(magnitude * factor, root, rest, x);
  }
};

template <int Levels> struct UnsignedEncoder {
  F factor;
  MEMKERN_FN explicit UnsignedEncoder(float factor_) : factor(factor_) {}

  // x >= 0 or not finite. What is not finite converts to 0x80000000, and as an unsigned number saturates to
  // the largest code.
  MEMKERN_FN __m128i encode(F x, F u) {
    const F c = sqrt(x * factor) + u;
    // At least 1 where x is not 0: min(bits of x, 1) is 0 for 0 alone, and cheaper than a comparison.
    const __m512i one = _mm512_set1_epi32(1), least = _mm512_min_epu32(_mm512_castps_si512(x.v), one);
    __m512i q = _mm512_max_epu32(_mm512_cvttps_epi32(c.v), least);
    if constexpr (Levels < 255) q = _mm512_min_epu32(q, _mm512_set1_epi32(Levels));
    return _mm512_cvtusepi32_epi8(q);
  }
};

}  // namespace memkern::avx512
