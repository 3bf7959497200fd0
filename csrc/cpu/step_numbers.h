// The numbers of a step on the CPU: those that come as tensors, and the dither of each place in a block.
#pragma once
#include <map>
#include <memory>
#include <tuple>

#include "common/step_checks.h"
#include "core/corrections.h"
#include "core/power.h"
#include "core/weights.h"
#include "cpu/kernels/jobs.h"

namespace memkern {

inline bool skipped(const StepArgs& args) {
  return args.found_inf && read_number(*args.found_inf, "found_inf") != 0;
}

inline double gradient_factor(const std::optional<Tensor>& grad_scale, const std::optional<Tensor>& grad_norm,
                              double max_grad_norm) {
  const double scale = grad_scale ? read_number(*grad_scale, "grad_scale") : 1.0;
  const double norm = grad_norm ? read_number(*grad_norm, "grad_norm") : 0.0;
  return gradient_factor(scale, grad_norm.has_value(), norm, max_grad_norm);
}

inline double gradient_factor(const StepArgs& args) {
  return gradient_factor(args.grad_scale, args.grad_norm, args.max_grad_norm);
}

inline std::vector<double> read_rates(const StepArgs& args) {
  std::vector<double> rates;
  for (const Tensor& t : args.lr) rates.push_back(read_number(t, "lr"));
  return rates;
}

// Counts a step, unless only squares are wanted, and returns its number.
inline uint64_t next_step(const Tensor& step, bool squares_only = false) {
  float& count = *static_cast<float*>(step.data_ptr());
  const float next = count + 1.0f;
  if (!squares_only) count = next;
  return static_cast<uint64_t>(next);
}

// The dither by block size and step, which tensors share.
class Dithers {
 public:
  Dither at(int64_t block, uint64_t step) {
    const int64_t row = block + 16;  // a vector may end behind the block
    auto& u = found_[{block, step}];
    if (!u) {
      u.reset(new float[2 * row]());
      for (int64_t j = 0; j < block; ++j) {
        u[j] = dither(static_cast<uint32_t>(j), static_cast<uint32_t>(step));
        u[row + j] = signed_rest(u[j]);
      }
    }
    return {u.get(), u.get() + row};
  }

 private:
  std::map<std::pair<int64_t, uint64_t>, std::unique_ptr<float[]>> found_;
};

// The random bits that weights are rounded with, likewise; none where no bits are dropped.
class WeightRandoms {
 public:
  const uint32_t* at(int64_t block, uint64_t step, WeightStorage storage) {
    const int dropped = storage == WeightStorage::kStochastic ? kWeightDroppedStochastic
                        : storage == WeightStorage::kError8   ? kWeightDroppedError8
                                                              : 0;
    if (dropped == 0) return nullptr;
    auto& r = found_[{block, step, dropped}];
    if (!r) {
      r.reset(new uint32_t[block + 16]());
      for (int64_t j = 0; j < block; ++j)
        r[j] = weight_random(static_cast<uint32_t>(j), static_cast<uint32_t>(step), dropped);
    }
    return r.get();
  }

 private:
  std::map<std::tuple<int64_t, uint64_t, int>, std::unique_ptr<uint32_t[]>> found_;
};

}  // namespace memkern
