// A moment's codes, eight at a time, and the block maxima that their scales are made of.
#pragma once
#include "../core/dynamic.h"
#include "../core/power.h"
#include "lanes.cuh"

namespace memkern {

template <bool Signed> constexpr int kLevels = Signed ? kPowerLevelsSigned : kPowerLevelsUnsigned;

// The largest over the lanes of a group, in every lane of it; groups are of a power of two.
MEMKERN_DEVICE float max_over_lanes(float x, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2)
    x = max_or_nan(x, __shfl_xor_sync(kAllLanes, x, distance));
  return x;
}

// What code i of a word counts, without a conversion: its byte becomes the last one of 2^23's mantissa. Conversions
// share the slow unit with the roots.
template <bool Signed> MEMKERN_DEVICE float code_value(uint32_t word, int i) {
  const uint32_t bytes = Signed ? word ^ 0x80808080u : word;
  return float_of(__byte_perm(bytes, 0x4B000000u, 0x7550u + i)) - (Signed ? 8388736.0f : 8388608.0f);
}

// The values of eight codes: unit is the scale times the decay, for power codes over N^2.
template <StateKind Kind, bool Signed>
MEMKERN_DEVICE void decode(const Codes& codes, float unit, float (&x)[kEight]) {
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    const uint32_t word = i < 4 ? codes.x : codes.y;
    if constexpr (Kind == StateKind::kPower)
      x[i] = power_decode<Signed>(code_value<Signed>(word, i % 4), unit);
    else
      x[i] = dynamic_decode<Signed>(static_cast<uint8_t>(word >> 8 * (i % 4))) * unit;
  }
}

template <StateKind Kind, bool Signed> MEMKERN_DEVICE float unit_of(float scale, float decay) {
  return Kind == StateKind::kPower ? power_unit(scale, decay, kLevels<Signed>) : decay * scale;
}

template <StateKind Kind, bool Signed> MEMKERN_DEVICE float factor_of(float scale) {
  return Kind == StateKind::kPower ? power_factor(scale, kLevels<Signed>) : dynamic_factor(scale);
}

// The largest finite magnitude; `finite` becomes false where a value is not.
template <bool Signed> MEMKERN_DEVICE float largest_of(const float (&x)[kEight], bool& finite) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kEight; ++i) largest = max_or_nan(largest, Signed ? fabsf(x[i]) : x[i]);
  if (!is_finite(largest)) {
    finite = false;
    largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kEight; ++i)
      if (is_finite(x[i])) largest = max(Signed ? fabsf(x[i]) : x[i], largest);
  }
  return largest;
}

// How the unsigned power code at a place in its block is rounded: down, after u is added.
struct Rounding {
  bool nearest;
  uint32_t step;
  MEMKERN_DEVICE float operator()(int j) const {
    return nearest ? 0.5f : dither(static_cast<uint32_t>(j), step);
  }
  MEMKERN_DEVICE float add(float c, int j) const { return c + (*this)(j); }
};

// The low bytes of four words.
MEMKERN_DEVICE uint32_t low_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

MEMKERN_DEVICE Codes pack(const uint32_t (&code)[kEight]) {
  return {low_bytes(code[0], code[1], code[2], code[3]), low_bytes(code[4], code[5], code[6], code[7])};
}

// Formula by formula, for any values; j is the first one's place in its block.
template <StateKind Kind, bool Signed>
MEMKERN_DEVICE Codes encode_exactly(const float (&x)[kEight], float factor, int j, const Rounding& rounding) {
  uint32_t code[kEight];
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    if constexpr (Kind == StateKind::kDynamic)
      code[i] = dynamic_encode<Signed>(x[i], factor);
    else if constexpr (Signed)
      code[i] = static_cast<uint32_t>(static_cast<int>(power_encode_signed(x[i], factor)));
    else
      code[i] = static_cast<uint32_t>(power_encode_unsigned(x[i], factor, rounding(j + i)));
  }
  if (factor == 0.0f) return {0, 0};
  return pack(code);
}

// Power codes of finite values from approximate roots, and how far they came from a boundary between two codes:
// where sure() holds, they are the formula's. A number plus 2^23 has its whole part in its low bits, which spares
// the conversion.
template <bool Signed> struct PowerEstimate {
  // The root of the formula is within 2^-24, the approximate one within 2^-23, relatively. Unsigned, the sum with u is
  // rounded too, both times by up to 2^-17.
  static constexpr float kDoubt = Signed ? 127 * 0x1.8p-23f : 255 * 0x1.8p-23f + 0x1p-16f;
  float farthest = 0.0f;  // from the middle between two boundaries

  MEMKERN_DEVICE bool sure() const { return farthest < 0.5f - kDoubt; }

  MEMKERN_DEVICE Codes encode(const float (&x)[kEight], float factor, int j, const Rounding& rounding) {
    uint32_t code[kEight];
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      const float root = approximate_sqrt((Signed ? fabsf(x[i]) : x[i]) * factor);
      if constexpr (Signed) {
        constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: to nearest even, of either sign
        const float c = copysignf(root, x[i]), rounded = c + kRound;
        farthest = fmaxf(farthest, fabsf(c - (rounded - kRound)));
        code[i] = bits_of(rounded);
      } else {
        constexpr float kDown = 8388608.0f;  // 2^23
        const float c = rounding.add(root, j + i), down = __fadd_rd(c, kDown);
        farthest = fmaxf(farthest, fabsf(c - (down - kDown) - 0.5f));
        code[i] = bits_of(fminf(fmaxf(down, x[i] > 0.0f ? kDown + 1.0f : kDown), kDown + kPowerLevelsUnsigned));
      }
    }
    if (factor == 0.0f) return {0, 0};
    return pack(code);
  }
};

// The codes of eight values of a block. `finite`: whether all of this lane's values of the block are. Warps call it
// whole: what one lane is not sure of, all its lanes encode by the formula.
template <StateKind Kind, bool Signed>
MEMKERN_DEVICE Codes encode(const float (&x)[kEight], float factor, bool finite, int j,
                            const Rounding& rounding) {
  if constexpr (Kind == StateKind::kPower) {
    PowerEstimate<Signed> estimate;
    const Codes codes = estimate.encode(x, factor, j, rounding);
    if (!__any_sync(kAllLanes, !(finite && estimate.sure()))) return codes;
  }
  return encode_exactly<Kind, Signed>(x, factor, j, rounding);
}

}  // namespace memkern
