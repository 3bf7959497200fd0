// The update of a tile with Adam's two moments, for Adam and LAMB. A Rule has the update of the parameter.
// The first half of the file takes every tensor. The second half, adam_update_main_path, takes the tensors
// whose `main_path` is set (main_path.cuh), with the same results in three quarters of the instructions.
#pragma once
#include "block_state.cuh"
#include "core/adam.h"
#include "fast_path.cuh"
#include "main_path.cuh"
#include "step_table.cuh"
#include "weights.cuh"

namespace memkern {

// A vector of 8 elements in registers: parameter, gradient and moments in fp32.
struct AdamVector {
  float p[kVector], g[kVector], m[kVector], v[kVector];
};

// Whether gradients enter the moments unchanged.
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

// Loads a vector and updates its moments. m_unit, v_unit: decode_unit of its block, with the moments' decay.
template <StateKind Kind, class Tensor, class P, class G>
MEMKERN_DEVICE AdamVector adam_load(const TileWork<Tensor>& work, P param_type, G grad_type, const Span& at,
                                    float m_unit, float v_unit) {
  const TensorRecord& t = work.tensor;
  RawWeights<P> p;
  Raw g;
  Codes m, v;
  const Alignment alignment = alignment_of(work.grad, at);
  with_constant_span(at, [&](const Span& span) {
    p = load_weights(t, param_type, span);
    g = load_gradient(work.grad, grad_type, span, alignment);
    m = load_codes(t.m, span);
    v = load_codes(t.v, span);
  });
  AdamVector x;
  join_weights(t, param_type, p, x.p);
  gradient_to_floats(g, grad_type, alignment, x.g);
  decode<Kind, true>(m, m_unit, x.m);
  decode<Kind, false>(v, v_unit, x.v);
  if constexpr (is_power(Kind))
    for (float& w : x.v) w = w * w;  // power codes hold w = sqrt(v)
  adam_update_moments(x, work.stepped.scalars, plain_gradients(work.stepped.scalars));
  return x;
}

template <class P> MEMKERN_DEVICE AdamVector adam_load_fp32(const TensorRecord& t, P param_type,
                                                            const void* grad, const Span& at,
                                                            const AdamScalars& s) {
  const Alignment alignment = alignment_of(grad, at);
  const auto p = load_weights(t, param_type, at);
  const Raw g = load_gradient(grad, t.grad_type, at, alignment);
  AdamVector x;
  load_floats(t.m, FloatType::kFp32, at, x.m);
  load_floats(t.v, FloatType::kFp32, at, x.v);
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

// Whether roots and divisions of all 8 elements are within the range of Fast (fast_path.cuh). m_absmax and
// v_absmax are the vector's, and NaN if an element is; then the comparison is false. With v from 2^-101 to
// 2^40 and eps from 0 to 2^20 the denominator sqrt(v) + eps is from 2^-50.5 to 2^21: within the range, too.
MEMKERN_DEVICE bool in_fast_range(const AdamVector& x, float m_absmax, float v_absmax, const AdamScalars& s) {
  bool fast = m_absmax <= kMaxNumerator && v_absmax <= kMaxRadicand && s.eps <= kMaxDenominator / 2;
#pragma unroll
  for (int i = 0; i < kVector; ++i) fast = fast && x.v[i] >= kMinRadicand && fabsf(x.m[i]) >= kMinNumerator;
  return fast;
}

// Whether roots and divisions are within the range of FastOrZero, which has zeros of m and v as well: they
// are common in rows of an embedding whose tokens have not occurred yet, and fill up the last vector of a
// tensor. The denominator of v = 0 is eps alone, so that eps has a lower bound here.
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

// Calls work(number), where the type of `number` (its value has no meaning) is the fastest one whose
// division and root are correctly rounded for this vector: Fast, FastOrZero or float. With n = 0 elements
// nothing is stored, so that any type will do.
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
MEMKERN_DEVICE void adam_update_8bit(const TileWork<typename Rule::Stepped>& work, P param_type, G grad_type,
                                     LaneGroup group) {
  constexpr bool kPower = is_power(Kind);
  const TensorRecord& t = work.tensor;
  const typename Rule::Scalars& s = work.stepped.scalars;
  const Rounding rounding{false, work.stepped.step};
  const MomentHalves half(group);
  const int levels = half.pick(levels_of(true), levels_of(false));
  for_each_block(t.blocks, work.tile, group, [&](const BlockSpan& block) {
    float* const scale = half.pick(t.m_scale, t.v_scale) + block.index;
    const float decay = half.pick(s.beta1, kPower ? s.root_beta2 : s.beta2);
    float m_unit, v_unit;
    half.exchange(decode_unit<Kind>(__ldcs(scale), decay, levels), m_unit, v_unit);
    float m_absmax = 0.0f, v_absmax = 0.0f, m_factor = 0.0f, v_factor = 0.0f;
    bool finite = true;
    // A block of one vector per lane takes one iteration, which finds the maxima and stores the vector. A
    // larger block does not fit into registers. Its first `vectors` iterations (max_pass) update the vectors
    // for their maxima, and the last of these makes the new scales. As many more (store_pass) load and
    // update the same vectors again, and store them.
    const int iterations = group.vectors == 1 ? 1 : 2 * group.vectors;
    for (int iteration = 0; iteration < iterations; ++iteration) {
      const bool max_pass = iteration < group.vectors, store_pass = iteration >= iterations - group.vectors;
      const int j =
          ((max_pass ? iteration : iteration - group.vectors) * group.width() + group.lane()) * kVector;
      const Span at = span_of(block.start + j, block.n - j, t.aligned);
      AdamVector x = adam_load<Kind>(work, param_type, grad_type, at, m_unit, v_unit);
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
      if (iteration == group.vectors - 1) {  // the last max_pass
        float absmax = half.maximum(m_absmax, v_absmax);
        if (kPower && half.upper) absmax = sqrt(absmax);  // of w
        half.exchange(encode_factor<Kind>(absmax, levels), m_factor, v_factor);
        // The first lane of each half of the group stores the scale of its half's moment.
        if ((group.lane() & (half.distance - 1)) == 0 && block.n > 0) __stcs(scale, absmax);
      }
      if (store_pass) {
        Codes m_codes, v_codes;
        encode_both<Kind>(x.m, m_factor, kPower ? w : x.v, v_factor, finite, j, rounding, m_codes, v_codes);
        with_constant_span(at, [&](const Span& span) {
          store_codes(t.m, span, m_codes);
          store_codes(t.v, span, v_codes);
        });
      }
    }
  });
}

template <class Rule, class P>
MEMKERN_DEVICE void adam_update_fp32(const TileWork<typename Rule::Stepped>& work, P param_type) {
  const TensorRecord& t = work.tensor;
  const typename Rule::Scalars s = work.stepped.scalars;
  const void* const grad = work.grad;
  for_each_vector(t.numel, work.tile_index, t.blocks.tile_elements, t.aligned, [&](const Span& at) {
    AdamVector x = adam_load_fp32(t, param_type, grad, at, s);
    float w[kVector];
    adam_update_params<Rule, float>(x, w, s);
    store_weights(
        t, param_type, at, work.stepped.step,
        [&](int i) { return position_in_block(t.blocks, at.offset + i); }, x.p);
    store_floats(t.m, FloatType::kFp32, at, x.m);
    store_floats(t.v, FloatType::kFp32, at, x.v);
  });
}

// ---- the main path (main_path.cuh)

// How a thread holds a tensor's constants: as a copy in registers, or as a reference to shared memory
// (TileWork) where the registers do not suffice:
//   before sm_90      for all types
//   from sm_90 on     for kScarce: bf16 whose gradient is not aligned to 16 bytes, so that it is not copied
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
template <class Scalars, class P, class G, Loads How> using HeldScalars = const Scalars&;
#else
template <class Scalars, class P, class G, Loads How> using HeldScalars =
    std::conditional_t<kScarce<P, G, How>, const Scalars&, const Scalars>;
#endif

// A tile's vectors, with the constants that all of them need.
template <class Scalars, class P, class G, Loads How, StateKind Kind = StateKind::kPower> struct AdamMainPath
    : LaneVectors<Kind, P, G, How> {
  HeldScalars<Scalars, P, G, How> s;
  bool plain;

  template <class Work> MEMKERN_DEVICE AdamMainPath(const Work& work, P param_type, G grad_type)
      : LaneVectors<Kind, P, G, How>(work, param_type, grad_type, &work.stepped.scalars.beta1,
                                     &work.stepped.scalars.root_beta2),
        s(work.stepped.scalars),
        plain(!any_lane(!plain_gradients(s))) {}

  // Calls work(vector) for each vector, with its moments updated. `work` returns the scale to be stored, or
  // nothing.
  template <class Work> MEMKERN_DEVICE void for_each(Work&& work) {
    this->for_each_loaded([&](const Loaded<P>& loaded) { return work(update(loaded)); });
  }

 private:
  MEMKERN_DEVICE AdamVector update(const Loaded<P>& loaded) const {
    const auto& [p, g, m, v] = loaded;
    const float m_unit = this->unit(0), v_unit = this->unit(1);
    AdamVector x;
    join_weights(this->tensor, this->param_type, p, x.p);
    gradient_to_floats(g, this->grad_type, this->grad_alignment(), x.g);
    decode<StateKind::kPower, true>(m, m_unit, x.m);
    decode_root(v, v_unit, x.v);
#pragma unroll
    for (float& w : x.v) w = w * w;  // power codes hold w = sqrt(v)
    adam_update_moments(x, s, plain);
    return x;
  }
};

// The magnitudes of a vector's moments. m_max is NaN if any m is; v_max or v_min is NaN if any v is.
struct AdamRange {
  float m_min, m_max, v_min, v_max;

  MEMKERN_DEVICE explicit AdamRange(const AdamVector& x)
      : m_min(absmin(x.m)), m_max(absmax_or_nan<true>(x.m)) {
    min_and_max(x.v, v_min, v_max);
  }
  // Whether roots and divisions of all 8 elements are within the range of Fast (fast_path.cuh). max_radicand
  // is kMaxRadicand, or -1 for a tensor whose scalars are out of the range: then no vector is fast.
  MEMKERN_DEVICE bool is_fast(float max_radicand) const {
    return m_min >= kMinNumerator && m_max <= kMaxNumerator && v_min >= kMinRadicand && v_max <= max_radicand;
  }
};

// Whether a tensor's scalars are within Fast's range: eps, a part of the denominator w + eps, and, if
// `changes`, the step size. `changes`: whether parameters are rounded from approximations
// (adam_round_params), for which a parameter's change, step_size * m / (w + eps), has to be a normal number
// or zero.
template <class Scalars> MEMKERN_DEVICE bool fast_scalars(const Scalars& s, bool changes) {
  return s.eps >= kMinDenominator && s.eps <= kMaxDenominator / 2 &&
         (!changes || s.step_size == 0.0f || fabsf(s.step_size) >= kMinStepSize);
}

// Rounds parameters to bf16 without an exact root and an exact division, which would take seven instructions
// more. The approximate change is off by at most 10 * 2^-24 of itself, less than 2^-20 = 16 * 2^-24, so that
// the exact one is between 1 - 2^-20 and 1 + 2^-20 times the approximate one. Rounding is monotone: where
// both ends of this range give the same parameter, the exact change gives it too. Returns whether the ends
// agree for all elements. w: the approximate roots.
template <class Rule> MEMKERN_DEVICE bool adam_round_params(const AdamVector& x,
                                                            const typename Rule::Scalars& s,
                                                            float (&w)[kVector], Raw& rounded) {
  typename Rule::Scalars less = s, more = s;  // with the smallest and the largest possible change
  less.step_size = s.step_size * (1.0f - 0x1p-20f);
  more.step_size = s.step_size * (1.0f + 0x1p-20f);
  float p_less[kVector], p_more[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const Approximate old(x.p[i]), m(x.m[i]), root = sqrt(Approximate(x.v[i]));
    w[i] = static_cast<float>(root);
    p_less[i] = static_cast<float>(Rule::param(old, m, root, less));
    p_more[i] = static_cast<float>(Rule::param(old, m, root, more));
  }
  constexpr ConstantType<FloatType::kBf16> bf16;
  rounded = to_raw(p_less, bf16);
  const Raw rounded_more = to_raw(p_more, bf16);
  uint32_t differ = 0;
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) differ |= rounded.word[i] ^ rounded_more.word[i];
  return differ == 0;
}

// The cases that are checked once a vector of the warp is not fast. zeros: v may have zeros, which
// encode_positive gives a code above 0. nonfinite: m or v has NaN or infinity; the maxima are then over
// finite values.
struct AdamRareCases {
  bool zeros = false, nonfinite = false;

  MEMKERN_DEVICE void check(const AdamVector& x, float& m_absmax, float& v_absmax) {
    zeros = true;
    v_absmax = absmax_or_nan<false>(x.v);
    if (is_finite(m_absmax) && is_finite(v_absmax)) return;
    nonfinite = true;
    m_absmax = finite_absmax<true>(x.m);
    v_absmax = finite_absmax<false>(x.v);
  }
};

// Gives the bits of adam_update_8bit. Usually all vectors of a warp are fast and, with kRounded, their
// parameters certain. Otherwise the warp takes a branch, in which each lane chooses for its own vector:
//   kRounded    the parameters that adam_round_params has made, or else the formula in float
//   others      Fast, FastOrZero or float (with_float_type)
// The codes are made by sums with a table. Another branch makes those anew that the sums may get wrong.
template <StateKind Kind, class Rule, Loads How, class P, class G>
MEMKERN_DEVICE void adam_update_main_path(const TileWork<typename Rule::Stepped>& work, P param_type,
                                          G grad_type) {
  // Whether parameters are rounded from approximations. Then w has approximate roots, except where a lane
  // has applied the formula; without kRounded w has the exact roots.
  constexpr bool kRounded = Rule::kOneProduct && std::is_same_v<P, ConstantType<FloatType::kBf16>>;
  constexpr int kRootLevels = levels_of(false);
  constexpr uint32_t kRootBias = kBias<kRootLevels, kRounded>;
  AdamMainPath<typename Rule::Scalars, P, G, How, Kind> at(work, param_type, grad_type);
  const auto& s = at.s;
  const uint32_t step = work.stepped.step;
  const float max_radicand = fast_scalars(s, kRounded) ? kMaxRadicand : -1.0f;
  DitherTable& dithers = dither_table();
  dithers.template fill<at.kParts>(step, kRootBias);
  const LaneDithers<decltype(at)> dither{at, {false, step}};
  at.for_each([&](AdamVector x) {
    const AdamRange range(x);
    const bool fast = range.is_fast(max_radicand);
    float m_absmax = range.m_max, v_absmax = range.v_max, w[kVector];
    AdamRareCases rare;
    if constexpr (kRounded) {
      Raw rounded;
      const bool certain = adam_round_params<Rule>(x, s, w, rounded);
      if (any_lane(!(fast && certain))) {
        rare.check(x, m_absmax, v_absmax);
        // `rounded` is right if it is certain and the elements are zero or fast. Else it is overwritten.
        if (!(certain && max_radicand > 0.0f && in_fast_range_or_zero(x, m_absmax, v_absmax, s))) {
          adam_update_params<Rule, float>(x, w, s);
          rounded = to_raw(x.p, param_type);
        }
      }
      if (at.exists()) store_raw(at.tensor.param, param_type, at.place(), rounded);
    } else {
      if (any_lane(!fast)) {
        with_float_type(x, kVector, m_absmax, v_absmax, s,
                        [&](auto number) { adam_update_params<Rule, decltype(number)>(x, w, s); });
        rare.check(x, m_absmax, v_absmax);
      } else {
        adam_update_params<Rule, Fast>(x, w, s);
      }
      if (at.exists())
        store_weights(
            at.tensor, param_type, at.place(), step,
            [&](int i) { return static_cast<uint32_t>(at.position(i)); }, x.p);
    }
    float scale = at.half.maximum(m_absmax, v_absmax), m_factor, v_factor;
    at.half.exchange(at.formula.factor(scale), m_factor, v_factor);
    PositiveSums v_sums;
    SignedSums m_sums;
    Codes v_codes = encode_positive(w, v_factor, dithers, at.lane, v_sums),
          m_codes = encode_signed(x.m, m_factor, dithers, at.lane, m_sums);
    // A code may be wrong if its sum is in doubt (vector_codes.cuh), v is 0 or a value is not finite.
    if (any_lane(v_sums.min_fraction < 2 * kRootBias || m_sums.min_fraction < 2 * kSignedBias ||
                 rare.zeros)) {
      const auto root = [&](int i) { return kRounded ? sqrt(x.v[i]) : w[i]; };  // the exact one
      recompute_doubtful(v_sums, kRootBias, v_codes, [&](int i) {
        return static_cast<uint32_t>(power_encode_unsigned<kRootLevels>(root(i), v_factor, dither.u(i)));
      });
      recompute_doubtful(m_sums, kSignedBias, m_codes, [&](int i) {
        const float code = power_encode_signed(x.m[i], m_factor, dither.one_minus_u(i));
        return static_cast<uint32_t>(static_cast<int>(code));
      });
      // Approximate roots are 0 for v = 0 alone: a v from 2^-149 to 2^-101 has had the exact root.
      v_codes = clear_zeros(w, v_factor, v_codes);
      if (rare.nonfinite) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) w[i] = root(i);
        m_codes = encode_exactly<Kind, true>(x.m, m_factor, 0, dither);
        v_codes = encode_exactly<Kind, false>(w, v_factor, 0, dither);
      }
    }
    if (at.exists()) store_codes(at.tensor.m, at.place(), m_codes);
    if (at.exists()) store_codes(at.tensor.v, at.place(), v_codes);
    return scale;
  });
}

// A tile of 8-bit states.
template <StateKind Kind, class Rule, class P, class G, class Group>
MEMKERN_DEVICE void adam_update(const TileWork<typename Rule::Stepped>& work, P param_type, G grad_type,
                                Group group) {
  if constexpr (is_power(Kind) && std::is_same_v<Group, SixteenLanes>)
    if (any_lane(work.tensor.main_path))
      return with_loads(work, param_type, grad_type, [&](auto how) {
        adam_update_main_path<Kind, Rule, how.value>(work, param_type, grad_type);
      });
  adam_update_8bit<Kind, Rule>(work, param_type, grad_type, group);
}

}  // namespace memkern
