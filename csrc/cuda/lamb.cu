// memkern::lamb_step_ on CUDA devices. Lower bound of a step's time: its bytes over the copy bandwidth. The
// first pass reads p, g, m and v, the second does so too and writes p, m and v: 26.19 bytes per parameter in
// fp32, 16.19 in bf16 (each moment: 1.03 with its scale).
#include "adam_update.cuh"
#include "common/ops.h"
#include "core/lamb.h"
#include "launch_trust_ratios.h"

namespace memkern {

using LambGroup = StepGroup<LambHyperparameters>;
using LambStepped = Stepped<LambScalars>;

struct LambRule {
  using Stepped = LambStepped;
  using Scalars = LambScalars;
  static constexpr bool kOneProduct = false;
  template <class F> static MEMKERN_DEVICE F param(F p, F m, F w, const Scalars& s) {
    return lamb_param(p, m, w, s);
  }
};

using LambTable = StepTable<LambGroup, LambStepped>;

// One thread per layer: computes the layer's scalars. layer_ratios increments the step, which a tensor's
// layers share.
static __global__ void lamb_prologue(LambTable table) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= table.count || skipped(*table.header)) return;
  const TensorRecord& t = table.tensors[i];
  const LambGroup& group = table.groups[t.group];
  const uint64_t step = static_cast<uint64_t>(*t.step + 1.0f);
  table.scalars[i] = {lamb_scalars(read(group.lr), group.h, gradient_factor(*table.header), step),
                      static_cast<uint32_t>(step)};
}

// Adds the squares of a vector's first n elements, whose moments are updated.
template <class F>
MEMKERN_DEVICE void lamb_squares(Squares& sum, const AdamVector& x, int n, const LambScalars& s) {
  float param[kVector] = {}, update[kVector] = {};
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i >= n) continue;
    const F p = lamb_decayed(F(x.p[i]), s);
    param[i] = static_cast<float>(p);
    update[i] = static_cast<float>(lamb_update(p, F(x.m[i]), sqrt(F(x.v[i])), s));
  }
  add_squares(sum.param, param);
  add_squares(sum.update, update);
}

// The same sums as lamb_norms_8bit, on the main path (main_path.cuh).
template <Loads How, class P, class G>
MEMKERN_DEVICE Squares lamb_norms_main_path(const TileWork<LambStepped>& work, P param_type, G grad_type) {
  AdamMainPath<LambScalars, P, G, How> at(work, param_type, grad_type);
  const float max_radicand = fast_scalars(at.s, false) ? kMaxRadicand : -1.0f;
  Squares sum{0.0, 0.0};
  at.for_each([&](const AdamVector& x) {
    const AdamRange range(x);
    const int n = at.count();
    if (any_lane(!range.is_fast(max_radicand)) || at.any_half()) {
      with_float_type(x, n, range.m_max, absmax_or_nan<false>(x.v), at.s,
                      [&](auto number) { lamb_squares<decltype(number)>(sum, x, n, at.s); });
    } else if (n > 0) {
      lamb_squares<Fast>(sum, x, kVector, at.s);
    }
  });
  return sum;
}

template <StateKind Kind, class P, class G>
MEMKERN_DEVICE Squares lamb_norms_8bit(const TileWork<LambStepped>& work, P param_type, G grad_type,
                                       LaneGroup group) {
  constexpr bool kPower = Kind == StateKind::kPower;
  const TensorRecord& t = work.tensor;
  const LambScalars& s = work.stepped.scalars;
  const MomentHalves half(group);
  const int levels = half.pick(kPowerLevelsSigned, kPowerLevelsUnsigned);
  Squares sum{0.0, 0.0};
  for_each_block(t.blocks, work.tile, group, [&](const BlockSpan& block) {
    const float* const scale = half.pick(t.m_scale, t.v_scale) + block.index;
    const float decay = half.pick(s.beta1, kPower ? s.root_beta2 : s.beta2);
    float m_unit, v_unit;
    half.exchange(decode_unit<Kind>(*scale, decay, levels), m_unit, v_unit);
    for (int iteration = 0; iteration < group.vectors; ++iteration) {
      const int j = (iteration * group.width() + group.lane()) * kVector;
      const Span at = span_of(block.start + j, block.n - j, t.aligned);
      const AdamVector x = adam_load<Kind>(work, param_type, grad_type, at, m_unit, v_unit);
      with_float_type(x, at.n, absmax_or_nan<true>(x.m), absmax_or_nan<false>(x.v), s,
                      [&](auto number) { lamb_squares<decltype(number)>(sum, x, at.n, s); });
    }
  });
  return sum;
}

template <StateKind Kind, class P, class G, class Group>
MEMKERN_DEVICE Squares lamb_norms(const TileWork<LambStepped>& work, P param_type, G grad_type, Group group) {
  if constexpr (Kind == StateKind::kPower && std::is_same_v<Group, SixteenLanes>)
    if (any_lane(work.tensor.main_path)) {
      Squares sum;
      with_loads(work, param_type, grad_type,
                 [&](auto how) { sum = lamb_norms_main_path<how.value>(work, param_type, grad_type); });
      return sum;
    }
  return lamb_norms_8bit<Kind>(work, param_type, grad_type, group);
}

template <class P> MEMKERN_DEVICE Squares lamb_norms_fp32(const TileWork<LambStepped>& work, P param_type) {
  const TensorRecord& t = work.tensor;
  const LambScalars s = work.stepped.scalars;
  const void* const grad = work.grad;
  Squares sum{0.0, 0.0};
  for_each_vector(t.numel, work.tile_index, t.blocks.tile_elements, t.aligned, [&](const Span& at) {
    lamb_squares<float>(sum, adam_load_fp32(t, param_type, grad, at, s), at.n, s);
  });
  return sum;
}

// First pass, one thread block per tile: writes the tile's sums of squares and nothing else.
template <StateKind Kind, bool Master> __global__ void __launch_bounds__(kThreads, kNormBlocks)
    lamb_norm_tiles(LambTable table, bool fp32, Squares* partial) {
  __shared__ TileWork<LambStepped> work;
  fill_dynamic_shared<Kind>();
  if (!work.find(table, Kind, fp32, Master) || !adapts(table.groups[work.tensor.group].h)) return;
  Squares sum{0.0, 0.0};
  with_state_types<Master>(
      work.tensor, [&](auto... types) { sum = lamb_norms<Kind>(work, types...); },
      [&](auto type) { sum = lamb_norms_fp32(work, type); });
  store_squares(partial, sum);
}

// Second pass, one thread block per tile.
template <StateKind Kind, bool Master>
__global__ void __launch_bounds__(kThreads, Master ? kWideBlocks : kAheadBlocks)
    lamb_tiles(LambTable table, bool fp32) {
  __shared__ TileWork<LambStepped> work;
  fill_dynamic_shared<Kind>();
  if (!work.find(table, Kind, fp32, Master)) return;
  with_state_types<Master>(
      work.tensor, [&](auto... types) { adam_update<Kind, LambRule>(work, types...); },
      [&](auto type) { adam_update_fp32<LambRule>(work, type); });
}

void lamb_step_cuda(const StepArgs& args) {
  step_in_two_passes<kAheadBlocks, LambHyperparameters, LambStepped>(
      kLambStep, args, lamb_prologue,
      {.plain = {.power = lamb_norm_tiles<StateKind::kPower, false>,
                 .dynamic = lamb_norm_tiles<StateKind::kDynamic, false>},
       .master = {.power = lamb_norm_tiles<StateKind::kPower, true>,
                  .dynamic = lamb_norm_tiles<StateKind::kDynamic, true>}},
      {.plain = {.power = lamb_tiles<StateKind::kPower, false>,
                 .dynamic = lamb_tiles<StateKind::kDynamic, false>},
       .master = {.power = lamb_tiles<StateKind::kPower, true>,
                  .dynamic = lamb_tiles<StateKind::kDynamic, true>}});
}

}  // namespace memkern
