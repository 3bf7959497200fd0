// memkern::adam_step_ on the CPU.
#include <map>

#include "../ops.h"
#include "multi_tensor.h"
#include "rounding.h"
#include "scaler.h"

namespace memkern {

void adam_step_cpu(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs,
                   const Tensors& exp_avg_sqs, const Tensors& exp_avg_scales,
                   const Tensors& exp_avg_sq_scales, const Tensors& steps, const Ints& group,
                   const Tensors& lr, const Doubles& beta1, const Doubles& beta2, const Doubles& eps,
                   const Doubles& weight_decay, const Ints& decoupled, const Ints& maximize,
                   const Ints& codec, const Ints& block_size, const std::optional<Tensor>& grad_scale,
                   const std::optional<Tensor>& found_inf, const std::optional<Tensor>& grad_norm,
                   double max_grad_norm) {
  const size_t groups = lr.size();
  check_hyperparameters(
      {beta1.size(), beta2.size(), eps.size(), weight_decay.size(), decoupled.size(), maximize.size()},
      groups);
  const MomentArgs m{"exp_avgs", exp_avgs, ScalarType::Char, exp_avg_scales};
  const MomentArgs v{"exp_avg_sqs", exp_avg_sqs, ScalarType::Byte, exp_avg_sq_scales};
  auto jobs = make_jobs<AdamJob>(params, grads, {&m, &v}, group, groups, codec, block_size);
  check_steps(steps, params);
  const double grad_factor = gradient_factor(grad_scale, grad_norm, max_grad_norm);
  const std::vector<double> rate = read_rates(lr);
  if (skipped(found_inf)) return;

  // Tensors of one group and age share their scalars.
  std::map<std::pair<int64_t, uint64_t>, AdamScalars> scalars;
  Rounding rounding;
  for (size_t i = 0; i < jobs.size(); ++i) {
    AdamJob& job = jobs[i];
    const int64_t k = group[i];
    const uint64_t step = next_step(steps[i]);
    auto [s, is_new] = scalars.try_emplace({k, step});
    if (is_new)
      s->second = adam_scalars(rate[k], beta1[k], beta2[k], eps[k], weight_decay[k], decoupled[k] != 0,
                               maximize[k] != 0, grad_factor, step);
    job.scalars = &s->second;
    if (job.kind == StateKind::kPower) job.rounding = rounding.at(job.layout.block, step);
    job.run = MEMKERN_PICK(adam_kernel, job.kind, job.param_type, job.grad_type);
  }
  run_jobs(jobs);
}

}  // namespace memkern
