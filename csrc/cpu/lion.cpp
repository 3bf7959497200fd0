// memkern::lion_step_ on the CPU.
#include "common/ops.h"
#include "cpu/parallel.h"
#include "cpu/step_numbers.h"

namespace memkern {

void lion_step_cpu(const StepArgs& args) {
  const auto groups = args.groups<LionHyperparameters>();
  auto jobs = step_tensors<LionJob>(args, kLionStep);
  const double grad_factor = gradient_factor(args);
  const std::vector<double> lr = read_rates(args);
  if (skipped(args)) return;

  std::vector<LionScalars> scalars;
  for (size_t k = 0; k < groups.size(); ++k) scalars.push_back(lion_scalars(lr[k], groups[k], grad_factor));
  for (size_t i = 0; i < jobs.size(); ++i) {
    jobs[i].scalars = &scalars[args.group[i]];
    jobs[i].run = MEMKERN_PICK(lion_kernel, jobs[i].kind, jobs[i].param_type, jobs[i].grad_type);
  }
  run_jobs(jobs);
}

}  // namespace memkern
