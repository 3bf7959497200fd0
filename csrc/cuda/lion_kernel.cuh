// Lion's kernels. Floor: the bytes of a step (14.06 a parameter in fp32, 8.06 in bf16) over the copy rate.
#pragma once
#include "core/lion.h"
#include "moment.cuh"
#include "table.cuh"

namespace memkern {

using LionGroup = StepGroup<LionHyperparameters>;

using LionTable = Table<LionGroup, LionScalars>;

// One thread per tensor works out its scalars.
static __global__ void lion_prologue(LionTable table) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= table.count || skipped(*table.header)) return;
  const LionGroup& k = table.groups[table.tensors[i].group];
  table.scalars[i] = lion_scalars(read(k.lr), k.h, gradient_factor(*table.header));
}

// Eight elements as a lane holds them.
struct LionEight {
  float p[kEight], g[kEight], m[kEight];
};

// unit: of their block. Without m it is 0.
template <StateKind Kind, class Scalars, class P, class G>
MEMKERN_DEVICE LionEight lion_load(const TileWork<Scalars>& work, P param_type, G grad_type, const Span& at,
                                   float unit, bool with_m = true) {
  const TensorRecord& t = work.tensor;
  Raw p, g;
  Codes m{0, 0};
  either_way(at, [&](const Span& span) {
    p = load_raw(t.param, param_type, span);
    g = load_raw(work.grad, grad_type, span);
    if (with_m) m = load_codes(t.exp_avg, span);
  });
  LionEight x;
  to_floats(p, param_type, x.p);
  to_floats(g, grad_type, x.g);
  decode<Kind, true>(m, unit, x.m);
  return x;
}

// What becomes of the parameter and the moment; all else LARS shares.
struct LionRule {
  using Scalars = LionScalars;
  static MEMKERN_DEVICE void update(float& p, float g, float& m, const Scalars& s) {
    lion_update(p, g, m, s);
  }
};

template <class Rule> MEMKERN_DEVICE void lion_eight(LionEight& x, const typename Rule::Scalars& s) {
  typename Rule::Scalars unscaled = s;
  unscaled.grad_factor = 1.0f;
  // One test for all eight; each by itself would cost an instruction where nothing is to be done.
  if (s.grad_factor == 1.0f) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) Rule::update(x.p[i], x.g[i], x.m[i], unscaled);
  } else {
#pragma unroll
    for (int i = 0; i < kEight; ++i) Rule::update(x.p[i], x.g[i], x.m[i], s);
  }
}

template <StateKind Kind, class Rule, class P, class G>
MEMKERN_DEVICE void lion_coded(const TileWork<typename Rule::Scalars>& work, P param_type, G grad_type,
                               Group group) {
  const TensorRecord& t = work.tensor;
  const typename Rule::Scalars& s = work.scalars;
  const bool aligned = t.aligned && on_16_bytes(work.grad);
  for_places(t.blocks, work.walk, group, [&](const Place& place) {
    const float unit = unit_of<Kind>(__ldcs(t.exp_avg_scale + place.block), 1.0f, kPowerLevelsSigned);
    float largest = 0.0f, factor = 0.0f;
    bool finite = true;
    // Once where a block fits its lanes; else all of it for its maximum, and again to be written.
    const int turns = group.turns == 1 ? 1 : 2 * group.turns;
    for (int turn = 0; turn < turns; ++turn) {
      const bool first = turn < group.turns, last = turn >= turns - group.turns;
      const int j = ((first ? turn : turn - group.turns) * group.width() + group.lane()) * kEight;
      const Span at = span_of(place.start + j, place.n - j, aligned);
      LionEight x = lion_load<Kind>(work, param_type, grad_type, at, unit);
      lion_eight<Rule>(x, s);
      if (first) {
        float here = largest_of<true>(x.m);
        if (!is_finite(here)) {
          finite = false;
          here = largest_finite<true>(x.m);
        }
        largest = fmaxf(largest, here);
      }
      if (turn == group.turns - 1) {
        largest = max_over_lanes(largest, group.width() / 2);
        factor = factor_of<Kind>(largest, kPowerLevelsSigned);
        if (group.lane() == 0 && place.n > 0) __stcs(t.exp_avg_scale + place.block, largest);
      }
      if (last) {
        const Codes codes = encode<Kind, true>(x.m, factor, finite, j, Rounding{true, 0});
        const Raw p = to_raw(x.p, param_type);
        either_way(at, [&](const Span& span) {
          store_raw(t.param, param_type, span, p);
          store_codes(t.exp_avg, span, codes);
        });
      }
    }
  });
}

template <class Rule> MEMKERN_DEVICE void lion_fp32(const TileWork<typename Rule::Scalars>& work) {
  const TensorRecord& t = work.tensor;
  const typename Rule::Scalars s = work.scalars;
  const void* const grad = work.grad;
  const bool aligned = t.aligned && on_16_bytes(grad);
  for_eights(t.numel, work.tile, aligned, [&](const Span& at) {
    const Raw p = load_raw(t.param, t.param_type, at), g = load_raw(grad, t.grad_type, at);
    LionEight x;
    load_floats(t.exp_avg, FloatType::kFp32, at, x.m);
    to_floats(p, t.param_type, x.p);
    to_floats(g, t.grad_type, x.g);
    lion_eight<Rule>(x, s);
    store_floats(t.param, t.param_type, at, x.p);
    store_floats(t.exp_avg, FloatType::kFp32, at, x.m);
  });
}

// One thread block per tile.
template <StateKind Kind> __global__ void __launch_bounds__(kThreads, 5)
    lion_tiles(LionTable table, bool fp32) {
  __shared__ TileWork<LionScalars> work;
  if (!work.find(table, Kind, fp32)) return;
  with_states(
      work.tensor, [&](auto... known) { lion_coded<Kind, LionRule>(work, known...); },
      [&] { lion_fp32<LionRule>(work); });
}

}  // namespace memkern
