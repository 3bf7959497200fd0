// Power codes of full vectors, and the scales of blocks of 16 lanes, for the main path of steps and for
// tensors saved for a backward pass. Codes come from approximate square roots, which sums with a table in
// shared memory round; codes that are in doubt are computed anew by the formula.
#pragma once
#include "block_state.cuh"
#include "fast_path.cuh"

namespace memkern {

// Computes the scale of one moment. Half of a block's lanes do it for m, the other half for v (MomentHalves).
struct ScaleFormula {
  float squared_levels, reciprocal, decay;
  bool is_root;  // true for v, whose scale is the root of its maximum

  // The same as power_unit(scale, decay, levels).
  MEMKERN_DEVICE float unit(float scale) const {
    const float x = decay * scale;
    float unit = divide(x, squared_levels, reciprocal);
    if (any_lane(x < kMinDividend && x != 0.0f)) unit = x / squared_levels;
    return unit;
  }

  // The same as power_factor(scale, levels). `scale` is the block's maximum on entry and its scale on return.
  // For maxima from 2^-101 to 2^40 reciprocals and quotients are normal numbers, as the fast division needs.
  MEMKERN_DEVICE float factor(float& scale) const {
    const float absmax = scale, root = static_cast<float>(sqrt(Fast(absmax)));
    scale = is_root ? root : absmax;
    float factor = static_cast<float>(Fast(squared_levels) / Fast(scale));
    const bool middle = absmax >= kMinRadicand && absmax <= kMaxRadicand;
    if (any_lane(!middle)) {
      if (absmax == 0.0f) return scale = 0.0f;
      if (!middle) {
        scale = is_root ? sqrt(absmax) : absmax;
        factor = squared_levels / scale;
        if (!is_finite(factor)) factor = 0.0f;
      }
    }
    return factor;
  }
};

// The same as decode<kPower, false>: unit * (q * q), rounded once. Adding q * q, which is below 2^16, to the
// bits of 2^23 makes the float 2^23 + q * q. The fma subtracts 2^23 * unit, a product that is exact: no
// scale of w exceeds 2^64, so that it does not overflow.
MEMKERN_DEVICE void decode_root(const Codes& codes, float unit, float (&w)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const uint32_t q = __byte_perm(i < 4 ? codes.x : codes.y, 0, 0x4440u + i % 4);
    w[i] = __fmaf_rn(float_of(0x4B000000u + q * q), unit, -8388608.0f * unit);
  }
}

// How codes are rounded with the dither of a step: a sum whose floor is the code.
//
// Second moments: the formula is floor(max(root, 1) + u). The sum with 256 + u, rounded down, is between 256
// and 512, where the unit of a float's last bit is 2^-15. So its bits 15 to 22 are the code, bits 0 to 14
// the fraction.
//
// Signed codes: with a = |m| * factor, q = floor(sqrt(a)) and t = one_minus_u, the formula takes q + 1 where
// a - q^2 >= t * (2 q + 1), else q. As q^2 + t * (2 q + 1) = (q + t)^2 + t * (1 - t), that is where
// sqrt(a - t * (1 - t)) >= q + t, and the code is floor(sqrt(a - t * (1 - t)) + 1 - t). With 128 added, the
// last bit's unit is 2^-16: bits 16 to 22 are the code, bits 0 to 15 the fraction.
//
// kBias bounds the error of a sum, in units of the fraction, and is a part of the addend, so that no sum is
// too small. A sum may be too large by up to 2 * kBias: a code is in doubt if its fraction is below that.
// Errors of second moments' sums, in these units: approximate root 1, the formula's root 1/4, the formula's
// sum 1/4, addend 1/2, and 1 if w is an approximate root too. Of signed codes' sums: root 1, addend 1/2,
// difference in the root 1/4.
template <int Levels, bool Approximate> constexpr uint32_t kBias = Levels < 16 ? 1 : Approximate ? 3 : 2;
constexpr uint32_t kSignedBias = 2;

// What the sums above add and subtract for each position of a block, in shared memory, for all blocks of a
// tensor. To load such a number takes a quarter of an instruction, to compute it three to six.
struct DitherTable {
  // Elements 0 to 3 of all lanes, then elements 4 to 7, so that loads of 16 bytes have no bank conflicts.
  using Row = uint4[2][kBlockLanes];
  Row addends, signed_addends, subtrahends;

  // The word of position j. InParts: lanes have vectors in parts.
  template <bool InParts> static MEMKERN_DEVICE auto& word(Row& row, int j) {
    constexpr int kHalf = kFullBlock / 2;
    return InParts ? (&row[j / kHalf][j % kHalf / 4].x)[j % 4] : (&row[j / 4 % 2][j / kVector].x)[j % 4];
  }

  // All threads call it. bias: kBias of the second moment's codes, if there are any.
  template <bool InParts> MEMKERN_DEVICE void fill(uint32_t step, uint32_t bias) {
    const Rounding rounding{false, step};
#pragma unroll
    for (int first = 0; first < kFullBlock; first += kThreads) {
      const int j = first + static_cast<int>(threadIdx.x);
      if (kThreads > kFullBlock && j >= kFullBlock) break;
      const float one_minus_u = rounding.one_minus_u(j);
      word<InParts>(addends, j) = bits_of(256.0f + static_cast<float>(bias) * 0x1p-15f + rounding.u(j));
      word<InParts>(signed_addends, j) = bits_of(128.0f + kSignedBias * 0x1p-16f + (1.0f - one_minus_u));
      word<InParts>(subtrahends, j) = bits_of(one_minus_u * (1.0f - one_minus_u));
    }
    __syncthreads();
  }

  static MEMKERN_DEVICE void load(const Row& row, int lane, float (&x)[kVector]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 four = row[half][lane];
      const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) x[4 * half + i] = float_of(words[i]);
    }
  }
};

MEMKERN_DEVICE DitherTable& dither_table() {
  __shared__ DitherTable table;
  return table;
}

// The sums of a vector's codes, and the smallest of their fractions, which has the 15 or 16 bits of Fraction.
template <uint32_t Fraction> struct Sums {
  uint32_t bits[kVector], min_fraction = Fraction;

  MEMKERN_DEVICE void set(int i, float sum) {
    bits[i] = bits_of(sum);
    const uint32_t fraction = bits[i] & Fraction;
    min_fraction = min_fraction < fraction ? min_fraction : fraction;
  }
  MEMKERN_DEVICE bool in_doubt(int i, uint32_t bias) const { return (bits[i] & Fraction) < 2 * bias; }
};
using PositiveSums = Sums<0x7FFFu>;
using SignedSums = Sums<0xFFFFu>;

MEMKERN_DEVICE Codes codes_of(const PositiveSums& sums) {
  // Two sums' bits 8 to 23 in the halves of a word; shifted by 7, bytes 0 and 2 are their bits 15 to 22.
  const auto four = [](const uint32_t* t) {
    const uint32_t two = __byte_perm(t[0], t[1], 0x6521) >> 7, others = __byte_perm(t[2], t[3], 0x6521) >> 7;
    return __byte_perm(two, others, 0x6420);
  };
  return {four(sums.bits), four(sums.bits + 4)};
}

// The codes with the signs of x.
MEMKERN_DEVICE Codes codes_of(const SignedSums& sums, const float (&x)[kVector]) {
  const auto four = [&](int i) {
    const uint32_t* t = sums.bits + i;
    const uint32_t code =
        __byte_perm(__byte_perm(t[0], t[1], 0x0062), __byte_perm(t[2], t[3], 0x0062), 0x5410);
    const uint32_t negative = __byte_perm(sign_bytes(x[i], x[i + 1]), sign_bytes(x[i + 2], x[i + 3]), 0x5410);
    // Byte 2 of a sum has bits 16 to 23; bit 23, of the exponent of 128, is 0. In bytes of negative x the
    // code c becomes -c: 127 - c, plus 1, is at most 128, so that no carry leaves the byte, and bit 7 is
    // flipped.
    return (((code ^ negative) & 0x7F7F7F7Fu) + (negative & 0x01010101u)) ^ (negative & 0x80808080u);
  };
  return {four(0), four(4)};
}

// The codes of w > 0 for a factor above 0.
MEMKERN_DEVICE Codes encode_positive(const float (&w)[kVector], float factor, const DitherTable& dithers,
                                     int lane, PositiveSums& sums) {
  float addend[kVector];
  DitherTable::load(dithers.addends, lane, addend);
#pragma unroll
  for (int i = 0; i < kVector; ++i)
    sums.set(i, __fadd_rd(fmaxf(approximate_sqrt(w[i] * factor), 1.0f), addend[i]));
  return codes_of(sums);
}

// The codes of finite m.
MEMKERN_DEVICE Codes encode_signed(const float (&m)[kVector], float factor, const DitherTable& dithers,
                                   int lane, SignedSums& sums) {
  float subtrahend[kVector], addend[kVector];
  DitherTable::load(dithers.subtrahends, lane, subtrahend);
  DitherTable::load(dithers.signed_addends, lane, addend);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const float square = fmaxf(fabsf(m[i]) * factor - subtrahend[i], 0.0f);
    sums.set(i, __fadd_rd(approximate_sqrt(square), addend[i]));
  }
  return codes_of(sums, m);
}

// The codes rounded to the nearest: with a dither of 1/2. Unsigned codes are of x >= 0, and only of zeros if
// factor is 0.
MEMKERN_DEVICE Codes encode_to_nearest(const float (&x)[kVector], float factor, SignedSums& sums) {
#pragma unroll
  for (int i = 0; i < kVector; ++i)
    sums.set(i, __fadd_rd(approximate_sqrt(fabsf(x[i]) * factor), 128.5f + kSignedBias * 0x1p-16f));
  return codes_of(sums, x);
}
MEMKERN_DEVICE Codes encode_to_nearest(const float (&x)[kVector], float factor, PositiveSums& sums) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const float root = fmaxf(approximate_sqrt(x[i] * factor), x[i] > 0.0f ? 1.0f : 0.0f);
    sums.set(i, __fadd_rd(root, 256.5f + kBias<kPowerLevelsUnsigned, false> * 0x1p-15f));
  }
  return codes_of(sums);
}

// Replaces codes that are in doubt, which are few, by formula(i): element i's in all lanes if one is in any
// lane.
template <uint32_t Fraction, class Formula>
MEMKERN_DEVICE void recompute_doubtful(const Sums<Fraction>& sums, uint32_t bias, Codes& codes,
                                       Formula&& formula) {
  if (!any_lane(sums.min_fraction < 2 * bias)) return;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (!any_lane(sums.in_doubt(i, bias))) continue;
    uint32_t& word = i < 4 ? codes.x : codes.y;
    word = (word & ~(0xFFu << 8 * (i % 4))) | (formula(i) & 0xFFu) << 8 * (i % 4);
  }
}

// Clears the codes of zeros, and all codes if the factor is 0.
MEMKERN_DEVICE Codes clear_zeros(const float (&w)[kVector], float factor, Codes codes) {
#pragma unroll
  for (int i = 0; i < kVector; ++i)
    if (w[i] == 0.0f || factor == 0.0f) (i < 4 ? codes.x : codes.y) &= ~(0xFFu << 8 * (i % 4));
  return codes;
}

}  // namespace memkern
