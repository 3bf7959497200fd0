// The fast path of a step. It takes power codes in blocks of 65 to 128 elements, rows whose length is a
// multiple of 8, and arrays that are aligned to 16 bytes (gradients: to their elements). It computes once per
// tile what the general kernels compute for each element or block. Rare cases are behind warp-uniform
// branches.
#pragma once
#include "block_state.cuh"
#include "fast_path.cuh"
#include "step_table.cuh"
#include "weights.cuh"

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

// The position of a lane's vector, as its distance from the tile's first element. Lanes past the end of a
// block load the block's first vector, which does not change the maximum, and store nothing.
struct WholeVector {
  uint32_t offset;
  bool within;
};

// Iterates over a lane's vectors in the blocks of a tile. 16 lanes share a block.
template <StateKind Kind, class P, class G, int Moments = 2> struct WholeVectors {
  static constexpr int kLanes = kWholeLanes, kGroups = kThreads / kLanes;
  TensorRecord tensor;  // with its pointers moved to the start of the tile
  const void* grad;
  float* scales;
  P param_type;
  G grad_type;
  Alignment grad_alignment;
  MomentHalves half;
  ScaleFormula formula;
  int lane, rounds, left;
  WholeVector here, ahead;

  template <class Work>
  MEMKERN_DEVICE WholeVectors(const Work& work, P param_type_, G grad_type_, float m_decay, float w_decay)
      : tensor(work.tensor),
        param_type(param_type_),
        grad_type(grad_type_),
        half(SixteenLanes{}),
        lane(threadIdx.x % kLanes),
        rounds(same_in_all_lanes((work.tile.blocks + kGroups - 1) / kGroups)),
        left(work.tile.blocks - static_cast<int>(threadIdx.x) / kLanes),
        tile(work.tile),
        blocks(work.tensor.blocks),
        ragged(any_lane(!are_whole(blocks))) {
    if (Moments == 1) half.upper = false;
    const float levels = half.pick(kLevels<Kind, true>, kLevels<Kind, false>);
    formula = {levels * levels, 1.0f / (levels * levels), half.pick(m_decay, w_decay), half.upper};
    start_at(tile.first_block,
             tile.segment_start + static_cast<int64_t>(tile.block_in_segment) * blocks.block, work.grad);
    const unsigned group = left > 0 ? threadIdx.x / kLanes : 0;
    const unsigned per_segment = static_cast<unsigned>(blocks.blocks_per_segment),
                   block = static_cast<unsigned>(tile.block_in_segment) + group;
    in_segment = static_cast<int>(block % per_segment);
    start = group * blocks.block + static_cast<int>(block / per_segment) * tile.gap;
    find_vector();
    here = ahead;
  }

  // The position of the lane's first element in its block.
  MEMKERN_DEVICE int position() const { return lane * kVector; }
  // False for a group of lanes that has no block left: it loads its last block again, or the tile's first,
  // and stores nothing.
  MEMKERN_DEVICE bool exists() const { return left > 0 && here.within; }
  // One lane for each moment.
  MEMKERN_DEVICE bool stores_scale() const { return left > 0 && lane % (kLanes / Moments) == 0; }
  MEMKERN_DEVICE Span span() const { return {here.offset, kVector, true}; }
  MEMKERN_DEVICE float* scale() const { return scales + (tile.blocks - left); }
  // The scale of the block `blocks_on` further, or of the tile's last block if the tile ends before it.
  MEMKERN_DEVICE float load_scale(int blocks_on) const {
    const int block = tile.blocks - left + blocks_on;
    return __ldcs(scales + (block < tile.blocks ? block : tile.blocks - 1));
  }

  // Finds the vector of the next block; call it before next(). After its last block a group keeps its vector:
  // a load that hits the cache takes fewer instructions than a branch around it.
  MEMKERN_DEVICE void find_next() {
    const bool more = left > kGroups;
    if (!ragged) {
      ahead.offset += more ? kGroups * kWholeBlock : 0;
    } else if (more) {
      in_segment += tile.block_step;
      start += tile.step;
      if (in_segment >= blocks.blocks_per_segment) {
        in_segment -= blocks.blocks_per_segment;
        start += tile.gap;
      }
      find_vector();
    }
  }

  MEMKERN_DEVICE void next() {
    left -= kGroups;
    here = ahead;
  }

 private:
  const Tile& tile;  // in shared memory: registers are scarce
  const Blocks& blocks;
  bool ragged;     // some blocks have fewer than 128 elements
  int in_segment;  // index of the next block in its segment
  uint32_t start;

  MEMKERN_DEVICE void find_vector() {
    const bool last = in_segment == blocks.blocks_per_segment - 1;
    ahead.within = lane * kVector < blocks.block + (last ? tile.gap : 0);
    ahead.offset = start + (ahead.within ? position() : 0);
  }

  MEMKERN_DEVICE void start_at(int64_t block, int64_t element, const void* gradient) {
    const auto forward = [](auto* array, int64_t bytes) {
      return static_cast<decltype(array)>(static_cast<char*>(const_cast<void*>(array)) + bytes);
    };
    scales = half.pick(tensor.m_scale, tensor.v_scale) + block;
    tensor.param = forward(tensor.param, element * (param_type == FloatType::kFp32 ? 4 : 2));
    grad = forward(gradient, element * (grad_type == FloatType::kFp32 ? 4 : 2));
    grad_alignment = static_cast<Alignment>(same_in_all_lanes(static_cast<int>(alignment_of(grad))));
    tensor.m = forward(tensor.m, element);
    tensor.v = forward(tensor.v, Kind == StateKind::kPower4 ? element / 2 : element);
    tensor.weight_state = forward(tensor.weight_state, element * weight_state_bytes(tensor.weight_storage));
  }
};

// The dithers of all positions of a block, in shared memory; all blocks of a tensor share them. Computing one
// takes three instructions, and what signed codes derive from it three more. A load takes a quarter of an
// instruction.
struct DitherTable {
  // Elements 0 to 3 of all lanes, then elements 4 to 7, so that loads of 16 bytes have no bank conflicts.
  using Row = uint4[2][kWholeLanes];
  Row us, rests, twice_rests;

  template <class Words> static MEMKERN_DEVICE auto& word(Words& row, int j) {
    return (&row[j / 4 % 2][j / kVector].x)[j % 4];
  }

  // All threads call it.
  MEMKERN_DEVICE void fill(uint32_t step) {
    const Rounding rounding{false, step};
#pragma unroll
    for (int first = 0; first < kWholeBlock; first += kThreads) {
      const int j = first + static_cast<int>(threadIdx.x);
      if (kThreads > kWholeBlock && j >= kWholeBlock) break;
      const float rest_of_j = rounding.rest(j);
      word(us, j) = bits_of(rounding.u(j));
      word(rests, j) = bits_of(rest_of_j);
      word(twice_rests, j) = bits_of(2.0f * rest_of_j);
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

  // What encode_exactly() needs; Rounding has the same members.
  static constexpr bool nearest = false;
  MEMKERN_DEVICE float u(int j) const { return float_of(word(us, j)); }
  MEMKERN_DEVICE float rest(int j) const { return float_of(word(rests, j)); }
};

MEMKERN_DEVICE DitherTable& dither_table() {
  __shared__ DitherTable table;
  return table;
}

// Loads a vector of the second moment's codes as they are in memory. 4-bit codes fill the first word only.
template <StateKind Kind> MEMKERN_DEVICE Codes load_root_codes(const void* array, const Span& at) {
  if constexpr (Kind == StateKind::kPower4)
    return {load_pairs(array, packed_span(at.offset / 2, kVector, true)), 0};
  else
    return load_codes(array, at);
}

template <StateKind Kind>
MEMKERN_DEVICE void store_root_codes(void* array, const Span& at, const Codes& codes) {
  if constexpr (Kind == StateKind::kPower4)
    store_packed(array, packed_span(at.offset / 2, kVector, true), codes);
  else
    store_codes(array, at, codes);
}

// The same as decode<kPower, false>: unit * (q * q), rounded once. Adding q * q to the bits of 2^23 makes the
// float 2^23 + q * q; the fma subtracts 2^23 * unit, which is exact because no scale of w exceeds 2^64.
template <StateKind Kind>
MEMKERN_DEVICE void decode_root(const Codes& loaded, float unit, float (&w)[kVector]) {
  const Codes codes = Kind == StateKind::kPower4 ? unpack_pairs(loaded.x) : loaded;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const uint32_t q = __byte_perm(i < 4 ? codes.x : codes.y, 0, 0x4440u + i % 4);
    w[i] = __fmaf_rn(float_of(0x4B000000u + q * q), unit, -8388608.0f * unit);
  }
}

// The smallest magnitude. NaN is ignored.
MEMKERN_DEVICE float absmin(const float (&x)[kVector]) {
  float least = fabsf(x[0]);
#pragma unroll
  for (int i = 1; i < kVector; ++i) least = fminf(least, fabsf(x[i]));
  return least;
}

// The smallest and the largest of non-negative numbers. Their bits are compared as integers, three in one
// instruction on sm_90. A NaN then compares above infinity, or below 0.
MEMKERN_DEVICE void least_and_most(const float (&x)[kVector], float& least, float& most) {
  int low = static_cast<int>(bits_of(x[0])), high = low;
#pragma unroll
  for (int i = 1; i < kVector; ++i) {
    const int next = static_cast<int>(bits_of(x[i]));
    low = low < next ? low : next;
    high = high > next ? high : next;
  }
  least = float_of(static_cast<uint32_t>(low));
  most = float_of(static_cast<uint32_t>(high));
}

// The codes of the first moment. None of them is in doubt.
MEMKERN_DEVICE Codes encode_signed(const float (&m)[kVector], float factor, const DitherTable& dithers,
                                   int lane) {
  float rest[kVector], twice_rest[kVector];
  DitherTable::load(dithers.rests, lane, rest);
  DitherTable::load(dithers.twice_rests, lane, twice_rest);
  uint32_t code[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) code[i] = signed_code(m[i], factor, rest[i], twice_rest[i]);
  return pack(code);
}

// Estimates the codes of w > 0 for a factor above 0. `farthest` is the largest distance from the middle of a
// code's interval. While it is below kCertain, every code is the formula's, and none is above Levels.
//
// kCertain bounds the difference between the sum here and that of the formula, which is largest just below
// Levels + 1. In halves of a unit in the last place there: 4 for the approximate root, 1 for the formula's
// root and 2 for rounding the sums. If w is an approximate root too (Approximate): 2 for it, 1 for the
// formula's w and 1 for the two products.
template <int Levels, bool Approximate> constexpr float kCertain =
    0.5f - (Approximate ? 11 : 7) * (Levels + 1) * 0x1p-25f;
MEMKERN_DEVICE Codes estimate_positive(const float (&w)[kVector], float factor, const DitherTable& dithers,
                                       int lane, float& farthest) {
  float u[kVector];
  DitherTable::load(dithers.us, lane, u);
  uint32_t code[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const float c = fmaxf(approximate_sqrt(w[i] * factor), 1.0f) + u[i];
    const float down = __fadd_rd(c, kDown);
    farthest = fmaxf(farthest, fabsf(c - (down - (kDown - 0.5f))));
    code[i] = bits_of(down);
  }
  return pack(code);
}

// Clears the codes of zeros, and all codes if the factor is 0.
MEMKERN_DEVICE Codes clear_zeros(const float (&w)[kVector], float factor, Codes codes) {
#pragma unroll
  for (int i = 0; i < kVector; ++i)
    if (w[i] == 0.0f || factor == 0.0f) (i < 4 ? codes.x : codes.y) &= ~(0xFFu << 8 * (i % 4));
  return codes;
}

}  // namespace memkern
