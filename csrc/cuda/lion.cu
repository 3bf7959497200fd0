// memkern::lion_step_ on CUDA devices.
#include "common/ops.h"
#include "lion_kernel.cuh"
#include "step_table.h"

namespace memkern {

void lion_step_cuda(const StepArgs& args) {
  const auto groups = args.groups<LionHyperparameters>();
  const auto jobs = step_tensors<StepTensor>(args, kLionStep);
  if (args.params.empty()) return;
  const StepHeader header = header_of(args);
  const auto records = records_of(args, groups);
  const OnDevice on(args.params[0]);
  const auto step = upload_step<LionGroup, LionScalars>("lion_step_", header, records, jobs, args.params[0],
                                                        args.steps, args.group, on.stream);
  launch_step("lion_step_", step, lion_prologue, lion_tiles<StateKind::kPower>,
              lion_tiles<StateKind::kDynamic>, on.stream);
}

}  // namespace memkern
