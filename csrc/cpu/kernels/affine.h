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
  for (int i = 0; i < n / 2; ++i) halves[i] = affine_pair(codes[2 * i], codes[2 * i + 1]);
  if (n % 2) halves[n / 2] = affine_pair(codes[n - 1], 0);
}

MEMKERN_FN void unpack_halves(const uint8_t* halves, int64_t offset, int n, int8_t* codes) {
  if (offset % 2) {
    for (int i = 0; i < n; ++i) codes[i] = static_cast<int8_t>(affine_half(halves, offset + i));
    return;
  }
  halves += offset / 2;
  for (int i = 0; i < n / 2; ++i) {
    codes[2 * i] = static_cast<int8_t>(((halves[i] & 15) ^ 8) - 8);
    codes[2 * i + 1] = static_cast<int8_t>((halves[i] >> 4 ^ 8) - 8);
  }
  if (n % 2) codes[n - 1] = static_cast<int8_t>(affine_half(halves, n - 1));
}

// The index of a block's scale.
MEMKERN_FN int64_t scale_of(const AffineJob& job, int64_t block) {
  return job.blocks_per_scale == 1 ? block : block / job.blocks_per_scale;
}

template <class T> void quantize_affine_run(const AffineJob& job, int64_t begin, int64_t end) {
  alignas(64) int8_t buffer[kMaxBlockSize + kLanes];
  const F least(affine_least(job.bits)), most(affine_most(job.bits));
  const bool stochastic = job.stochastic;
  for_blocks(job.layout, begin, end, [&](int64_t offset, int n, int64_t block) MEMKERN_LAMBDA {
    const T* x = static_cast<const T*>(job.values) + offset;
    const int64_t k = scale_of(job, block);
    const Range range = job.low ? Range{job.low[k], job.high[k]} : range_of(x, n);
    const AffineParameters p = affine_parameters(range.low, range.high, job.bits);
    if (k * job.blocks_per_scale == block) {
      job.scale[k] = p.scale;
      job.zero_point[k] = static_cast<int32_t>(p.zero_point);
    }
    int8_t* codes = job.packed ? buffer : static_cast<int8_t*>(job.codes) + offset;
    const F scale(p.scale), zero(p.zero_point);
    if (stochastic) {
      const uint32_t h = static_cast<uint32_t>(offset) * kDitherJ + job.seed * kDitherStep;
      for_vectors(n, [&](int i, auto load_from, auto store_to) MEMKERN_LAMBDA {
        const F u = dither_of(h + static_cast<uint32_t>(i) * kDitherJ);
        store_to(codes + i, floor(affine_place(load_from(x + i), scale, zero, least, most, u)));
      });
    } else {
      for_vectors(n, [&](int i, auto load_from, auto store_to) MEMKERN_LAMBDA {
        store_to(codes + i, rint(affine_place(load_from(x + i), scale, zero, least, most)));
      });
    }
    if (job.packed) pack_halves(codes, n, static_cast<uint8_t*>(job.codes) + offset / 2);
  });
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
    for_vectors(n, [&](int i, auto load_from, auto store_to) MEMKERN_LAMBDA {
      store_to(x + i, affine_decode(load_from(codes + i), scale, zero));
    });
  });
}

}  // namespace

decltype(AffineJob::run) affine_kernel(FloatType values, bool quantize) {
  return with_type(values, [&](auto t) -> decltype(AffineJob::run) {
    return quantize ? quantize_affine_run<decltype(t)> : dequantize_affine_run<decltype(t)>;
  });
}

}  // namespace memkern::MEMKERN_ISA
