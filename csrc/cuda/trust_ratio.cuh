// Trust ratios (LAMB, LARS) on the device: the first pass stores sums of squares per tile, layer_ratios makes
// of them a ratio per layer, and the second pass, the update, reads the ratios. In the step's table each
// layer of a tensor is a tensor of its own.
#pragma once
#include "core/trust_ratio.h"
#include "squares.cuh"
#include "step_table.cuh"

namespace memkern {

// Stores the sums over all threads of a tile.
MEMKERN_DEVICE void store_squares(Squares* partial, const Squares& mine) {
  const Squares total{sum_over_block(mine.param), sum_over_block(mine.update)};
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

constexpr int kRatioThreads = 1024;  // a layer of 10^9 elements has 61,000 tiles

// One thread block per layer: adds the sums of the layer's tiles in a fixed order, and stores the ratio in
// `trust_ratio` and in the layer's scalars. The first layer of a tensor increments the tensor's step here, as
// the prologue reads the step for every layer. `squares`, if not null, has a row per layer:
//   squares_only    the sums are stored there, and nothing else is done
//   else            the sums are read there, and not made of the tiles'
template <class Group, class Scalars> __global__ void __launch_bounds__(kRatioThreads)
    layer_ratios(StepTable<Group, Scalars> table, const Squares* partial, int tiles, Squares* squares,
                 bool squares_only) {
  if (skipped(*table.header)) return;
  const int i = blockIdx.x;
  const TensorRecord& t = table.tensors[i];
  const TrustRule rule = trust_rule(read(table.groups[t.group].lr), table.groups[t.group].h);
  const int first = table.first_tiles[i], end = i + 1 < table.count ? table.first_tiles[i + 1] : tiles;
  Squares sum{0.0, 0.0};
  if (rule.adapt && (!squares || squares_only)) {
#pragma unroll 4
    for (int k = first + static_cast<int>(threadIdx.x); k < end; k += kRatioThreads) {
      sum.param += partial[k].param;
      sum.update += partial[k].update;
    }
  }
  sum = {sum_over_block<kRatioThreads>(sum.param), sum_over_block<kRatioThreads>(sum.update)};
  if (threadIdx.x != 0) return;
  if (squares_only) {
    squares[i] = sum;
    return;
  }
  if (squares) sum = squares[i];
  const float ratio = rule.adapt ? trust_ratio(sum, rule) : 1.0f;
  *t.trust_ratio = ratio;
  set_trust_ratio(scalars_of(table.scalars[i]), rule.lr, ratio);
  if (t.first_layer) *t.step += 1.0f;
}

}  // namespace memkern
