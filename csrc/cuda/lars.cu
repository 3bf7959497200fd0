// memkern::lars_step_ on CUDA devices.
#include "common/ops.h"
#include "lars_kernel.cuh"
#include "layer_table.h"

namespace memkern {

void lars_step_cuda(const StepArgs& args) {
  const auto groups = args.groups<LarsHyperparameters>();
  const auto jobs = step_tensors<StepTensor>(args, kLarsStep);
  check_trust_ratios(args, jobs, groups);
  if (args.params.empty()) return;
  const StepHeader header = header_of(args);
  const auto records = records_of(args, groups);
  const OnDevice on(args.params[0]);
  step_layers<LarsGroup, LarsScalars>(
      "lars_step_", header, records, layers_of(jobs, args), args.params[0], lars_prologue,
      {lars_norm_tiles<StateKind::kPower>, lars_norm_tiles<StateKind::kDynamic>},
      {lars_tiles<StateKind::kPower>, lars_tiles<StateKind::kDynamic>}, on.stream);
}

}  // namespace memkern
