// The ops' C++ entry points on each device, and their registration. Schemas: memkern/schemas.py.
#pragma once
#include <tuple>

#include "common/step_args.h"

// An optimizer's step: its entry point and its registration. MEMKERN_FOR_STEPS(DO, ...), in the generated
// common/schemas.h, is DO(adam_step, ...) DO(lamb_step, ...) and so on.
#define MEMKERN_DECLARE_STEP(NAME, DEVICE) void NAME##_##DEVICE(const StepArgs& args);
#define MEMKERN_REGISTER_STEP(NAME, LIBRARY, DEVICE) \
  LIBRARY.impl(#NAME "_", memkern::step_op<memkern::NAME##_##DEVICE>);

// Muon's two ops take torch's stack, as each ends with the arguments of a step (muon_op, step_op).
#define MEMKERN_DECLARE_OPS(DEVICE)                                                                         \
  namespace memkern {                                                                                       \
  std::tuple<Tensor, Tensor> quantize_blockwise_##DEVICE(Tensor x, int64_t codec, bool is_signed,           \
                                                         int64_t block_size, std::optional<int64_t> step,   \
                                                         bool mark_nonfinite);                              \
  Tensor dequantize_blockwise_##DEVICE(Tensor codes, Tensor scale, int64_t codec, int64_t block_size,       \
                                       ScalarType dtype);                                                   \
  MEMKERN_FOR_STEPS(MEMKERN_DECLARE_STEP, DEVICE)                                                           \
  void grad_norm_##DEVICE(Tensor norm, const Tensors& grads, const std::optional<Tensor>& grad_scale);      \
  void muon_momentum_##DEVICE(StableIValue* stack, uint64_t arguments, uint64_t results);                   \
  void muon_apply_##DEVICE(StableIValue* stack, uint64_t arguments, uint64_t results);                      \
  Tensor few_bit_encode_##DEVICE(Tensor x, int64_t bits, Doubles thresholds, Ints flips, int64_t symmetry); \
  Tensor few_bit_backward_##DEVICE(Tensor grad, Tensor codes, Doubles levels);                              \
  Tensor few_bit_backward_from_output_##DEVICE(Tensor grad, Tensor output, Tensor codes, double minimum,    \
                                               Doubles falling, Doubles rising, double falling_reach,       \
                                               double rising_reach);                                        \
  }

// Registers all ops but few_bit_forward.
#define MEMKERN_REGISTER_OPS(library, DEVICE)                                               \
  library.impl("quantize_blockwise", TORCH_BOX(&memkern::quantize_blockwise_##DEVICE));     \
  library.impl("dequantize_blockwise", TORCH_BOX(&memkern::dequantize_blockwise_##DEVICE)); \
  MEMKERN_FOR_STEPS(MEMKERN_REGISTER_STEP, library, DEVICE)                                 \
  library.impl("grad_norm_", TORCH_BOX(&memkern::grad_norm_##DEVICE));                      \
  library.impl("muon_momentum_", memkern::muon_momentum_##DEVICE);                          \
  library.impl("muon_apply_", memkern::muon_apply_##DEVICE);                                \
  library.impl("few_bit_encode", TORCH_BOX(&memkern::few_bit_encode_##DEVICE));             \
  library.impl("few_bit_backward", TORCH_BOX(&memkern::few_bit_backward_##DEVICE));         \
  library.impl("few_bit_backward_from_output", TORCH_BOX(&memkern::few_bit_backward_from_output_##DEVICE))

MEMKERN_DECLARE_OPS(cpu)

MEMKERN_DECLARE_OPS(cuda)

// few_bit_forward has no kernel on the CPU: it is torch's own op and few_bit_encode there (memkern/_ops.py).
namespace memkern {
std::tuple<Tensor, Tensor> few_bit_forward_cuda(Tensor x, int64_t fn, double a, double b, int64_t bits,
                                                Doubles thresholds, Ints flips, int64_t symmetry);
}
