// The update of a tile with Adam's two moments, for Adam and LAMB: a Rule says how the parameter changes.
#pragma once
#include "block_state.cuh"
#include "core/adam.h"
#include "fast_path.cuh"
#include "step_table.cuh"
#include "weights.cuh"

namespace memkern {

// A vector of 8 elements in registers: parameter, gradient and moments in fp32.
struct AdamVector {
  float p[kVector], g[kVector], m[kVector], v[kVector];
};

// Whether moments see the gradients as they are.
MEMKERN_DEVICE bool plain_gradients(const AdamScalars& s) {
  return s.grad_factor == 1.0f && s.coupled_decay == 0.0f;
}

// m and v are already multiplied by beta1 and beta2.
MEMKERN_DEVICE void adam_update_moments(AdamVector& x, const AdamScalars& s, bool plain) {
  // One branch for the whole vector: most steps neither scale gradients nor have coupled decay, and applying
  // both to each element would take three instructions.
  if (!plain) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) x.g[i] = adam_gradient(x.g[i], x.p[i], s);
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) adam_moments(x.m[i], x.v[i], x.g[i], s);
}

// Loads a vector and updates its moments. v_at: where the second moment's codes are, of kPower4
// packed_span(). m_unit, v_unit: decode_unit of its block, with the moments' decay.
template <StateKind Kind, class Tensor, class P, class G>
MEMKERN_DEVICE AdamVector adam_load(const TileWork<Tensor>& work, P param_type, G grad_type, const Span& at,
                                    const Span& v_at, float m_unit, float v_unit) {
  const TensorRecord& t = work.tensor;
  RawWeights<P> p;
  Raw g;
  Codes m, v;
  const Alignment alignment = alignment_of(work.grad, at);
  with_constant_span(at, [&](const Span& span) {
    p = load_weights(t, param_type, span);
    g = load_gradient(work.grad, grad_type, span, alignment);
    m = load_codes(t.exp_avg, span);
    if constexpr (Kind != StateKind::kPower4) v = load_codes(t.exp_avg_sq, span);
  });
  if constexpr (Kind == StateKind::kPower4) v = unpack_pairs(load_pairs(t.exp_avg_sq, v_at));
  AdamVector x;
  join_weights(t, param_type, p, x.p);
  gradient_to_floats(g, grad_type, alignment, x.g);
  decode<Kind, true>(m, m_unit, x.m);
  decode<Kind, false>(v, v_unit, x.v);
  if constexpr (is_power(Kind))
    for (float& w : x.v) w = w * w;  // power codes hold w = sqrt(v)
  adam_update_moments(x, work.scalars.scalars, plain_gradients(work.scalars.scalars));
  return x;
}

template <class P> MEMKERN_DEVICE AdamVector adam_load_fp32(const TensorRecord& t, P param_type,
                                                            const void* grad, const Span& at,
                                                            const AdamScalars& s) {
  const Alignment alignment = alignment_of(grad, at);
  const auto p = load_weights(t, param_type, at);
  const Raw g = load_gradient(grad, t.grad_type, at, alignment);
  AdamVector x;
  load_floats(t.exp_avg, FloatType::kFp32, at, x.m);
  load_floats(t.exp_avg_sq, FloatType::kFp32, at, x.v);
  join_weights(t, param_type, p, x.p);
  gradient_to_floats(g, t.grad_type, alignment, x.g);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    x.m[i] = s.beta1 * x.m[i];
    x.v[i] = s.beta2 * x.v[i];
  }
  adam_update_moments(x, s, plain_gradients(s));
  return x;
}

// Updates the parameters; w = sqrt(v).
template <class Rule, class F>
MEMKERN_DEVICE void adam_update_params(AdamVector& x, float (&w)[kVector], const typename Rule::Scalars& s) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const F root = sqrt(F(x.v[i]));
    w[i] = static_cast<float>(root);
    x.p[i] = static_cast<float>(Rule::param(F(x.p[i]), F(x.m[i]), root, s));
  }
}

// Whether roots and divisions of all 8 elements are within the range of Fast (fast_path.cuh).
MEMKERN_DEVICE bool in_fast_range(const AdamVector& x, float m_absmax, float v_absmax, const AdamScalars& s) {
  bool fast = m_absmax <= kMaxNumerator && v_absmax <= kMaxRadicand && s.eps <= kMaxDenominator / 2;
#pragma unroll
  for (int i = 0; i < kVector; ++i) fast = fast && x.v[i] >= kMinRadicand && fabsf(x.m[i]) >= kMinNumerator;
  return fast;
}

// The same for FastOrZero: elements with m and v zero are common in rows of an embedding whose tokens have
// not occurred yet, and fill up the last vector of a tensor.
MEMKERN_DEVICE bool in_fast_range_or_zero(const AdamVector& x, float m_absmax, float v_absmax,
                                          const AdamScalars& s) {
  bool fast = m_absmax <= kMaxNumerator && v_absmax <= kMaxRadicand && s.eps <= kMaxDenominator / 2 &&
              s.eps >= kMinDenominator;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    fast = fast && (x.v[i] == 0.0f || x.v[i] >= kMinRadicand);
    fast = fast && (x.m[i] == 0.0f || fabsf(x.m[i]) >= kMinNumerator);
  }
  return fast;
}

// Calls work(number), where the type of `number` (its value has no meaning) is the fastest one whose division
// and root are correctly rounded for this vector: Fast, FastOrZero or float.
template <class Work> MEMKERN_DEVICE void with_float_type(const AdamVector& x, int n, float m_absmax,
                                                          float v_absmax, const AdamScalars& s, Work work) {
  if (n == 0 || in_fast_range(x, m_absmax, v_absmax, s))
    work(Fast(0.0f));
  else if (in_fast_range_or_zero(x, m_absmax, v_absmax, s))
    work(FastOrZero(0.0f));
  else
    work(0.0f);
}

template <StateKind Kind, class Rule, class P, class G>
MEMKERN_DEVICE void adam_update_8bit(const TileWork<typename Rule::Tensor>& work, P param_type, G grad_type,
                                     LaneGroup group) {
  constexpr bool kPower = is_power(Kind), kPacked = Kind == StateKind::kPower4;
  const TensorRecord& t = work.tensor;
  const typename Rule::Scalars& s = work.scalars.scalars;
  const Rounding rounding{false, work.scalars.step};
  const MomentHalves half(group);
  const int levels = half.pick(kLevels<Kind, true>, kLevels<Kind, false>);
  for_each_block(t.blocks, work.tile, group, [&](const BlockSpan& block) {
    float* const scale = half.pick(t.exp_avg_scale, t.exp_avg_sq_scale) + block.index;
    const float decay = half.pick(s.beta1, kPower ? s.root_beta2 : s.beta2);
    float m_unit, v_unit;
    half.exchange(decode_unit<Kind>(__ldcs(scale), decay, levels), m_unit, v_unit);
    const int64_t v_start = kPacked ? packed_offset(t.blocks.segment, t.blocks.block,
                                                    t.blocks.blocks_per_segment, block.start, block.index)
                                    : block.start;
    float m_absmax = 0.0f, v_absmax = 0.0f, m_factor = 0.0f, v_factor = 0.0f;
    bool finite = true;
    // A block of one vector per lane is updated once. A larger one does not fit into registers: it is updated
    // once for its maxima and, with the new scales known, again to be stored.
    const int iterations = group.vectors == 1 ? 1 : 2 * group.vectors;
    for (int iteration = 0; iteration < iterations; ++iteration) {
      const bool max_pass = iteration < group.vectors, store_pass = iteration >= iterations - group.vectors;
      const int j =
          ((max_pass ? iteration : iteration - group.vectors) * group.width() + group.lane()) * kVector;
      const Span at = span_of(block.start + j, block.n - j, t.aligned);
      const Span v_at = kPacked ? packed_span(v_start + j / 2, at.n, t.aligned) : at;
      AdamVector x = adam_load<Kind>(work, param_type, grad_type, at, v_at, m_unit, v_unit);
      float m_vector_max = absmax_or_nan<true>(x.m), v_vector_max = absmax_or_nan<false>(x.v), w[kVector];
      with_float_type(x, at.n, m_vector_max, v_vector_max, s,
                      [&](auto number) { adam_update_params<Rule, decltype(number)>(x, w, s); });
      if (store_pass)
        store_weights(
            t, param_type, at, rounding.step, [&](int i) { return static_cast<uint32_t>(j + i); }, x.p);
      if (max_pass) {
        if (!(is_finite(m_vector_max) && is_finite(v_vector_max))) {
          finite = false;
          m_vector_max = finite_absmax<true>(x.m);
          v_vector_max = finite_absmax<false>(x.v);
        }
        m_absmax = fmaxf(m_absmax, m_vector_max);
        v_absmax = fmaxf(v_absmax, v_vector_max);
      }
      if (iteration == group.vectors - 1) {
        float absmax = half.maximum(m_absmax, v_absmax);
        if (kPower && half.upper) absmax = sqrt(absmax);  // of w
        half.exchange(encode_factor<Kind>(absmax, levels), m_factor, v_factor);
        if ((group.lane() & (half.distance - 1)) == 0 && block.n > 0) __stcs(scale, absmax);
      }
      if (store_pass) {
        Codes m_codes, v_codes;
        encode_both<Kind>(x.m, m_factor, kPower ? w : x.v, v_factor, finite, j, rounding, m_codes, v_codes);
        with_constant_span(at, [&](const Span& span) {
          store_codes(t.exp_avg, span, m_codes);
          if constexpr (!kPacked) store_codes(t.exp_avg_sq, span, v_codes);
        });
        if constexpr (kPacked) store_packed(t.exp_avg_sq, v_at, v_codes);
      }
    }
  });
}

template <class Rule, class P>
MEMKERN_DEVICE void adam_update_fp32(const TileWork<typename Rule::Tensor>& work, P param_type) {
  const TensorRecord& t = work.tensor;
  const typename Rule::Scalars s = work.scalars.scalars;
  const void* const grad = work.grad;
  for_each_vector(t.numel, work.tile_index, t.blocks.tile_elements, t.aligned, [&](const Span& at) {
    AdamVector x = adam_load_fp32(t, param_type, grad, at, s);
    float w[kVector];
    adam_update_params<Rule, float>(x, w, s);
    store_weights(
        t, param_type, at, work.scalars.step,
        [&](int i) { return position_in_block(t.blocks, at.offset + i); }, x.p);
    store_floats(t.exp_avg, FloatType::kFp32, at, x.m);
    store_floats(t.exp_avg_sq, FloatType::kFp32, at, x.v);
  });
}

}  // namespace memkern
