// The arguments of an optimizer's step: one struct for all optimizers, how an op gets it from torch, its
// checks, and a StepTensor for each parameter.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/schemas.h"
#include "common/tensors.h"

namespace memkern {

// StepArgs of memkern/schemas.py, which documents each field.
struct StepArgs {
  Tensors params, grads, moments, scales, steps, trust_ratios, weight_states;
  Ints group;
  Tensors lr;
  Doubles hyperparameters;
  Ints codec, block_size, weight_storage;
  std::optional<Tensor> grad_scale, found_inf, grad_norm;
  double max_grad_norm;
  std::optional<Tensor> squares;
  bool squares_only;

  // Takes the arguments from torch's stack, in the order of the schema.
  explicit StepArgs(StableIValue* stack) {
    const auto take = [&]<class... T>(T&... to) { ((to = torch::stable::detail::to<T>(*stack++)), ...); };
    take(params, grads, moments, scales, steps, trust_ratios, weight_states, group, lr, hyperparameters,
         codec, block_size, weight_storage, grad_scale, found_inf, grad_norm, max_grad_norm, squares,
         squares_only);
  }
  StepArgs(const StepArgs&) = delete;

  // The hyperparameters of each group, as the optimizer's struct of them (core/hyperparameters.h).
  template <class Hyperparameters> std::vector<Hyperparameters> groups() const {
    std::vector<Hyperparameters> structs(lr.size());
    const size_t per_group = sizeof(Hyperparameters) / sizeof(double);
    MEMKERN_CHECK(hyperparameters.size() == per_group * structs.size(), "hyperparameters must have ",
                  per_group * structs.size(), " entries, ", per_group, " per group, got ",
                  hyperparameters.size());
    std::memcpy(structs.data(), hyperparameters.data(), hyperparameters.size() * sizeof(double));
    return structs;
  }
};

// Copies each gradient that has its parameter's shape but other strides, as autograd makes some. The step's
// checks come after this and raise for other mismatches and for parameters with gaps.
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

// The op that runs Step, as torch's dispatcher calls it. TORCH_BOX would unpack the stack into the parameters
// of a function; this takes it into one struct.
template <void (*Step)(const StepArgs&)>
void step_op(StableIValue* stack, uint64_t arguments, uint64_t results) {
  MEMKERN_CHECK(arguments == kStepArguments && results == 0, "an optimizer's step takes ", kStepArguments,
                " arguments, got ", arguments);
  StepArgs args(stack);
  align_gradients(args);
  Step(args);
}

// ---- checks, before anything is changed

// Checks a tensor of one element on the CPU, and returns its value.
inline double read_number(const Tensor& t, const char* name) {
  MEMKERN_CHECK(t.numel() == 1 && t.is_cpu(), name, " must be a tensor of one element on the CPU");
  if (t.scalar_type() == ScalarType::Double) return *static_cast<const double*>(address_of(t, name));
  MEMKERN_CHECK(t.scalar_type() == ScalarType::Float, name, " must be float32 or float64");
  return *static_cast<const float*>(address_of(t, name));
}

inline void check_count(const char* name, size_t count, size_t per_param, size_t params) {
  MEMKERN_CHECK(count == per_param * params, name, " must have ", per_param * params, " entries, ", per_param,
                " per parameter, got ", count);
}

// Checks everything but the tensors that have the parameters' shapes: lengths of lists, values per group,
// step counters.
inline void check_lists(const StepArgs& args, const StepOp& op) {
  const size_t n = args.params.size(), groups = args.lr.size();
  check_count("grads", args.grads.size(), 1, n);
  check_count("group", args.group.size(), 1, n);
  check_count("moments", args.moments.size(), op.moments, n);
  check_count("steps", args.steps.size(), 1, n);
  check_count("trust_ratios", args.trust_ratios.size(), op.has_trust_ratios, n);
  MEMKERN_CHECK(args.codec.size() == groups && args.block_size.size() == groups,
                "codec and block_size must have one entry per group, ", groups, ", got ", args.codec.size(),
                " and ", args.block_size.size());
  for (size_t k = 0; k < groups; ++k) {
    check_codec(args.codec[k]);
    check_block_size(args.block_size[k]);
  }
  MEMKERN_CHECK(args.weight_storage.empty() || args.weight_storage.size() == groups,
                "weight_storage must have ", groups, " entries or none, got ", args.weight_storage.size());
  for (const int64_t storage : args.weight_storage)
    MEMKERN_CHECK(0 <= storage && storage <= static_cast<int64_t>(WeightStorage::kError16),
                  "weight_storage must be from 0 to ", static_cast<int64_t>(WeightStorage::kError16),
                  ", got ", storage);
  MEMKERN_CHECK(op.has_trust_ratios || !(args.squares || args.squares_only),
                "squares and squares_only are of steps with trust ratios");
  const DeviceOf device(args.params);
  for (size_t i = 0; i < args.steps.size(); ++i) {
    const Tensor& step = args.steps[i];
    MEMKERN_CHECK(step.numel() == 1 && step.scalar_type() == ScalarType::Float && device.holds(step),
                  name_of("steps", i),
                  " must be a float32 tensor of one element on the device of the parameters");
    const void* address = address_of(step, "steps[", i, ']');
    if (!step.is_cpu()) continue;
    const float count = *static_cast<const float*>(address);
    MEMKERN_CHECK(count >= 0 && std::isfinite(count), name_of("steps", i),
                  " must be a finite number, 0 or more, got ", count);
  }
}

// Checks the moments of parameter i and sets t's pointers to them. J: as of step_tensors(). `coded`:
// how many parameters before it have moments in codes. Returns whether the moments of parameter i are codes.
template <class J> bool set_moments(J& t, const StepArgs& args, const StepOp& op, size_t i, size_t coded,
                                    const Shape& shape, const DeviceOf& device) {
  const size_t n = args.params.size(), scales_per_moment = args.scales.size() / op.moments;
  const bool has_codes = args.moments[i].scalar_type() != ScalarType::Float;
  void** const states[] = {&t.m, &t.v};
  float** const state_scales[] = {&t.m_scale, &t.v_scale};
  t.kind = has_codes ? code_kind(args.codec[args.group[i]]) : StateKind::kFp32;
  for (int k = 0; k < op.moments; ++k) {
    const Tensor& state = args.moments[k * n + i];
    const char* name = op.moment[k].name;
    const ScalarType code_type = op.moment[k].is_signed ? ScalarType::Char : ScalarType::Byte;
    MEMKERN_CHECK(state.scalar_type() == (has_codes ? code_type : ScalarType::Float), name_of(name, i),
                  " must be 8-bit codes or float32, like the parameter's other states");
    MEMKERN_CHECK(same_layout(state, shape), name_of(name, i),
                  " must have its parameter's shape and strides");
    MEMKERN_CHECK(device.holds(state), name_of(name, i), " must be on its parameter's device");
    *states[k] = address_of(state, name, '[', i, ']');
    if (!has_codes) continue;
    MEMKERN_CHECK(coded < scales_per_moment, name_of(name, i), " holds codes and has no scale");
    const Tensor& scale = args.scales[k * scales_per_moment + coded];
    check_scale(scale, t.layout, name);
    MEMKERN_CHECK(device.holds(scale), "the scale of ", name_of(name, i),
                  " must be on its parameter's device");
    *state_scales[k] = static_cast<float*>(address_of(scale, "the scale of ", name, '[', i, ']'));
  }
  return has_codes;
}

// Checks how parameter i is stored and, where that needs a weight state (the errors of rounding it to bf16),
// this state; sets both in t. `states_before`: how many parameters before it have a weight state. Returns
// whether parameter i has a weight state.
template <class J> bool set_weight_state(J& t, const StepArgs& args, size_t i, size_t states_before,
                                         const Shape& shape, const DeviceOf& device) {
  if (args.weight_storage.empty()) return false;
  t.weight_storage = static_cast<WeightStorage>(args.weight_storage[args.group[i]]);
  // Every storage but 0 (kNearest) is for bf16 alone.
  MEMKERN_CHECK(t.weight_storage == WeightStorage::kNearest || t.param_type == FloatType::kBf16,
                name_of("params", i), " must be bfloat16 for another weight_storage than 0");
  const int bytes = weight_state_bytes(t.weight_storage);
  if (bytes == 0) return false;
  MEMKERN_CHECK(states_before < args.weight_states.size(), name_of("params", i), " has no weight state");
  const Tensor& state = args.weight_states[states_before];
  const bool is_wide = bytes == 2;
  MEMKERN_CHECK(state.scalar_type() == (is_wide ? ScalarType::Short : ScalarType::Char) &&
                    same_layout(state, shape) && device.holds(state),
                name_of("weight_states", states_before), " must be ", is_wide ? "int16" : "int8",
                " with its parameter's shape and strides, on its device");
  t.weight_state = address_of(state, "weight_states[", states_before, ']');
  return true;
}

// Checks everything, and returns a J for each parameter, with its gradient and its states. J: StepTensor, or
// a struct that the CPU's code derives from it.
template <class J> std::vector<J> step_tensors(const StepArgs& args, const StepOp& op) {
  check_lists(args, op);
  const size_t n = args.params.size(), groups = args.lr.size();
  std::vector<J> tensors(n);
  const DeviceOf device(args.params);
  size_t coded = 0, weight_states = 0;
  for (size_t i = 0; i < n; ++i) {
    const int64_t group = args.group[i];
    MEMKERN_CHECK(group >= 0 && static_cast<size_t>(group) < groups, name_of("group", i),
                  " must be from 0 to ", groups - 1, ", got ", group);
    const Tensor &p = args.params[i], &g = args.grads[i];
    const ScalarType p_type = p.scalar_type(), g_type = g.scalar_type();
    MEMKERN_CHECK(is_float_type(p_type), name_of("params", i), " must be float32, bfloat16 or float16");
    MEMKERN_CHECK(is_float_type(g_type), name_of("grads", i), " must be float32, bfloat16 or float16");
    const Shape shape(p);
    MEMKERN_CHECK(same_layout(g, shape), name_of("grads", i), " must have its parameter's shape and strides");
    MEMKERN_CHECK(device.holds(g) && device.holds(p), name_of("grads", i),
                  " and its parameter must be on the device of the first parameter");
    J& t = tensors[i];
    t.layout = layout_of(shape, args.block_size[group], "a parameter");
    t.param = address_of(p, "params[", i, ']');
    t.grad = address_of(g, "grads[", i, ']');
    t.param_type = float_type(p_type);
    t.grad_type = float_type(g_type);
    coded += set_moments(t, args, op, i, coded, shape, device);
    weight_states += set_weight_state(t, args, i, weight_states, shape, device);
  }
  MEMKERN_CHECK(args.scales.size() == coded * op.moments, "scales must have ", coded * op.moments,
                " entries, one per moment of codes, got ", args.scales.size());
  MEMKERN_CHECK(args.weight_states.size() == weight_states, "weight_states must have ", weight_states,
                " entries, one per parameter whose group stores one, got ", args.weight_states.size());
  return tensors;
}

}  // namespace memkern
