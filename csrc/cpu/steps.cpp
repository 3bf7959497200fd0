// memkern::adam_step_, lion_step_, sgd_step_, lamb_step_ and lars_step_ on the CPU.
#include "common/ops.h"
#include "cpu/step_in_two_passes.h"

namespace memkern {

void adam_step_cpu(const StepArgs& args) {
  step_in_one_pass<AdamHyperparameters, AdamScalars>(args, kAdamStep, adam_scalars, cpu_kernels().adam);
}

void lion_step_cpu(const StepArgs& args) {
  const auto scalars = [](double lr, const LionHyperparameters& h, double grad_factor, uint64_t) {
    return lion_scalars(lr, h, grad_factor);
  };
  step_in_one_pass<LionHyperparameters, LionScalars>(args, kLionStep, scalars, cpu_kernels().lion);
}

void sgd_step_cpu(const StepArgs& args) {
  step_in_one_pass<SgdHyperparameters, SgdScalars>(args, kSgdStep, sgd_scalars<SgdHyperparameters>,
                                                   cpu_kernels().sgd);
}

void lamb_step_cpu(const StepArgs& args) {
  const Kernels& kernels = cpu_kernels();
  step_in_two_passes<LambHyperparameters, LambScalars>(args, kLambStep, lamb_scalars, kernels.lamb,
                                                       kernels.lamb_norms);
}

void lars_step_cpu(const StepArgs& args) {
  const Kernels& kernels = cpu_kernels();
  step_in_two_passes<LarsHyperparameters, LarsScalars>(args, kLarsStep, lars_scalars, kernels.lars,
                                                       kernels.lars_norms);
}

}  // namespace memkern
