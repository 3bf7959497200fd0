// Codes of a state's block, a vector of 8 per lane: dequantized with the block's scale, and quantized with
// the block's new scale, which is the absmax of the new values.
#pragma once
#include "core/dynamic.h"
#include "core/power.h"
#include "tile.cuh"

namespace memkern {

// The maximum over aligned groups of 2 * distance lanes, in every lane. All five shuffles of a warp are
// executed, so that the loop's length is a constant; what comes from another group is ignored.
MEMKERN_DEVICE float max_over_lanes(float x, int distance) {
#pragma unroll
  for (int d = kWarp / 2; d > 0; d /= 2) {
    const float other = __shfl_xor_sync(kAllLanes, x, d);
    if (d <= distance) x = fmaxf(x, other);
  }
  return x;
}

// Both moments of a block: the lower half of its lanes computes the scale's square roots and divisions for m,
// the upper half those for v, at the same time.
struct MomentHalves {
  int distance;  // to the lane of the other half
  bool upper;

  MEMKERN_DEVICE explicit MomentHalves(const LaneGroup& group)
      : distance(group.width() / 2), upper((group.lane() & distance) != 0) {}
  // What this lane's half computes with.
  template <class T> MEMKERN_DEVICE T pick(T of_m, T of_v) const { return upper ? of_v : of_m; }
  // Gives both halves' results to all lanes.
  MEMKERN_DEVICE void exchange(float mine, float& of_m, float& of_v) const {
    const float other = __shfl_xor_sync(kAllLanes, mine, distance);
    of_m = pick(mine, other);
    of_v = pick(other, mine);
  }
  // The maximum over the group: of m in the lower half's lanes, of v in the upper half's.
  MEMKERN_DEVICE float maximum(float of_m, float of_v) const {
    const float other = __shfl_xor_sync(kAllLanes, pick(of_v, of_m), distance);
    return max_over_lanes(fmaxf(pick(of_m, of_v), other), distance / 2);
  }
};

// Byte i of a word as a float, without a conversion instruction, as conversions would compete with square
// roots for the special function units. With the byte b in the low bits of 0x4B000000 = 2^23 the float is
// 2^23 + b, from which 2^23 is subtracted. A signed byte b is made b + 128 (its top bit is flipped), and
// 2^23 + 128 is subtracted.
template <bool Signed> MEMKERN_DEVICE float code_value(uint32_t word, int i) {
  const uint32_t bytes = Signed ? word ^ 0x80808080u : word;
  return float_of(__byte_perm(bytes, 0x4B000000u, 0x7550u + i)) - (Signed ? 8388736.0f : 8388608.0f);
}

// The dynamic map in shared memory: lanes index it with codes of their own. From constant memory, which
// serves one address at a time, a warp would wait for each of up to 32.
struct DynamicShared {
  static constexpr int kEntries = 256;
  float map[2][kEntries], midpoints[2][kEntries];  // unsigned, signed
};

MEMKERN_DEVICE DynamicShared& dynamic_shared() {
  __shared__ DynamicShared tables;
  return tables;
}

template <bool Signed> MEMKERN_DEVICE DynamicTables<Signed> dynamic_tables() {
  return {dynamic_shared().map[Signed], dynamic_shared().midpoints[Signed]};
}

// Fills the tables of a kernel for dynamic codes. All threads call it, before a __syncthreads() and the first
// code.
template <StateKind Kind> MEMKERN_DEVICE void fill_dynamic_shared() {
  if constexpr (Kind == StateKind::kDynamic) {
    DynamicShared& shared = dynamic_shared();
    for (int i = threadIdx.x; i < DynamicShared::kEntries; i += kThreads) {
      const int middle = i < DynamicShared::kEntries - 1 ? i : i - 1;
      shared.map[0][i] = kDynamicMapUnsigned[i];
      shared.map[1][i] = kDynamicMapSigned[i];
      shared.midpoints[0][i] = kDynamicMidpointsUnsigned[middle];
      shared.midpoints[1][i] = kDynamicMidpointsSigned[middle];
    }
  }
}

// Dequantizes a vector of codes. unit (decode_unit): scale * decay, and for power codes scale * decay / N^2,
// where N is the largest code (core/power.h).
template <StateKind Kind, bool Signed>
MEMKERN_DEVICE void decode(const Codes& codes, float unit, float (&x)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const uint32_t word = i < 4 ? codes.x : codes.y;
    if constexpr (is_power(Kind))
      x[i] = power_decode<Signed>(code_value<Signed>(word, i % 4), unit);
    else
      x[i] = dynamic_decode(static_cast<uint8_t>(word >> 8 * (i % 4)), dynamic_tables<Signed>()) * unit;
  }
}

MEMKERN_FN constexpr int levels_of(bool is_signed) {
  return is_signed ? kPowerLevelsSigned : kPowerLevelsUnsigned;
}

template <StateKind Kind> MEMKERN_DEVICE float decode_unit(float scale, float decay, int levels) {
  return is_power(Kind) ? power_unit(scale, decay, levels) : decay * scale;
}

template <StateKind Kind> MEMKERN_DEVICE float encode_factor(float scale, int levels) {
  return is_power(Kind) ? power_factor(scale, levels) : dynamic_factor(scale);
}

// The largest magnitude of a vector, NaN if any element is.
template <bool Signed> MEMKERN_DEVICE float absmax_or_nan(const float (&x)[kVector]) {
  float largest = Signed ? fabsf(x[0]) : x[0];
#pragma unroll
  for (int i = 1; i < kVector; ++i) largest = max_or_nan(largest, Signed ? fabsf(x[i]) : x[i]);
  return largest;
}

template <bool Signed> MEMKERN_DEVICE float finite_absmax(const float (&x)[kVector]) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kVector; ++i)
    if (is_finite(x[i])) largest = max(Signed ? fabsf(x[i]) : x[i], largest);
  return largest;
}

// How the power code of element j of a block is rounded: to the nearest, or with the dither of a step.
struct Rounding {
  bool nearest;
  uint32_t step;
  // u times 2^24
  MEMKERN_DEVICE float bits(int j) const {
    return static_cast<float>(dither_bits(static_cast<uint32_t>(j), step));
  }
  MEMKERN_DEVICE float u(int j) const { return nearest ? 0.5f : bits(j) * 0x1p-24f; }
  // one_minus_dither(u)
  MEMKERN_DEVICE float one_minus_u(int j) const {
    return fminf(fmaxf(__fmaf_rn(bits(j), -0x1p-24f, 1.0f), kDitherClamp), 1.0f - kDitherClamp);
  }
  // c + u. The product bits * 2^-24 is exact, so that the fma's sum is rounded once, like c + u.
  MEMKERN_DEVICE float add(float c, int j) const {
    return nearest ? c + 0.5f : __fmaf_rn(bits(j), 0x1p-24f, c);
  }
};

// The low bytes of four words.
MEMKERN_DEVICE uint32_t low_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

MEMKERN_DEVICE Codes pack(const uint32_t (&code)[kVector]) {
  return {low_bytes(code[0], code[1], code[2], code[3]), low_bytes(code[4], code[5], code[6], code[7])};
}

// Codes, and whether they are certain to be those of the formula.
struct Encoded {
  Codes codes;
  bool certain;
};

// Added to a number, these leave an integer in the float's low bits: from 2^23 on, the last bit stands for 1.
constexpr float kDown = 8388608.0f;    // 2^23: added with rounding down, it gives the floor of a number >= 0
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: gives the nearest integer (ties: even) of either sign

// power_encode_signed(x, factor, one_minus_u) of a finite x, in the low byte. The square root is
// approximate; the comparison `up` corrects its error (core/power.h).
MEMKERN_DEVICE uint32_t signed_code(float x, float factor, float one_minus_u, float twice_one_minus_u) {
  const float a = fabsf(x) * factor;
  const float q = __fadd_rd(approximate_sqrt(a), kDown) - kDown;
  // a - q^2 >= one_minus_u * (2 q + 1). The left side is exact. The right side, as the fma of
  // 2 * one_minus_u, is rounded once, as in the formula.
  const bool up = __fmaf_rn(-q, q, a) >= __fmaf_rn(twice_one_minus_u, q, one_minus_u);
  return bits_of(copysignf(up ? q + 1.0f : q, x) + kRound);
}

// Power codes of finite values, from approximate square roots.
template <bool Signed, int Levels = levels_of(Signed)>
MEMKERN_DEVICE Encoded estimate(const float (&x)[kVector], float factor, int j, const Rounding& rounding) {
  // The largest distance between the number that the formula rounds and the one that is rounded here.
  // Relative errors: 2^-24 of the formula's root, 2^-23 of the approximate one. For unsigned codes both sums
  // with u are rounded too, by up to 2^-17 each.
  constexpr float kMaxError = Signed ? 127 * 0x1.8p-23f : 255 * 0x1.8p-23f + 0x1p-16f;
  // The largest distance of a number from the middle of its code's interval, whose ends are 0.5 away.
  float farthest = 0.0f;
  uint32_t code[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (Signed && !rounding.nearest) {
      const float one_minus_u = rounding.one_minus_u(j + i);
      code[i] = signed_code(x[i], factor, one_minus_u, one_minus_u + one_minus_u);
      continue;
    }
    const float root = approximate_sqrt((Signed ? fabsf(x[i]) : x[i]) * factor);
    if constexpr (Signed) {
      const float c = copysignf(root, x[i]), rounded = c + kRound;
      farthest = fmaxf(farthest, fabsf(c - (rounded - kRound)));
      code[i] = bits_of(rounded);
    } else {
      // Codes 1 and Levels are clamped to the middle of their intervals, 1.5 and Levels + 0.5: numbers below
      // and above have the same codes, and are always certain.
      constexpr float kLast = Levels + 0.5f;
      const float c = fminf(fmaxf(rounding.add(root, j + i), x[i] > 0.0f ? 1.5f : 0.0f), kLast);
      const float down = __fadd_rd(c, kDown);
      farthest = fmaxf(farthest, fabsf(c - (down - (kDown - 0.5f))));
      code[i] = bits_of(down);
    }
  }
  const Codes codes = pack(code);
  return {{factor == 0.0f ? 0 : codes.x, factor == 0.0f ? 0 : codes.y}, farthest < 0.5f - kMaxError};
}

// Codes by the formulas of core/, for any values. j: the first element's index in its block. rounding:
// Rounding, or LaneDithers (main_path.cuh).
template <StateKind Kind, bool Signed, class Dithers>
MEMKERN_DEVICE Codes encode_exactly(const float (&x)[kVector], float factor, int j, const Dithers& rounding) {
  uint32_t code[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if constexpr (Kind == StateKind::kDynamic) {
      code[i] = dynamic_encode(x[i], factor, dynamic_tables<Signed>());
      if (!Signed && !rounding.nearest && code[i] == 0 && x[i] > 0.0f) code[i] = 1;
    } else if constexpr (Signed) {
      const float q = rounding.nearest ? power_encode_signed(x[i], factor)
                                       : power_encode_signed(x[i], factor, rounding.one_minus_u(j + i));
      code[i] = static_cast<uint32_t>(static_cast<int>(q));
    } else {
      code[i] =
          static_cast<uint32_t>(power_encode_unsigned<levels_of(false)>(x[i], factor, rounding.u(j + i)));
    }
  }
  if (factor == 0.0f) return {0, 0};
  return pack(code);
}

// Quantizes a vector of one moment. finite: whether all of this lane's values of the block are finite. All
// lanes of a warp call it: if one lane is not certain of its codes, all lanes use the formula.
template <StateKind Kind, bool Signed> MEMKERN_DEVICE Codes encode(const float (&x)[kVector], float factor,
                                                                   bool finite, int j,
                                                                   const Rounding& rounding) {
  if constexpr (Kind == StateKind::kPower) {
    const Encoded estimated = estimate<Signed>(x, factor, j, rounding);
    if (!any_lane(!(finite && estimated.certain))) return estimated.codes;
  }
  return encode_exactly<Kind, Signed>(x, factor, j, rounding);
}

// encode() of both moments, with one vote of the warp if all codes are certain; else a vote for each moment.
template <StateKind Kind> MEMKERN_DEVICE void encode_both(const float (&m)[kVector], float m_factor,
                                                          const float (&v)[kVector], float v_factor,
                                                          bool finite, int j, const Rounding& rounding,
                                                          Codes& m_codes, Codes& v_codes) {
  if constexpr (is_power(Kind)) {
    const Encoded first = estimate<true>(m, m_factor, j, rounding),
                  second = estimate<false, levels_of(false)>(v, v_factor, j, rounding);
    m_codes = first.codes;
    v_codes = second.codes;
    if (!any_lane(!(finite && first.certain && second.certain))) return;
    if (any_lane(!(finite && first.certain))) m_codes = encode_exactly<Kind, true>(m, m_factor, j, rounding);
    if (any_lane(!(finite && second.certain)))
      v_codes = encode_exactly<Kind, false>(v, v_factor, j, rounding);
    return;
  }
  m_codes = encode_exactly<Kind, true>(m, m_factor, j, rounding);
  v_codes = encode_exactly<Kind, false>(v, v_factor, j, rounding);
}

}  // namespace memkern
