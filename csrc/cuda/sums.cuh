// Sums in a fixed order: the same bits every run.
#pragma once
#include "runtime.h"

namespace memkern {

MEMKERN_DEVICE double sum_over_warp(double x) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
  return x;
}

// The sum over all threads of a block, in every one of them. All call it.
MEMKERN_DEVICE double sum_over_block(double x) {
  __shared__ double of_warp[kThreads / kWarp];
  x = sum_over_warp(x);
  __syncthreads();  // who still reads the sums of a call before this one
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = x;
  __syncthreads();
  double sum = 0.0;
#pragma unroll
  for (int i = 0; i < kThreads / kWarp; ++i) sum += of_warp[i];
  return sum;
}

}  // namespace memkern
