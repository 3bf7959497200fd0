// Adam's kernels. Floor: the bytes of a step (FACTS: 16.13 a parameter in fp32, 10.13 in bf16) over the copy
// rate.
#pragma once
#include "core/adam.h"
#include "moment.cuh"
#include "table.cuh"
#include "usual.cuh"

namespace memkern {

using AdamGroup = StepGroup<AdamHyperparameters>;

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
  table.scalars[i] = {adam_scalars(read(k.lr), k.h, gradient_factor(*table.header), step),
                      static_cast<uint32_t>(step)};
}

// Eight elements as a lane holds them.
struct AdamEight {
  float p[kEight], g[kEight], m[kEight], v[kEight];
};

// m and v come in decayed.
MEMKERN_DEVICE void adam_new_moments(AdamEight& x, const AdamScalars& s) {
  // One test for all eight; each by itself would cost three instructions where nothing is to be done.
  if (s.grad_factor != 1.0f || s.coupled_decay != 0.0f) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) x.g[i] = adam_gradient(x.g[i], x.p[i], s);
  }
#pragma unroll
  for (int i = 0; i < kEight; ++i) adam_moments(x.m[i], x.v[i], x.g[i], s);
}

// Loads eight elements and makes their moments new. The units are those of their block, decayed.
template <StateKind Kind, class Tensor, class P, class G>
MEMKERN_DEVICE AdamEight adam_load(const TileWork<Tensor>& work, P param_type, G grad_type, const Span& at,
                                   float m_unit, float v_unit) {
  const TensorRecord& t = work.tensor;
  Raw p, g;
  Codes m, v;
  either_way(at, [&](const Span& span) {
    p = load_raw(t.param, param_type, span);
    g = load_raw(work.grad, grad_type, span);
    m = load_codes(t.exp_avg, span);
    v = load_codes(t.exp_avg_sq, span);
  });
  AdamEight x;
  to_floats(p, param_type, x.p);
  to_floats(g, grad_type, x.g);
  decode<Kind, true>(m, m_unit, x.m);
  decode<Kind, false>(v, v_unit, x.v);
  if constexpr (Kind == StateKind::kPower)
    for (float& w : x.v) w = w * w;  // power codes hold w = sqrt(v)
  adam_new_moments(x, work.scalars.scalars);
  return x;
}

MEMKERN_DEVICE AdamEight adam_load_fp32(const TensorRecord& t, const void* grad, const Span& at,
                                        const AdamScalars& s) {
  const Raw p = load_raw(t.param, t.param_type, at), g = load_raw(grad, t.grad_type, at);
  AdamEight x;
  load_floats(t.exp_avg, FloatType::kFp32, at, x.m);
  load_floats(t.exp_avg_sq, FloatType::kFp32, at, x.v);
  to_floats(p, t.param_type, x.p);
  to_floats(g, t.grad_type, x.g);
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    x.m[i] = s.beta1 * x.m[i];
    x.v[i] = s.beta2 * x.v[i];
  }
  adam_new_moments(x, s);
  return x;
}

// What becomes of the parameter; all else LAMB shares.
struct AdamRule {
  using Tensor = AdamTensor;
  using Scalars = AdamScalars;
  template <class F> static MEMKERN_DEVICE F param(F p, F m, F w, const Scalars& s) {
    return adam_param(p, m, w, s);
  }
};

// The new p, and w = sqrt(v).
template <class Rule, class F>
MEMKERN_DEVICE void adam_params(AdamEight& x, float (&w)[kEight], const typename Rule::Scalars& s) {
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    const F root = sqrt(F(x.v[i]));
    w[i] = static_cast<float>(root);
    x.p[i] = static_cast<float>(Rule::param(F(x.p[i]), F(x.m[i]), root, s));
  }
}

// Whether roots and divisions of these are of usual size.
MEMKERN_DEVICE bool adam_usual(const AdamEight& x, float m_largest, float v_largest, const AdamScalars& s) {
  bool usual = m_largest <= kMostNumerator && v_largest <= kMostRoot && s.eps <= 0x1p40f;
#pragma unroll
  for (int i = 0; i < kEight; ++i) usual = usual && x.v[i] >= kLeastRoot && fabsf(x.m[i]) >= kLeastNumerator;
  return usual;
}

// The same, where some may be zero: rows of an embedding whose tokens have not come yet, and the end of a
// tensor.
MEMKERN_DEVICE bool adam_usual_or_zero(const AdamEight& x, float m_largest, float v_largest,
                                       const AdamScalars& s) {
  bool usual =
      m_largest <= kMostNumerator && v_largest <= kMostRoot && s.eps <= 0x1p40f && s.eps >= kLeastDenominator;
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    usual = usual && (x.v[i] == 0.0f || x.v[i] >= kLeastRoot);
    usual = usual && (x.m[i] == 0.0f || fabsf(x.m[i]) >= kLeastNumerator);
  }
  return usual;
}

// Calls `work` with the number type to reckon these with: a value of it, which says no more than its type.
template <class Work> MEMKERN_DEVICE void with_numbers(const AdamEight& x, int n, float m_largest,
                                                       float v_largest, const AdamScalars& s, Work work) {
  if (n == 0 || adam_usual(x, m_largest, v_largest, s))
    work(Usual(0.0f));
  else if (adam_usual_or_zero(x, m_largest, v_largest, s))
    work(UsualOrZero(0.0f));
  else
    work(0.0f);
}

template <StateKind Kind, class Rule, class P, class G>
MEMKERN_DEVICE void adam_coded(const TileWork<typename Rule::Tensor>& work, P param_type, G grad_type,
                               Group group) {
  constexpr bool kPower = Kind == StateKind::kPower;
  const TensorRecord& t = work.tensor;
  const typename Rule::Scalars& s = work.scalars.scalars;
  const Rounding rounding{false, work.scalars.step};
  const Halves half(group);
  const int levels = half.own(kPowerLevelsSigned, kPowerLevelsUnsigned);
  const bool aligned = t.aligned && on_16_bytes(work.grad);
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
      AdamEight x = adam_load<Kind>(work, param_type, grad_type, at, m_unit, v_unit);
      float m_here = largest_of<true>(x.m), v_here = largest_of<false>(x.v), w[kEight];
      with_numbers(x, at.n, m_here, v_here, s,
                   [&](auto number) { adam_params<Rule, decltype(number)>(x, w, s); });
      if (last) store_floats(t.param, param_type, at, x.p);
      if (first) {
        if (!(is_finite(m_here) && is_finite(v_here))) {
          finite = false;
          m_here = largest_finite<true>(x.m);
          v_here = largest_finite<false>(x.v);
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
        Codes m_codes, v_codes;
        encode_both<Kind>(x.m, m_factor, kPower ? w : x.v, v_factor, finite, j, rounding, m_codes, v_codes);
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
    AdamEight x = adam_load_fp32(t, grad, at, s);
    float w[kEight];
    adam_params<Rule, float>(x, w, s);
    store_floats(t.param, t.param_type, at, x.p);
    store_floats(t.exp_avg, FloatType::kFp32, at, x.m);
    store_floats(t.exp_avg_sq, FloatType::kFp32, at, x.v);
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
