// StepTensor: one parameter of an optimizer's step with its gradient and states, as the kernels of every
// device get it. Includes nothing of torch.
#pragma once
#include <type_traits>

#include "common/layout.h"
#include "core/tables.h"

namespace memkern {

enum class StateKind { kFp32, kPower, kDynamic };
enum class FloatType { kFp32, kBf16, kFp16 };
// How a parameter is stored: WEIGHTS of memkern/quant/codec.py. All but the first are for bf16.
enum class WeightStorage { kNearest, kStochastic, kError8, kError16 };

struct StepTensor {
  void* param;
  const void* grad;
  void *m, *v;  // first and second moment, whatever their names in the optimizer's state (StepOp)
  float *m_scale, *v_scale;
  BlockLayout layout;
  StateKind kind;
  FloatType param_type, grad_type;
  float* trust_ratio = nullptr;  // of the layer (LAMB, LARS: each layer is a StepTensor)
  bool first_layer = true;       // whether it is the first layer of its tensor
  void* weight_state = nullptr;  // int8 or int16 errors of the parameter
  WeightStorage weight_storage = WeightStorage::kNearest;
};

// How many low bits of an fp32 weight are rounded away at random; 0: none.
MEMKERN_FN constexpr int dropped_bits(WeightStorage storage) {
  return storage == WeightStorage::kStochastic ? kWeightDroppedStochastic
         : storage == WeightStorage::kError8   ? kWeightDroppedError8
                                               : 0;
}

// Whether the second moment is stored as w = sqrt(v).
MEMKERN_FN constexpr bool is_power(StateKind kind) { return kind == StateKind::kPower; }

// Bytes per element of the weight state.
MEMKERN_FN int weight_state_bytes(WeightStorage storage) {
  return storage == WeightStorage::kError16 ? 2 : storage == WeightStorage::kError8 ? 1 : 0;
}

// Layer k of the tensor's `count` layers, which are equal runs of whole blocks (layer_count).
template <class J> J layer_of(const J& tensor, int64_t k, int64_t count) {
  const auto bytes_of = [](FloatType type) { return type == FloatType::kFp32 ? 4 : 2; };
  const auto at = [](auto* array, int64_t offset) {
    using Byte =
        std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(array)>>, const char, char>;
    return array ? static_cast<Byte*>(array) + offset : nullptr;
  };
  J layer = tensor;
  BlockLayout& l = layer.layout;
  l.numel /= count;
  l.rows /= count;
  l.blocks /= count;
  if (!l.long_rows) {
    l.segment = l.numel;
    l.blocks_per_segment = l.blocks;
  }
  const int64_t elements = k * l.numel,
                state_bytes = tensor.kind == StateKind::kFp32 ? 4 * elements : elements;
  layer.param = at(tensor.param, elements * bytes_of(tensor.param_type));
  layer.grad = at(tensor.grad, elements * bytes_of(tensor.grad_type));
  layer.m = at(tensor.m, state_bytes);
  layer.v = at(tensor.v, state_bytes);
  layer.weight_state = at(tensor.weight_state, elements * weight_state_bytes(tensor.weight_storage));
  if (tensor.m_scale) layer.m_scale += k * l.blocks;
  if (tensor.v_scale) layer.v_scale += k * l.blocks;
  layer.trust_ratio += k;
  layer.first_layer = k == 0;
  return layer;
}

}  // namespace memkern
