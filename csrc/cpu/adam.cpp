// memkern::adam_step_ on the CPU.
#include <map>

#include "common/ops.h"
#include "cpu/parallel.h"
#include "cpu/step_numbers.h"

namespace memkern {

void adam_step_cpu(const StepArgs& args) {
  const auto groups = args.groups<AdamHyperparameters>();
  auto jobs = step_tensors<AdamJob>(args, kAdamStep);
  const double grad_factor = gradient_factor(args);
  const std::vector<double> lr = read_rates(args);
  if (skipped(args)) return;

  // Tensors of one group and step share their scalars.
  std::map<std::pair<int64_t, uint64_t>, AdamScalars> scalars;
  Dithers dithers;
  WeightRandoms weight_randoms;
  for (size_t i = 0; i < jobs.size(); ++i) {
    AdamJob& job = jobs[i];
    const int64_t k = args.group[i];
    const uint64_t step = next_step(args.steps[i]);
    auto [s, is_new] = scalars.try_emplace({k, step});
    if (is_new) s->second = adam_scalars(lr[k], groups[k], grad_factor, step);
    job.scalars = &s->second;
    if (job.kind != StateKind::kFp32) job.dither = dithers.at(job.layout.block, step);
    job.weight_random = weight_randoms.at(job.layout.block, step, job.weight_storage);
    job.run = MEMKERN_PICK(adam_kernel, job);
  }
  run_jobs(jobs);
}

}  // namespace memkern
