// The global norm of gradients: a sum in fp64 for each tile, then the sum of those, both in a fixed order.
#pragma once
#include "sums.cuh"
#include "table.cuh"

namespace memkern {

struct NormTensor {
  const void* values;
  int64_t numel;
  FloatType type;
  int32_t aligned;
};

struct NormTable {
  const StepHeader* header;
  const uint32_t* first_tiles;
  const NormTensor* tensors;
  double* partial;  // of each tile
  int count, tiles;
};

static __global__ void __launch_bounds__(kThreads) norm_tiles(NormTable table) {
  const int i = find_tensor(table.first_tiles, table.count, blockIdx.x);
  const NormTensor t = table.tensors[i];
  double sum = 0.0;
  for_eights(t.numel, blockIdx.x - table.first_tiles[i], t.aligned, [&](const Span& at) {
    float g[kEight];
    load_floats(t.values, t.type, at, g);
#pragma unroll
    for (int k = 0; k < kEight; ++k) sum += static_cast<double>(g[k]) * static_cast<double>(g[k]);
  });
  sum = sum_over_block(sum);
  if (threadIdx.x == 0) table.partial[blockIdx.x] = sum;
}

// One thread block.
static __global__ void __launch_bounds__(kThreads) norm_total(NormTable table, double* norm) {
  double sum = 0.0;
#pragma unroll 8
  for (int i = threadIdx.x; i < table.tiles; i += kThreads) sum += table.partial[i];
  sum = sum_over_block(sum);
  if (threadIdx.x == 0) *norm = ::sqrt(sum) * gradient_factor(*table.header);
}

}  // namespace memkern
