// The update of a tile with one moment on the main path (whole_blocks.cuh): the results of lion_update_8bit,
// with the loads of the next vector under way and the dithers in a table.
#pragma once
#include "lion_update.cuh"
#include "whole_blocks.cuh"

namespace memkern {

// A vector of a tensor and its moment, and its block's scale, as they are in memory.
template <class P> struct LionLoaded {
  float scale;
  RawWeights<P> p;
  Raw g;
  Codes m;
};

template <class P, class G> struct LionWhole : WholeVectors<StateKind::kPower, P, G, 1> {
  template <class Work> MEMKERN_DEVICE LionWhole(const Work& work, P param_type, G grad_type)
      : WholeVectors<StateKind::kPower, P, G, 1>(work, param_type, grad_type, 1.0f, 1.0f) {}

  // The vector ahead, in the block so many on.
  MEMKERN_DEVICE LionLoaded<P> load(int blocks_on) const {
    const Span at{this->ahead.offset, kVector, true};
    return {this->load_scale(blocks_on), load_weights(this->tensor, this->param_type, at),
            load_gradient(this->grad, this->grad_type, at, this->grad_alignment),
            load_codes(this->tensor.exp_avg, at)};
  }

  MEMKERN_DEVICE LionVector decoded(const LionLoaded<P>& loaded) const {
    LionVector x;
    join_weights(this->tensor, this->param_type, loaded.p, x.p);
    gradient_to_floats(loaded.g, this->grad_type, this->grad_alignment, x.g);
    decode<StateKind::kPower, true>(loaded.m, this->formula.unit(loaded.scale), x.m);
    return x;
  }
};

template <class Rule, class P, class G>
MEMKERN_DEVICE void lion_update_whole(const TileWork<typename Rule::Tensor>& work, P param_type,
                                      G grad_type) {
  LionWhole<P, G> at(work, param_type, grad_type);
  const typename Rule::Scalars s = work.scalars.scalars;
  const uint32_t step = work.scalars.step;
  DitherTable& dithers = dither_table();
  dithers.fill(step);
  LionLoaded<P> next = at.load(0);
  for (int round = 0; round < at.rounds; ++round, at.next()) {
    const LionLoaded<P> loaded = next;
    at.find_next();
    next = at.load(at.kGroups);
    LionVector x = at.decoded(loaded);
    lion_update_vector<Rule>(x, s);
    float absmax = absmax_or_nan<true>(x.m);
    const bool finite = is_finite(absmax);
    if (any_lane(!finite)) absmax = finite_absmax<true>(x.m);
    float scale = max_over_lanes(absmax, kWholeLanes / 2);
    const float factor = at.formula.factor(scale);
    Codes codes = encode_signed(x.m, factor, dithers, at.lane);
    if (any_lane(!finite))
      codes = encode_exactly<StateKind::kPower, true>(x.m, factor, at.position(), dithers);
    if (at.exists()) {
      store_weights(
          at.tensor, param_type, at.span(), step,
          [&](int i) { return static_cast<uint32_t>(at.position() + i); }, x.p);
      store_codes(at.tensor.exp_avg, at.span(), codes);
    }
    if (at.stores_scale()) __stcs(at.scale(), scale);
  }
}

// A tile of 8-bit states.
template <StateKind Kind, class Rule, class P, class G, class Group>
MEMKERN_DEVICE void lion_update_tile(const TileWork<typename Rule::Tensor>& work, P param_type, G grad_type,
                                     Group group) {
  if constexpr (Kind == StateKind::kPower && std::is_same_v<Group, SixteenLanes>)
    if (any_lane(work.tensor.main_path)) return lion_update_whole<Rule>(work, param_type, grad_type);
  lion_update_8bit<Kind, Rule>(work, param_type, grad_type, group);
}

}  // namespace memkern
