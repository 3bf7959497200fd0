// The affine codec (formulas: memkern/reference/affine.py). F is float or a vector of floats; codes are whole
// numbers in F.
#pragma once
#include "core/scalar.h"
#include "core/tables.h"

namespace memkern {

// The least and the largest code.
MEMKERN_FN int affine_least(int bits) { return -(1 << (bits - 1)); }
MEMKERN_FN int affine_most(int bits) { return (1 << (bits - 1)) - 1; }

struct AffineParameters {
  float scale, zero_point;  // the zero point is a whole number of at most about kAffineFarthest
};

// Of the range [low, high].
MEMKERN_FN AffineParameters affine_parameters(float low, float high, int bits) {
  const float least = static_cast<float>(affine_least(bits)), most = static_cast<float>(affine_most(bits));
  const float size = max(abs(low), abs(high));
  if (low == high) {
    const float sign = low > 0.0f ? 1.0f : low < 0.0f ? -1.0f : 0.0f;
    return {size > 0.0f ? size : 1.0f, least - sign};
  }
  // Halves: the difference of two large numbers of unlike sign would overflow.
  const float step = (high * 0.5f - low * 0.5f) / ((most - least) * 0.5f);
  const float scale = max(max(step, size / static_cast<float>(kAffineFarthest)), 0x1p-126f);
  return {scale, rint(least - low / scale)};
}

// What is rounded to the nearest whole number or, with u in [0, 1), down, once it is clipped to the codes'
// range. The code of 0 for NaN.
template <class F> MEMKERN_FN F affine_place(F x, F scale, F zero_point) {
  return select(is_nan(x), zero_point, x / scale + zero_point);
}
template <class F> MEMKERN_FN F affine_place(F x, F scale, F zero_point, F u) {
  return select(is_nan(x), zero_point, x / scale + zero_point + u);
}

template <class F> MEMKERN_FN F affine_decode(F q, F scale, F zero_point) { return scale * (q - zero_point); }

// Two codes of 4 bits in a byte, the first in the low half.
MEMKERN_FN uint8_t affine_pair(int first, int second) {
  return static_cast<uint8_t>((first & 15) | (second & 15) << 4);
}
// The code of element i.
MEMKERN_FN int affine_half(const uint8_t* halves, int64_t i) {
  return ((halves[i / 2] >> (i % 2 * 4) & 15) ^ 8) - 8;
}

// The same for 8 codes of a byte each.
MEMKERN_FN uint32_t affine_pairs(uint64_t codes) {
  codes &= 0x0F0F0F0F0F0F0F0Full;
  codes = (codes | codes >> 4) & 0x00FF00FF00FF00FFull;
  codes = (codes | codes >> 8) & 0x0000FFFF0000FFFFull;
  return static_cast<uint32_t>(codes | codes >> 16);
}
MEMKERN_FN uint64_t affine_halves(uint32_t pairs) {
  uint64_t codes = pairs;
  codes = (codes | codes << 16) & 0x0000FFFF0000FFFFull;
  codes = (codes | codes << 8) & 0x00FF00FF00FF00FFull;
  codes = ((codes | codes << 4) & 0x0F0F0F0F0F0F0F0Full) ^ 0x0808080808080808ull;
  // Less 8 in each byte; the bit above keeps them apart.
  return ((codes | 0x8080808080808080ull) - 0x0808080808080808ull) ^ 0x8080808080808080ull;
}

}  // namespace memkern
