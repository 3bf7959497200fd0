// Values to affine codes and back. Compiled once per instruction set (simd/compile_*.cpp).
#pragma once
#include "cpu/kernels/vector_loops.h"

namespace memkern::MEMKERN_ISA {
namespace {

struct Range {
  float low, high;
};

constexpr float kInfinity = __builtin_inff();

template <class T> __attribute__((noinline)) Range finite_range(const T* x, int n) {
  Range found{kInfinity, -kInfinity};
  for (int i = 0; i < n; ++i) {
    T one[kLanes] = {x[i]};
    float lane[kLanes];
    store(lane, load(one));
    if (!memkern::is_finite(lane[0])) continue;
    found = {memkern::min(lane[0], found.low), memkern::max(lane[0], found.high)};
  }
  return found.low > found.high ? Range{0.0f, 0.0f} : found;
}

// The least and the largest finite value; zeros where there is none.
template <class T> MEMKERN_FN Range range_of(const T* x, int n) {
  F low(kInfinity), high(-kInfinity);
  const auto widen = [&](F v) MEMKERN_LAMBDA {
    low = min(v, low);  // skips NaN
    high = max(v, high);
  };
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) widen(load(x + i));
  if (i < n) {
    T rest[kLanes];
    for (T& each : rest) each = x[i];
    std::memcpy(rest, x + i, (n - i) * sizeof(T));
    widen(load(rest));
  }
  const Range found{min_of(low), max_of(high)};
  if (memkern::is_finite(found.low) && memkern::is_finite(found.high)) return found;
  return finite_range(x, n);
}

// Of a block's n codes the bytes with two in each; the last half byte is 0 where n is odd.
MEMKERN_FN void pack_halves(const int8_t* codes, int n, uint8_t* halves) {
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t eight;
    std::memcpy(&eight, codes + i, 8);
    const uint32_t pairs = affine_pairs(eight);
    std::memcpy(halves + i / 2, &pairs, 4);
  }
  for (; i < n; i += 2) halves[i / 2] = affine_pair(codes[i], i + 1 < n ? codes[i + 1] : 0);
}

MEMKERN_FN void unpack_halves(const uint8_t* halves, int64_t offset, int n, int8_t* codes) {
  int i = 0;
  for (; offset % 2 == 0 && i + 8 <= n; i += 8) {
    uint32_t pairs;
    std::memcpy(&pairs, halves + (offset + i) / 2, 4);
    const uint64_t eight = affine_halves(pairs);
    std::memcpy(codes + i, &eight, 8);
  }
  for (; i < n; ++i) codes[i] = static_cast<int8_t>(affine_half(halves, offset + i));
}

// The index of a block's scale.
MEMKERN_FN int64_t scale_of(const AffineJob& job, int64_t block) {
  return job.blocks_per_scale == 1 ? block : block / job.blocks_per_scale;
}

// A block whose parameters are known. Blocks are coded two at a time, so that the divisions of one wait
// beside the codes of the other.
template <class T> struct MeasuredBlock {
  const T* x;
  int64_t offset;
  int n;
  float scale, zero_point;
};

// Stores the parameters too, if the block is the first of its scale.
template <class T>
MEMKERN_FN MeasuredBlock<T> measure(const AffineJob& job, int64_t offset, int n, int64_t block) {
  const T* x = static_cast<const T*>(job.values) + offset;
  const int64_t k = scale_of(job, block);
  const Range range = job.low ? Range{job.low[k], job.high[k]} : range_of(x, n);
  const AffineParameters p = affine_parameters(range.low, range.high, job.bits);
  if (k * job.blocks_per_scale == block) {
    job.scale[k] = p.scale;
    job.zero_point[k] = static_cast<int32_t>(p.zero_point);
  }
  return {x, offset, n, p.scale, p.zero_point};
}

// Vectors are stored as the nearest whole numbers (simd/); generic code cuts the fraction off.
MEMKERN_FN F nearest(F x) { return kLanes == 1 ? rint(x) : x; }

template <bool Stochastic, class T>
MEMKERN_FN void encode_block(const AffineJob& job, const MeasuredBlock<T>& b) {
  alignas(64) int8_t buffer[kMaxBlockSize + kLanes];
  const F least(affine_least(job.bits)), most(affine_most(job.bits)), scale(b.scale), zero(b.zero_point);
  const bool packed = job.packed;
  int8_t* codes = packed ? buffer : static_cast<int8_t*>(job.codes) + b.offset;
  const uint32_t h = static_cast<uint32_t>(b.offset) * kDitherJ + job.seed * kDitherStep;
  const T* x = b.x;
  for_vectors(b.n, [&](int i, auto load_from, auto store_to) MEMKERN_LAMBDA {
    if constexpr (Stochastic) {
      const F u = dither_of(h + static_cast<uint32_t>(i) * kDitherJ);
      const F place = affine_place(load_from(x + i), scale, zero, u);
      store_to(codes + i, floor(min(max(place, least), most)));
    } else {
      const F place = affine_place(load_from(x + i), scale, zero);
      store_to(codes + i, nearest(min(max(place, least), most)));
    }
  });
  if (packed) pack_halves(codes, b.n, static_cast<uint8_t*>(job.codes) + b.offset / 2);
}

template <bool Stochastic, class T>
void quantize_affine_run(const AffineJob& job, int64_t begin, int64_t end) {
  MeasuredBlock<T> first;
  bool waiting = false;
  for_blocks(job.layout, begin, end, [&](int64_t offset, int n, int64_t block) MEMKERN_LAMBDA {
    const MeasuredBlock<T> next = measure<T>(job, offset, n, block);
    if (waiting) {
      encode_block<Stochastic>(job, first);
      encode_block<Stochastic>(job, next);
    }
    first = next;
    waiting = !waiting;
  });
  if (waiting) encode_block<Stochastic>(job, first);
}

template <class T> void dequantize_affine_run(const AffineJob& job, int64_t begin, int64_t end) {
  alignas(64) int8_t buffer[kMaxBlockSize + kLanes];
  for_blocks(job.layout, begin, end, [&](int64_t offset, int n, int64_t block) MEMKERN_LAMBDA {
    T* x = static_cast<T*>(job.values) + offset;
    const int64_t k = scale_of(job, block);
    const F scale(job.scale[k]), zero(static_cast<float>(job.zero_point[k]));
    const int8_t* codes = static_cast<const int8_t*>(job.codes) + offset;
    if (job.packed) {
      unpack_halves(static_cast<const uint8_t*>(job.codes), offset, n, buffer);
      codes = buffer;
    }
    for_vectors(n, [&](int i, auto load_from, auto store_to)
                       MEMKERN_LAMBDA { store_to(x + i, affine_decode(load_from(codes + i), scale, zero)); });
  });
}

}  // namespace

decltype(AffineJob::run) affine_kernel(FloatType values, bool quantize, bool stochastic) {
  return with_type(values, [&](auto t) -> decltype(AffineJob::run) {
    using T = decltype(t);
    if (!quantize) return dequantize_affine_run<T>;
    return stochastic ? quantize_affine_run<true, T> : quantize_affine_run<false, T>;
  });
}

}  // namespace memkern::MEMKERN_ISA
