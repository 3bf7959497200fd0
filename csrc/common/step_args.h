// The arguments of an optimizer's step: one struct for all of them, and how an op gets it from torch.
#pragma once
#include <algorithm>
#include <cstring>

#include "common/schemas.h"
#include "common/tensors.h"

namespace memkern {

// StepArgs of memkern/schemas.py, which says what each of these holds.
class StepArgs {
  // Takes the arguments from torch's stack, one after the other.
  struct Stack {
    StableIValue* next;
    template <class T> T take() { return torch::stable::detail::to<T>(*next++); }
  };
  Stack stack_;

 public:
  explicit StepArgs(StableIValue* stack) : stack_{stack} {}
  StepArgs(const StepArgs&) = delete;

  // In the order of the schema, in which they are initialized.
  Tensors params = stack_.take<Tensors>();
  Tensors grads = stack_.take<Tensors>();
  Tensors moments = stack_.take<Tensors>();
  Tensors scales = stack_.take<Tensors>();
  Tensors steps = stack_.take<Tensors>();
  Tensors trust_ratios = stack_.take<Tensors>();
  Tensors weight_states = stack_.take<Tensors>();
  Ints group = stack_.take<Ints>();
  Tensors lr = stack_.take<Tensors>();
  Doubles hyperparameters = stack_.take<Doubles>();
  Ints codec = stack_.take<Ints>();
  Ints block_size = stack_.take<Ints>();
  Ints weight_storage = stack_.take<Ints>();
  std::optional<Tensor> grad_scale = stack_.take<std::optional<Tensor>>();
  std::optional<Tensor> found_inf = stack_.take<std::optional<Tensor>>();
  std::optional<Tensor> grad_norm = stack_.take<std::optional<Tensor>>();
  double max_grad_norm = stack_.take<double>();
  std::optional<Tensor> squares = stack_.take<std::optional<Tensor>>();
  bool squares_only = stack_.take<bool>();

  // The hyperparameters of each group, as the optimizer's struct of them (core/hyperparameters.h).
  template <class Hyperparameters> std::vector<Hyperparameters> groups() const {
    std::vector<Hyperparameters> all(lr.size());
    const size_t each = sizeof(Hyperparameters) / sizeof(double);
    MEMKERN_CHECK(hyperparameters.size() == each * all.size(), "hyperparameters must have ",
                  each * all.size(), " entries, ", each, " per group, got ", hyperparameters.size());
    std::memcpy(all.data(), hyperparameters.data(), hyperparameters.size() * sizeof(double));
    return all;
  }
};

// Copies each gradient that has its parameter's shape and other strides, as autograd makes some. What does
// not fit in another way is left to the step's checks, which come after; so is a parameter with gaps.
inline void align_gradients(StepArgs& args) {
  for (size_t i = 0; i < args.grads.size() && i < args.params.size(); ++i) {
    const Tensor &p = args.params[i], &g = args.grads[i];
    const Shape of_p(p), of_g(g);
    const bool same_sizes =
        of_p.dims == of_g.dims && std::equal(of_p.sizes, of_p.sizes + of_p.dims, of_g.sizes);
    if (!same_sizes || same_layout(of_g, of_p) || !is_dense(of_p)) continue;
    if (!is_float_type(g.scalar_type()) || g.is_cpu() != p.is_cpu()) continue;
    Tensor aligned = empty_like(p, g.scalar_type());
    torch::stable::copy_(aligned, g);
    args.grads[i] = aligned;
  }
}

// The op that runs Step: what torch calls, in place of TORCH_BOX.
template <void (*Step)(const StepArgs&)>
void step_op(StableIValue* stack, uint64_t arguments, uint64_t results) {
  MEMKERN_CHECK(arguments == kStepArguments && results == 0, "an optimizer's step takes ", kStepArguments,
                " arguments, got ", arguments);
  StepArgs args(stack);
  align_gradients(args);
  Step(args);
}

}  // namespace memkern
