// The ops' C++ entry points, one per device. Schemas: library.cpp.
#pragma once
#include <tuple>

#include "tensors.h"

namespace memkern {

std::tuple<Tensor, Tensor> quantize_blockwise_cpu(Tensor x, int64_t codec, bool is_signed, int64_t block_size,
                                                  std::optional<int64_t> step);
Tensor dequantize_blockwise_cpu(Tensor codes, Tensor scale, int64_t codec, int64_t block_size,
                                ScalarType dtype);

void adam_step_cpu(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs,
                   const Tensors& exp_avg_sqs, const Tensors& exp_avg_scales,
                   const Tensors& exp_avg_sq_scales, const Tensors& steps, const Ints& group,
                   const Tensors& lr, const Doubles& beta1, const Doubles& beta2, const Doubles& eps,
                   const Doubles& weight_decay, const Ints& decoupled, const Ints& maximize,
                   const Ints& codec, const Ints& block_size, const std::optional<Tensor>& grad_scale,
                   const std::optional<Tensor>& found_inf, const std::optional<Tensor>& grad_norm,
                   double max_grad_norm);

void lamb_step_cpu(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs,
                   const Tensors& exp_avg_sqs, const Tensors& exp_avg_scales,
                   const Tensors& exp_avg_sq_scales, const Tensors& steps, const Tensors& trust_ratios,
                   const Ints& group, const Tensors& lr, const Doubles& beta1, const Doubles& beta2,
                   const Doubles& eps, const Doubles& weight_decay, const Ints& decoupled,
                   const Ints& bias_correction, const Ints& trust_clip, const Ints& always_adapt,
                   const Ints& layers, const Ints& maximize, const Ints& codec, const Ints& block_size,
                   const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
                   const std::optional<Tensor>& grad_norm, double max_grad_norm);

void lars_step_cpu(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs,
                   const Tensors& exp_avg_scales, const Tensors& steps, const Tensors& trust_ratios,
                   const Ints& group, const Tensors& lr, const Doubles& momentum, const Doubles& dampening,
                   const Doubles& weight_decay, const Ints& nesterov, const Doubles& trust_coeff,
                   const Doubles& eps, const Ints& trust_clip, const Ints& always_adapt, const Ints& layers,
                   const Ints& maximize, const Ints& codec, const Ints& block_size,
                   const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
                   const std::optional<Tensor>& grad_norm, double max_grad_norm);

void lion_step_cpu(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs,
                   const Tensors& exp_avg_scales, const Ints& group, const Tensors& lr, const Doubles& beta1,
                   const Doubles& beta2, const Doubles& weight_decay, const Ints& maximize, const Ints& codec,
                   const Ints& block_size, const std::optional<Tensor>& grad_scale,
                   const std::optional<Tensor>& found_inf, const std::optional<Tensor>& grad_norm,
                   double max_grad_norm);

void grad_norm_cpu(Tensor norm, const Tensors& grads, const std::optional<Tensor>& grad_scale);

Tensor few_bit_encode_cpu(Tensor x, int64_t bits, Doubles thresholds, Ints flips, int64_t symmetry);
Tensor few_bit_backward_cpu(Tensor grad, Tensor codes, Doubles levels);
Tensor few_bit_backward_from_output_cpu(Tensor grad, Tensor output, Tensor codes, double minimum,
                                        Doubles falling, Doubles rising, double falling_reach,
                                        double rising_reach);

std::tuple<Tensor, Tensor> quantize_blockwise_cuda(Tensor x, int64_t codec, bool is_signed,
                                                   int64_t block_size, std::optional<int64_t> step);
Tensor dequantize_blockwise_cuda(Tensor codes, Tensor scale, int64_t codec, int64_t block_size,
                                 ScalarType dtype);

void adam_step_cuda(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs,
                    const Tensors& exp_avg_sqs, const Tensors& exp_avg_scales,
                    const Tensors& exp_avg_sq_scales, const Tensors& steps, const Ints& group,
                    const Tensors& lr, const Doubles& beta1, const Doubles& beta2, const Doubles& eps,
                    const Doubles& weight_decay, const Ints& decoupled, const Ints& maximize,
                    const Ints& codec, const Ints& block_size, const std::optional<Tensor>& grad_scale,
                    const std::optional<Tensor>& found_inf, const std::optional<Tensor>& grad_norm,
                    double max_grad_norm);

void lamb_step_cuda(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs,
                    const Tensors& exp_avg_sqs, const Tensors& exp_avg_scales,
                    const Tensors& exp_avg_sq_scales, const Tensors& steps, const Tensors& trust_ratios,
                    const Ints& group, const Tensors& lr, const Doubles& beta1, const Doubles& beta2,
                    const Doubles& eps, const Doubles& weight_decay, const Ints& decoupled,
                    const Ints& bias_correction, const Ints& trust_clip, const Ints& always_adapt,
                    const Ints& layers, const Ints& maximize, const Ints& codec, const Ints& block_size,
                    const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
                    const std::optional<Tensor>& grad_norm, double max_grad_norm);

void lars_step_cuda(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs,
                    const Tensors& exp_avg_scales, const Tensors& steps, const Tensors& trust_ratios,
                    const Ints& group, const Tensors& lr, const Doubles& momentum, const Doubles& dampening,
                    const Doubles& weight_decay, const Ints& nesterov, const Doubles& trust_coeff,
                    const Doubles& eps, const Ints& trust_clip, const Ints& always_adapt, const Ints& layers,
                    const Ints& maximize, const Ints& codec, const Ints& block_size,
                    const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& found_inf,
                    const std::optional<Tensor>& grad_norm, double max_grad_norm);

void lion_step_cuda(const Tensors& params, const Tensors& grads, const Tensors& exp_avgs,
                    const Tensors& exp_avg_scales, const Ints& group, const Tensors& lr, const Doubles& beta1,
                    const Doubles& beta2, const Doubles& weight_decay, const Ints& maximize,
                    const Ints& codec, const Ints& block_size, const std::optional<Tensor>& grad_scale,
                    const std::optional<Tensor>& found_inf, const std::optional<Tensor>& grad_norm,
                    double max_grad_norm);

void grad_norm_cuda(Tensor norm, const Tensors& grads, const std::optional<Tensor>& grad_scale);

Tensor few_bit_encode_cuda(Tensor x, int64_t bits, Doubles thresholds, Ints flips, int64_t symmetry);
std::tuple<Tensor, Tensor> few_bit_forward_cuda(Tensor x, int64_t fn, double a, double b, int64_t bits,
                                                Doubles thresholds, Ints flips, int64_t symmetry);
Tensor few_bit_backward_cuda(Tensor grad, Tensor codes, Doubles levels);
Tensor few_bit_backward_from_output_cuda(Tensor grad, Tensor output, Tensor codes, double minimum,
                                         Doubles falling, Doubles rising, double falling_reach,
                                         double rising_reach);

}  // namespace memkern
