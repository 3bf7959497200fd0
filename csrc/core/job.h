// One tensor of an optimizer step, as the kernels of every device see it. No torch in here.
#pragma once
#include "layout.h"

namespace memkern {

enum class StateKind { kFp32, kPower, kDynamic };
enum class FloatType { kFp32, kBf16, kFp16 };

struct StepTensor {
  void* param;
  const void* grad;
  void* exp_avg;
  float* exp_avg_scale;
  void* exp_avg_sq;
  float* exp_avg_sq_scale;
  BlockLayout layout;
  StateKind kind;
  FloatType param_type, grad_type;
};

}  // namespace memkern
