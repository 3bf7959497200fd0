// The update of a tile with one moment, for Lion, SGD and LARS. A Rule has the update of the parameter and
// the moment. The first half of the file takes every tensor. The second half, lion_update_main_path, takes
// the tensors whose `main_path` is set; it loads the next vector early and has the dithers in a table.
#pragma once
#include "block_state.cuh"
#include "main_path.cuh"
#include "step_table.cuh"
#include "weights.cuh"

namespace memkern {

// A vector of 8 elements in registers: parameter, gradient and moment in fp32.
struct LionVector {
  float p[kVector], g[kVector], m[kVector];
};

// Loads a vector. unit: decode_unit of its block. with_m = false: m is not needed, and is 0.
template <StateKind Kind, class Tensor, class P, class G>
MEMKERN_DEVICE LionVector lion_load(const TileWork<Tensor>& work, P param_type, G grad_type, const Span& at,
                                    float unit, bool with_m = true) {
  const TensorRecord& t = work.tensor;
  RawWeights<P> p;
  Raw g;
  Codes m{0, 0};
  const Alignment alignment = alignment_of(work.grad, at);
  with_constant_span(at, [&](const Span& span) {
    p = load_weights(t, param_type, span);
    g = load_gradient(work.grad, grad_type, span, alignment);
    if (with_m) m = load_codes(t.m, span);
  });
  LionVector x;
  join_weights(t, param_type, p, x.p);
  gradient_to_floats(g, grad_type, alignment, x.g);
  decode<Kind, true>(m, unit, x.m);
  return x;
}

template <class Rule> MEMKERN_DEVICE void lion_update_vector(LionVector& x, const typename Rule::Scalars& s) {
  typename Rule::Scalars unscaled = s;
  unscaled.grad_factor = 1.0f;
  // One branch for the whole vector: most steps do not scale gradients, and 1 as a constant saves a
  // multiplication each.
  if (s.grad_factor == 1.0f) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) Rule::update(x.p[i], x.g[i], x.m[i], unscaled);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) Rule::update(x.p[i], x.g[i], x.m[i], s);
  }
}

template <StateKind Kind, class Rule, class P, class G>
MEMKERN_DEVICE void lion_update_8bit(const TileWork<typename Rule::Stepped>& work, P param_type, G grad_type,
                                     LaneGroup group) {
  const TensorRecord& t = work.tensor;
  const typename Rule::Scalars& s = work.stepped.scalars;
  const Rounding rounding{false, work.stepped.step};
  for_each_block(t.blocks, work.tile, group, [&](const BlockSpan& block) {
    const float unit = decode_unit<Kind>(__ldcs(t.m_scale + block.index), 1.0f, kPowerLevelsSigned);
    float absmax = 0.0f, factor = 0.0f;
    bool finite = true;
    // A block of one vector per lane is updated once. A larger block does not fit into registers: it is
    // updated once for its maximum (max_pass) and, with the new scale known, again to be stored (store_pass).
    const int iterations = group.vectors == 1 ? 1 : 2 * group.vectors;
    for (int iteration = 0; iteration < iterations; ++iteration) {
      const bool max_pass = iteration < group.vectors, store_pass = iteration >= iterations - group.vectors;
      const int j =
          ((max_pass ? iteration : iteration - group.vectors) * group.width() + group.lane()) * kVector;
      const Span at = span_of(block.start + j, block.n - j, t.aligned);
      LionVector x = lion_load<Kind>(work, param_type, grad_type, at, unit);
      lion_update_vector<Rule>(x, s);
      if (max_pass) {
        float vector_max = absmax_or_nan<true>(x.m);
        if (!is_finite(vector_max)) {
          finite = false;
          vector_max = finite_absmax<true>(x.m);
        }
        absmax = fmaxf(absmax, vector_max);
      }
      if (iteration == group.vectors - 1) {
        absmax = max_over_lanes(absmax, group.width() / 2);
        factor = encode_factor<Kind>(absmax, kPowerLevelsSigned);
        if (group.lane() == 0 && block.n > 0) __stcs(t.m_scale + block.index, absmax);
      }
      if (store_pass) {
        const Codes codes = encode<Kind, true>(x.m, factor, finite, j, rounding);
        if constexpr (std::is_same_v<P, MasterWeights>) {
          store_weights(
              t, param_type, at, rounding.step, [&](int i) { return static_cast<uint32_t>(j + i); }, x.p);
          with_constant_span(at, [&](const Span& span) { store_codes(t.m, span, codes); });
        } else {
          const Raw p = to_raw(x.p, param_type);
          with_constant_span(at, [&](const Span& span) {
            store_raw(t.param, param_type, span, p);
            store_codes(t.m, span, codes);
          });
        }
      }
    }
  });
}

template <class Rule, class P>
MEMKERN_DEVICE void lion_update_fp32(const TileWork<typename Rule::Stepped>& work, P param_type) {
  const TensorRecord& t = work.tensor;
  const typename Rule::Scalars s = work.stepped.scalars;
  const void* const grad = work.grad;
  for_each_vector(t.numel, work.tile_index, t.blocks.tile_elements, t.aligned, [&](const Span& at) {
    const auto p = load_weights(t, param_type, at);
    LionVector x;
    load_floats(t.m, FloatType::kFp32, at, x.m);
    join_weights(t, param_type, p, x.p);
    load_gradient_floats(grad, t.grad_type, at, x.g);
    lion_update_vector<Rule>(x, s);
    store_weights(
        t, param_type, at, work.stepped.step,
        [&](int i) { return position_in_block(t.blocks, at.offset + i); }, x.p);
    store_floats(t.m, FloatType::kFp32, at, x.m);
  });
}

// ---- the main path (main_path.cuh)

template <class Rule, Loads How, class P, class G>
MEMKERN_DEVICE void lion_update_main_path(const TileWork<typename Rule::Stepped>& work, P param_type,
                                          G grad_type) {
  LaneVectors<StateKind::kPower, P, G, How, 1> at(work, param_type, grad_type);
  const typename Rule::Scalars& s = work.stepped.scalars;
  const uint32_t step = work.stepped.step;
  DitherTable& dithers = dither_table();
  dithers.template fill<at.kParts>(step, 0);
  const LaneDithers<decltype(at)> dither{at, {false, step}};
  at.for_each_loaded([&](const Loaded<P>& loaded) {
    LionVector x;
    join_weights(at.tensor, param_type, loaded.p, x.p);
    gradient_to_floats(loaded.g, grad_type, at.grad_alignment(), x.g);
    decode<StateKind::kPower, true>(loaded.m, at.unit(0), x.m);
    lion_update_vector<Rule>(x, s);
    float absmax = absmax_or_nan<true>(x.m);
    const bool finite = is_finite(absmax);
    if (any_lane(!finite)) absmax = finite_absmax<true>(x.m);
    float scale = max_over_lanes(absmax, kBlockLanes / 2);
    const float factor = at.formula.factor(scale);
    SignedSums sums;
    Codes codes = encode_signed(x.m, factor, dithers, at.lane, sums);
    recompute_doubtful(sums, kSignedBias, codes, [&](int i) {
      const float code = power_encode_signed(x.m[i], factor, dither.one_minus_u(i));
      return static_cast<uint32_t>(static_cast<int>(code));
    });
    if (any_lane(!finite)) codes = encode_exactly<StateKind::kPower, true>(x.m, factor, 0, dither);
    if (at.exists()) {
      store_weights(
          at.tensor, param_type, at.place(), step,
          [&](int i) { return static_cast<uint32_t>(at.position(i)); }, x.p);
      store_codes(at.tensor.m, at.place(), codes);
    }
    return scale;
  });
}

// A tile of 8-bit states.
template <StateKind Kind, class Rule, class P, class G, class Group>
MEMKERN_DEVICE void lion_update_tile(const TileWork<typename Rule::Stepped>& work, P param_type, G grad_type,
                                     Group group) {
  if constexpr (Kind == StateKind::kPower && std::is_same_v<Group, SixteenLanes>)
    if (any_lane(work.tensor.main_path))
      return with_loads(work, param_type, grad_type, [&](auto how) {
        lion_update_main_path<Rule, how.value>(work, param_type, grad_type);
      });
  lion_update_8bit<Kind, Rule>(work, param_type, grad_type, group);
}

}  // namespace memkern
