// The dynamic codec (its map: memkern/quant/codec.py). Decoding is a look-up; encoding guesses an entry by
// arithmetic, and compares with the midpoints on both sides of it.
#pragma once
#include "core/scalar.h"
#include "core/tables.h"

namespace memkern {

// Once per block: 1 / scale, or 0 where that overflows: all codes of the block are then 0.
MEMKERN_FN float dynamic_factor(float scale) {
  const float factor = 1.0f / scale;
  return is_finite(factor) ? factor : 0.0f;
}

// The map and the midpoints between its entries; a kernel may have a copy that is quicker to index.
template <bool Signed> struct DynamicTables {
  const float* map = Signed ? kDynamicMapSigned : kDynamicMapUnsigned;
  const float* midpoints = Signed ? kDynamicMidpointsSigned : kDynamicMidpointsUnsigned;
};

// A code is an entry's index less that of 0 (modulo 256), so that code 0 is 0 in both maps.
template <bool Signed> MEMKERN_FN float dynamic_decode(uint8_t code, const DynamicTables<Signed>& tables) {
  return tables.map[Signed ? static_cast<uint8_t>(code + kDynamicZeroSigned) : code];
}

// The code of the entry nearest to x / scale (a tie takes the lower one). Non-finite: 0 where signed, else
// the largest.
template <bool Signed>
MEMKERN_FN uint8_t dynamic_encode(float x, float factor, const DynamicTables<Signed>& tables) {
  if (!is_finite(x)) return Signed ? 0 : 255;
  const float scaled = (Signed || x > 0 ? x : 0.0f) * factor;
  // `decade`: the upper end of x's decade, which has `entries` of each sign, evenly spaced from a tenth of it
  // on. entries_before: those nearer to zero.
  const float magnitude = fabsf(scaled);
  int entries = 0;
  float decade = 1e-6f;
  int entries_before = 0;
  if (magnitude > 1e-7f) {
    entries = Signed ? 1 : 2;
    entries_before = 1;
    while (magnitude > decade && decade < 0.5f) {
      entries_before += entries;
      entries *= 2;
      decade *= 10.0f;
    }
  }
  int rank =
      entries_before + static_cast<int>((magnitude / decade - 0.1f) * (static_cast<float>(entries) / 0.9f));
  if (Signed) rank = kDynamicZeroSigned + (scaled < 0 ? -rank : rank);
  int index = rank < 0 ? 0 : rank > 254 ? 254 : rank;
  // The guess is at most one off: fp32 rounds near a boundary, and decades do not meet at a midpoint.
  if (index > 0 && !(scaled > tables.midpoints[index - 1])) --index;
  if (scaled > tables.midpoints[index]) ++index;
  return static_cast<uint8_t>(Signed ? index - kDynamicZeroSigned : index);
}

}  // namespace memkern
