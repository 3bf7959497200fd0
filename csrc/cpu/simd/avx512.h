// The types and operations that CPU kernels are written in, for vectors of 16 floats in AVX-512 F, BW, DQ and
// VL, and the power codec's encoder. compile_avx512.cpp includes it below the pragma for these.
#pragma once
#include <immintrin.h>

#include "core/power.h"
#include "core/tables.h"
#include "cpu/simd/half.h"

namespace memkern::avx512 {

struct F {
  __m512 v;
  F() = default;
  MEMKERN_FN F(__m512 x) : v(x) {}
  MEMKERN_FN explicit F(float x) : v(_mm512_set1_ps(x)) {}
  MEMKERN_FN explicit F(int x) : v(_mm512_set1_ps(static_cast<float>(x))) {}
};
struct Mask {
  __mmask16 m;
};
// The bits of F, in 32-bit lanes.
struct I {
  __m512i v;
  I() = default;
  MEMKERN_FN I(__m512i u) : v(u) {}
  MEMKERN_FN explicit I(uint32_t u) : v(_mm512_set1_epi32(static_cast<int>(u))) {}
};
constexpr int kLanes = 16;

MEMKERN_FN I operator+(I a, I b) { return _mm512_add_epi32(a.v, b.v); }
MEMKERN_FN I operator-(I a, I b) { return _mm512_sub_epi32(a.v, b.v); }
MEMKERN_FN I operator&(I a, I b) { return _mm512_and_si512(a.v, b.v); }
MEMKERN_FN I to_bits(F x) { return _mm512_castps_si512(x.v); }
MEMKERN_FN F from_bits(I u) { return _mm512_castsi512_ps(u.v); }
MEMKERN_FN F operator+(F a, F b) { return _mm512_add_ps(a.v, b.v); }
MEMKERN_FN F operator-(F a, F b) { return _mm512_sub_ps(a.v, b.v); }
MEMKERN_FN F operator*(F a, F b) { return _mm512_mul_ps(a.v, b.v); }
// By the division instruction: Adam's loop takes 9 cycles on Zen 5. With quotients made of multiplications
// it would take 14, and 19 with a test for quotients that are not rounded correctly.
MEMKERN_FN F operator/(F a, F b) { return _mm512_div_ps(a.v, b.v); }
MEMKERN_FN F fma(F x, F y, F z) { return _mm512_fmadd_ps(x.v, y.v, z.v); }
MEMKERN_FN F abs(F x) { return _mm512_abs_ps(x.v); }
MEMKERN_FN F sqrt(F x) { return _mm512_sqrt_ps(x.v); }
MEMKERN_FN F floor(F x) { return _mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
MEMKERN_FN F rint(F x) { return _mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
MEMKERN_FN F min(F a, F b) { return _mm512_min_ps(a.v, b.v); }
MEMKERN_FN F max(F a, F b) { return _mm512_max_ps(a.v, b.v); }
MEMKERN_FN F copysign(F magnitude, F sign) {
  const __m512 bit = _mm512_set1_ps(-0.0f);
  return _mm512_or_ps(_mm512_andnot_ps(bit, magnitude.v), _mm512_and_ps(bit, sign.v));
}
MEMKERN_FN Mask greater(F a, F b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
MEMKERN_FN uint32_t bits_of(Mask mask) { return mask.m; }
MEMKERN_FN Mask mask_of(uint32_t bits) { return {static_cast<__mmask16>(bits)}; }
MEMKERN_FN Mask is_nan(F x) { return {_mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q)}; }
MEMKERN_FN Mask is_finite(F x) {
  return {_mm512_cmp_ps_mask(_mm512_abs_ps(x.v), _mm512_set1_ps(3.402823466e38f), _CMP_LE_OQ)};
}
MEMKERN_FN F select(Mask yes, F a, F b) { return _mm512_mask_blend_ps(yes.m, b.v, a.v); }
MEMKERN_FN float max_of(F x) { return _mm512_reduce_max_ps(x.v); }

// A sum of squares in fp64, where a square is exact: fused or not, the bits are the same.
struct SquareSum {
  __m512d low, high;
  MEMKERN_FN SquareSum() : low(_mm512_setzero_pd()), high(low) {}
  MEMKERN_FN void add(F x) { add(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1)); }
  MEMKERN_FN void add(const float* x) { add(_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)); }
  MEMKERN_FN void add(__m256 first, __m256 second) {
    const __m512d a = _mm512_cvtps_pd(first), b = _mm512_cvtps_pd(second);
    low = _mm512_fmadd_pd(a, a, low);
    high = _mm512_fmadd_pd(b, b, high);
  }
  MEMKERN_FN double total() const {
    double lane[8];  // g++ 12 warns of its own _mm512_reduce_add_pd
    _mm512_storeu_pd(lane, _mm512_add_pd(low, high));
    return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
  }
};

MEMKERN_FN F load(const float* p) { return _mm512_loadu_ps(p); }
MEMKERN_FN F load(const bf16* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
MEMKERN_FN F load(const fp16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
MEMKERN_FN F load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
MEMKERN_FN F load(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
MEMKERN_FN I load(const uint32_t* p) { return _mm512_loadu_si512(p); }
MEMKERN_FN I load(const error16* p) {
  return _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
MEMKERN_FN I load(const error8* p) {
  const __m512i units = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_slli_epi32(units, 8);
}
MEMKERN_FN void store(error16* p, I error) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(error.v));
}
MEMKERN_FN void store(error8* p, I error) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_srai_epi32(error.v, 8)));
}
MEMKERN_FN void store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
MEMKERN_FN void store(bf16* p, F x) {
  const __m512i u = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
  r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(r));
}
MEMKERN_FN void store(fp16* p, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}
MEMKERN_FN void store(int8_t* p, __m128i codes) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), codes); }
MEMKERN_FN void store(uint8_t* p, __m128i codes) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), codes); }

// A table of 2^Bits levels. `table` has room for 16 floats. at(): the level of each lane's
// code; bits[p] has bit p of all lanes' codes.
template <int Bits> struct LevelTable {
  __m512 levels;
  MEMKERN_FN explicit LevelTable(const float* table) : levels(_mm512_loadu_ps(table)) {}
  MEMKERN_FN F at(const uint32_t* bits) const {
    __m512i index = _mm512_setzero_si512();
    for (int p = 0; p < Bits; ++p)
      index = _mm512_mask_or_epi32(index, static_cast<__mmask16>(bits[p]), index, _mm512_set1_epi32(1 << p));
    return _mm512_permutexvar_ps(index, levels);
  }
};

// The power codec's encoder with AVX-512: the codes of csrc/core/power.h, in fewer instructions.
// Cycles per 16 elements:
//                                       Zen 4       Zen 5
//   root, in the divider                10          5
//   division, in the divider            6           3
//   most others, not in the divider     1/2 to 1    1/4 to 1/2
// Adam itself needs a root and a division. So only the code of w = sqrt(v) takes another root of the
// divider, and meanwhile the code of m takes an estimate by multiplications, whose error dithered_code
// corrects. The code of w has no such correction: an estimate would need a check that it is not too near to
// a boundary between codes. Under a steady gradient w approaches boundaries slowly, and one block of 3 would
// fail the check.

// c with the sign of x, rounded to nearest even, as a byte. Infinity and NaN are converted to 0x80000000,
// whose low byte, the code, is 0.
MEMKERN_FN __m128i signed_code(F c, F x) {
  return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(copysign(c, x).v));
}

// The nearest code, without dither.
MEMKERN_FN __m128i nearest_signed(F x, F factor) { return signed_code(sqrt(abs(x) * factor), x); }

// power_encode_signed(x, factor, one_minus_u) from a = |x| * factor and an approximate sqrt(a), whose
// relative error may be 3 units of 2^-23 (core/power.h says why). With q = floor(root) the code is q + 1
// where a - q^2 >= one_minus_u * (2 q + 1), else q. The left side is exact. The right side is
// fma(2 * one_minus_u, q, one_minus_u), rounded once as in power_encode_signed. A root of NaN gives code 0.
MEMKERN_FN __m128i dithered_code(F a, F root, F one_minus_u, F x) {
  const __m512 q = floor(root).v, bound = _mm512_fmadd_ps((one_minus_u + one_minus_u).v, q, one_minus_u.v);
  const __mmask16 up = _mm512_cmp_ps_mask(_mm512_fnmadd_ps(q, q, a.v), bound, _CMP_GE_OQ);
  return signed_code(F(_mm512_mask_add_ps(q, up, q, _mm512_set1_ps(1.0f))), x);
}

struct SignedEncoder {
  F factor;
  MEMKERN_FN explicit SignedEncoder(float factor_) : factor(factor_) {}
  MEMKERN_FN __m128i encode(F x, F one_minus_u) {
    const F a = abs(x) * factor;
    return dithered_code(a, sqrt(a), one_minus_u, x);
  }
};

// The same codes without the divider, for use beside an UnsignedEncoder.
struct SignedEstimator {
  F factor, quarter;  // N^2 / scale (N: the largest code, core/power.h), and a quarter of it
  MEMKERN_FN explicit SignedEstimator(float factor_) : factor(factor_), quarter(factor_ * 0.25f) {}

  // sqrt(a) by a 14-bit estimate and one Newton step: t = a/4, r ~ 1/sqrt(t), y = t r ~ sqrt(t). The step
  // for sqrt(t) is y (3 - y r) / 2; without its division by 2 it gives 2 sqrt(t) = sqrt(a), off by at most
  // 1.5 units of 2^-23 (dithered_code allows 3). For x = 0 and an x that is not finite the root is NaN.
  MEMKERN_FN __m128i encode(F x, F one_minus_u) {
    const F magnitude = abs(x);
    const __m512 t = (magnitude * quarter).v, r = _mm512_rsqrt14_ps(t), y = _mm512_mul_ps(t, r);
    const __m512 root = _mm512_mul_ps(y, _mm512_fnmadd_ps(y, r, _mm512_set1_ps(3.0f)));
    return dithered_code(magnitude * factor, root, one_minus_u, x);
  }
};

template <int Levels> struct UnsignedEncoder {
  F factor;
  MEMKERN_FN explicit UnsignedEncoder(float factor_) : factor(factor_) {}

  // x >= 0 or not finite. An x that is not finite is converted to 0x80000000, which is the largest code once
  // it is saturated as an unsigned number.
  MEMKERN_FN __m128i encode(F x, F u) {
    const F c = sqrt(x * factor) + u;
    // The least code is 1 where x is not 0. As unsigned integers min(bits of x, 1) is 0 for x = 0 and else
    // 1, and is cheaper than a comparison.
    const __m512i one = _mm512_set1_epi32(1), least = _mm512_min_epu32(_mm512_castps_si512(x.v), one);
    __m512i q = _mm512_max_epu32(_mm512_cvttps_epi32(c.v), least);
    if constexpr (Levels < 255) q = _mm512_min_epu32(q, _mm512_set1_epi32(Levels));
    return _mm512_cvtusepi32_epi8(q);
  }
};

}  // namespace memkern::avx512
