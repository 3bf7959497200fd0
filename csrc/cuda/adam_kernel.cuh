// Adam's kernels. Floor: the bytes of a step (FACTS: 16.13 a parameter in fp32, 10.13 in bf16) over the copy
// rate.
#pragma once
#include "../core/adam.h"
#include "moment.cuh"
#include "table.cuh"
#include "usual.cuh"

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

MEMKERN_DEVICE void adam_new_moments(float (&m)[kEight], float (&v)[kEight], float (&g)[kEight],
                                     const float (&p)[kEight], const AdamScalars& s) {
  // One test for all eight; each by itself would cost three instructions where nothing is to be done.
  if (s.grad_factor != 1.0f || s.coupled_decay != 0.0f) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) g[i] = adam_gradient(g[i], p[i], s);
  }
#pragma unroll
  for (int i = 0; i < kEight; ++i) adam_moments(m[i], v[i], g[i], s);
}

// What becomes of the parameter; all else LAMB shares.
struct AdamRule {
  using Tensor = AdamTensor;
  using Scalars = AdamScalars;
  template <class F> static MEMKERN_DEVICE F param(F p, F m, F w, const Scalars& s) {
    return adam_param(p, m, w, s);
  }
};

// p and w = sqrt(v) of eight elements whose moments are new.
template <class Rule, class F> MEMKERN_DEVICE void adam_params(float (&p)[kEight], const float (&m)[kEight],
                                                               const float (&v)[kEight], float (&w)[kEight],
                                                               const typename Rule::Scalars& s) {
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    const F root = sqrt(F(v[i]));
    w[i] = static_cast<float>(root);
    p[i] = static_cast<float>(Rule::param(F(p[i]), F(m[i]), root, s));
  }
}

// Whether roots and divisions of these are of usual size.
MEMKERN_DEVICE bool adam_usual(const float (&m)[kEight], const float (&v)[kEight], float m_largest,
                               float v_largest, const AdamScalars& s) {
  bool usual = m_largest <= kMostNumerator && v_largest <= kMostRoot && s.eps <= 0x1p40f;
#pragma unroll
  for (int i = 0; i < kEight; ++i) usual = usual && v[i] >= kLeastRoot && fabsf(m[i]) >= kLeastNumerator;
  return usual;
}

template <StateKind Kind, class Rule, class P, class G>
MEMKERN_DEVICE void adam_coded(const TileWork<typename Rule::Tensor>& work, P param_type, G grad_type,
                               Group group) {
  constexpr bool kPower = Kind == StateKind::kPower;
  const TensorRecord& t = work.tensor;
  const typename Rule::Scalars& s = work.scalars.scalars;
  const void* const grad = work.grad;
  const Rounding rounding{false, work.scalars.step};
  const Halves half(group);
  const int levels = half.own(kPowerLevelsSigned, kPowerLevelsUnsigned);
  const bool aligned = t.aligned && on_16_bytes(grad);
  for_places(t.blocks, work.walk, group, [&](const Place& place) {
    float* const scale = half.own(t.exp_avg_scale, t.exp_avg_sq_scale) + place.block;
    const float decay = half.own(s.beta1, kPower ? s.root_beta2 : s.beta2);
    float m_unit, v_unit;
    half.share(unit_of<Kind>(__ldcs(scale), decay, levels), m_unit, v_unit);
    float m_largest = 0.0f, v_largest = 0.0f, m_factor = 0.0f, v_factor = 0.0f;
    bool finite = true;
    // Once where a block fits its lanes; else all of it for its maxima, and again to be written.
    const int turns = group.turns == 1 ? 1 : 2 * group.turns;
    for (int turn = 0; turn < turns; ++turn) {
      const bool first = turn < group.turns, last = turn >= turns - group.turns;
      const int j = ((first ? turn : turn - group.turns) * group.width() + group.lane()) * kEight;
      const Span at = span_of(place.start + j, place.n - j, aligned);
      Raw p_raw, g_raw;
      Codes m_codes, v_codes;
      either_way(at, [&](const Span& span) {
        p_raw = load_raw(t.param, param_type, span);
        g_raw = load_raw(grad, grad_type, span);
        m_codes = load_codes(t.exp_avg, span);
        v_codes = load_codes(t.exp_avg_sq, span);
      });
      float p[kEight], g[kEight], m[kEight], v[kEight], w[kEight];
      to_floats(p_raw, param_type, p);
      to_floats(g_raw, grad_type, g);
      decode<Kind, true>(m_codes, m_unit, m);
      decode<Kind, false>(v_codes, v_unit, v);
      if constexpr (kPower)
        for (float& x : v) x = x * x;  // power codes hold w = sqrt(v)
      adam_new_moments(m, v, g, p, s);
      float m_here = largest_of<true>(m), v_here = largest_of<false>(v);
      if (at.n == 0 || adam_usual(m, v, m_here, v_here, s))
        adam_params<Rule, Usual>(p, m, v, w, s);
      else
        adam_params<Rule, float>(p, m, v, w, s);
      if (last) store_floats(t.param, param_type, at, p);
      if (first) {
        if (!(is_finite(m_here) && is_finite(v_here))) {
          finite = false;
          m_here = largest_finite<true>(m);
          v_here = largest_finite<false>(v);
        }
        m_largest = fmaxf(m_largest, m_here);
        v_largest = fmaxf(v_largest, v_here);
      }
      if (turn == group.turns - 1) {
        float largest = half.largest(m_largest, v_largest);
        if (kPower && half.upper) largest = sqrt(largest);  // the largest w
        half.share(factor_of<Kind>(largest, levels), m_factor, v_factor);
        if ((group.lane() & (half.distance - 1)) == 0 && place.n > 0) __stcs(scale, largest);
      }
      if (last) {
        encode_both<Kind>(m, m_factor, kPower ? w : v, v_factor, finite, j, rounding, m_codes, v_codes);
        either_way(at, [&](const Span& span) {
          store_codes(t.exp_avg, span, m_codes);
          store_codes(t.exp_avg_sq, span, v_codes);
        });
      }
    }
  });
}

template <class Rule> MEMKERN_DEVICE void adam_fp32(const TileWork<typename Rule::Tensor>& work) {
  const TensorRecord& t = work.tensor;
  const typename Rule::Scalars s = work.scalars.scalars;
  const void* const grad = work.grad;
  const bool aligned = t.aligned && on_16_bytes(grad);
  for_eights(t.numel, work.tile, aligned, [&](const Span& at) {
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
    adam_new_moments(m, v, g, p, s);
    adam_params<Rule, float>(p, m, v, w, s);
    store_floats(t.param, t.param_type, at, p);
    store_floats(t.exp_avg, FloatType::kFp32, at, m);
    store_floats(t.exp_avg_sq, FloatType::kFp32, at, v);
  });
}

// One thread block per tile.
template <StateKind Kind> __global__ void __launch_bounds__(kThreads, 5)
    adam_tiles(AdamTable table, bool fp32) {
  __shared__ TileWork<AdamTensor> work;
  if (!work.find(table, Kind, fp32)) return;
  with_states(
      work.tensor, [&](auto... known) { adam_coded<Kind, AdamRule>(work, known...); },
      [&] { adam_fp32<AdamRule>(work); });
}

}  // namespace memkern
