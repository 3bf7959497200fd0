// The types and operations that CPU kernels are written in, for vectors of 8 floats in AVX2, F16C and FMA.
// compile_avx2.cpp includes it below the pragma that compiles functions for these.
#pragma once
#include <immintrin.h>

#include "core/tables.h"
#include "cpu/simd/half.h"

namespace memkern::avx2 {

// A vector of floats.
struct F {
  __m256 v;
  F() = default;
  MEMKERN_FN F(__m256 x) : v(x) {}
  MEMKERN_FN explicit F(float x) : v(_mm256_set1_ps(x)) {}
  MEMKERN_FN explicit F(int x) : v(_mm256_set1_ps(static_cast<float>(x))) {}
};
// A condition for each lane: all bits of the lane are 1 where it holds, else 0.
struct Mask {
  __m256 m;
};
// The bits of F, in 32-bit lanes.
struct I {
  __m256i v;
  I() = default;
  MEMKERN_FN I(__m256i u) : v(u) {}
  MEMKERN_FN explicit I(uint32_t u) : v(_mm256_set1_epi32(static_cast<int>(u))) {}
};
constexpr int kLanes = 8;

MEMKERN_FN I operator+(I a, I b) { return _mm256_add_epi32(a.v, b.v); }
MEMKERN_FN I operator-(I a, I b) { return _mm256_sub_epi32(a.v, b.v); }
MEMKERN_FN I operator&(I a, I b) { return _mm256_and_si256(a.v, b.v); }
MEMKERN_FN I to_bits(F x) { return _mm256_castps_si256(x.v); }
MEMKERN_FN F from_bits(I u) { return _mm256_castsi256_ps(u.v); }
MEMKERN_FN F operator+(F a, F b) { return _mm256_add_ps(a.v, b.v); }
MEMKERN_FN F operator-(F a, F b) { return _mm256_sub_ps(a.v, b.v); }
MEMKERN_FN F operator*(F a, F b) { return _mm256_mul_ps(a.v, b.v); }
MEMKERN_FN F operator/(F a, F b) { return _mm256_div_ps(a.v, b.v); }
MEMKERN_FN F fma(F x, F y, F z) { return _mm256_fmadd_ps(x.v, y.v, z.v); }
MEMKERN_FN F abs(F x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x.v); }
MEMKERN_FN F sqrt(F x) { return _mm256_sqrt_ps(x.v); }
MEMKERN_FN F floor(F x) { return _mm256_floor_ps(x.v); }
MEMKERN_FN F rint(F x) { return _mm256_round_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
MEMKERN_FN F min(F a, F b) { return _mm256_min_ps(a.v, b.v); }
MEMKERN_FN F max(F a, F b) { return _mm256_max_ps(a.v, b.v); }
MEMKERN_FN F copysign(F magnitude, F sign) {
  const __m256 bit = _mm256_set1_ps(-0.0f);
  return _mm256_or_ps(_mm256_andnot_ps(bit, magnitude.v), _mm256_and_ps(bit, sign.v));
}
MEMKERN_FN Mask greater(F a, F b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ)}; }
// A mask as a number, with lane i's truth in bit i, and back.
MEMKERN_FN uint32_t bits_of(Mask mask) { return static_cast<uint32_t>(_mm256_movemask_ps(mask.m)); }
MEMKERN_FN __m256i lanes_of(uint32_t bits) {
  const __m256i lane_bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane_bit), lane_bit);
}
MEMKERN_FN Mask mask_of(uint32_t bits) { return {_mm256_castsi256_ps(lanes_of(bits))}; }
MEMKERN_FN Mask is_nan(F x) { return {_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q)}; }
MEMKERN_FN Mask is_finite(F x) {
  return {_mm256_cmp_ps(abs(x).v, _mm256_set1_ps(3.402823466e38f), _CMP_LE_OQ)};
}
MEMKERN_FN F select(Mask yes, F a, F b) { return _mm256_blendv_ps(b.v, a.v, yes.m); }
MEMKERN_FN float max_of(F x) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}

// A sum of squares in fp64, where a square is exact.
struct SquareSum {
  __m256d low, high;
  MEMKERN_FN SquareSum() : low(_mm256_setzero_pd()), high(low) {}
  MEMKERN_FN void add(F x) {
    const __m256d a = _mm256_cvtps_pd(_mm256_castps256_ps128(x.v));
    const __m256d b = _mm256_cvtps_pd(_mm256_extractf128_ps(x.v, 1));
    low = _mm256_add_pd(low, _mm256_mul_pd(a, a));
    high = _mm256_add_pd(high, _mm256_mul_pd(b, b));
  }
  MEMKERN_FN void add(const float* x) { add(_mm256_loadu_ps(x)); }
  MEMKERN_FN double total() const {
    double lane[4];
    _mm256_storeu_pd(lane, _mm256_add_pd(low, high));
    return (lane[0] + lane[1]) + (lane[2] + lane[3]);
  }
};

MEMKERN_FN F load(const float* p) { return _mm256_loadu_ps(p); }
MEMKERN_FN F load(const bf16* p) {
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
MEMKERN_FN F load(const fp16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
MEMKERN_FN F load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
MEMKERN_FN F load(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
// The lanes as 16-bit integers, saturated.
MEMKERN_FN __m128i pack16(__m256i x, bool is_signed) {
  const __m128i low = _mm256_castsi256_si128(x), high = _mm256_extracti128_si256(x, 1);
  return is_signed ? _mm_packs_epi32(low, high) : _mm_packus_epi32(low, high);
}
MEMKERN_FN I load(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
MEMKERN_FN I load(const error16* p) {
  return _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
MEMKERN_FN I load(const error8* p) {
  const __m256i units = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm256_slli_epi32(units, 8);
}
MEMKERN_FN void store(error16* p, I error) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), pack16(error.v, true));
}
MEMKERN_FN void store(error8* p, I error) {
  const __m128i h = pack16(_mm256_srai_epi32(error.v, 8), true);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(h, h));
}
MEMKERN_FN void store(float* p, F x) { _mm256_storeu_ps(p, x.v); }
MEMKERN_FN void store(bf16* p, F x) {
  const __m256i u = _mm256_castps_si256(x.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
  const __m256 nan = _mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q);
  r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7FC0), _mm256_castps_si256(nan));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), pack16(r, false));
}
MEMKERN_FN void store(fp16* p, F x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}
MEMKERN_FN void store(int8_t* p, F x) {
  const __m128i h = pack16(_mm256_cvtps_epi32(x.v), true);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(h, h));
}
MEMKERN_FN void store(uint8_t* p, F x) {
  const __m128i h = pack16(_mm256_cvtps_epi32(x.v), true);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(h, h));
}

// A table of 2^Bits levels. at(): the level of each lane's code; bits[p] has bit p of all lanes' codes.
template <int Bits> struct LevelTable {
  __m256 low, high;
  MEMKERN_FN explicit LevelTable(const float* table)
      : low(_mm256_loadu_ps(table)), high(_mm256_loadu_ps(table + 8)) {}
  MEMKERN_FN F at(const uint32_t* bits) const {
    __m256i index = _mm256_setzero_si256();
    for (int p = 0; p < Bits && p < 3; ++p)
      index = _mm256_or_si256(index, _mm256_and_si256(lanes_of(bits[p]), _mm256_set1_epi32(1 << p)));
    const F level = _mm256_permutevar8x32_ps(low, index);
    if constexpr (Bits < 4) return level;
    return select(mask_of(bits[Bits - 1]), _mm256_permutevar8x32_ps(high, index), level);
  }
};

}  // namespace memkern::avx2
