// memkern::grad_norm_ on the CPU.
#include <cmath>

#include "../ops.h"
#include "multi_tensor.h"
#include "scaler.h"

namespace memkern {

// A partial sum for each chunk, whatever the number of threads, and all added in order.
constexpr int64_t kChunk = 1 << 14;

void grad_norm_cpu(Tensor norm, const Tensors& grads, const std::optional<Tensor>& grad_scale) {
  STD_TORCH_CHECK(norm.numel() == 1 && norm.scalar_type() == ScalarType::Double && norm.is_cpu(),
                  "norm must be float64 of one element on the gradients' device");
  const double factor = gradient_factor(grad_scale, std::nullopt, 0.0);
  std::vector<SquaresJob> jobs;
  int64_t chunks = 0;
  for (size_t i = 0; i < grads.size(); ++i) {
    const TensorRef g = grads[i];
    STD_TORCH_CHECK(g.is_cpu(), name_of("grads", i), " must be on the CPU, like norm");
    STD_TORCH_CHECK(is_float_type(g.scalar_type()), name_of("grads", i),
                    " must be float32, bfloat16 or float16");
    BlockLayout layout = layout_of(g, kMinBlockSize, "a gradient");
    if (layout.numel == 0) continue;
    layout.segment = layout.numel;
    layout.block = kChunk;
    layout.blocks = layout.blocks_per_segment = (layout.numel + kChunk - 1) / kChunk;
    jobs.push_back({g.data_ptr(), nullptr, layout, MEMKERN_PICK(squares_kernel, float_type(g))});
    chunks += layout.blocks;
  }
  std::vector<double> partial(chunks);
  chunks = 0;
  for (SquaresJob& job : jobs) {
    job.partial = partial.data() + chunks;
    chunks += job.layout.blocks;
  }
  run_jobs(jobs);
  double sum = 0.0;
  for (double x : partial) sum += x;
  *static_cast<double*>(norm.data_ptr()) = std::sqrt(sum) * factor;
}

}  // namespace memkern
