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

// The larger of `largest` and the values' magnitudes, NaN where one of them is.
template <bool Signed> MEMKERN_DEVICE float larger(float largest, const float (&x)[kEight]) {
#pragma unroll
  for (int i = 0; i < kEight; ++i) largest = max_or_nan(largest, Signed ? fabsf(x[i]) : x[i]);
  return largest;
}

template <bool Signed> MEMKERN_DEVICE float larger_finite(float largest, const float (&x)[kEight]) {
#pragma unroll
  for (int i = 0; i < kEight; ++i)
    if (is_finite(x[i])) largest = max(Signed ? fabsf(x[i]) : x[i], largest);
  return largest;
}

// How the unsigned power code at a place in its block is rounded: down, after u is added.
struct Rounding {
  bool nearest;
  uint32_t step;
  MEMKERN_DEVICE float operator()(int j) const {
    return nearest ? 0.5f : dither(static_cast<uint32_t>(j), step);
  }
};

// Formula by formula, any values; j is the first one's place in its block.
template <StateKind Kind, bool Signed>
MEMKERN_DEVICE Codes encode_exactly(const float (&x)[kEight], float factor, int j, const Rounding& rounding) {
  uint32_t word[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    uint32_t code;
    if constexpr (Kind == StateKind::kDynamic)
      code = dynamic_encode<Signed>(x[i], factor);
    else if constexpr (Signed)
      code = static_cast<uint32_t>(static_cast<int>(power_encode_signed(x[i], factor))) & 0xFF;
    else
      code = static_cast<uint32_t>(power_encode_unsigned(x[i], factor, rounding(j + i)));
    word[i / 4] |= code << 8 * (i % 4);
  }
  if (factor == 0.0f) return {0, 0};
  return {word[0], word[1]};
}

}  // namespace memkern
