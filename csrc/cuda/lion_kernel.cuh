// Lion's kernels. Floor: the bytes of a step (14.06 a parameter in fp32, 8.06 in bf16) over the copy rate.
#pragma once
#include "../core/lion.h"
#include "moment.cuh"
#include "table.cuh"

namespace memkern {

struct LionGroup {
  Number lr;
  double beta1, beta2, weight_decay;
  int64_t maximize;
};

using LionTable = Table<LionGroup, LionScalars>;

// One thread per tensor works out its scalars.
static __global__ void lion_prologue(LionTable table) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= table.count || skipped(*table.header)) return;
  const LionGroup& k = table.groups[table.tensors[i].group];
  table.scalars[i] = lion_scalars(read(k.lr), k.beta1, k.beta2, k.weight_decay, k.maximize != 0,
                                  gradient_factor(*table.header));
}

template <StateKind Kind>
MEMKERN_DEVICE void lion_coded(const TensorRecord& t, const void* grad, int64_t tile, const LionScalars& s) {
  const Group group(t.blocks.block);
  const bool aligned = t.aligned && on_16_bytes(grad);
  for_places(t.blocks, tile, group, [&](const Place& place) {
    const float unit = place.n > 0 ? unit_of<Kind, true>(t.exp_avg_scale[place.block], 1.0f) : 0.0f;
    float largest = 0.0f, factor = 0.0f;
    bool finite = true;
    // Once where a block fits its lanes; else all of it for its maximum, and again to be written.
    const int turns = group.turns == 1 ? 1 : 2 * group.turns;
    for (int turn = 0; turn < turns; ++turn) {
      const bool first = turn < group.turns, last = turn >= turns - group.turns;
      const int j = ((first ? turn : turn - group.turns) * group.width + group.lane) * kEight;
      const Span at = span_of(place.start + j, place.n - j, aligned);
      const Raw p_raw = load_raw(t.param, t.param_type, at), g_raw = load_raw(grad, t.grad_type, at);
      const Codes codes = load_codes(t.exp_avg, at);
      float p[kEight], g[kEight], m[kEight];
      to_floats(p_raw, t.param_type, p);
      to_floats(g_raw, t.grad_type, g);
      decode<Kind, true>(codes, unit, m);
#pragma unroll
      for (int i = 0; i < kEight; ++i) lion_update(p[i], g[i], m[i], s);
      if (last) store_floats(t.param, t.param_type, at, p);
      if (first) largest = fmaxf(largest, largest_of<true>(m, finite));
      if (turn == group.turns - 1) {
        largest = max_over_lanes(largest, group.width);
        factor = factor_of<Kind, true>(largest);
        if (group.lane == 0 && place.n > 0) t.exp_avg_scale[place.block] = largest;
      }
      if (last) store_codes(t.exp_avg, at, encode<Kind, true>(m, factor, finite, j, Rounding{true, 0}));
    }
  });
}

MEMKERN_DEVICE void lion_fp32(const TensorRecord& t, const void* grad, int64_t tile, const LionScalars& s) {
  const bool aligned = t.aligned && on_16_bytes(grad);
  for_eights(t.numel, tile, aligned, [&](const Span& at) {
    const Raw p_raw = load_raw(t.param, t.param_type, at), g_raw = load_raw(grad, t.grad_type, at);
    float p[kEight], g[kEight], m[kEight];
    load_floats(t.exp_avg, FloatType::kFp32, at, m);
    to_floats(p_raw, t.param_type, p);
    to_floats(g_raw, t.grad_type, g);
#pragma unroll
    for (int i = 0; i < kEight; ++i) lion_update(p[i], g[i], m[i], s);
    store_floats(t.param, t.param_type, at, p);
    store_floats(t.exp_avg, FloatType::kFp32, at, m);
  });
}

// One thread block per tile. Kind: the codes that this launch sees to; one of the launches also does fp32 states.
template <StateKind Kind> __global__ void __launch_bounds__(kThreads) lion_tiles(LionTable table, bool fp32) {
  if (skipped(*table.header)) return;
  const int i = find_tensor(table.first_tiles, table.count, blockIdx.x);
  const TensorRecord t = table.tensors[i];
  const LionScalars scalars = table.scalars[i];
  const int64_t tile = blockIdx.x - table.first_tiles[i];
  if (t.kind == Kind)
    lion_coded<Kind>(t, table.grads[i], tile, scalars);
  else if (t.kind == StateKind::kFp32 && fp32)
    lion_fp32(t, table.grads[i], tile, scalars);
}

}  // namespace memkern
