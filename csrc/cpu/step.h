// An optimizer's step on the CPU, in one pass: its scalars, the tables that its tensors share, and the op.
// With trust ratios: step_in_two_passes.h. On CUDA devices: csrc/cuda/launch_step.h.
#pragma once
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "common/step_args.h"
#include "core/corrections.h"
#include "core/power.h"
#include "core/weights.h"
#include "cpu/run_jobs.h"

namespace memkern {

// ---- the scalars of a step

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

// Returns the number of the step and, unless only squares are computed, stores it.
inline uint64_t next_step(const Tensor& step, bool squares_only = false) {
  float& count = *static_cast<float*>(step.data_ptr());
  const float next = count + 1.0f;
  if (!squares_only) count = next;
  return static_cast<uint64_t>(next);
}

// Tables of dithers, by block size and step: tensors share them.
class Dithers {
 public:
  Dither at(int64_t block, uint64_t step) {
    const int64_t padded_block = block + 16;  // a vector may end behind the block
    auto& u = tables_[{block, step}];
    if (!u) {
      u.reset(new float[2 * padded_block]());
      for (int64_t j = 0; j < block; ++j) {
        u[j] = dither(static_cast<uint32_t>(j), static_cast<uint32_t>(step));
        u[padded_block + j] = one_minus_dither(u[j]);
      }
    }
    return {u.get(), u.get() + padded_block};
  }

 private:
  std::map<std::pair<int64_t, uint64_t>, std::unique_ptr<float[]>> tables_;
};

// Tables of the random bits for rounding weights, by block size, step and number of dropped bits; null where
// no bits are dropped.
class WeightRandoms {
 public:
  const uint32_t* at(int64_t block, uint64_t step, WeightStorage storage) {
    const int dropped = dropped_bits(storage);
    if (dropped == 0) return nullptr;
    auto& r = tables_[{block, step, dropped}];
    if (!r) {
      r.reset(new uint32_t[block + 16]());
      for (int64_t j = 0; j < block; ++j)
        r[j] = weight_random(static_cast<uint32_t>(j), static_cast<uint32_t>(step), dropped);
    }
    return r.get();
  }

 private:
  std::map<std::tuple<int64_t, uint64_t, int>, std::unique_ptr<uint32_t[]>> tables_;
};

// The tables that the tensors of a step share.
class SharedTables {
 public:
  template <class J> void set(J& job, uint64_t step) {
    if (job.kind != StateKind::kFp32) job.dither = dithers_.at(job.layout.block, step);
    job.weight_random = weight_randoms_.at(job.layout.block, step, job.weight_storage);
  }

 private:
  Dithers dithers_;
  WeightRandoms weight_randoms_;
};

// ---- a step in one pass

// scalars_of(lr, hyperparameters, grad_factor, step): the scalars that the tensors of one group and step
// share. pick(tensor): the kernel that runs its blocks.
template <class Hyperparameters, class Scalars, class ScalarsOf>
void step_in_one_pass(const StepArgs& args, const StepOp& op, ScalarsOf scalars_of,
                      PickKernel<Scalars> pick) {
  const auto groups = args.groups<Hyperparameters>();
  auto jobs = step_tensors<Job<Scalars>>(args, op);
  const double grad_factor = gradient_factor(args);
  const std::vector<double> lr = read_rates(args);
  if (skipped(args)) return;

  std::map<std::pair<int64_t, uint64_t>, Scalars> scalars;
  SharedTables tables;
  for (size_t i = 0; i < jobs.size(); ++i) {
    Job<Scalars>& job = jobs[i];
    const int64_t group = args.group[i];
    const uint64_t step = next_step(args.steps[i]);
    auto [s, is_new] = scalars.try_emplace({group, step});
    if (is_new) s->second = scalars_of(lr[group], groups[group], grad_factor, step);
    job.scalars = &s->second;
    tables.set(job, step);
    job.run = pick(job);
  }
  run_jobs(jobs);
}

}  // namespace memkern
