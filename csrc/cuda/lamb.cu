// memkern::lamb_step_ on CUDA devices.
#include "common/ops.h"
#include "lamb_kernel.cuh"
#include "layer_table.h"

namespace memkern {

void lamb_step_cuda(const StepArgs& args) {
  const auto groups = args.groups<LambHyperparameters>();
  const auto jobs = step_tensors<StepTensor>(args, kLambStep);
  check_trust_ratios(args, jobs, groups);
  if (args.params.empty()) return;
  const StepHeader header = header_of(args);
  const auto records = records_of(args, groups);
  const OnDevice on(args.params[0]);
  step_layers<LambGroup, LambTensor>(
      "lamb_step_", header, records, layers_of(jobs, args), args.params[0], lamb_prologue,
      {lamb_norm_tiles<StateKind::kPower>, lamb_norm_tiles<StateKind::kDynamic>},
      {lamb_tiles<StateKind::kPower>, lamb_tiles<StateKind::kDynamic>}, on.stream);
}

}  // namespace memkern
