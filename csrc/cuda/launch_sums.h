// The sum of squares of each of many arrays, for Muon's updates. Defined in grad_norm.cu.
#pragma once
#include "launch_step.h"

namespace memkern {

// An array, and where its sum goes.
struct NormTensor {
  const void* values;
  double* sum;
  int64_t numel;
  FloatType type;
  int32_t unused;  // in place of padding, whose bytes would be undefined
};

// Two launches: *sum is the sum of squares of each array, in fp64, or 0 where the step is skipped.
void launch_sums(const char* op, const StepHeader& header, const std::vector<NormTensor>& tensors,
                 const Tensor& like, cudaStream_t stream);

}  // namespace memkern
