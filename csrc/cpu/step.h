// What the optimizer steps' host sides share: checks before anything changes, and the scalars that ride on
// tensors.
#pragma once
#include <array>
#include <map>

#include "multi_tensor.h"

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
inline double read_number(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.numel() == 1 && t.is_cpu(), name, " must be a tensor of one element on the CPU");
  if (t.scalar_type() == ScalarType::Double) return *static_cast<const double*>(t.data_ptr());
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float, name, " must be float32 or float64");
  return *static_cast<const float*>(t.data_ptr());
}

inline bool skipped(const std::optional<Tensor>& found_inf) {
  return found_inf && read_number(*found_inf, "found_inf") != 0;
}

inline float inverse_grad_scale(const std::optional<Tensor>& grad_scale) {
  return grad_scale ? static_cast<float>(1.0 / read_number(*grad_scale, "grad_scale")) : 1.0f;
}

inline StateKind state_kind(const Tensor& state, int64_t codec) {
  return state.scalar_type() == ScalarType::Float ? StateKind::kFp32 : code_kind(codec);
}

// Checks everything, and makes the jobs: all but their scalars, rounding and kernel.
template <class J> std::vector<J> make_jobs(const Tensors& params, const Tensors& grads,
                                            const std::array<const MomentArgs*, 2>& moments,
                                            const Ints& group, size_t groups, const Ints& codec,
                                            const Ints& block_size) {
  const size_t n = params.size();
  STD_TORCH_CHECK(grads.size() == n && group.size() == n, "grads and group must have ", n,
                  " entries, one per parameter, got ", grads.size(), " and ", group.size());
  STD_TORCH_CHECK(codec.size() == groups && block_size.size() == groups,
                  "every hyperparameter must have one entry per group");
  for (size_t k = 0; k < groups; ++k) {
    check_codec(codec[k]);
    check_block_size(block_size[k]);
  }
  for (const MomentArgs* moment : moments)
    if (moment)
      STD_TORCH_CHECK(moment->tensors.size() == n, moment->name, " must have ", n,
                      " entries, one per parameter, got ", moment->tensors.size());

  std::vector<J> jobs(n);
  size_t used = 0;
  for (size_t i = 0; i < n; ++i) {
    STD_TORCH_CHECK(group[i] >= 0 && static_cast<size_t>(group[i]) < groups, name_of("group", i),
                    " must be from 0 to ", groups - 1, ", got ", group[i]);
    const int64_t size = block_size[group[i]];
    const Tensor &p = params[i], &g = grads[i];
    STD_TORCH_CHECK(is_float_type(p.scalar_type()), name_of("params", i),
                    " must be float32, bfloat16 or float16");
    STD_TORCH_CHECK(is_float_type(g.scalar_type()), name_of("grads", i),
                    " must be float32, bfloat16 or float16");
    STD_TORCH_CHECK(same_layout(g, p), name_of("grads", i), " must have its parameter's shape and strides");
    J& job = jobs[i];
    job.layout = layout_of(p, size, "a parameter");
    job.param = p.data_ptr();
    job.grad = g.data_ptr();
    const bool coded = moments[0]->tensors[i].scalar_type() != ScalarType::Float;
    for (int k = 0; k < 2; ++k) {
      const MomentArgs* moment = moments[k];
      if (!moment) continue;
      const Tensor& state = moment->tensors[i];
      STD_TORCH_CHECK(state.scalar_type() == (coded ? moment->code : ScalarType::Float),
                      name_of(moment->name, i),
                      " must be 8-bit codes or float32, like the parameter's other states");
      STD_TORCH_CHECK(same_layout(state, p), name_of(moment->name, i),
                      " must have its parameter's shape and strides");
      float* scale = nullptr;
      if (coded) {
        STD_TORCH_CHECK(used < moment->scales.size(), name_of(moment->name, i),
                        " holds codes and has no scale");
        check_scale(moment->scales[used], job.layout, moment->name);
        scale = static_cast<float*>(moment->scales[used].data_ptr());
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

}  // namespace memkern
