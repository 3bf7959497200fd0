// memkern::lamb_step_ on the CPU.
#include "common/ops.h"
#include "cpu/simd/isa.h"
#include "cpu/step_numbers.h"
#include "cpu/two_passes.h"

namespace memkern {

void lamb_step_cpu(const StepArgs& args) {
  const auto groups = args.groups<LambHyperparameters>();
  const auto jobs = step_tensors<Layer<LambScalars>>(args, kLambStep);
  check_trust_ratios(args, jobs, groups);
  const double grad_factor = gradient_factor(args);
  const std::vector<double> lr = read_rates(args);
  if (skipped(args)) return;

  Dithers dithers;
  WeightRandoms weight_randoms;
  std::vector<Layer<LambScalars>> all;
  for (size_t i = 0; i < jobs.size(); ++i) {
    Layer<LambScalars> job = jobs[i];
    const int64_t k = args.group[i];
    const uint64_t step = next_step(args.steps[i], args.squares_only);
    job.own = lamb_scalars(lr[k], groups[k], grad_factor, step);
    job.trust = trust_rule(lr[k], groups[k]);
    if (job.kind != StateKind::kFp32) job.dither = dithers.at(job.layout.block, step);
    job.weight_random = weight_randoms.at(job.layout.block, step, job.weight_storage);
    job.run = MEMKERN_PICK(lamb_kernel, job);
    job.norms = MEMKERN_PICK(lamb_norms, job);
    add_layers(all, job, args.trust_ratios[i]);
  }
  run_layers(all, squares_of(args), args.squares_only);
}

}  // namespace memkern
