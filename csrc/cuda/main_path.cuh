// The main path of a step: faster kernels for the usual tensors, with the bits of the general kernels. A
// tensor is on the main path if it has power codes in blocks of 65 to 128 elements, rows whose length is a
// multiple of 8, a parameter and a gradient that are both fp32 or both bf16 (with_state_types), and arrays
// that are aligned to 16 bytes (the gradient: to its elements). The main path computes once per tile what the
// general kernels compute for each element or block. Rare cases are behind warp-uniform branches.
#pragma once
#include <cstddef>

#include "step_table.cuh"
#include "vector_codes.cuh"
#include "weights.cuh"

namespace memkern {

// The position of a lane's vector, and how many of the vector's elements are within the block. In one word,
// as registers are scarce:
//   bits 2 to 31    the distance from the tile's first element, in elements (a multiple of 4)
//   bits 0 and 1    n / 4, where n is 8, 0 or, of a vector in parts, 4. Not with kCopiedFull, where n is 8.
// A lane past the end of its block (n = 0) loads the block's first elements, which does not change the
// maximum, and stores nothing.
struct LaneVector {
  uint32_t word;

  MEMKERN_DEVICE uint32_t offset() const { return word & ~3u; }
  MEMKERN_DEVICE int n() const { return static_cast<int>(word & 3u) * 4; }
};

template <class Type> constexpr bool kIsFp32 = std::is_same_v<Type, ConstantType<FloatType::kFp32>>;
template <class Type> constexpr bool kIsBf16 = std::is_same_v<Type, ConstantType<FloatType::kBf16>>;

// A vector of a tensor and its moments as they are in memory.
template <class P> struct Loaded {
  RawWeights<P> p;
  Raw g;
  Codes m, v;
};

// A thread block's vectors of one iteration, where vectors are copied to shared memory. p, g and codes have
// 16 bytes of each thread, so that the distances between a thread's places in these are constants.
struct CopiedVectors {
  uint4 p[kThreads], g[kThreads], codes[kThreads];  // of m in the first half, of v in the second
  uint32_t word[kThreads];                          // LaneVector, where not all blocks are full
};

MEMKERN_DEVICE CopiedVectors& copied_vectors(int slot) {
  __shared__ CopiedVectors slots[kCopiesAhead + 1];
  return slots[slot];
}

// A thread's places in a slot.
struct CopiedVector {
  static constexpr int kG = offsetof(CopiedVectors, g), kCodes = offsetof(CopiedVectors, codes);
  SharedAddress p;

  MEMKERN_DEVICE explicit CopiedVector(int slot) : p(shared_address(&copied_vectors(slot).p[threadIdx.x])) {}
  MEMKERN_DEVICE SharedAddress word() const {
    return p + static_cast<int>(offsetof(CopiedVectors, word)) -
           static_cast<int>(threadIdx.x * (sizeof(uint4) - sizeof(uint32_t)));
  }
};

// Whether vectors of these types may be copied to shared memory some iterations ahead, so that bytes on
// their way from memory take no registers. They are copied if the gradient is aligned to 16 bytes as well
// (with_loads). Types: bf16 gradients, with bf16 parameters or Muon's update, which is written in a
// parameter's place and not read. A vector of fp32 has 32 bytes: one ahead in registers is enough, and
// copies were slower (lab/results/gpu-tune.csv).
template <class P, class G> constexpr bool kCanCopy =
    (kIsBf16<P> || std::is_same_v<P, Written>) && kIsBf16<G>;

// How vectors are loaded: kAhead, one ahead in registers; kCopied, by copies to shared memory; kCopiedFull,
// by copies where all blocks have 128 elements. In the last case lanes need not keep how many elements their
// vectors have, so that AdamW's iteration in bf16 takes 457 instructions and not 480 (sm_90).
enum class Loads { kAhead, kCopied, kCopiedFull };
// Whether registers are too few for the next batch's scales and the stride: before sm_90 where blocks are not
// full or vectors not copied, and for gradients of 16 bits that start anywhere.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
template <class P, class G, Loads How> constexpr bool kScarce = How != Loads::kCopiedFull;
#else
template <class P, class G, Loads How> constexpr bool kScarce = kCanCopy<P, G> && How == Loads::kAhead;
#endif

// Iterates over a lane's vectors in the blocks of a tile. 16 lanes share a block. Lane l holds of it
//   elements 8 l to 8 l + 7                                in general
//   elements 4 l to 4 l + 3 and 64 + 4 l to 64 + 4 l + 3   with kParts: parameter and gradient are fp32
template <StateKind Kind, class P, class G, Loads How, int Moments = 2> struct LaneVectors {
  static constexpr bool kCopied = How != Loads::kAhead, kFull = How == Loads::kCopiedFull;
  static constexpr bool kParts = kIsFp32<P> && kIsFp32<G>;
  static constexpr int kPart = kParts ? kVector / 2 : kVector, kDistance = kFullBlock / 2;
  // Iterations whose scales are loaded together, a lane for each, and stored together.
  static constexpr int kBatch = kBlockLanes / Moments;
  TensorRecord tensor;  // with its pointers moved to the start of the tile
  const void* grad;
  P param_type;
  G grad_type;
  MomentHalves half;
  ScaleFormula formula;
  int lane, left;  // left: blocks of the run (Tile) from this group's block on, other groups' blocks included
  LaneVector here, ahead;

  template <class Work>
  MEMKERN_DEVICE LaneVectors(const Work& work, P param_type_, G grad_type_, const float* m_decay_ = nullptr,
                             const float* w_decay_ = nullptr)
      : tensor(work.tensor),
        param_type(param_type_),
        grad_type(grad_type_),
        half(SixteenLanes{}),
        lane(threadIdx.x % kBlockLanes),
        left(work.tile.blocks - static_cast<int>(threadIdx.x) / kBlockLanes),
        tile(work.tile),
        record(work.tensor),
        m_decay(m_decay_),
        w_decay(w_decay_),
        blocks(work.tensor.blocks),
        held_stride(same_in_all_lanes(work.tile.block_stride)),
        ragged(any_lane(!are_full(blocks))) {
    if (Moments == 1) half.upper = false;
    const float levels = half.pick(levels_of(true), levels_of(false));
    formula = {levels * levels, 1.0f / (levels * levels), 1.0f, half.upper};
    start_at(tile.segment_start + static_cast<int64_t>(tile.block_in_segment) * blocks.block, work.grad);
    const unsigned group = left > 0 ? threadIdx.x / kBlockLanes : 0;
    const unsigned per_segment = static_cast<unsigned>(blocks.blocks_per_segment),
                   block = static_cast<unsigned>(tile.block_in_segment) + group;
    in_segment = static_cast<int>(block % per_segment);
    start = group * blocks.block + static_cast<int>(block / per_segment) * tile.gap;
    find_vector();
    here = ahead;
  }

  // The number of iterations. All groups take part in all of them, even without a block, as lanes shuffle.
  MEMKERN_DEVICE int iterations() const { return same_in_all_lanes((tile.blocks + stride() - 1) / stride()); }
  // The position of the lane's element i in its block.
  MEMKERN_DEVICE int position(int i) const { return lane * kPart + (i < kPart ? i : kDistance + i - kPart); }
  // How many elements of the lane's vector are to be stored: none in a group that has no block left, which
  // loads its last block again, or the tile's first.
  MEMKERN_DEVICE int count() const { return left <= 0 ? 0 : kFull ? kVector : here.n(); }
  MEMKERN_DEVICE bool exists() const { return count() > 0; }
  // Whether in any lane only the first part of the vector is within the block. (A lane of which neither part
  // is holds another lane's elements.)
  MEMKERN_DEVICE bool any_half() const { return kParts && any_lane(here.n() == kPart); }
  // What codes of moment 0 or 1 are multiplied by, in this iteration's block (decode_unit).
  MEMKERN_DEVICE float unit(int moment) const {
    return __shfl_sync(kAllLanes, units, moment * kBatch + iteration, kBlockLanes);
  }
  // Where a vector is: Span or Parts.
  static MEMKERN_DEVICE auto place(const LaneVector& vector) {
    if constexpr (kParts)
      return Parts{vector.offset(), vector.n() == kVector ? kDistance : 0};
    else
      return Span{offset(vector), kVector, true};
  }
  MEMKERN_DEVICE auto place() const { return place(here); }
  // The number of blocks from a group's block to its next.
  MEMKERN_DEVICE int stride() const { return kScarce<P, G, How> ? tile.block_stride : held_stride; }
  MEMKERN_DEVICE Alignment grad_alignment() const {
    return kCopied ? Alignment::kVector : alignment_of(grad);
  }

  // Calls work(loaded) for each vector. `work` returns the lane's scale, to be stored, or nothing. Later
  // vectors are loaded before the call: into registers only the next one, as there are no more registers.
  // Four thread blocks of a multiprocessor that load ahead hide more of the memory's latency than five that
  // do not.
  template <class Work> MEMKERN_DEVICE void for_each_loaded(Work&& work) {
    if constexpr (kCopied)
      for_each_copied(work);
    else
      for_each_in_registers(work);
  }

 private:
  const Tile& tile;  // in shared memory, like what the next four point to: registers are scarce
  const TensorRecord& record;
  const float *m_decay, *w_decay;
  const Blocks& blocks;
  int held_stride;
  bool ragged;     // some blocks have fewer than 128 elements
  int in_segment;  // index of the next block in its segment
  uint32_t start;
  int iteration;  // in its batch
  float units;    // of the lane's iteration and moment; after that iteration, its new scale

  static MEMKERN_DEVICE uint32_t offset(const LaneVector& vector) {
    return kFull ? vector.word : vector.offset();
  }

  MEMKERN_DEVICE float decay() const {
    if constexpr (Moments > 1) return half.pick(*m_decay, *w_decay);
    return 1.0f;
  }

  // The scale of the group's block `iterations` iterations later, or null if there is none.
  MEMKERN_DEVICE float* scale_of(int iterations) const {
    const int blocks_left = left - iterations * tile.block_stride;  // from that block on
    if (blocks_left <= 0) return nullptr;
    return half.pick(record.m_scale, record.v_scale) + (tile.first_block + (tile.blocks - blocks_left));
  }
  MEMKERN_DEVICE float load_scale(int iterations) const {
    const float* const scale = scale_of(iterations);
    return scale ? __ldcs(scale) : 0.0f;
  }

  // Calls work() for each iteration. The 16 lanes of a group share the scales of a batch of iterations:
  //   two moments    lane l has the scale of iteration l % 8: of m if l < 8, else of v
  //   one moment     lane l has the scale of m in iteration l
  // A lane loads its scale a batch ahead (kScarce: as the batch begins) and divides it once. In the scale's
  // iteration unit() hands it to the other lanes, and the new scale takes its place. The new scales are
  // stored after the batch.
  template <class Work> MEMKERN_DEVICE void for_each_iteration(Work&& work) {
    constexpr bool kStores = !std::is_void_v<decltype(work())>;
    const int own_iteration = lane % kBatch;
    float next = kScarce<P, G, How> ? 0.0f : load_scale(own_iteration);
    for (int remaining = iterations(); remaining > 0; remaining -= kBatch) {
      if (kScarce<P, G, How>) next = load_scale(own_iteration);
      units = decay() * next / formula.squared_levels;
      if (!kScarce<P, G, How>) next = load_scale(kBatch + own_iteration);
      const int count = remaining < kBatch ? remaining : kBatch;
      for (iteration = 0; iteration < count; ++iteration, left -= stride()) {
        if constexpr (kStores) {
          const float scale = work();
          if ((iteration ^ lane) % kBatch == 0) units = scale;  // iteration is own_iteration
        } else {
          work();
        }
      }
      if constexpr (kStores)  // `left` has moved on by `count` iterations
        if (float* const address = scale_of(own_iteration - count)) __stcs(address, units);
    }
  }

  // Moves `ahead` on by so many iterations. Where the group has no block there, `ahead` keeps its vector: a
  // load that hits the cache takes fewer instructions than a branch around it.
  MEMKERN_DEVICE void find_next(int iterations) {
    const bool more = left > iterations * stride();
    if (kFull || !ragged) {
      ahead.word += more ? stride() * kFullBlock : 0;
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

  MEMKERN_DEVICE Loaded<P> load() const {
    const auto at = place(ahead);
    Loaded<P> loaded{load_weights(tensor, param_type, at),
                     load_gradient(grad, grad_type, at, grad_alignment()), load_codes(tensor.m, at)};
    if constexpr (Moments > 1) loaded.v = load_codes(tensor.v, at);
    return loaded;
  }

  template <class Work> MEMKERN_DEVICE void for_each_in_registers(Work&& work) {
    Loaded<P> next = arrived(load(), blocks);
    for_each_iteration([&] {
      const Loaded<P> loaded = next;
      here = ahead;
      find_next(1);
      next = load();
      return work(loaded);
    });
  }

  MEMKERN_DEVICE void copy(const CopiedVector& to) const {
    const uint32_t at = offset(ahead);
    if constexpr (!std::is_same_v<P, Written>) copy_async<16>(to.p, element<2>(tensor.param, at));
    copy_async<16>(to.p + to.kG, element<2>(grad, at));
    copy_async<8>(to.p + to.kCodes, element<1>(tensor.m, at));
    if constexpr (Moments > 1) copy_async<8>(to.p + to.kCodes + 8, element<1>(tensor.v, at));
    if (!kFull && ragged) store_shared(to.word(), ahead.word);
  }

  static MEMKERN_DEVICE Raw words(const uint4& x) { return {{x.x, x.y, x.z, x.w}}; }

  // Each thread reads only what it has copied itself, so that no barrier is needed.
  template <class Work> MEMKERN_DEVICE void for_each_copied(Work&& work) {
    const CopiedVector first(0), last(kCopiesAhead);
    CopiedVector slot = first, before = last;  // before: the slot of the iteration before, which is free
    for (int iterations = 0; iterations < kCopiesAhead; ++iterations) {
      if (iterations > 0) find_next(iterations);
      copy(CopiedVector(iterations));
      commit_copies();
    }
    here.word -= stride() * kFullBlock;
    int to_copy = iterations() - kCopiesAhead;
    for_each_iteration([&] {
      wait_for_copies<kCopiesAhead - 1>();
      if (to_copy > 0) {
        find_next(kCopiesAhead);
        copy(before);
        --to_copy;
      }
      commit_copies();
      Loaded<P> loaded{};
      if constexpr (!std::is_same_v<P, Written>) loaded.p = {words(load_shared<uint4>(slot.p))};
      loaded.g = words(load_shared<uint4>(slot.p + slot.kG));
      if constexpr (Moments > 1) {
        const uint4 codes = load_shared<uint4>(slot.p + slot.kCodes);
        loaded.m = {codes.x, codes.y};
        loaded.v = {codes.z, codes.w};
      } else {  // the other bytes were not copied
        loaded.m = load_shared<uint2>(slot.p + slot.kCodes);
      }
      here.word = kFull || !ragged ? here.word + stride() * kFullBlock : load_shared<uint32_t>(slot.word());
      before = slot;
      slot.p = slot.p == last.p ? first.p : slot.p + sizeof(CopiedVectors);
      return work(loaded);
    });
  }

  MEMKERN_DEVICE void find_vector() {
    const bool last = in_segment == blocks.blocks_per_segment - 1;
    const int length = blocks.block + (last ? tile.gap : 0);
    const int n = position(kVector - 1) < length ? kVector : kParts && position(0) < length ? kPart : 0;
    ahead.word = start + (n > 0 ? position(0) : 0) + (kFull ? 0 : n / 4);
  }

  MEMKERN_DEVICE void start_at(int64_t element, const void* gradient) {
    const auto forward = [](auto* array, int64_t bytes) {
      return static_cast<decltype(array)>(static_cast<char*>(const_cast<void*>(array)) + bytes);
    };
    tensor.param = forward(tensor.param, element * (param_type == FloatType::kFp32 ? 4 : 2));
    grad = forward(gradient, element * (grad_type == FloatType::kFp32 ? 4 : 2));
    tensor.m = forward(tensor.m, element);
    tensor.v = forward(tensor.v, element);
    tensor.weight_state = forward(tensor.weight_state, element * weight_state_bytes(tensor.weight_storage));
  }
};

// Calls use(how), where `how` is the Loads of a tile as a compile-time constant.
template <class Work, class P, class G, class Use>
MEMKERN_DEVICE void with_loads(const Work& work, P, G, Use&& use) {
  if constexpr (kCanCopy<P, G>)
    if (any_lane(alignment_of(work.grad) == Alignment::kVector)) {
      if (any_lane(are_full(work.tensor.blocks)))
        return use(std::integral_constant<Loads, Loads::kCopiedFull>{});
      return use(std::integral_constant<Loads, Loads::kCopied>{});
    }
  use(std::integral_constant<Loads, Loads::kAhead>{});
}

// The dithers of a lane's elements by their formula. It is a Rounding whose i is an element's index in the
// vector, not in the block.
template <class Vectors> struct LaneDithers {
  const Vectors& at;
  Rounding rounding;
  static constexpr bool nearest = false;
  MEMKERN_DEVICE float u(int i) const { return rounding.u(at.position(i)); }
  MEMKERN_DEVICE float one_minus_u(int i) const { return rounding.one_minus_u(at.position(i)); }
};

// The smallest magnitude. NaN is ignored.
MEMKERN_DEVICE float absmin(const float (&x)[kVector]) {
  float least = fabsf(x[0]);
#pragma unroll
  for (int i = 1; i < kVector; ++i) least = fminf(least, fabsf(x[i]));
  return least;
}

// The smallest and the largest of non-negative numbers. Their bits are compared as signed integers, three in
// one instruction on sm_90. A NaN is then above infinity or, if its sign bit is set, below 0.
MEMKERN_DEVICE void min_and_max(const float (&x)[kVector], float& min_value, float& max_value) {
  int min_bits = static_cast<int>(bits_of(x[0])), max_bits = min_bits;
#pragma unroll
  for (int i = 1; i < kVector; ++i) {
    const int bits = static_cast<int>(bits_of(x[i]));
    min_bits = min_bits < bits ? min_bits : bits;
    max_bits = max_bits > bits ? max_bits : bits;
  }
  min_value = float_of(static_cast<uint32_t>(min_bits));
  max_value = float_of(static_cast<uint32_t>(max_bits));
}

}  // namespace memkern
