// memkern::lion_step_ on the CPU.
#include "common/ops.h"
#include "cpu/one_pass.h"

namespace memkern {

void lion_step_cpu(const StepArgs& args) {
  step_in_one_pass<LionHyperparameters, LionScalars>(
      args, kLionStep,
      [](double lr, const LionHyperparameters& h, double grad_factor, uint64_t) {
        return lion_scalars(lr, h, grad_factor);
      },
      [](const LionJob& job) { return MEMKERN_PICK(lion_kernel, job); });
}

}  // namespace memkern
