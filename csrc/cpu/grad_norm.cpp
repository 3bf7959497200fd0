// memkern::grad_norm_ on the CPU.
#include <cmath>

#include "common/ops.h"
#include "cpu/step.h"

namespace memkern {

void grad_norm_cpu(Tensor norm, const Tensors& grads, const std::optional<Tensor>& grad_scale) {
  MEMKERN_CHECK(norm.numel() == 1 && norm.scalar_type() == ScalarType::Double && norm.is_cpu(),
                "norm must be float64 of one element on the gradients' device");
  auto* const result = static_cast<double*>(address_of(norm, "norm"));
  const double factor = gradient_factor(grad_scale, std::nullopt, 0.0);
  const Kernels& kernels = cpu_kernels();
  std::vector<SquaresJob> jobs;
  Tensors values;  // keeps the memory that the jobs point to
  for (size_t i = 0; i < grads.size(); ++i) {
    MEMKERN_CHECK(grads[i].is_cpu(), name_of("grads", i), " must be on the CPU, like norm");
    values.push_back(dense(grads[i]));
    const Tensor& g = values.back();
    const BlockLayout layout = flat_layout(g, name_of("grads", i).c_str(), kSquaresChunk);
    if (layout.numel == 0) continue;
    jobs.push_back({address_of(g, "a gradient"), nullptr, layout, kernels.squares(float_type(g))});
  }
  double sum = 0.0;
  for (double x : run_squares(jobs)) sum += x;
  *result = std::sqrt(sum) * factor;
}

}  // namespace memkern
