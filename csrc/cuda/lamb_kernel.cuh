// LAMB's kernels; its update is Adam's. Floor: the bytes of a step (FACTS: 26.19 a parameter in fp32, 16.19
// in bf16) over the copy rate.
#pragma once
#include "adam_kernel.cuh"
#include "core/lamb.h"
#include "layers.cuh"

namespace memkern {

using LambGroup = StepGroup<LambHyperparameters>;

struct LambTensor {
  LambScalars scalars;
  uint32_t step;
};

struct LambRule {
  using Tensor = LambTensor;
  using Scalars = LambScalars;
  template <class F> static MEMKERN_DEVICE F param(F p, F m, F w, const Scalars& s) {
    return lamb_param(p, m, w, s);
  }
};

using LambTable = Table<LambGroup, LambTensor>;

MEMKERN_DEVICE LambScalars& scalars_of(LambTensor& t) { return t.scalars; }

// One thread per layer: its scalars for the step that begins, which layer_ratios counts.
static __global__ void lamb_prologue(LambTable table) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= table.count || skipped(*table.header)) return;
  const TensorRecord& t = table.tensors[i];
  const LambGroup& k = table.groups[t.group];
  const uint64_t step = static_cast<uint64_t>(*t.step + 1.0f);
  table.scalars[i] = {lamb_scalars(read(k.lr), k.h, gradient_factor(*table.header), step),
                      static_cast<uint32_t>(step)};
}

// Adds the squares of the first n elements, whose moments are new.
template <class F>
MEMKERN_DEVICE void lamb_squares(Squares& sum, const AdamEight& x, int n, const LambScalars& s) {
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    if (i >= n) continue;
    const F p = lamb_decayed(F(x.p[i]), s);
    add_square(sum.param, static_cast<float>(p));
    add_square(sum.update, static_cast<float>(lamb_update(p, F(x.m[i]), sqrt(F(x.v[i])), s)));
  }
}

template <StateKind Kind, class P, class G>
MEMKERN_DEVICE Squares lamb_norms_coded(const TileWork<LambTensor>& work, P param_type, G grad_type,
                                        Group group) {
  constexpr bool kPower = Kind == StateKind::kPower;
  const TensorRecord& t = work.tensor;
  const LambScalars& s = work.scalars.scalars;
  const Halves half(group);
  const int levels = half.own(kPowerLevelsSigned, kPowerLevelsUnsigned);
  const bool aligned = t.aligned && on_16_bytes(work.grad);
  Squares sum{0.0, 0.0};
  for_places(t.blocks, work.walk, group, [&](const Place& place) {
    const float* const scale = half.own(t.exp_avg_scale, t.exp_avg_sq_scale) + place.block;
    const float decay = half.own(s.beta1, kPower ? s.root_beta2 : s.beta2);
    float m_unit, v_unit;
    half.share(unit_of<Kind>(*scale, decay, levels), m_unit, v_unit);
    for (int turn = 0; turn < group.turns; ++turn) {
      const int j = (turn * group.width() + group.lane()) * kEight;
      const Span at = span_of(place.start + j, place.n - j, aligned);
      const AdamEight x = adam_load<Kind>(work, param_type, grad_type, at, m_unit, v_unit);
      with_numbers(x, at.n, largest_of<true>(x.m), largest_of<false>(x.v), s,
                   [&](auto number) { lamb_squares<decltype(number)>(sum, x, at.n, s); });
    }
  });
  return sum;
}

MEMKERN_DEVICE Squares lamb_norms_fp32(const TileWork<LambTensor>& work) {
  const TensorRecord& t = work.tensor;
  const LambScalars s = work.scalars.scalars;
  const void* const grad = work.grad;
  Squares sum{0.0, 0.0};
  for_eights(t.numel, work.tile, t.aligned && on_16_bytes(grad),
             [&](const Span& at) { lamb_squares<float>(sum, adam_load_fp32(t, grad, at, s), at.n, s); });
  return sum;
}

// One thread block per tile; nothing is written but the tile's sums.
template <StateKind Kind> __global__ void __launch_bounds__(kThreads, 4)
    lamb_norm_tiles(LambTable table, bool fp32, Squares* partial) {
  __shared__ TileWork<LambTensor> work;
  if (!work.find(table, Kind, fp32) || !adapts(table.groups[work.tensor.group].h)) return;
  Squares sum{0.0, 0.0};
  with_states(
      work.tensor, [&](auto... known) { sum = lamb_norms_coded<Kind>(work, known...); },
      [&] { sum = lamb_norms_fp32(work); });
  store_squares(partial, sum);
}

// One thread block per tile.
template <StateKind Kind> __global__ void __launch_bounds__(kThreads, 5)
    lamb_tiles(LambTable table, bool fp32) {
  __shared__ TileWork<LambTensor> work;
  if (!work.find(table, Kind, fp32)) return;
  with_states(
      work.tensor, [&](auto... known) { adam_coded<Kind, LambRule>(work, known...); },
      [&] { adam_fp32<LambRule>(work); });
}

}  // namespace memkern
