// The main path of a step. It takes power codes in blocks of 65 to 128 elements, rows whose length is a
// multiple of 8, and arrays that are aligned to 16 bytes (gradients: to their elements). It computes once per
// tile what the general kernels compute for each element or block. Rare cases are behind warp-uniform
// branches.
#pragma once
#include "step_table.cuh"
#include "weights.cuh"
#include "whole_codes.cuh"

namespace memkern {

// The position of a lane's vector, as its distance from the tile's first element, and how many of its
// elements are within the block: all, none or, of a vector in parts, the first 4. Lanes past the end of a
// block load the block's first elements, which does not change the maximum, and store nothing.
struct WholeVector {
  uint32_t word;  // the distance, a multiple of 4, and n / 4: registers are scarce

  MEMKERN_DEVICE uint32_t offset() const { return word & ~3u; }
  MEMKERN_DEVICE int n() const { return static_cast<int>(word & 3u) * 4; }
};

template <class Type> constexpr bool kIsFp32 = std::is_same_v<Type, ConstantType<FloatType::kFp32>>;
template <class Type> constexpr bool kIsBf16 = std::is_same_v<Type, ConstantType<FloatType::kBf16>>;

// A vector of a tensor and its moments, and its block's scale, as they are in memory.
template <class P> struct Loaded {
  float scale;
  RawWeights<P> p;
  Raw g;
  Codes m, v;
};

// The vectors of a thread block in a turn, where they are copied to shared memory.
struct CopiedVectors {
  uint4 p[kThreads], g[kThreads];
  uint2 m[kThreads], v[kThreads];
  float scale[kThreads];
  uint32_t place[kThreads];  // WholeVector
};

MEMKERN_DEVICE CopiedVectors& copied_vectors(int slot) {
  __shared__ CopiedVectors slots[kCopiesAhead + 1];
  return slots[slot];
}

// Whether vectors are copied to shared memory, some turns ahead, so that the bytes on their way take no
// registers: of bf16, where the gradient is aligned. Vectors of fp32 are 32 bytes: one ahead in registers is
// enough, and copies were slower (lab/results/gpu-tune.csv).
template <class P, class G> constexpr bool kCanCopy = kIsBf16<P> && kIsBf16<G>;

// Iterates over a lane's vectors in the blocks of a tile. 16 lanes share a block. Those of fp32 are in parts,
// half a block from each other.
template <StateKind Kind, class P, class G, bool Copied, int Moments = 2> struct WholeVectors {
  static constexpr bool kParts = kIsFp32<P> && kIsFp32<G>;
  static constexpr int kPart = kParts ? kVector / 2 : kVector, kDistance = kWholeBlock / 2;
  static constexpr int kLanes = kWholeLanes;
  TensorRecord tensor;  // with its pointers moved to the start of the tile
  const void* grad;
  float* scales;
  P param_type;
  G grad_type;
  MomentHalves half;
  ScaleFormula formula;
  int lane, left;  // left: blocks from the group's on, with those of other groups
  WholeVector here, ahead;

  template <class Work>
  MEMKERN_DEVICE WholeVectors(const Work& work, P param_type_, G grad_type_, float m_decay, float w_decay)
      : tensor(work.tensor),
        param_type(param_type_),
        grad_type(grad_type_),
        half(SixteenLanes{}),
        lane(threadIdx.x % kLanes),
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

  // Turns of the tile: a group without a block takes part, as lanes shuffle.
  MEMKERN_DEVICE int turns() const { return same_in_all_lanes((tile.blocks + stride() - 1) / stride()); }
  // The position of the lane's element i in its block.
  MEMKERN_DEVICE int position(int i) const { return lane * kPart + (i < kPart ? i : kDistance + i - kPart); }
  // Elements to be stored. None in a group of lanes that has no block left: it loads its last block again, or
  // the tile's first.
  MEMKERN_DEVICE int count() const { return left > 0 ? here.n() : 0; }
  MEMKERN_DEVICE bool exists() const { return count() > 0; }
  // One lane for each moment.
  MEMKERN_DEVICE bool stores_scale() const { return left > 0 && lane % (kLanes / Moments) == 0; }
  // Where a vector is: Span or Parts.
  static MEMKERN_DEVICE auto place(const WholeVector& vector) {
    if constexpr (kParts)
      return Parts{vector.offset(), vector.n() == kVector ? kDistance : 0};
    else
      return Span{vector.offset(), kVector, true};
  }
  MEMKERN_DEVICE auto place() const { return place(here); }
  MEMKERN_DEVICE float* scale() const { return scales + (tile.blocks - left); }
  // Of the block `turns` turns further, to be loaded: of the tile's first if there is none, as the run's last
  // may be another thread block's.
  MEMKERN_DEVICE const float* scale_ahead(int turns) const {
    const int block = tile.blocks - left + turns * stride();
    return scales + (block < tile.blocks ? block : 0);
  }

  MEMKERN_DEVICE Alignment grad_alignment() const { return Copied ? Alignment::kVector : alignment_of(grad); }
  // From a group's block to its next.
  MEMKERN_DEVICE int stride() const { return tile.block_stride; }

  // Calls work(loaded) for each vector. The next ones are on their way before: in registers the next alone,
  // as there are no more; four thread blocks of a multiprocessor that load ahead hide more of the memory's
  // latency than the five that there are registers for without.
  template <class Work> MEMKERN_DEVICE void for_each_loaded(Work&& work) {
    if constexpr (Copied)
      for_each_copied(work);
    else
      for_each_in_registers(work);
  }

 private:
  const Tile& tile;  // in shared memory: registers are scarce
  const Blocks& blocks;
  bool ragged;     // some blocks have fewer than 128 elements
  int in_segment;  // index of the next block in its segment
  uint32_t start;

  // Moves `ahead` to the block that is `turns` turns after the present one. Where the group has none it keeps
  // its vector: a load that hits the cache takes fewer instructions than a branch around it.
  MEMKERN_DEVICE void find_next(int turns) {
    const bool more = left > turns * stride();
    if (!ragged) {
      ahead.word += more ? stride() * kWholeBlock : 0;
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

  // The vector ahead, and the scale of its block.
  MEMKERN_DEVICE Loaded<P> load(int turns) const {
    const auto at = place(ahead);
    Loaded<P> loaded{__ldcs(scale_ahead(turns)), load_weights(tensor, param_type, at),
                     load_gradient(grad, grad_type, at, grad_alignment()), load_codes(tensor.m, at)};
    if constexpr (Moments > 1) loaded.v = load_root_codes<Kind>(tensor.v, at);
    return loaded;
  }

  template <class Work> MEMKERN_DEVICE void for_each_in_registers(Work&& work) {
    Loaded<P> next = arrived(load(0), blocks);
    for (int turn = turns(); turn > 0; --turn, left -= stride(), here = ahead) {
      const Loaded<P> loaded = next;
      find_next(1);
      next = load(1);
      work(loaded);
    }
  }

  MEMKERN_DEVICE void copy(int slot, int turns) const {
    CopiedVectors& to = copied_vectors(slot);
    const int i = static_cast<int>(threadIdx.x);
    const uint32_t offset = ahead.offset();
    copy_async<16>(&to.p[i], static_cast<const uint16_t*>(tensor.param) + offset);
    copy_async<16>(&to.g[i], static_cast<const uint16_t*>(grad) + offset);
    copy_async<8>(&to.m[i], static_cast<const uint8_t*>(tensor.m) + offset);
    if constexpr (Moments > 1 && Kind == StateKind::kPower4)
      copy_async<4>(&to.v[i], static_cast<const uint8_t*>(tensor.v) + offset / 2);
    else if constexpr (Moments > 1)
      copy_async<8>(&to.v[i], static_cast<const uint8_t*>(tensor.v) + offset);
    copy_async<4>(&to.scale[i], scale_ahead(turns));
    to.place[i] = ahead.word;
  }

  // A thread reads what it has copied itself: no barrier is needed.
  template <class Work> MEMKERN_DEVICE void for_each_copied(Work&& work) {
    for (int turn = 0; turn < kCopiesAhead; ++turn) {
      if (turn > 0) find_next(turn);
      copy(turn, turn);
      commit_copies();
    }
    int slot = 0, before = kCopiesAhead;  // before: the slot of the turn before, which is free
    for (int turn = turns(); turn > 0; --turn, left -= stride()) {
      wait_for_copies<kCopiesAhead - 1>();
      if (left > kCopiesAhead * stride()) {
        find_next(kCopiesAhead);
        copy(before, kCopiesAhead);
      }
      commit_copies();
      const CopiedVectors& from = copied_vectors(slot);
      const int i = static_cast<int>(threadIdx.x);
      const uint4 p = from.p[i], g = from.g[i];
      Loaded<P> loaded{from.scale[i], {{p.x, p.y, p.z, p.w}}, {{g.x, g.y, g.z, g.w}}, from.m[i]};
      if constexpr (Moments > 1) loaded.v = {from.v[i].x, Kind == StateKind::kPower4 ? 0 : from.v[i].y};
      here.word = from.place[i];
      before = slot;
      slot = slot == kCopiesAhead ? 0 : slot + 1;
      work(loaded);
    }
  }

  MEMKERN_DEVICE void find_vector() {
    const bool last = in_segment == blocks.blocks_per_segment - 1;
    const int length = blocks.block + (last ? tile.gap : 0);
    const int n = position(kVector - 1) < length ? kVector : kParts && position(0) < length ? kPart : 0;
    ahead.word = start + (n > 0 ? position(0) : 0) + n / 4;
  }

  MEMKERN_DEVICE void start_at(int64_t block, int64_t element, const void* gradient) {
    const auto forward = [](auto* array, int64_t bytes) {
      return static_cast<decltype(array)>(static_cast<char*>(const_cast<void*>(array)) + bytes);
    };
    scales = half.pick(tensor.m_scale, tensor.v_scale) + block;
    tensor.param = forward(tensor.param, element * (param_type == FloatType::kFp32 ? 4 : 2));
    grad = forward(gradient, element * (grad_type == FloatType::kFp32 ? 4 : 2));
    tensor.m = forward(tensor.m, element);
    tensor.v = forward(tensor.v, Kind == StateKind::kPower4 ? element / 2 : element);
    tensor.weight_state = forward(tensor.weight_state, element * weight_state_bytes(tensor.weight_storage));
  }
};

// Calls use(copied), whether a tile's vectors are copied to shared memory as a constant.
template <class Work, class P, class G, class Use>
MEMKERN_DEVICE void with_copies(const Work& work, P, G, Use&& use) {
  if constexpr (kCanCopy<P, G>)
    if (any_lane(alignment_of(work.grad) == Alignment::kVector)) return use(std::true_type{});
  use(std::false_type{});
}

// The dithers of a lane's elements, by their formula: Rounding with places in the vector for those in the
// block.
template <class Vectors> struct LaneDithers {
  const Vectors& at;
  Rounding rounding;
  static constexpr bool nearest = false;
  MEMKERN_DEVICE float u(int i) const { return rounding.u(at.position(i)); }
  MEMKERN_DEVICE float rest(int i) const { return rounding.rest(at.position(i)); }
};

// The bytes of a whole vector's codes of 4 bits.
MEMKERN_DEVICE Span packed(const Span& at) { return packed_span(at.offset / 2, kVector, true); }
MEMKERN_DEVICE Parts packed(const Parts& at) { return {at.offset / 2, at.distance / 2}; }

// Loads a vector of the second moment's codes as they are in memory. 4-bit codes fill the first word or, of a
// vector in parts, the lower halves of both: joining them here would wait for them.
template <StateKind Kind> MEMKERN_DEVICE Codes load_root_codes(const void* array, const Span& at) {
  if constexpr (Kind == StateKind::kPower4) return {load_pairs(array, packed(at)), 0};
  return load_codes(array, at);
}
template <StateKind Kind> MEMKERN_DEVICE Codes load_root_codes(const void* array, const Parts& at) {
  if constexpr (Kind != StateKind::kPower4) return load_codes(array, at);
  const Parts bytes = packed(at);
  const uint8_t* p = static_cast<const uint8_t*>(array) + bytes.offset;
  return {__ldcs(reinterpret_cast<const uint16_t*>(p)),
          __ldcs(reinterpret_cast<const uint16_t*>(p + bytes.distance))};
}

template <StateKind Kind, class At>
MEMKERN_DEVICE void store_root_codes(void* array, const At& at, const Codes& codes) {
  if constexpr (Kind == StateKind::kPower4)
    store_packed(array, packed(at), codes);
  else
    store_codes(array, at, codes);
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

}  // namespace memkern
