// Reductions over lanes of a warp and threads of a thread block, in a fixed order: the same bits every run.
#pragma once
#include "device.cuh"

namespace memkern {

// The maximum over aligned groups of 2 * distance lanes, in every lane. All five shuffles of a warp are
// executed and those across groups ignored, which makes the loop's length a constant.
MEMKERN_DEVICE float max_over_lanes(float x, int distance) {
#pragma unroll
  for (int d = kWarp / 2; d > 0; d /= 2) {
    const float other = __shfl_xor_sync(kAllLanes, x, d);
    if (d <= distance) x = fmaxf(x, other);
  }
  return x;
}

MEMKERN_DEVICE double sum_over_warp(double x) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
  return x;
}

// The sum over all threads of a thread block, in every thread. All of them call it.
template <int Threads = kThreads> MEMKERN_DEVICE double sum_over_block(double x) {
  __shared__ double of_warp[Threads / kWarp];
  x = sum_over_warp(x);
  __syncthreads();  // until all threads have read the sums of an earlier call
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = x;
  __syncthreads();
  double sum = 0.0;
#pragma unroll
  for (int i = 0; i < Threads / kWarp; ++i) sum += of_warp[i];
  return sum;
}

}  // namespace memkern
