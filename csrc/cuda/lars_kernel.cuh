// LARS's kernels; its update is Lion's. Floor: the bytes of a step (23.09 a parameter in fp32, classic 22.06)
// over the copy rate.
#pragma once
#include "core/lars.h"
#include "layers.cuh"
#include "lion_kernel.cuh"

namespace memkern {

using LarsGroup = StepGroup<LarsHyperparameters>;

struct LarsRule {
  using Scalars = LarsScalars;
  static MEMKERN_DEVICE void update(float& p, float g, float& m, const Scalars& s) {
    lars_update(p, g, m, s);
  }
};

using LarsTable = Table<LarsGroup, LarsScalars>;

MEMKERN_DEVICE LarsScalars& scalars_of(LarsScalars& s) { return s; }

// One thread per layer: its scalars for the step that begins, which layer_ratios counts.
static __global__ void lars_prologue(LarsTable table) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= table.count || skipped(*table.header)) return;
  const TensorRecord& t = table.tensors[i];
  const LarsGroup& k = table.groups[t.group];
  table.scalars[i] =
      lars_scalars(read(k.lr), k.h, gradient_factor(*table.header), static_cast<uint64_t>(*t.step + 1.0f));
}

// Adds the squares of the parameters and, classic, the gradients, else the new moments. Elements that do not
// exist are 0 in all of them.
MEMKERN_DEVICE void lars_squares(Squares& sum, const LionEight& x, const LarsScalars& s) {
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    float d = lars_gradient(x.g[i], s);
    add_square(sum.param, x.p[i]);
    if (s.classic)
      add_square(sum.update, d);
    else
      add_square(sum.update, lars_moment(x.p[i], d, x.m[i], s));
  }
}

template <StateKind Kind, class P, class G>
MEMKERN_DEVICE Squares lars_norms_coded(const TileWork<LarsScalars>& work, P param_type, G grad_type,
                                        Group group) {
  const TensorRecord& t = work.tensor;
  const LarsScalars& s = work.scalars;
  const bool aligned = t.aligned && on_16_bytes(work.grad);
  Squares sum{0.0, 0.0};
  for_places(t.blocks, work.walk, group, [&](const Place& place) {
    const float unit = unit_of<Kind>(t.exp_avg_scale[place.block], 1.0f, kPowerLevelsSigned);
    for (int turn = 0; turn < group.turns; ++turn) {
      const int j = (turn * group.width() + group.lane()) * kEight;
      const Span at = span_of(place.start + j, place.n - j, aligned);
      lars_squares(sum, lion_load<Kind>(work, param_type, grad_type, at, unit, !s.classic), s);
    }
  });
  return sum;
}

MEMKERN_DEVICE Squares lars_norms_fp32(const TileWork<LarsScalars>& work) {
  const TensorRecord& t = work.tensor;
  const LarsScalars s = work.scalars;
  const void* const grad = work.grad;
  Squares sum{0.0, 0.0};
  for_eights(t.numel, work.tile, t.aligned && on_16_bytes(grad), [&](const Span& at) {
    LionEight x{};
    load_floats(t.param, t.param_type, at, x.p);
    load_floats(grad, t.grad_type, at, x.g);
    if (!s.classic) load_floats(t.exp_avg, FloatType::kFp32, at, x.m);
    lars_squares(sum, x, s);
  });
  return sum;
}

// One thread block per tile; nothing is written but the tile's sums.
template <StateKind Kind> __global__ void __launch_bounds__(kThreads, 4)
    lars_norm_tiles(LarsTable table, bool fp32, Squares* partial) {
  __shared__ TileWork<LarsScalars> work;
  if (!work.find(table, Kind, fp32) || !adapts(table.groups[work.tensor.group].h)) return;
  Squares sum{0.0, 0.0};
  with_states(
      work.tensor, [&](auto... known) { sum = lars_norms_coded<Kind>(work, known...); },
      [&] { sum = lars_norms_fp32(work); });
  store_squares(partial, sum);
}

// One thread block per tile.
template <StateKind Kind> __global__ void __launch_bounds__(kThreads, 5)
    lars_tiles(LarsTable table, bool fp32) {
  __shared__ TileWork<LarsScalars> work;
  if (!work.find(table, Kind, fp32)) return;
  with_states(
      work.tensor, [&](auto... known) { lion_coded<Kind, LarsRule>(work, known...); },
      [&] { lion_fp32<LarsRule>(work); });
}

}  // namespace memkern
