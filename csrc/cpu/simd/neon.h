// The types and operations that CPU kernels are written in, for vectors of 8 floats in two registers of NEON,
// as every 64-bit ARM processor has it.
#pragma once
#include <arm_neon.h>

#include "core/tables.h"
#include "cpu/simd/half.h"

namespace memkern::neon {

struct F {
  float32x4_t low, high;
  F() = default;
  MEMKERN_FN F(float32x4_t low_, float32x4_t high_) : low(low_), high(high_) {}
  MEMKERN_FN explicit F(float x) : F(vdupq_n_f32(x), vdupq_n_f32(x)) {}
  MEMKERN_FN explicit F(int x) : F(static_cast<float>(x)) {}
};
// A chosen lane has all bits 1, another one all bits 0.
struct Mask {
  uint32x4_t low, high;
};
// The bits of F, in 32-bit lanes.
struct I {
  uint32x4_t low, high;
  I() = default;
  MEMKERN_FN I(uint32x4_t low_, uint32x4_t high_) : low(low_), high(high_) {}
  MEMKERN_FN explicit I(uint32_t u) : I(vdupq_n_u32(u), vdupq_n_u32(u)) {}
};
constexpr int kLanes = 8;

MEMKERN_FN I operator+(I a, I b) { return {vaddq_u32(a.low, b.low), vaddq_u32(a.high, b.high)}; }
MEMKERN_FN I operator-(I a, I b) { return {vsubq_u32(a.low, b.low), vsubq_u32(a.high, b.high)}; }
MEMKERN_FN I operator&(I a, I b) { return {vandq_u32(a.low, b.low), vandq_u32(a.high, b.high)}; }
MEMKERN_FN I to_bits(F x) { return {vreinterpretq_u32_f32(x.low), vreinterpretq_u32_f32(x.high)}; }
MEMKERN_FN F from_bits(I u) { return {vreinterpretq_f32_u32(u.low), vreinterpretq_f32_u32(u.high)}; }
MEMKERN_FN F operator+(F a, F b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
MEMKERN_FN F operator-(F a, F b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
MEMKERN_FN F operator*(F a, F b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
MEMKERN_FN F operator/(F a, F b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
MEMKERN_FN F fma(F x, F y, F z) {
  return {vfmaq_f32(z.low, x.low, y.low), vfmaq_f32(z.high, x.high, y.high)};
}
MEMKERN_FN F abs(F x) { return {vabsq_f32(x.low), vabsq_f32(x.high)}; }
MEMKERN_FN F sqrt(F x) { return {vsqrtq_f32(x.low), vsqrtq_f32(x.high)}; }
MEMKERN_FN F floor(F x) { return {vrndmq_f32(x.low), vrndmq_f32(x.high)}; }
MEMKERN_FN F rint(F x) { return {vrndnq_f32(x.low), vrndnq_f32(x.high)}; }
MEMKERN_FN Mask greater(F a, F b) { return {vcgtq_f32(a.low, b.low), vcgtq_f32(a.high, b.high)}; }
MEMKERN_FN F select(Mask yes, F a, F b) {
  return {vbslq_f32(yes.low, a.low, b.low), vbslq_f32(yes.high, a.high, b.high)};
}
// b where a or b is NaN, as on x86 (core/scalar.h). FMAX would give NaN, and FMAXNM the one that is a number.
MEMKERN_FN F min(F a, F b) { return select(greater(b, a), a, b); }
MEMKERN_FN F max(F a, F b) { return select(greater(a, b), a, b); }
MEMKERN_FN F copysign(F magnitude, F sign) {
  const uint32x4_t bit = vdupq_n_u32(0x80000000u);
  return select({bit, bit}, sign, magnitude);
}
MEMKERN_FN Mask lanes_of(uint32_t bits) {
  const uint32x4_t lane_bit = {1, 2, 4, 8}, repeated = vdupq_n_u32(bits);
  return {vtstq_u32(repeated, lane_bit), vtstq_u32(repeated, vshlq_n_u32(lane_bit, 4))};
}
MEMKERN_FN Mask mask_of(uint32_t bits) { return lanes_of(bits); }
MEMKERN_FN uint32_t bits_of(Mask mask) {
  const uint32x4_t lane_bit = {1, 2, 4, 8};
  return vaddvq_u32(vorrq_u32(vandq_u32(mask.low, lane_bit), vandq_u32(mask.high, vshlq_n_u32(lane_bit, 4))));
}
MEMKERN_FN Mask is_nan(F x) {
  return {vmvnq_u32(vceqq_f32(x.low, x.low)), vmvnq_u32(vceqq_f32(x.high, x.high))};
}
MEMKERN_FN Mask is_finite(F x) {
  const float32x4_t largest = vdupq_n_f32(3.402823466e38f);
  return {vcaleq_f32(x.low, largest), vcaleq_f32(x.high, largest)};
}
MEMKERN_FN float max_of(F x) {
  float lane[kLanes];
  vst1q_f32(lane, select(greater(x, {x.high, x.high}), x, {x.high, x.high}).low);
  const float even = memkern::max(lane[0], lane[2]), odd = memkern::max(lane[1], lane[3]);
  return memkern::max(even, odd);
}

// A sum of squares in fp64, where a square is exact: fused or not, the bits are the same. The order is
// avx2.h's.
struct SquareSum {
  float64x2_t sums[4];
  MEMKERN_FN SquareSum() {
    for (float64x2_t& sum : sums) sum = vdupq_n_f64(0.0);
  }
  MEMKERN_FN void add(F x) {
    const float64x2_t wide[4] = {vcvt_f64_f32(vget_low_f32(x.low)), vcvt_high_f64_f32(x.low),
                                 vcvt_f64_f32(vget_low_f32(x.high)), vcvt_high_f64_f32(x.high)};
    for (int i = 0; i < 4; ++i) sums[i] = vfmaq_f64(sums[i], wide[i], wide[i]);
  }
  MEMKERN_FN void add(const float* x) { add(F(vld1q_f32(x), vld1q_f32(x + 4))); }
  MEMKERN_FN double total() const {
    return vaddvq_f64(vaddq_f64(sums[0], sums[2])) + vaddvq_f64(vaddq_f64(sums[1], sums[3]));
  }
};

MEMKERN_FN F from_int16(int16x8_t x) {
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(x))), vcvtq_f32_s32(vmovl_high_s16(x))};
}
MEMKERN_FN F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
MEMKERN_FN F load(const bf16* p) {
  const uint16x8_t h = vld1q_u16(&p->bits);
  return from_bits({vshll_n_u16(vget_low_u16(h), 16), vshll_high_n_u16(h, 16)});
}
MEMKERN_FN F load(const fp16* p) {
  const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(&p->bits));
  return {vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)};
}
MEMKERN_FN F load(const int8_t* p) { return from_int16(vmovl_s8(vld1_s8(p))); }
MEMKERN_FN F load(const uint8_t* p) { return from_int16(vreinterpretq_s16_u16(vmovl_u8(vld1_u8(p)))); }
MEMKERN_FN I load(const uint32_t* p) { return {vld1q_u32(p), vld1q_u32(p + 4)}; }
MEMKERN_FN I load(const error16* p) {
  const int16x8_t units = vld1q_s16(&p->units);
  return {vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(units))),
          vreinterpretq_u32_s32(vmovl_high_s16(units))};
}
MEMKERN_FN I load(const error8* p) {
  const int16x8_t units = vshll_n_s8(vld1_s8(&p->units), 8);
  return {vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(units))),
          vreinterpretq_u32_s32(vmovl_high_s16(units))};
}
MEMKERN_FN int16x8_t narrowed(I x) {
  return vcombine_s16(vqmovn_s32(vreinterpretq_s32_u32(x.low)), vqmovn_s32(vreinterpretq_s32_u32(x.high)));
}
MEMKERN_FN void store(error16* p, I error) { vst1q_s16(&p->units, narrowed(error)); }
MEMKERN_FN void store(error8* p, I error) { vst1_s8(&p->units, vshrn_n_s16(narrowed(error), 8)); }
MEMKERN_FN void store(float* p, F x) {
  vst1q_f32(p, x.low);
  vst1q_f32(p + 4, x.high);
}
MEMKERN_FN uint16x4_t to_bf16(float32x4_t x) {
  const uint32x4_t u = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
  const uint16x4_t r = vshrn_n_u32(vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7FFF))), 16);
  return vbsl_u16(vmovn_u32(vceqq_f32(x, x)), r, vdup_n_u16(0x7FC0));
}
MEMKERN_FN void store(bf16* p, F x) { vst1q_u16(&p->bits, vcombine_u16(to_bf16(x.low), to_bf16(x.high))); }
MEMKERN_FN void store(fp16* p, F x) {
  const float16x8_t h = vcvt_high_f16_f32(vcvt_f16_f32(x.low), x.high);
  vst1q_u16(&p->bits, vreinterpretq_u16_f16(h));
}
MEMKERN_FN int16x8_t to_int16(F x) {
  return vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(x.low)), vqmovn_s32(vcvtnq_s32_f32(x.high)));
}
MEMKERN_FN void store(int8_t* p, F x) { vst1_s8(p, vqmovn_s16(to_int16(x))); }
MEMKERN_FN void store(uint8_t* p, F x) { vst1_u8(p, vqmovun_s16(to_int16(x))); }

// A table of 2^Bits levels. at(): the level of each lane's code; bits[p] has bit p of all lanes' codes.
template <int Bits> struct LevelTable {
  uint8x16x4_t table;  // the bytes of 16 levels
  MEMKERN_FN explicit LevelTable(const float* levels) {
    for (int i = 0; i < 4; ++i) table.val[i] = vreinterpretq_u8_f32(vld1q_f32(levels + 4 * i));
  }
  MEMKERN_FN float32x4_t look_up(uint32x4_t index) const {
    // The table is of bytes: level `index` has bytes 4 index to 4 index + 3.
    const uint32x4_t bytes = vmlaq_n_u32(vdupq_n_u32(0x03020100u), index, 0x04040404u);
    if constexpr (Bits <= 2)
      return vreinterpretq_f32_u8(vqtbl1q_u8(table.val[0], vreinterpretq_u8_u32(bytes)));
    if constexpr (Bits == 3)
      return vreinterpretq_f32_u8(vqtbl2q_u8({{table.val[0], table.val[1]}}, vreinterpretq_u8_u32(bytes)));
    return vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(bytes)));
  }
  MEMKERN_FN F at(const uint32_t* bits) const {
    uint32x4_t low = vdupq_n_u32(0), high = low;
    for (int p = 0; p < Bits; ++p) {
      const Mask lanes = lanes_of(bits[p]);
      const uint32x4_t bit = vdupq_n_u32(1u << p);
      low = vorrq_u32(low, vandq_u32(lanes.low, bit));
      high = vorrq_u32(high, vandq_u32(lanes.high, bit));
    }
    return {look_up(low), look_up(high)};
  }
};

}  // namespace memkern::neon
