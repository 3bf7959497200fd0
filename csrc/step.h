// What the optimizer steps' host sides share on every device: checks before anything changes, and jobs.
#pragma once
#include <array>

#include "tensors.h"

namespace memkern {

// One moment of all tensors: its name, its tensors, the dtype of its codes, and a scale for each tensor of
// codes.
struct MomentArgs {
  const char* name;
  const Tensors& tensors;
  ScalarType code;
  const Tensors& scales;
};

// A tensor of one number on the CPU.
inline double read_number(TensorRef t, const char* name) {
  STD_TORCH_CHECK(t.numel() == 1 && t.is_cpu(), name, " must be a tensor of one element on the CPU");
  if (t.scalar_type() == ScalarType::Double) return *static_cast<const double*>(t.data_ptr());
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float, name, " must be float32 or float64");
  return *static_cast<const float*>(t.data_ptr());
}

// What is not a tensor comes as one entry per group.
inline void check_hyperparameters(std::initializer_list<size_t> sizes, size_t groups) {
  for (size_t got : sizes)
    STD_TORCH_CHECK(got == groups, "every hyperparameter must have one entry per group, ", groups, ", got ",
                    got);
}

inline void check_steps(const Tensors& steps, const Tensors& params) {
  STD_TORCH_CHECK(steps.size() == params.size(), "steps must have ", params.size(),
                  " entries, one per parameter, got ", steps.size());
  const DeviceOf device(params);
  for (size_t i = 0; i < steps.size(); ++i)
    STD_TORCH_CHECK(
        steps[i].numel() == 1 && steps[i].scalar_type() == ScalarType::Float && device.holds(steps[i]),
        name_of("steps", i), " must be a float32 tensor of one element on the device of the parameters");
}

// Checks everything, and makes the jobs (J: a StepTensor): all that the tensors tell.
template <class J> std::vector<J> make_jobs(const Tensors& params, const Tensors& grads,
                                            const std::array<const MomentArgs*, 2>& moments,
                                            const Ints& group, size_t groups, const Ints& codec,
                                            const Ints& block_size) {
  const size_t n = params.size();
  STD_TORCH_CHECK(grads.size() == n && group.size() == n, "grads and group must have ", n,
                  " entries, one per parameter, got ", grads.size(), " and ", group.size());
  check_hyperparameters({codec.size(), block_size.size()}, groups);
  for (size_t k = 0; k < groups; ++k) {
    check_codec(codec[k]);
    check_block_size(block_size[k]);
  }
  for (const MomentArgs* moment : moments)
    if (moment)
      STD_TORCH_CHECK(moment->tensors.size() == n, moment->name, " must have ", n,
                      " entries, one per parameter, got ", moment->tensors.size());

  std::vector<J> jobs(n);
  const DeviceOf device(params);
  size_t used = 0;
  for (size_t i = 0; i < n; ++i) {
    STD_TORCH_CHECK(group[i] >= 0 && static_cast<size_t>(group[i]) < groups, name_of("group", i),
                    " must be from 0 to ", groups - 1, ", got ", group[i]);
    const int64_t size = block_size[group[i]];
    const TensorRef p = params[i], g = grads[i];
    const ScalarType p_type = p.scalar_type(), g_type = g.scalar_type();
    STD_TORCH_CHECK(is_float_type(p_type), name_of("params", i), " must be float32, bfloat16 or float16");
    STD_TORCH_CHECK(is_float_type(g_type), name_of("grads", i), " must be float32, bfloat16 or float16");
    const Shape shape(p);
    STD_TORCH_CHECK(same_layout(g, shape), name_of("grads", i),
                    " must have its parameter's shape and strides");
    STD_TORCH_CHECK(device.holds(g) && device.holds(p), name_of("grads", i),
                    " and its parameter must be on the device of the first parameter");
    J& job = jobs[i];
    job.layout = layout_of(shape, size, "a parameter");
    job.param = p.data_ptr();
    job.grad = g.data_ptr();
    job.param_type = float_type(p_type);
    job.grad_type = float_type(g_type);
    const bool coded = moments[0]->tensors[i].scalar_type() != ScalarType::Float;
    job.kind = coded ? code_kind(codec[group[i]]) : StateKind::kFp32;
    for (int k = 0; k < 2; ++k) {
      const MomentArgs* moment = moments[k];
      if (!moment) continue;
      const TensorRef state = moment->tensors[i];
      STD_TORCH_CHECK(state.scalar_type() == (coded ? moment->code : ScalarType::Float),
                      name_of(moment->name, i),
                      " must be 8-bit codes or float32, like the parameter's other states");
      STD_TORCH_CHECK(same_layout(state, shape), name_of(moment->name, i),
                      " must have its parameter's shape and strides");
      STD_TORCH_CHECK(device.holds(state), name_of(moment->name, i), " must be on its parameter's device");
      float* scale = nullptr;
      if (coded) {
        STD_TORCH_CHECK(used < moment->scales.size(), name_of(moment->name, i),
                        " holds codes and has no scale");
        const TensorRef all = moment->scales[used];
        check_scale(all, job.layout, moment->name);
        STD_TORCH_CHECK(device.holds(all), "the scale of ", name_of(moment->name, i),
                        " must be on its parameter's device");
        scale = static_cast<float*>(all.data_ptr());
      }
      (k ? job.exp_avg_sq : job.exp_avg) = state.data_ptr();
      (k ? job.exp_avg_sq_scale : job.exp_avg_scale) = scale;
    }
    used += coded;
  }
  for (const MomentArgs* moment : moments)
    if (moment)
      STD_TORCH_CHECK(moment->scales.size() == used, moment->name, " has ", used, " tensors of codes, but ",
                      moment->scales.size(), " scales were given");
  return jobs;
}

// Appends the layers of a tensor, which has a trust ratio for each.
template <class J> void add_layers(std::vector<J>& layers, J tensor, TensorRef trust_ratios) {
  const int64_t count = trust_ratios.numel();
  tensor.trust_ratio = static_cast<float*>(trust_ratios.data_ptr());
  for (int64_t k = 0; k < count; ++k) layers.push_back(layer_of(tensor, k, count));
}

// Checks that there is a trust ratio for each layer of each tensor.
template <class J> void check_trust_ratios(const Tensors& params, const std::vector<J>& jobs,
                                           const Tensors& trust_ratios, const Ints& group,
                                           const Ints& layers) {
  STD_TORCH_CHECK(trust_ratios.size() == params.size(), "trust_ratios must have ", params.size(),
                  " entries, one per parameter, got ", trust_ratios.size());
  const DeviceOf device(params);
  for (size_t i = 0; i < jobs.size(); ++i) {
    const int64_t wish = layers[group[i]];
    const int64_t count = layer_count(jobs[i].layout, params[i].dim(), wish);
    STD_TORCH_CHECK(count > 0, "layers must divide the rows of ", name_of("params", i), ", ",
                    jobs[i].layout.rows, ", and end where a block of ", jobs[i].layout.block,
                    " elements does, got ", wish);
    const TensorRef ratios = trust_ratios[i];
    STD_TORCH_CHECK(ratios.scalar_type() == ScalarType::Float && ratios.dim() == 1 &&
                        ratios.numel() == count && ratios.is_contiguous() && device.holds(ratios),
                    name_of("trust_ratios", i), " must be contiguous float32 of shape (", count,
                    ",) on its parameter's device");
  }
}

}  // namespace memkern
