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
  Dithers dithers;
  WeightRandoms weight_randoms;
  for (size_t i = 0; i < jobs.size(); ++i) {
    LionJob& job = jobs[i];
    const uint64_t step = next_step(args.steps[i]);
    job.scalars = &scalars[args.group[i]];
    if (job.kind != StateKind::kFp32) job.dither = dithers.at(job.layout.block, step);
    job.weight_random = weight_randoms.at(job.layout.block, step, job.weight_storage);
    job.run = MEMKERN_PICK(lion_kernel, job);
  }
  run_jobs(jobs);
}

}  // namespace memkern
