// Every op: its schema and its registration. Built against LibTorch's stable ABI: no Python.h, one binary for
// any Python and torch >= 2.10. memkern/_ops.py repeats the schemas for installations without this file (a
// test compares them).
#include "ops.h"
#include "recall.h"

STABLE_TORCH_LIBRARY(memkern, m) {
  m.def(
      "quantize_blockwise(Tensor x, int codec, bool signed, int block_size, int? step=None) -> (Tensor, "
      "Tensor)");
  m.def(
      "dequantize_blockwise(Tensor codes, Tensor scale, int codec, int block_size, ScalarType dtype) -> "
      "Tensor");
  m.def(
      "adam_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
      "Tensor(d!)[] exp_avg_scales, Tensor(e!)[] exp_avg_sq_scales, Tensor(f!)[] steps, int[] group, "
      "Tensor[] lr, "
      "float[] beta1, float[] beta2, float[] eps, float[] weight_decay, int[] decoupled, int[] maximize, "
      "int[] codec, int[] block_size, Tensor? grad_scale=None, Tensor? found_inf=None, "
      "Tensor? grad_norm=None, float max_grad_norm=0.0) -> ()");
  m.def(
      "lamb_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
      "Tensor(d!)[] exp_avg_scales, Tensor(e!)[] exp_avg_sq_scales, Tensor(f!)[] steps, "
      "Tensor(g!)[] trust_ratios, int[] group, Tensor[] lr, float[] beta1, float[] beta2, float[] eps, "
      "float[] weight_decay, int[] decoupled, int[] bias_correction, int[] trust_clip, int[] always_adapt, "
      "int[] layers, int[] maximize, int[] codec, int[] block_size, Tensor? grad_scale=None, "
      "Tensor? found_inf=None, Tensor? grad_norm=None, float max_grad_norm=0.0) -> ()");
  m.def(
      "lars_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_scales, "
      "Tensor(d!)[] steps, Tensor(e!)[] trust_ratios, int[] group, Tensor[] lr, float[] momentum, "
      "float[] dampening, float[] weight_decay, int[] nesterov, float[] trust_coeff, float[] eps, "
      "int[] trust_clip, int[] always_adapt, int[] layers, int[] maximize, int[] codec, int[] block_size, "
      "Tensor? grad_scale=None, Tensor? found_inf=None, Tensor? grad_norm=None, float max_grad_norm=0.0) -> "
      "()");
  m.def(
      "lion_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_scales, "
      "int[] group, Tensor[] lr, float[] beta1, float[] beta2, float[] weight_decay, int[] maximize, int[] "
      "codec, "
      "int[] block_size, Tensor? grad_scale=None, Tensor? found_inf=None, "
      "Tensor? grad_norm=None, float max_grad_norm=0.0) -> ()");
  m.def("grad_norm_(Tensor(a!) norm, Tensor[] grads, Tensor? grad_scale=None) -> ()");
  m.def("few_bit_encode(Tensor x, int bits, float[] thresholds, int[] flips, int symmetry) -> Tensor");
  m.def(
      "few_bit_forward(Tensor x, int fn, float a, float b, int bits, float[] thresholds, int[] flips, int "
      "symmetry) -> (Tensor, Tensor)");
  m.def("few_bit_backward(Tensor grad, Tensor codes, float[] levels) -> Tensor");
  m.def(
      "few_bit_backward_from_output(Tensor grad, Tensor output, Tensor codes, float minimum, float[] "
      "falling, "
      "float[] rising, float falling_reach, float rising_reach) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(memkern, CPU, m) {
  m.impl("quantize_blockwise", TORCH_BOX(&memkern::quantize_blockwise_cpu));
  m.impl("dequantize_blockwise", TORCH_BOX(&memkern::dequantize_blockwise_cpu));
  m.impl("adam_step_", TORCH_BOX(&memkern::adam_step_cpu));
  m.impl("lamb_step_", TORCH_BOX(&memkern::lamb_step_cpu));
  m.impl("lars_step_", TORCH_BOX(&memkern::lars_step_cpu));
  m.impl("lion_step_", TORCH_BOX(&memkern::lion_step_cpu));
  m.impl("grad_norm_", TORCH_BOX(&memkern::grad_norm_cpu));
  m.impl("few_bit_encode", TORCH_BOX(&memkern::few_bit_encode_cpu));
  m.impl("few_bit_backward", TORCH_BOX(&memkern::few_bit_backward_cpu));
  m.impl("few_bit_backward_from_output", TORCH_BOX(&memkern::few_bit_backward_from_output_cpu));
}

#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(memkern, CUDA, m) {
  m.impl("quantize_blockwise", TORCH_BOX(&memkern::quantize_blockwise_cuda));
  m.impl("dequantize_blockwise", TORCH_BOX(&memkern::dequantize_blockwise_cuda));
  m.impl("adam_step_", TORCH_BOX(&memkern::adam_step_cuda));
  m.impl("lamb_step_", TORCH_BOX(&memkern::lamb_step_cuda));
  m.impl("lars_step_", TORCH_BOX(&memkern::lars_step_cuda));
  m.impl("lion_step_", TORCH_BOX(&memkern::lion_step_cuda));
  m.impl("grad_norm_", TORCH_BOX(&memkern::grad_norm_cuda));
  m.impl("few_bit_encode", TORCH_BOX(&memkern::few_bit_encode_cuda));
  m.impl("few_bit_forward", TORCH_BOX(&memkern::few_bit_forward_cuda));
  m.impl("few_bit_backward", TORCH_BOX(&memkern::few_bit_backward_cuda));
  m.impl("few_bit_backward_from_output", TORCH_BOX(&memkern::few_bit_backward_from_output_cuda));
}
#endif

// For Python, which knows when an optimizer's step begins (backend.py).
extern "C" __attribute__((visibility("default"))) void memkern_recall(int64_t key) {
  memkern::Recall::begin(key);
}
