// States of a step that stay here from one step to the next. torch takes 80 ns for each tensor in a list of
// an op's, most of it for memory that it allocates on the way, and a step of 148 parameters has 740 states.
#pragma once
#include <map>
#include <mutex>

#include "common/step_args.h"

namespace memkern {

// Of each parameter dtype, device, sizes and strides.
class Layouts {
 public:
  explicit Layouts(const Tensors& tensors) {
    facts_.reserve(8 * tensors.size());
    for (const Tensor& t : tensors) {
      int32_t dtype, type;
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &type));
      const Shape shape(t);
      facts_.insert(facts_.end(), {dtype, type, t.get_device(), shape.dims});
      facts_.insert(facts_.end(), shape.sizes, shape.sizes + shape.dims);
      facts_.insert(facts_.end(), shape.strides, shape.strides + shape.dims);
    }
  }
  bool operator==(const Layouts& other) const { return facts_ == other.facts_; }

 private:
  std::vector<int64_t> facts_;
};

struct KeptStep {
  Layouts params;
  std::shared_ptr<const StepStates> states;
};

class KeptStates {
 public:
  static KeptStates& all() {
    static KeptStates* const found = new KeptStates;  // never freed: torch may be gone before its tensors
    return *found;
  }

  int64_t keep(KeptStep step) {
    auto kept = std::make_shared<const KeptStep>(std::move(step));
    const std::lock_guard lock(mutex_);
    steps_[++last_] = std::move(kept);
    return last_;
  }

  std::shared_ptr<const KeptStep> find(int64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = steps_.find(number);
    MEMKERN_CHECK(found != steps_.end(), "there are no states of the number ", number);
    return found->second;
  }

  // A step that runs in another thread keeps them until it is done.
  void forget(int64_t number) {
    std::shared_ptr<const KeptStep> last;  // freed after the lock: a tensor takes Python's lock where it ends
    const std::lock_guard lock(mutex_);
    const auto found = steps_.find(number);
    if (found == steps_.end()) return;
    last = std::move(found->second);
    steps_.erase(found);
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<const KeptStep>> steps_;
  int64_t last_ = 0;
};

// The op keep_states.
inline void keep_states(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentStack arguments{stack};
  Tensors params;
  const auto s = std::make_shared<StepStates>();
  arguments.take(params, s->moments, s->scales, s->steps, s->trust_ratios, s->weight_states, s->group,
                 s->codec, s->block_size, s->weight_storage);
  stack[0] = torch::stable::detail::from(KeptStates::all().keep({Layouts(params), s}));
}

// The op forget_states.
inline void forget_states(StableIValue* stack, uint64_t, uint64_t) {
  KeptStates::all().forget(torch::stable::detail::to<int64_t>(stack[0]));
}

// The op that runs Step with states that are kept, if the parameters are laid out as they were then.
template <void (*Step)(const StepArgs&)> void kept_step_op(StableIValue* stack, uint64_t, uint64_t) {
  ArgumentStack arguments{stack};
  StepValues v;
  int64_t number;
  arguments.take(number, v.params, v.grads, v.lr, v.hyperparameters, v.grad_scale, v.found_inf, v.grad_norm,
                 v.max_grad_norm);
  const auto kept = KeptStates::all().find(number);
  const bool holds = Layouts(v.params) == kept->params;
  if (holds) {
    v.states = kept->states;
    StepArgs args(std::move(v));
    align_gradients(args);
    Step(args);
  }
  stack[0] = torch::stable::detail::from(holds);
}

}  // namespace memkern
