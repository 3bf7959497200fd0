// Blocks to codes and back, for one tensor.
#pragma once
#include "moment.cuh"
#include "tile.cuh"

namespace memkern {

struct CodecTensor {
  void* values;
  void* codes;
  float* scale;
  Blocks blocks;
  FloatType type;
  bool aligned;  // values and codes start on 16 bytes
};

// Unsigned codes are for x >= 0: a negative one, and -0, are stored as 0. NaN stays.
template <bool Signed> MEMKERN_DEVICE float storable(float x) { return Signed || !(x <= 0.0f) ? x : 0.0f; }

template <StateKind Kind, bool Signed> __global__ void __launch_bounds__(kThreads)
    quantize_tiles(CodecTensor t, Rounding rounding) {
  const Group group(t.blocks.block);
  __shared__ Walk walk;
  if (threadIdx.x == 0) walk.start(t.blocks, blockIdx.x, group);
  __syncthreads();
  for_places(t.blocks, walk, group, [&](const Place& place) {
    float largest = 0.0f, factor = 0.0f;
    bool finite = true;
    // Once where a block fits its lanes; else all of it for its maximum, and again to be written.
    const int turns = group.turns == 1 ? 1 : 2 * group.turns;
    for (int turn = 0; turn < turns; ++turn) {
      const bool first = turn < group.turns, last = turn >= turns - group.turns;
      const int j = ((first ? turn : turn - group.turns) * group.width() + group.lane()) * kEight;
      const Span at = span_of(place.start + j, place.n - j, t.aligned);
      float x[kEight];
      load_floats(t.values, t.type, at, x);
      for (float& each : x) each = storable<Signed>(each);
      if (first) {
        float here = largest_of<Signed>(x);
        if (!is_finite(here)) {
          finite = false;
          here = largest_finite<Signed>(x);
        }
        largest = fmaxf(largest, here);
      }
      if (turn == group.turns - 1) {
        largest = max_over_lanes(largest, group.width() / 2);
        factor = factor_of<Kind>(largest, levels_of(Signed));
        if (group.lane() == 0 && place.n > 0) __stcs(t.scale + place.block, largest);
      }
      if (last) store_codes(t.codes, at, encode<Kind, Signed>(x, factor, finite, j, rounding));
    }
  });
}

template <StateKind Kind, bool Signed> __global__ void __launch_bounds__(kThreads)
    dequantize_tiles(CodecTensor t) {
  const Group group(t.blocks.block);
  __shared__ Walk walk;
  if (threadIdx.x == 0) walk.start(t.blocks, blockIdx.x, group);
  __syncthreads();
  for_places(t.blocks, walk, group, [&](const Place& place) {
    const float unit =
        place.n > 0 ? unit_of<Kind>(__ldcs(t.scale + place.block), 1.0f, levels_of(Signed)) : 0.0f;
    for (int turn = 0; turn < group.turns; ++turn) {
      const int j = (turn * group.width() + group.lane()) * kEight;
      const Span at = span_of(place.start + j, place.n - j, t.aligned);
      float x[kEight];
      decode<Kind, Signed>(load_codes(t.codes, at), unit, x);
      store_floats(t.values, t.type, at, x);
    }
  });
}

}  // namespace memkern
