// memkern::adam_step_ on CUDA devices. Lower bound of a step's time: its bytes (16.13 per parameter in
// fp32, 10.13 in bf16) over the copy bandwidth.
#include "adam_update.cuh"
#include "common/ops.h"
#include "core/adam.h"
#include "launch_step.h"

namespace memkern {

using AdamGroup = StepGroup<AdamHyperparameters>;
using AdamStepped = Stepped<AdamScalars>;
using AdamTable = StepTable<AdamGroup, AdamStepped>;

// One thread per tensor: increments its step and computes its scalars.
static __global__ void adam_prologue(AdamTable table) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= table.count || skipped(*table.header)) return;
  const TensorRecord& t = table.tensors[i];
  const AdamGroup& group = table.groups[t.group];
  const uint64_t step = static_cast<uint64_t>(*t.step += 1.0f);
  table.scalars[i] = {adam_scalars(read(group.lr), group.h, gradient_factor(*table.header), step),
                      static_cast<uint32_t>(step)};
}

struct AdamRule {
  using Stepped = AdamStepped;
  using Scalars = AdamScalars;
  static constexpr bool kOneProduct = true;  // so that bf16 parameters may be rounded by adam_round_params
  template <class F> static MEMKERN_DEVICE F param(F p, F m, F w, const Scalars& s) {
    return adam_param(p, m, w, s);  // w = sqrt(v)
  }
};

// One thread block per tile. Launched with fp32 = true, it also updates tensors with fp32 states.
// Master weights need more registers (tile.cuh).
template <StateKind Kind, bool Master>
__global__ void __launch_bounds__(kThreads, Master ? kWideBlocks : kAheadBlocks)
    adam_tiles(AdamTable table, bool fp32) {
  __shared__ TileWork<AdamStepped> work;
  fill_dynamic_shared<Kind>();
  if (!work.find(table, Kind, fp32, Master)) return;
  with_state_types<Master>(
      work.tensor, [&](auto... types) { adam_update<Kind, AdamRule>(work, types...); },
      [&](auto type) { adam_update_fp32<AdamRule>(work, type); });
}

void adam_step_cuda(const StepArgs& args) {
  step_in_one_pass<kAheadBlocks, AdamHyperparameters, AdamStepped>(
      kAdamStep, args, adam_prologue,
      {.plain = {.power = adam_tiles<StateKind::kPower, false>,
                 .dynamic = adam_tiles<StateKind::kDynamic, false>},
       .master = {.power = adam_tiles<StateKind::kPower, true>,
                  .dynamic = adam_tiles<StateKind::kDynamic, true>}});
}

}  // namespace memkern
