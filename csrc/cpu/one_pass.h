// Steps in one pass: each tensor is updated by itself. csrc/cuda/launch_step.h has the same for CUDA.
#pragma once
#include <map>
#include <utility>

#include "cpu/parallel.h"
#include "cpu/step_numbers.h"

namespace memkern {

// scalars_of(lr, hyperparameters, grad_factor, step): of the tensors of one group and step, which share them.
// pick(tensor): the kernel that runs its blocks.
template <class Hyperparameters, class Scalars, class ScalarsOf, class Pick>
void step_in_one_pass(const StepArgs& args, const StepOp& op, ScalarsOf scalars_of, Pick pick) {
  const auto groups = args.groups<Hyperparameters>();
  auto jobs = step_tensors<Job<Scalars>>(args, op);
  const double grad_factor = gradient_factor(args);
  const std::vector<double> lr = read_rates(args);
  if (skipped(args)) return;

  std::map<std::pair<int64_t, uint64_t>, Scalars> scalars;
  Dithers dithers;
  WeightRandoms weight_randoms;
  for (size_t i = 0; i < jobs.size(); ++i) {
    Job<Scalars>& job = jobs[i];
    const int64_t k = args.group[i];
    const uint64_t step = next_step(args.steps[i]);
    auto [s, is_new] = scalars.try_emplace({k, step});
    if (is_new) s->second = scalars_of(lr[k], groups[k], grad_factor, step);
    job.scalars = &s->second;
    if (job.kind != StateKind::kFp32) job.dither = dithers.at(job.layout.block, step);
    job.weight_random = weight_randoms.at(job.layout.block, step, job.weight_storage);
    job.run = pick(job);
  }
  run_jobs(jobs);
}

}  // namespace memkern
