// A moment's codes, eight at a time, and the block maxima that their scales are made of.
#pragma once
#include "core/dynamic.h"
#include "core/power.h"
#include "tile.cuh"

namespace memkern {

// The largest over 2 * distance lanes, in every one of them. Lanes further away are asked and not heard,
// which spares a loop.
MEMKERN_DEVICE float max_over_lanes(float x, int distance) {
#pragma unroll
  for (int d = kWarp / 2; d > 0; d /= 2) {
    const float other = __shfl_xor_sync(kAllLanes, x, d);
    if (d <= distance) x = fmaxf(x, other);
  }
  return x;
}

// Two moments of a block: the lower half of its lanes works out what m needs, the upper half what v needs, so
// that roots and divisions are done once.
struct Halves {
  int distance;
  bool upper;

  MEMKERN_DEVICE explicit Halves(const Group& group)
      : distance(group.width() / 2), upper((group.lane() & distance) != 0) {}
  template <class T> MEMKERN_DEVICE T own(T of_m, T of_v) const { return upper ? of_v : of_m; }
  // From each half's own number to both.
  MEMKERN_DEVICE void share(float mine, float& of_m, float& of_v) const {
    const float other = __shfl_xor_sync(kAllLanes, mine, distance);
    of_m = own(mine, other);
    of_v = own(other, mine);
  }
  // The largest over the group of the half's own number.
  MEMKERN_DEVICE float largest(float of_m, float of_v) const {
    const float other = __shfl_xor_sync(kAllLanes, own(of_v, of_m), distance);
    return max_over_lanes(fmaxf(own(of_m, of_v), other), distance / 2);
  }
};

// What code i of a word counts, without a conversion: its byte becomes the last one of 2^23's mantissa.
// Conversions share the slow unit with the roots.
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

MEMKERN_FN constexpr int levels_of(bool is_signed) {
  return is_signed ? kPowerLevelsSigned : kPowerLevelsUnsigned;
}

template <StateKind Kind> MEMKERN_DEVICE float unit_of(float scale, float decay, int levels) {
  return Kind == StateKind::kPower ? power_unit(scale, decay, levels) : decay * scale;
}

template <StateKind Kind> MEMKERN_DEVICE float factor_of(float scale, int levels) {
  return Kind == StateKind::kPower ? power_factor(scale, levels) : dynamic_factor(scale);
}

// The largest magnitude, NaN where a value is.
template <bool Signed> MEMKERN_DEVICE float largest_of(const float (&x)[kEight]) {
  float largest = Signed ? fabsf(x[0]) : x[0];
#pragma unroll
  for (int i = 1; i < kEight; ++i) largest = max_or_nan(largest, Signed ? fabsf(x[i]) : x[i]);
  return largest;
}

template <bool Signed> MEMKERN_DEVICE float largest_finite(const float (&x)[kEight]) {
  float largest = 0.0f;
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
  // c + u: the product is exact, so that one rounding is left.
  MEMKERN_DEVICE float add(float c, int j) const {
    return nearest ? c + 0.5f
                   : __fmaf_rn(static_cast<float>(dither_bits(static_cast<uint32_t>(j), step)), 0x1p-24f, c);
  }
};

// The low bytes of four words.
MEMKERN_DEVICE uint32_t low_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

MEMKERN_DEVICE Codes pack(const uint32_t (&code)[kEight]) {
  return {low_bytes(code[0], code[1], code[2], code[3]), low_bytes(code[4], code[5], code[6], code[7])};
}

// Codes, and whether they are surely the formula's.
struct Encoded {
  Codes codes;
  bool sure;
};

// Power codes of finite values from approximate roots. A number plus 2^23 has its whole part in its low bits,
// which spares the conversion.
template <bool Signed>
MEMKERN_DEVICE Encoded estimate(const float (&x)[kEight], float factor, int j, const Rounding& rounding) {
  // The root of the formula is within 2^-24, the approximate one within 2^-23, relatively. Unsigned, the sum
  // with u is rounded too, both times by up to 2^-17.
  constexpr float kDoubt = Signed ? 127 * 0x1.8p-23f : 255 * 0x1.8p-23f + 0x1p-16f;
  float farthest = 0.0f;  // from the middle between two boundaries
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
      // Clamped to the middle of the first and of the last cell: the same codes, and never in doubt.
      constexpr float kDown = 8388608.0f, kLast = kPowerLevelsUnsigned + 0.5f;  // kDown: 2^23
      const float c = fminf(fmaxf(rounding.add(root, j + i), x[i] > 0.0f ? 1.5f : 0.0f), kLast);
      const float down = __fadd_rd(c, kDown);
      farthest = fmaxf(farthest, fabsf(c - (down - (kDown - 0.5f))));
      code[i] = bits_of(down);
    }
  }
  const Codes codes = pack(code);
  return {{factor == 0.0f ? 0 : codes.x, factor == 0.0f ? 0 : codes.y}, farthest < 0.5f - kDoubt};
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

// The codes of one moment. `finite`: whether all of this lane's values of the block are. Warps call it whole:
// what one lane is not sure of, all its lanes encode by the formula.
template <StateKind Kind, bool Signed> MEMKERN_DEVICE Codes encode(const float (&x)[kEight], float factor,
                                                                   bool finite, int j,
                                                                   const Rounding& rounding) {
  if constexpr (Kind == StateKind::kPower) {
    const Encoded guess = estimate<Signed>(x, factor, j, rounding);
    if (!__any_sync(kAllLanes, !(finite && guess.sure))) return guess.codes;
  }
  return encode_exactly<Kind, Signed>(x, factor, j, rounding);
}

// The same for both moments, with one vote where nothing is in doubt; else only what is in doubt is encoded
// again.
template <StateKind Kind> MEMKERN_DEVICE void encode_both(const float (&m)[kEight], float m_factor,
                                                          const float (&v)[kEight], float v_factor,
                                                          bool finite, int j, const Rounding& rounding,
                                                          Codes& m_codes, Codes& v_codes) {
  if constexpr (Kind == StateKind::kPower) {
    const Encoded first = estimate<true>(m, m_factor, j, rounding),
                  second = estimate<false>(v, v_factor, j, rounding);
    m_codes = first.codes;
    v_codes = second.codes;
    if (!__any_sync(kAllLanes, !(finite && first.sure && second.sure))) return;
    if (__any_sync(kAllLanes, !(finite && first.sure)))
      m_codes = encode_exactly<Kind, true>(m, m_factor, j, rounding);
    if (__any_sync(kAllLanes, !(finite && second.sure)))
      v_codes = encode_exactly<Kind, false>(v, v_factor, j, rounding);
    return;
  }
  m_codes = encode_exactly<Kind, true>(m, m_factor, j, rounding);
  v_codes = encode_exactly<Kind, false>(v, v_factor, j, rounding);
}

}  // namespace memkern
