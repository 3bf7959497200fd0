// memkern::lion_step_ on CUDA devices. Lower bound of a step's time: its bytes (14.06 per parameter in
// fp32, 8.06 in bf16) over the copy bandwidth.
#include "common/ops.h"
#include "core/lion.h"
#include "launch_step.h"
#include "lion_update.cuh"

namespace memkern {

using LionGroup = StepGroup<LionHyperparameters>;
using LionStepped = Stepped<LionScalars>;
using LionTable = StepTable<LionGroup, LionStepped>;

// One thread per tensor: increments its step and computes its scalars.
static __global__ void lion_prologue(LionTable table) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= table.count || skipped(*table.header)) return;
  const TensorRecord& t = table.tensors[i];
  const LionGroup& group = table.groups[t.group];
  table.scalars[i] = {lion_scalars(read(group.lr), group.h, gradient_factor(*table.header)),
                      static_cast<uint32_t>(*t.step += 1.0f)};
}

struct LionRule {
  using Stepped = LionStepped;
  using Scalars = LionScalars;
  static MEMKERN_DEVICE void update(float& p, float g, float& m, const Scalars& s) {
    lion_update(p, g, m, s);
  }
};

// One thread block per tile. Launched with fp32 = true, it also updates tensors with fp32 states.
template <StateKind Kind, bool Master>
__global__ void __launch_bounds__(kThreads, Master ? kAheadBlocks : kStepBlocks)
    lion_tiles(LionTable table, bool fp32) {
  __shared__ TileWork<LionStepped> work;
  fill_dynamic_shared<Kind>();
  if (!work.find(table, Kind, fp32, Master)) return;
  with_state_types<Master>(
      work.tensor, [&](auto... types) { lion_update_tile<Kind, LionRule>(work, types...); },
      [&](auto type) { lion_update_fp32<LionRule>(work, type); });
}

void lion_step_cuda(const StepArgs& args) {
  step_in_one_pass<kStepBlocks, LionHyperparameters, LionStepped>(
      kLionStep, args, lion_prologue,
      {.plain = {.power = lion_tiles<StateKind::kPower, false>,
                 .dynamic = lion_tiles<StateKind::kDynamic, false>},
       .master = {.power = lion_tiles<StateKind::kPower, true>,
                  .dynamic = lion_tiles<StateKind::kDynamic, true>}});
}

}  // namespace memkern
