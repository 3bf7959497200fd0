// memkern::lars_step_ on CUDA devices. LARS has one moment, like Lion, so the update of a tile is in
// lion_update.cuh. Lower bound of a step's time: its bytes over the copy bandwidth. Per parameter in fp32, a
// moment with its share of the scale being 1.03:
//   first pass     9.03 (classic: 8)    reads p, g and, unless classic, m
//   second pass    14.06                reads p, g and m, writes p and m
#include "common/ops.h"
#include "core/lars.h"
#include "launch_trust_ratios.h"
#include "lion_update.cuh"

namespace memkern {

using LarsGroup = StepGroup<LarsHyperparameters>;
using LarsStepped = Stepped<LarsScalars>;

struct LarsRule {
  using Stepped = LarsStepped;
  using Scalars = LarsScalars;
  static MEMKERN_DEVICE void update(float& p, float g, float& m, const Scalars& s) {
    lars_update(p, g, m, s);
  }
};

using LarsTable = StepTable<LarsGroup, LarsStepped>;

// One thread per layer: computes the layer's scalars. layer_ratios increments the step, which a tensor's
// layers share.
static __global__ void lars_prologue(LarsTable table) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= table.count || skipped(*table.header)) return;
  const TensorRecord& t = table.tensors[i];
  const LarsGroup& group = table.groups[t.group];
  const uint64_t step = static_cast<uint64_t>(*t.step + 1.0f);
  table.scalars[i] = {lars_scalars(read(group.lr), group.h, gradient_factor(*table.header), step),
                      static_cast<uint32_t>(step)};
}

// Adds the squares of a vector's parameters, and of its gradients (classic) or else of its updated moments.
// Parameter, gradient and moment of elements past the end of a block are 0.
MEMKERN_DEVICE void lars_squares(Squares& sum, const LionVector& x, const LarsScalars& s) {
  float update[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    update[i] = sgd_gradient(x.g[i], s);
    if (!s.classic) update[i] = lars_moment(x.p[i], update[i], x.m[i], s);
  }
  add_squares(sum.param, x.p);
  add_squares(sum.update, update);
}

// The same sums as lars_norms_8bit, on the main path (main_path.cuh), which always loads m. So classic, whose
// norms are of p and g alone, is not here.
template <Loads How, class P, class G>
MEMKERN_DEVICE Squares lars_norms_main_path(const TileWork<LarsStepped>& work, P param_type, G grad_type) {
  LaneVectors<StateKind::kPower, P, G, How, 1> at(work, param_type, grad_type);
  const LarsScalars& s = work.stepped.scalars;
  Squares sum{0.0, 0.0};
  at.for_each_loaded([&](const Loaded<P>& loaded) {
    LionVector x;
    join_weights(at.tensor, param_type, loaded.p, x.p);
    gradient_to_floats(loaded.g, grad_type, at.grad_alignment(), x.g);
    decode<StateKind::kPower, true>(loaded.m, at.unit(0), x.m);
    // A lane has 8, 4 (Parts) or no elements of its own. Those past the first 4 are cleared if a lane of the
    // warp has 4. A lane without elements holds another lane's, and adds nothing.
    const int n = at.count();
    if (at.any_half())
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        if (i >= n) x.p[i] = x.g[i] = x.m[i] = 0.0f;
    if (n > 0) lars_squares(sum, x, s);
  });
  return sum;
}

template <StateKind Kind, class P, class G>
MEMKERN_DEVICE Squares lars_norms_8bit(const TileWork<LarsStepped>& work, P param_type, G grad_type,
                                       LaneGroup group) {
  const TensorRecord& t = work.tensor;
  const LarsScalars& s = work.stepped.scalars;
  Squares sum{0.0, 0.0};
  for_each_block(t.blocks, work.tile, group, [&](const BlockSpan& block) {
    const float unit = decode_unit<Kind>(t.m_scale[block.index], 1.0f, kPowerLevelsSigned);
    for (int iteration = 0; iteration < group.vectors; ++iteration) {
      const int j = (iteration * group.width() + group.lane()) * kVector;
      const Span at = span_of(block.start + j, block.n - j, t.aligned);
      lars_squares(sum, lion_load<Kind>(work, param_type, grad_type, at, unit, !s.classic), s);
    }
  });
  return sum;
}

// The sums of a tile of 8-bit states, by the kernel for its tensor.
template <StateKind Kind, class P, class G, class Group>
MEMKERN_DEVICE Squares lars_norms(const TileWork<LarsStepped>& work, P param_type, G grad_type, Group group) {
  if constexpr (Kind == StateKind::kPower && std::is_same_v<Group, SixteenLanes>)
    if (any_lane(work.tensor.main_path && !work.stepped.scalars.classic)) {
      Squares sum;
      with_loads(work, param_type, grad_type,
                 [&](auto how) { sum = lars_norms_main_path<how.value>(work, param_type, grad_type); });
      return sum;
    }
  return lars_norms_8bit<Kind>(work, param_type, grad_type, group);
}

template <class P> MEMKERN_DEVICE Squares lars_norms_fp32(const TileWork<LarsStepped>& work, P param_type) {
  const TensorRecord& t = work.tensor;
  const LarsScalars s = work.stepped.scalars;
  const void* const grad = work.grad;
  Squares sum{0.0, 0.0};
  for_each_vector(t.numel, work.tile_index, t.blocks.tile_elements, t.aligned, [&](const Span& at) {
    LionVector x{};
    join_weights(t, param_type, load_weights(t, param_type, at), x.p);
    load_gradient_floats(grad, t.grad_type, at, x.g);
    if (!s.classic) load_floats(t.m, FloatType::kFp32, at, x.m);
    lars_squares(sum, x, s);
  });
  return sum;
}

// First pass, one thread block per tile: writes the tile's sums of squares and nothing else.
template <StateKind Kind, bool Master> __global__ void __launch_bounds__(kThreads, kStepBlocks)
    lars_norm_tiles(LarsTable table, bool fp32, Squares* partial) {
  __shared__ TileWork<LarsStepped> work;
  fill_dynamic_shared<Kind>();
  if (!work.find(table, Kind, fp32, Master) || !adapts(table.groups[work.tensor.group].h)) return;
  Squares sum{0.0, 0.0};
  with_state_types<Master>(
      work.tensor, [&](auto... types) { sum = lars_norms<Kind>(work, types...); },
      [&](auto type) { sum = lars_norms_fp32(work, type); });
  store_squares(partial, sum);
}

// Second pass, one thread block per tile.
template <StateKind Kind, bool Master>
__global__ void __launch_bounds__(kThreads, Master ? kAheadBlocks : kStepBlocks)
    lars_tiles(LarsTable table, bool fp32) {
  __shared__ TileWork<LarsStepped> work;
  fill_dynamic_shared<Kind>();
  if (!work.find(table, Kind, fp32, Master)) return;
  with_state_types<Master>(
      work.tensor, [&](auto... types) { lion_update_tile<Kind, LarsRule>(work, types...); },
      [&](auto type) { lion_update_fp32<LarsRule>(work, type); });
}

void lars_step_cuda(const StepArgs& args) {
  step_in_two_passes<kStepBlocks, LarsHyperparameters, LarsStepped>(
      kLarsStep, args, lars_prologue,
      {.plain = {.power = lars_norm_tiles<StateKind::kPower, false>,
                 .dynamic = lars_norm_tiles<StateKind::kDynamic, false>},
       .master = {.power = lars_norm_tiles<StateKind::kPower, true>,
                  .dynamic = lars_norm_tiles<StateKind::kDynamic, true>}},
      {.plain = {.power = lars_tiles<StateKind::kPower, false>,
                 .dynamic = lars_tiles<StateKind::kDynamic, false>},
       .master = {.power = lars_tiles<StateKind::kPower, true>,
                  .dynamic = lars_tiles<StateKind::kDynamic, true>}});
}

}  // namespace memkern
