// memkern::sgd_step_ on the CPU.
#include "common/ops.h"
#include "cpu/parallel.h"
#include "cpu/step_numbers.h"

namespace memkern {

void sgd_step_cpu(const StepArgs& args) {
  const auto groups = args.groups<SgdHyperparameters>();
  auto jobs = step_tensors<SgdJob>(args, kSgdStep);
  const double grad_factor = gradient_factor(args);
  const std::vector<double> lr = read_rates(args);
  if (skipped(args)) return;

  std::vector<SgdScalars> scalars(jobs.size());
  Dithers dithers;
  WeightRandoms weight_randoms;
  for (size_t i = 0; i < jobs.size(); ++i) {
    SgdJob& job = jobs[i];
    const int64_t k = args.group[i];
    const uint64_t step = next_step(args.steps[i]);
    scalars[i] = sgd_scalars(lr[k], groups[k], grad_factor, step);
    job.scalars = &scalars[i];
    if (job.kind != StateKind::kFp32) job.dither = dithers.at(job.layout.block, step);
    job.weight_random = weight_randoms.at(job.layout.block, step, job.weight_storage);
    job.run = MEMKERN_PICK(sgd_kernel, job);
  }
  run_jobs(jobs);
}

}  // namespace memkern
