// Adam's kernels. Floor: the bytes of a step (FACTS: 16.13 a parameter in fp32, 10.13 in bf16) over the copy rate.
#pragma once
#include "../core/adam.h"
#include "moment.cuh"
#include "table.cuh"

namespace memkern {

struct AdamGroup {
  Number lr;
  double beta1, beta2, eps, weight_decay;
  int64_t decoupled, maximize;
};

// What the prologue leaves for a tensor.
struct AdamTensor {
  AdamScalars scalars;
  uint32_t step;
};

using AdamTable = Table<AdamGroup, AdamTensor>;

// One thread per tensor: counts its step, and works out its scalars.
static __global__ void adam_prologue(AdamTable table) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= table.count || skipped(*table.header)) return;
  const TensorRecord& t = table.tensors[i];
  const AdamGroup& k = table.groups[t.group];
  const uint64_t step = static_cast<uint64_t>(*t.step += 1.0f);
  table.scalars[i] = {adam_scalars(read(k.lr), k.beta1, k.beta2, k.eps, k.weight_decay, k.decoupled != 0,
                                   k.maximize != 0, gradient_factor(*table.header), step),
                      static_cast<uint32_t>(step)};
}

// Eight elements of a moment, and of p, through a step. m and v come in decayed.
MEMKERN_DEVICE void adam_eight(float (&p)[kEight], const float (&g)[kEight], float (&m)[kEight],
                               float (&v)[kEight], float (&w)[kEight], const AdamScalars& s) {
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    adam_moments(m[i], v[i], adam_gradient(g[i], p[i], s), s);
    w[i] = sqrt(v[i]);
    p[i] = adam_param(p[i], m[i], w[i], s);
  }
}

template <StateKind Kind>
MEMKERN_DEVICE void adam_coded(const TensorRecord& t, const void* grad, int64_t tile, const AdamTensor& scalars) {
  constexpr bool kPower = Kind == StateKind::kPower;
  const AdamScalars& s = scalars.scalars;
  const Rounding rounding{false, scalars.step};
  const Group group(t.blocks.block);
  const bool aligned = t.aligned && on_16_bytes(grad);
  for_places(t.blocks, tile, group, [&](const Place& place) {
    float m_unit = 0.0f, v_unit = 0.0f;
    if (place.n > 0) {
      m_unit = unit_of<Kind, true>(t.exp_avg_scale[place.block], s.beta1);
      v_unit = unit_of<Kind, false>(t.exp_avg_sq_scale[place.block], kPower ? s.root_beta2 : s.beta2);
    }
    float m_largest = 0.0f, v_largest = 0.0f, m_factor = 0.0f, v_factor = 0.0f;
    bool finite = true;
    // Once where a block fits its lanes; else all of it for its maxima, and again to be written.
    const int turns = group.turns == 1 ? 1 : 2 * group.turns;
    for (int turn = 0; turn < turns; ++turn) {
      const bool first = turn < group.turns, last = turn >= turns - group.turns;
      const int j = ((first ? turn : turn - group.turns) * group.width + group.lane) * kEight;
      const Span at = span_of(place.start + j, place.n - j, aligned);
      const Raw p_raw = load_raw(t.param, t.param_type, at), g_raw = load_raw(grad, t.grad_type, at);
      const Codes m_codes = load_codes(t.exp_avg, at), v_codes = load_codes(t.exp_avg_sq, at);
      float p[kEight], g[kEight], m[kEight], v[kEight], w[kEight];
      to_floats(p_raw, t.param_type, p);
      to_floats(g_raw, t.grad_type, g);
      decode<Kind, true>(m_codes, m_unit, m);
      decode<Kind, false>(v_codes, v_unit, v);
      if constexpr (kPower)
        for (float& x : v) x = x * x;  // power codes hold w = sqrt(v)
      adam_eight(p, g, m, v, w, s);
      if (last) store_floats(t.param, t.param_type, at, p);
      const float(&kept)[kEight] = kPower ? w : v;
      if (first) {
        m_largest = fmaxf(m_largest, largest_of<true>(m, finite));
        v_largest = fmaxf(v_largest, largest_of<false>(kept, finite));
      }
      if (turn == group.turns - 1) {
        m_largest = max_over_lanes(m_largest, group.width);
        v_largest = max_over_lanes(v_largest, group.width);
        m_factor = factor_of<Kind, true>(m_largest);
        v_factor = factor_of<Kind, false>(v_largest);
        if (group.lane == 0 && place.n > 0) {
          t.exp_avg_scale[place.block] = m_largest;
          t.exp_avg_sq_scale[place.block] = v_largest;
        }
      }
      if (last) {
        store_codes(t.exp_avg, at, encode<Kind, true>(m, m_factor, finite, j, rounding));
        store_codes(t.exp_avg_sq, at, encode<Kind, false>(kept, v_factor, finite, j, rounding));
      }
    }
  });
}

MEMKERN_DEVICE void adam_fp32(const TensorRecord& t, const void* grad, int64_t tile, const AdamScalars& s) {
  const bool aligned = t.aligned && on_16_bytes(grad);
  for_eights(t.numel, tile, aligned, [&](const Span& at) {
    const Raw p_raw = load_raw(t.param, t.param_type, at), g_raw = load_raw(grad, t.grad_type, at);
    float p[kEight], g[kEight], m[kEight], v[kEight], w[kEight];
    load_floats(t.exp_avg, FloatType::kFp32, at, m);
    load_floats(t.exp_avg_sq, FloatType::kFp32, at, v);
    to_floats(p_raw, t.param_type, p);
    to_floats(g_raw, t.grad_type, g);
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      m[i] = s.beta1 * m[i];
      v[i] = s.beta2 * v[i];
    }
    adam_eight(p, g, m, v, w, s);
    store_floats(t.param, t.param_type, at, p);
    store_floats(t.exp_avg, FloatType::kFp32, at, m);
    store_floats(t.exp_avg_sq, FloatType::kFp32, at, v);
  });
}

// One thread block per tile. Kind: the codes that this launch sees to; the first launch also does fp32 states.
template <StateKind Kind> __global__ void __launch_bounds__(kThreads) adam_tiles(AdamTable table, bool fp32) {
  if (skipped(*table.header)) return;
  const int i = find_tensor(table.first_tiles, table.count, blockIdx.x);
  const TensorRecord t = table.tensors[i];
  const AdamTensor scalars = table.scalars[i];
  const int64_t tile = blockIdx.x - table.first_tiles[i];
  if (t.kind == Kind)
    adam_coded<Kind>(t, table.grads[i], tile, scalars);
  else if (t.kind == StateKind::kFp32 && fp32)
    adam_fp32(t, table.grads[i], tile, scalars.scalars);
}

}  // namespace memkern
