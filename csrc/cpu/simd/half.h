// Types of fewer bits than fp32: bf16 and fp16, with conversions to float and back, rounded to nearest even,
// in plain C++; and the rounding errors of bf16 weights.
#pragma once
#include "core/scalar.h"

namespace memkern {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

// The rounding error of a bf16 weight, which has 16 bits (in units of 2^-16 of the weight's last place): all
// of them, or the upper 8.
struct error16 {
  int16_t units;
};
struct error8 {
  int8_t units;
};

MEMKERN_FN float to_float(bf16 h) { return float_of(static_cast<uint32_t>(h.bits) << 16); }

MEMKERN_FN bf16 to_bf16(float x) {
  const uint32_t u = bits_of(x);
  if (x != x) return {0x7FC0};
  return {static_cast<uint16_t>((u + 0x7FFF + ((u >> 16) & 1)) >> 16)};
}

// rest, in both directions: the bits without the sign.
MEMKERN_FN float to_float(fp16 h) {
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000) << 16, rest = h.bits & 0x7FFF;
  if (rest >= 0x7C00) return float_of(sign | 0x7F800000 | (rest & 0x3FF) << 13);
  // Subnormals as whole numbers, which torch.set_flush_denormal(True) does not make 0.
  if (rest < 0x400) return float_of(sign | bits_of(static_cast<float>(rest) * 0x1p-24f));
  return float_of(sign | ((rest << 13) + 0x38000000));
}

MEMKERN_FN fp16 to_fp16(float x) {
  const uint32_t u = bits_of(x), sign = u >> 16 & 0x8000, rest = u & 0x7FFFFFFF;
  if (rest > 0x7F800000) return {static_cast<uint16_t>(sign | 0x7E00)};
  if (rest >= 0x477FF000) return {static_cast<uint16_t>(sign | 0x7C00)};  // 65520 and more round to infinity
  uint32_t half;
  if (rest < 0x38800000) {
    // Below fp16's normal range, in units of 2^-24, which is the unit of the last bit of floats from 1/2 to
    // 1: the sum with 1/2 is rounded to that unit, and its bits less those of 1/2 are the count of units.
    half = bits_of(float_of(rest) + 0.5f) - bits_of(0.5f);
  } else {
    half = (rest - 0x38000000 + 0xFFF + (rest >> 13 & 1)) >> 13;
  }
  return {static_cast<uint16_t>(sign | half)};
}

}  // namespace memkern
