// memkern::sgd_step_ on CUDA devices. Lower bound of a step's time: its bytes (14.06 per parameter in fp32,
// 8.06 in bf16) over the copy bandwidth.
#include "common/ops.h"
#include "core/sgd.h"
#include "launch_step.h"
#include "lion_update.cuh"

namespace memkern {

using SgdGroup = StepGroup<SgdHyperparameters>;
using SgdStepped = Stepped<SgdScalars>;
using SgdTable = StepTable<SgdGroup, SgdStepped>;

// One thread per tensor: increments its step and computes its scalars.
static __global__ void sgd_prologue(SgdTable table) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= table.count || skipped(*table.header)) return;
  const TensorRecord& t = table.tensors[i];
  const SgdGroup& group = table.groups[t.group];
  const uint64_t step = static_cast<uint64_t>(*t.step += 1.0f);
  table.scalars[i] = {sgd_scalars(read(group.lr), group.h, gradient_factor(*table.header), step),
                      static_cast<uint32_t>(step)};
}

struct SgdRule {
  using Stepped = SgdStepped;
  using Scalars = SgdScalars;
  static MEMKERN_DEVICE void update(float& p, float g, float& m, const Scalars& s) { sgd_update(p, g, m, s); }
};

// One thread block per tile. Launched with fp32 = true, it also updates tensors with fp32 states.
template <StateKind Kind, bool Master>
__global__ void __launch_bounds__(kThreads, Master ? kAheadBlocks : kStepBlocks)
    sgd_tiles(SgdTable table, bool fp32) {
  __shared__ TileWork<SgdStepped> work;
  fill_dynamic_shared<Kind>();
  if (!work.find(table, Kind, fp32, Master)) return;
  with_state_types<Master>(
      work.tensor, [&](auto... types) { lion_update_tile<Kind, SgdRule>(work, types...); },
      [&](auto type) { lion_update_fp32<SgdRule>(work, type); });
}

void sgd_step_cuda(const StepArgs& args) {
  step_in_one_pass<kStepBlocks, SgdHyperparameters, SgdStepped>(
      kSgdStep, args, sgd_prologue,
      {.plain = {.power = sgd_tiles<StateKind::kPower, false>,
                 .dynamic = sgd_tiles<StateKind::kDynamic, false>},
       .master = {.power = sgd_tiles<StateKind::kPower, true>,
                  .dynamic = sgd_tiles<StateKind::kDynamic, true>}});
}

}  // namespace memkern
