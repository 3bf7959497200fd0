// memkern::lars_step_ on the CPU.
#include "../ops.h"
#include "isa.h"
#include "layers.h"
#include "scaler.h"

namespace memkern {

void lars_step_cpu(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs,
                   const Tensors& exp_avg_scales, const Tensors& steps, const Tensors& trust_ratios,
                   const Ints& group, const Tensors& lr, const Doubles& momentum, const Doubles& dampening,
                   const Doubles& weight_decay, const Ints& nesterov, const Doubles& trust_coeff,
                   const Doubles& eps, const Ints& trust_clip, const Ints& always_adapt, const Ints& layers,
                   const Ints& maximize, const Ints& codec, const Ints& block_size,
                   const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
                   const std::optional<Tensor>& grad_norm, double max_grad_norm) {
  const size_t groups = lr.size();
  check_hyperparameters(
      {momentum.size(), dampening.size(), weight_decay.size(), nesterov.size(), trust_coeff.size(),
       eps.size(), trust_clip.size(), always_adapt.size(), layers.size(), maximize.size()},
      groups);
  const MomentArgs m{"exp_avgs", exp_avgs, ScalarType::Char, exp_avg_scales};
  const auto jobs =
      make_jobs<Layer<LarsScalars>>(params, grads, {&m, nullptr}, group, groups, codec, block_size);
  check_trust_ratios(params, jobs, trust_ratios, group, layers);
  check_steps(steps, params);
  const double grad_factor = gradient_factor(grad_scale, grad_norm, max_grad_norm);
  const std::vector<double> rate = read_rates(lr);
  if (skipped(found_inf)) return;

  std::vector<Layer<LarsScalars>> all;
  for (size_t i = 0; i < jobs.size(); ++i) {
    Layer<LarsScalars> job = jobs[i];
    const int64_t k = group[i];
    job.own = lars_scalars(rate[k], momentum[k], dampening[k], weight_decay[k], nesterov[k] != 0,
                           trust_coeff[k] != 0.0, maximize[k] != 0, grad_factor, next_step(steps[i]));
    job.trust = {weight_decay[k] != 0.0 || always_adapt[k] != 0,
                 trust_clip[k] != 0,
                 trust_coeff[k],
                 weight_decay[k],
                 eps[k],
                 rate[k]};
    job.run = MEMKERN_PICK(lars_kernel, job.kind, job.param_type, job.grad_type);
    job.norms = MEMKERN_PICK(lars_norms, job.kind, job.param_type, job.grad_type);
    add_layers(all, job, trust_ratios[i]);
  }
  run_layers(all);
}

}  // namespace memkern
