// The arguments of Muon's two ops on every device: a step's, and beside them updates and sums, which are
// checked here.
#pragma once
#include "common/step_args.h"

namespace memkern {

// Checks a step's arguments and the updates, and makes a J of each parameter: a StepTensor with its update.
template <class J> std::vector<J> muon_tensors(const StepArgs& args, const Tensors& updates) {
  auto tensors = step_tensors<J>(args, kMuonStep);
  check_count("updates", updates.size(), 1, tensors.size());
  const DeviceOf device(args.params);
  for (size_t i = 0; i < tensors.size(); ++i) {
    MEMKERN_CHECK(args.params[i].dim() >= 2, name_of("params", i),
                  " must have two dimensions, or more where it is a batch of matrices");
    MEMKERN_CHECK(updates[i].scalar_type() == ScalarType::BFloat16 &&
                      same_layout(updates[i], args.params[i]) && device.holds(updates[i]),
                  name_of("updates", i), " must be bfloat16 with its parameter's shape and strides");
    tensors[i].update = address_of(updates[i], "updates[", i, ']');
  }
  return tensors;
}

// The matrices of a tensor: how many, and how many elements each has.
struct Matrices {
  int64_t count = 1, numel;
  explicit Matrices(const Tensor& x) {
    const Shape shape(x);
    for (int64_t d = 0; d + 2 < shape.dims; ++d) count *= shape.sizes[d];
    numel = count ? x.numel() / count : 0;
  }
};

// The update, or a copy of it, whose matrices follow one another, each as one run of memory in which its
// elements have any order.
inline Tensor with_whole_matrices(const Tensor& update) {
  return Matrices(update).count == 1 ? dense(update) : torch::stable::contiguous(update);
}

inline void check_sums(const StepArgs& args, const Tensors& updates, const Tensors& sums) {
  check_count("sums", sums.size(), 1, updates.size());
  const DeviceOf device(args.params);
  for (size_t i = 0; i < sums.size(); ++i) {
    MEMKERN_CHECK(sums[i].scalar_type() == ScalarType::Double && sums[i].is_contiguous() &&
                      device.holds(sums[i]) && sums[i].numel() == Matrices(updates[i]).count,
                  name_of("sums", i), " must be contiguous float64 with one element per matrix");
    address_of(sums[i], "sums[", i, ']');
  }
}

// The op that runs Run, as torch's dispatcher calls it, in place of TORCH_BOX (see step_op). SumsOrRatios:
// the type of its second argument, after which come those of a step (memkern/schemas.py).
template <class SumsOrRatios, void (*Run)(const Tensors&, const SumsOrRatios&, const StepArgs&)>
void muon_op(StableIValue* stack, uint64_t arguments, uint64_t results) {
  MEMKERN_CHECK(arguments == kStepArguments + 2 && results == 0, "Muon's ops take ", kStepArguments + 2,
                " arguments, got ", arguments);
  const auto updates = torch::stable::detail::to<Tensors>(stack[0]);
  const auto sums_or_ratios = torch::stable::detail::to<SumsOrRatios>(stack[1]);
  StepArgs args(stack + 2);
  align_gradients(args);
  Run(updates, sums_or_ratios, args);
}

}  // namespace memkern
