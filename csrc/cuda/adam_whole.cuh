// The update of a tile with Adam's two moments on the main path (whole_blocks.cuh): the results of
// adam_update_8bit, in three quarters of its instructions.
#pragma once
#include "adam_update.cuh"
#include "whole_blocks.cuh"

namespace memkern {

// A vector of a tensor and its moments, and its block's scale, as they are in memory.
template <class P> struct AdamLoaded {
  float scale;
  RawWeights<P> p;
  Raw g;
  Codes m, v;
};

// A tile's vectors, with the constants that all of them need.
template <class Scalars, class P, class G, StateKind Kind = StateKind::kPower> struct AdamWhole
    : WholeVectors<Kind, P, G> {
  Scalars s;
  bool plain;

  template <class Work> MEMKERN_DEVICE AdamWhole(const Work& work, P param_type, G grad_type)
      : WholeVectors<Kind, P, G>(work, param_type, grad_type, work.scalars.scalars.beta1,
                                 work.scalars.scalars.root_beta2),
        s(work.scalars.scalars),
        plain(!any_lane(!plain_gradients(s))) {}

  // Calls work(vector) for each vector, with its moments updated. All loads of the next one are under way
  // meanwhile: four thread blocks of a multiprocessor that load ahead hide more of the memory's latency than
  // five that do not, which is all that registers allow.
  template <class Work> MEMKERN_DEVICE void for_each(Work&& work) {
    AdamLoaded<P> next = load(0);
    for (int round = 0; round < this->rounds; ++round, this->next()) {
      const AdamLoaded<P> loaded = next;
      this->find_next();
      next = load(this->kGroups);
      work(update(loaded));
    }
  }

 private:
  // The vector ahead, in the block so many on.
  MEMKERN_DEVICE AdamLoaded<P> load(int blocks_on) const {
    const Span at{this->ahead.offset, kVector, true};
    return {this->load_scale(blocks_on), load_weights(this->tensor, this->param_type, at),
            load_gradient(this->grad, this->grad_type, at, this->grad_alignment),
            load_codes(this->tensor.exp_avg, at), load_root_codes<Kind>(this->tensor.exp_avg_sq, at)};
  }

  MEMKERN_DEVICE AdamVector update(const AdamLoaded<P>& loaded) const {
    const auto& [scale, p, g, m, v] = loaded;
    float m_unit, v_unit;
    this->half.exchange(this->formula.unit(scale), m_unit, v_unit);
    AdamVector x;
    join_weights(this->tensor, this->param_type, p, x.p);
    gradient_to_floats(g, this->grad_type, this->grad_alignment, x.g);
    decode<StateKind::kPower, true>(m, m_unit, x.m);
    decode_root<Kind>(v, v_unit, x.v);
#pragma unroll
    for (float& w : x.v) w = w * w;
    adam_update_moments(x, s, plain);
    return x;
  }
};

// The magnitudes of a vector's moments.
struct AdamRange {
  float m_least, m_most, v_least, v_most;  // m_most is NaN if any m is

  MEMKERN_DEVICE explicit AdamRange(const AdamVector& x)
      : m_least(absmin(x.m)), m_most(absmax_or_nan<true>(x.m)) {
    least_and_most(x.v, v_least, v_most);
  }
  // Whether roots and divisions of all 8 elements are within the range of Fast (fast_path.cuh).
  MEMKERN_DEVICE bool is_fast(float max_radicand) const {
    return m_least >= kMinNumerator && m_most <= kMaxNumerator && v_least >= kMinRadicand &&
           v_most <= max_radicand;
  }
};

// Whether divisions by w + eps and the changes of a parameter are within that range too. `changes`: whether
// these are rounded from approximations, where they have to be normal numbers or zero.
template <class Scalars> MEMKERN_DEVICE bool fast_scalars(const Scalars& s, bool changes) {
  return s.eps >= kMinDenominator && s.eps <= kMaxDenominator / 2 &&
         (!changes || s.step_size == 0.0f || fabsf(s.step_size) >= kMinStepSize);
}

// Rounds parameters to bf16 without an exact root and an exact division, which would take seven instructions
// more. The approximate change is off by at most 10 * 2^-24 of itself, so that the exact one is between 1 -
// 2^-20 and 1 + 2^-20 times the approximate one. Where parameters with either change are rounded to the same
// ones, these are the formula's; returns whether all are.
template <class Rule> MEMKERN_DEVICE bool adam_round_params(const AdamVector& x,
                                                            const typename Rule::Scalars& s,
                                                            float (&w)[kVector], Raw& rounded) {
  typename Rule::Scalars less = s, more = s;
  less.step_size = s.step_size * (1.0f - 0x1p-20f);
  more.step_size = s.step_size * (1.0f + 0x1p-20f);
  float p[kVector], other_p[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const Approximate old(x.p[i]), m(x.m[i]), root = sqrt(Approximate(x.v[i]));
    w[i] = static_cast<float>(root);
    p[i] = static_cast<float>(Rule::param(old, m, root, less));
    other_p[i] = static_cast<float>(Rule::param(old, m, root, more));
  }
  constexpr ConstantType<FloatType::kBf16> bf16;
  rounded = to_raw(p, bf16);
  const Raw other = to_raw(other_p, bf16);
  uint32_t differ = 0;
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) differ |= rounded.word[i] ^ other.word[i];
  return differ == 0;
}

// Where a vector is out of the range: its maxima over finite values, and in what its codes need care.
struct AdamCare {
  float zeros = 0.0f, farthest = 0.0f;  // farthest: of estimate_positive()

  MEMKERN_DEVICE void look(const AdamVector& x, float& m_absmax, float& v_absmax) {
    zeros = 1.0f;
    v_absmax = absmax_or_nan<false>(x.v);
    if (is_finite(m_absmax) && is_finite(v_absmax)) return;
    farthest = 1.0f;
    m_absmax = finite_absmax<true>(x.m);
    v_absmax = finite_absmax<false>(x.v);
  }
};

template <StateKind Kind, class Rule, class P, class G>
MEMKERN_DEVICE void adam_update_whole(const TileWork<typename Rule::Tensor>& work, P param_type,
                                      G grad_type) {
  constexpr bool kRounded = Rule::kOneProduct && std::is_same_v<P, ConstantType<FloatType::kBf16>>;
  constexpr float kSure = kCertain<kLevels<Kind, false>, kRounded>;
  AdamWhole<typename Rule::Scalars, P, G, Kind> at(work, param_type, grad_type);
  const auto& s = at.s;
  const uint32_t step = work.scalars.step;
  const float max_radicand = fast_scalars(s, kRounded) ? kMaxRadicand : -1.0f;
  DitherTable& dithers = dither_table();
  dithers.fill(step);
  at.for_each([&](AdamVector x) {
    const AdamRange range(x);
    const bool fast = range.is_fast(max_radicand);
    float m_absmax = range.m_most, v_absmax = range.v_most, w[kVector];
    AdamCare care;
    if constexpr (kRounded) {
      Raw rounded;
      const bool certain = adam_round_params<Rule>(x, s, w, rounded);
      if (any_lane(!(fast && certain))) {
        care.look(x, m_absmax, v_absmax);
        if (!(certain && max_radicand > 0.0f && in_fast_range_or_zero(x, m_absmax, v_absmax, s))) {
          adam_update_params<Rule, float>(x, w, s);
          rounded = to_raw(x.p, param_type);
        }
      }
      if (at.exists()) store_raw(at.tensor.param, param_type, at.span(), rounded);
    } else {
      if (any_lane(!fast)) {
        with_float_type(x, kVector, m_absmax, v_absmax, s,
                        [&](auto number) { adam_update_params<Rule, decltype(number)>(x, w, s); });
        care.look(x, m_absmax, v_absmax);
      } else {
        adam_update_params<Rule, Fast>(x, w, s);
      }
      if (at.exists())
        store_weights(
            at.tensor, param_type, at.span(), step,
            [&](int i) { return static_cast<uint32_t>(at.position() + i); }, x.p);
    }
    float scale = at.half.maximum(m_absmax, v_absmax), m_factor, v_factor;
    at.half.exchange(at.formula.factor(scale), m_factor, v_factor);
    Codes v_codes = estimate_positive(w, v_factor, dithers, at.lane, care.farthest),
          m_codes = encode_signed(x.m, m_factor, dithers, at.lane);
    if (any_lane(!(care.farthest < kSure && care.zeros == 0.0f))) {
      v_codes = clear_zeros(w, v_factor, v_codes);
      if (!(care.farthest < kSure)) {
        if constexpr (kRounded)
          for (int i = 0; i < kVector; ++i) w[i] = sqrt(x.v[i]);
        m_codes = encode_exactly<Kind, true>(x.m, m_factor, at.position(), dithers);
        v_codes = encode_exactly<Kind, false>(w, v_factor, at.position(), dithers);
      }
    }
    if (at.exists()) store_codes(at.tensor.exp_avg, at.span(), m_codes);
    if (at.exists()) store_root_codes<Kind>(at.tensor.exp_avg_sq, at.span(), v_codes);
    if (at.stores_scale()) __stcs(at.scale(), scale);
  });
}

// A tile of 8-bit states.
template <StateKind Kind, class Rule, class P, class G, class Group>
MEMKERN_DEVICE void adam_update(const TileWork<typename Rule::Tensor>& work, P param_type, G grad_type,
                                Group group) {
  if constexpr (is_power(Kind) && std::is_same_v<Group, SixteenLanes>)
    if (any_lane(work.tensor.main_path)) return adam_update_whole<Kind, Rule>(work, param_type, grad_type);
  adam_update_8bit<Kind, Rule>(work, param_type, grad_type, group);
}

}  // namespace memkern
