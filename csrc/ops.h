// The ops' C++ entry points, one per device. Schemas: library.cpp.
#pragma once
#include <tuple>

#include "tensors.h"

namespace memkern {

std::tuple<Tensor, Tensor> quantize_blockwise_cpu(Tensor x, int64_t codec, bool is_signed, int64_t block_size,
                                                  std::optional<int64_t> step);
Tensor dequantize_blockwise_cpu(Tensor codes, Tensor scale, int64_t codec, int64_t block_size,
                                ScalarType dtype);

void adam_step_cpu(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_sqs,
                   Tensors exp_avg_scales, Tensors exp_avg_sq_scales, Tensors steps, Ints group, Tensors lr,
                   Doubles beta1, Doubles beta2, Doubles eps, Doubles weight_decay, Ints decoupled,
                   Ints maximize, Ints codec, Ints block_size, std::optional<Tensor> grad_scale,
                   std::optional<Tensor> found_inf, std::optional<Tensor> grad_norm, double max_grad_norm);

void lion_step_cpu(Tensors params, Tensors grads, Tensors exp_avgs, Tensors exp_avg_scales, Ints group,
                   Tensors lr, Doubles beta1, Doubles beta2, Doubles weight_decay, Ints maximize, Ints codec,
                   Ints block_size, std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf,
                   std::optional<Tensor> grad_norm, double max_grad_norm);

void grad_norm_cpu(Tensor norm, Tensors grads, std::optional<Tensor> grad_scale);

}  // namespace memkern
