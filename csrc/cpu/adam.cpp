// memkern::adam_step_ on the CPU.
#include "common/ops.h"
#include "cpu/one_pass.h"

namespace memkern {

void adam_step_cpu(const StepArgs& args) {
  step_in_one_pass<AdamHyperparameters, AdamScalars>(
      args, kAdamStep, adam_scalars, [](const AdamJob& job) { return MEMKERN_PICK(adam_kernel, job); });
}

}  // namespace memkern
