// memkern::lion_step_ on the CPU.
#include "../ops.h"
#include "multi_tensor.h"
#include "scaler.h"

namespace memkern {

void lion_step_cpu(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs,
                   const Tensors& exp_avg_scales, const Ints& group, const Tensors& lr, const Doubles& beta1,
                   const Doubles& beta2, const Doubles& weight_decay, const Ints& maximize, const Ints& codec,
                   const Ints& block_size, const std::optional<Tensor>& grad_scale,
                   const std::optional<Tensor>& found_inf, const std::optional<Tensor>& grad_norm,
                   double max_grad_norm) {
  const size_t groups = lr.size();
  check_hyperparameters({beta1.size(), beta2.size(), weight_decay.size(), maximize.size()}, groups);
  const MomentArgs m{"exp_avgs", exp_avgs, ScalarType::Char, exp_avg_scales};
  auto jobs = make_jobs<LionJob>(params, grads, {&m, nullptr}, group, groups, codec, block_size);
  const double grad_factor = gradient_factor(grad_scale, grad_norm, max_grad_norm);
  std::vector<LionScalars> scalars;
  for (size_t k = 0; k < groups; ++k)
    scalars.push_back(lion_scalars(read_number(lr[k], "lr"), beta1[k], beta2[k], weight_decay[k],
                                   maximize[k] != 0, grad_factor));
  if (skipped(found_inf)) return;

  for (size_t i = 0; i < jobs.size(); ++i) {
    jobs[i].scalars = &scalars[group[i]];
    jobs[i].run = MEMKERN_PICK(lion_kernel, jobs[i].kind, jobs[i].param_type, jobs[i].grad_type);
  }
  run_jobs(jobs);
}

}  // namespace memkern
