// memkern::lion_step_ on the CPU.
#include "../ops.h"
#include "kernels.h"
#include "step.h"

namespace memkern {

void lion_step_cpu(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_scales, Ints group,
                   Tensors lr, Doubles beta1, Doubles beta2, Doubles weight_decay, Ints maximize, Ints codec,
                   Ints block_size, std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf) {
  const size_t groups = lr.size();
  for (size_t got : {beta1.size(), beta2.size(), weight_decay.size(), maximize.size()})
    STD_TORCH_CHECK(got == groups, "every hyperparameter must have one entry per group, ", groups, ", got ",
                    got);
  const MomentArgs m{"exp_avgs", exp_avgs, ScalarType::Char, exp_avg_scales};
  auto jobs = make_jobs<LionJob>(params, grads, {&m, nullptr}, group, groups, codec, block_size);
  const float inv_grad_scale = inverse_grad_scale(grad_scale);
  std::vector<LionScalars> scalars;
  for (size_t k = 0; k < groups; ++k)
    scalars.push_back(lion_scalars(read_number(lr[k], "lr"), beta1[k], beta2[k], weight_decay[k],
                                   maximize[k] != 0, inv_grad_scale));
  if (skipped(found_inf)) return;

  for (size_t i = 0; i < jobs.size(); ++i) {
    const StateKind kind = state_kind(exp_avgs[i], codec[group[i]]);
    jobs[i].scalars = &scalars[group[i]];
    jobs[i].run = MEMKERN_PICK(lion_kernel, kind, float_type(params[i]), float_type(grads[i]));
  }
  run_jobs(jobs);
}

}  // namespace memkern
