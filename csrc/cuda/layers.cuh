// Trust ratios on the device, for steps in two passes: norms by tile, then ratios by layer, then the update.
// A layer is a tensor of its own in the step's table.
#pragma once
#include "core/trust_ratio.h"
#include "sums.cuh"
#include "table.cuh"

namespace memkern {

// The square is exact: fused or not, the bits are the same.
MEMKERN_DEVICE void add_square(double& sum, float x) {
  sum += static_cast<double>(x) * static_cast<double>(x);
}

// The sums of all threads to the tile's place.
MEMKERN_DEVICE void store_squares(Squares* partial, const Squares& mine) {
  const Squares all{sum_over_block(mine.param), sum_over_block(mine.update)};
  if (threadIdx.x == 0) partial[blockIdx.x] = all;
}

// One thread block per layer: its ratio, from its tiles' sums in a fixed order, to `trust_ratio` and to its
// scalars. Here steps are counted: the kernels before read the count, for many layers of one tensor.
template <class Group, class Scalars> __global__ void __launch_bounds__(kThreads)
    layer_ratios(Table<Group, Scalars> table, const Squares* partial, int tiles) {
  if (skipped(*table.header)) return;
  const int i = blockIdx.x;
  const TensorRecord& t = table.tensors[i];
  const TrustRule rule = trust_rule(read(table.groups[t.group].lr), table.groups[t.group].h);
  const int first = table.first_tiles[i], end = i + 1 < table.count ? table.first_tiles[i + 1] : tiles;
  Squares sum{0.0, 0.0};
  if (rule.adapt) {
#pragma unroll 4
    for (int k = first + static_cast<int>(threadIdx.x); k < end; k += kThreads) {
      sum.param += partial[k].param;
      sum.update += partial[k].update;
    }
  }
  sum = {sum_over_block(sum.param), sum_over_block(sum.update)};
  if (threadIdx.x != 0) return;
  const float ratio = rule.adapt ? trust_ratio(sum, rule) : 1.0f;
  *t.trust_ratio = ratio;
  set_trust_ratio(scalars_of(table.scalars[i]), rule.lr, ratio);
  if (t.first_layer) *t.step += 1.0f;
}

}  // namespace memkern
