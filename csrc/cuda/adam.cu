// memkern::adam_step_ on CUDA devices.
#include "adam_kernel.cuh"
#include "common/ops.h"
#include "step_table.h"

namespace memkern {

void adam_step_cuda(const StepArgs& args) {
  const auto groups = args.groups<AdamHyperparameters>();
  const auto jobs = step_tensors<StepTensor>(args, kAdamStep);
  if (args.params.empty()) return;
  const StepHeader header = header_of(args);
  const auto records = records_of(args, groups);
  const OnDevice on(args.params[0]);
  const auto step = upload_step<AdamGroup, AdamTensor>("adam_step_", header, records, jobs, args.params[0],
                                                       args.steps, args.group, on.stream);
  launch_step("adam_step_", step, adam_prologue, adam_tiles<StateKind::kPower>,
              adam_tiles<StateKind::kDynamic>, on.stream);
}

}  // namespace memkern
