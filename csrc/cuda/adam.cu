// memkern::adam_step_ on CUDA devices.
#include "../ops.h"
#include "adam_kernel.cuh"
#include "step_table.h"

namespace memkern {

void adam_step_cuda(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs,
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
  const auto jobs = make_jobs<StepTensor>(params, grads, {&m, &v}, group, groups, codec, block_size);
  check_steps(steps, params);
  if (params.empty()) return;
  const StepHeader header = header_of(grad_scale, found_inf, grad_norm, max_grad_norm, params[0]);
  std::vector<AdamGroup> records;
  for (size_t k = 0; k < groups; ++k)
    records.push_back({number_of(lr[k], params[0], "lr"), beta1[k], beta2[k], eps[k], weight_decay[k],
                       decoupled[k] != 0, maximize[k] != 0});

  const OnDevice on(params[0]);
  const auto step = upload_step<AdamGroup, AdamTensor>("adam_step_", header, records, jobs, params[0], steps,
                                                       group, on.stream);
  launch_step("adam_step_", step, adam_prologue, adam_tiles<StateKind::kPower>,
              adam_tiles<StateKind::kDynamic>, on.stream);
}

}  // namespace memkern
