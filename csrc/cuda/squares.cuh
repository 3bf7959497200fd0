// Sums of squares, for the norm of gradients and the norms of layers. Sums over threads are in a fixed order:
// the same bits every run.
#pragma once
#include "block_state.cuh"

namespace memkern {

// The square of a float is exact in fp64, so the sum has the same bits with or without an fma, which is one
// instruction less.
MEMKERN_DEVICE void add_square(double& sum, float x) {
  const double wide = x;
  sum = ::fma(wide, wide, sum);
}

// Adds the squares of a vector's elements; elements past its end are 0.
//
// Where fp64 is slow, four squares are added in fp32 first. Each square is rounded once, and so are the two
// additions that it passes: the sum's relative error is at most 3 * 2^-24, its root's (a norm) half of that,
// 9e-8. So a vector takes 4 fp64 instructions instead of 16. On an RTX 5090, by the rate of its fp64 units,
// 16 take twice the time of the memory traffic of bf16 gradients, and 4 take half of it. Where the vector's
// largest element is outside [2^-50, 2^60], squares may be too small or too large for fp32, and all are added
// in fp64.
MEMKERN_DEVICE void add_squares(double& sum, const float (&x)[kVector]) {
  if (slow_fp64()) {
    const float largest = absmax_or_nan<true>(x);
    if (largest == 0.0f || (largest >= 0x1p-50f && largest <= 0x1p60f)) {
      const auto two = [&](int i) { return fmaf(x[i], x[i], x[i + 1] * x[i + 1]); };
      sum += static_cast<double>(two(0) + two(2)) + static_cast<double>(two(4) + two(6));
      return;
    }
  }
#pragma unroll
  for (const float each : x) add_square(sum, each);
}

MEMKERN_DEVICE double sum_over_warp(double x) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
  return x;
}

// The sum over all threads of a thread block, in every thread. All of them call it.
template <int Threads = kThreads> MEMKERN_DEVICE double sum_over_block(double x) {
  __shared__ double warp_sums[Threads / kWarp];
  x = sum_over_warp(x);
  __syncthreads();  // until all threads have read the sums of an earlier call
  if (threadIdx.x % kWarp == 0) warp_sums[threadIdx.x / kWarp] = x;
  __syncthreads();
  double sum = 0.0;
#pragma unroll
  for (int i = 0; i < Threads / kWarp; ++i) sum += warp_sums[i];
  return sum;
}

}  // namespace memkern
