// memkern::sgd_step_ on the CPU.
#include "common/ops.h"
#include "cpu/one_pass.h"

namespace memkern {

void sgd_step_cpu(const StepArgs& args) {
  step_in_one_pass<SgdHyperparameters, SgdScalars>(
      args, kSgdStep, sgd_scalars<SgdHyperparameters>,
      [](const SgdJob& job) { return MEMKERN_PICK(sgd_kernel, job); });
}

}  // namespace memkern
