// Muon's two ops on the CPU: memkern::muon_momentum_ and memkern::muon_apply_. Between them the updates are
// orthogonalized by torch's matrix products (memkern/reference/muon.py).
#include "common/muon_args.h"
#include "common/ops.h"
#include "cpu/step.h"

namespace memkern {
namespace {

// sums[i]: the sum of squares of each matrix of updates[i].
void sum_squares(const Tensors& updates, const Tensors& sums) {
  const Kernels& kernels = cpu_kernels();
  std::vector<SquaresJob> jobs;
  Tensors values;  // keeps the memory that the jobs point to
  for (const Tensor& u : updates) {
    const Matrices matrices(u);
    values.push_back(with_whole_matrices(u));
    auto* first = static_cast<const uint16_t*>(values.back().data_ptr());
    const BlockLayout layout = flat_layout(matrices.numel, kSquaresChunk);
    for (int64_t k = 0; matrices.numel && k < matrices.count; ++k)
      jobs.push_back({first + k * matrices.numel, nullptr, layout, kernels.squares(FloatType::kBf16)});
  }
  const std::vector<double> partial = run_squares(jobs);
  const SquaresJob* job = jobs.data();
  for (size_t i = 0; i < updates.size(); ++i) {
    const Matrices matrices(updates[i]);
    double* sum = static_cast<double*>(sums[i].data_ptr());
    for (int64_t k = 0; k < matrices.count; ++k) {
      sum[k] = 0.0;
      if (!matrices.numel) continue;
      for (int64_t c = 0; c < job->layout.blocks; ++c) sum[k] += job->partial[c];
      ++job;
    }
  }
}

void muon_momentum(const Tensors& updates, const Tensors& sums, const StepArgs& args) {
  const auto groups = args.groups<MuonHyperparameters>();
  auto jobs = muon_tensors<MuonJob>(args, updates);
  check_sums(args, updates, sums);
  const double grad_factor = gradient_factor(args);
  const std::vector<double> lr = read_rates(args);
  if (skipped(args)) {
    for (const Tensor& sum : sums) std::memset(sum.data_ptr(), 0, sum.numel() * sizeof(double));
    return;
  }
  std::vector<MuonScalars> scalars;
  for (size_t k = 0; k < groups.size(); ++k)
    scalars.push_back(muon_scalars(lr[k], groups[k], grad_factor, 1.0));
  Dithers dithers;
  for (size_t i = 0; i < jobs.size(); ++i) {
    MuonJob& job = jobs[i];
    const uint64_t step = next_step(args.steps[i]);
    job.scalars = &scalars[args.group[i]];
    if (job.kind != StateKind::kFp32) job.dither = dithers.at(job.layout.block, step);
    job.run = cpu_kernels().muon_momentum(job);
  }
  run_jobs(jobs);
  sum_squares(updates, sums);
}

void muon_apply(const Tensors& updates, const Doubles& ratios, const StepArgs& args) {
  const auto groups = args.groups<MuonHyperparameters>();
  auto jobs = muon_tensors<MuonJob>(args, updates);
  check_count("ratios", ratios.size(), 1, jobs.size());
  const std::vector<double> lr = read_rates(args);
  if (skipped(args)) return;
  std::vector<MuonScalars> scalars(jobs.size());
  WeightRandoms weight_randoms;
  for (size_t i = 0; i < jobs.size(); ++i) {
    MuonJob& job = jobs[i];
    const int64_t group = args.group[i];
    scalars[i] = muon_scalars(lr[group], groups[group], 1.0, ratios[i]);
    job.scalars = &scalars[i];
    const auto step = static_cast<uint64_t>(*static_cast<const float*>(args.steps[i].data_ptr()));
    job.weight_random = weight_randoms.at(job.layout.block, step, job.weight_storage);
    job.run = cpu_kernels().muon_apply(job);
  }
  run_jobs(jobs);
}

}  // namespace

void muon_momentum_cpu(StableIValue* stack, uint64_t arguments, uint64_t results) {
  muon_op<Tensors, muon_momentum>(stack, arguments, results);
}

void muon_apply_cpu(StableIValue* stack, uint64_t arguments, uint64_t results) {
  muon_op<Doubles, muon_apply>(stack, arguments, results);
}

}  // namespace memkern
