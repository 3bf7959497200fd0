// memkern::lamb_step_ on the CPU.
#include "../ops.h"
#include "isa.h"
#include "layers.h"
#include "rounding.h"
#include "scaler.h"

namespace memkern {

void lamb_step_cpu(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs,
                   const Tensors& exp_avg_sqs, const Tensors& exp_avg_scales,
                   const Tensors& exp_avg_sq_scales, const Tensors& steps, const Tensors& trust_ratios,
                   const Ints& group, const Tensors& lr, const Doubles& beta1, const Doubles& beta2,
                   const Doubles& eps, const Doubles& weight_decay, const Ints& decoupled,
                   const Ints& bias_correction, const Ints& trust_clip, const Ints& always_adapt,
                   const Ints& layers, const Ints& maximize, const Ints& codec, const Ints& block_size,
                   const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
                   const std::optional<Tensor>& grad_norm, double max_grad_norm) {
  const size_t groups = lr.size();
  check_hyperparameters(
      {beta1.size(), beta2.size(), eps.size(), weight_decay.size(), decoupled.size(), bias_correction.size(),
       trust_clip.size(), always_adapt.size(), layers.size(), maximize.size()},
      groups);
  const MomentArgs m{"exp_avgs", exp_avgs, ScalarType::Char, exp_avg_scales};
  const MomentArgs v{"exp_avg_sqs", exp_avg_sqs, ScalarType::Byte, exp_avg_sq_scales};
  const auto jobs = make_jobs<Layer<LambScalars>>(params, grads, {&m, &v}, group, groups, codec, block_size);
  check_trust_ratios(params, jobs, trust_ratios, group, layers);
  check_steps(steps, params);
  const double grad_factor = gradient_factor(grad_scale, grad_norm, max_grad_norm);
  const std::vector<double> rate = read_rates(lr);
  if (skipped(found_inf)) return;

  Rounding rounding;
  std::vector<Layer<LambScalars>> all;
  for (size_t i = 0; i < jobs.size(); ++i) {
    Layer<LambScalars> job = jobs[i];
    const int64_t k = group[i];
    const uint64_t step = next_step(steps[i]);
    job.own = lamb_scalars(rate[k], beta1[k], beta2[k], eps[k], weight_decay[k], decoupled[k] != 0,
                           bias_correction[k] != 0, maximize[k] != 0, grad_factor, step);
    job.trust = {weight_decay[k] != 0.0 || always_adapt[k] != 0, trust_clip[k] != 0, 0.0, 0.0, 0.0, rate[k]};
    if (job.kind == StateKind::kPower) job.rounding = rounding.at(job.layout.block, step);
    job.run = MEMKERN_PICK(lamb_kernel, job.kind, job.param_type, job.grad_type);
    job.norms = MEMKERN_PICK(lamb_norms, job.kind, job.param_type, job.grad_type);
    add_layers(all, job, trust_ratios[i]);
  }
  run_layers(all);
}

}  // namespace memkern
