// What the ops on the CPU share: the kernels of this processor, work on torch's threads, and an optimizer's
// step, in one pass or, with trust ratios, in two. csrc/cuda/launch_step.h and launch_trust_ratios.h have the
// steps for CUDA.
#pragma once
#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "common/trust_ratios.h"
#include "core/corrections.h"
#include "core/power.h"
#include "core/weights.h"
#include "cpu/kernels/jobs.h"
#include "cpu/simd/isa.h"

namespace memkern {

// The kernels of the instruction set in use. An op asks once, as this reads the environment.
inline const Kernels& cpu_kernels() {
#ifdef MEMKERN_ARM64
  if (cpu_isa() == Isa::kNeon) return neon::kKernels;
#elif defined(MEMKERN_X86)
  const Isa isa = cpu_isa();
  if (isa == Isa::kAvx512) return avx512::kKernels;
  if (isa == Isa::kAvx2) return avx2::kKernels;
#endif
  return generic::kKernels;
}

// ---- threads

// Calls run(k) for each of [0, count) in up to `threads` threads, with work stealing: a thread begins with a
// range of its own, the same in every call, so that it finds in its core's caches what an earlier pass left
// there, and then takes over what threads that are behind have not begun. (Where two cores have a last-level
// cache each, LAMB's step takes 0.8 of the time that it takes with one queue for all threads.)
template <class Run> void run_stealing(int64_t count, int64_t threads, Run&& run) {
  threads = std::min(threads, count);
  std::vector<std::atomic<int64_t>> next(threads);
  for (int64_t t = 0; t < threads; ++t) next[t] = count * t / threads;
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t i = 0; i < threads; ++i) {
        const int64_t owner = (t + i) % threads, stop = count * (owner + 1) / threads;
        for (int64_t k; (k = next[owner].fetch_add(1)) < stop;) run(k);
      }
  });
}

// Below this many elements per thread, waking the thread costs more than it saves.
constexpr int64_t kGrainElements = 1 << 15;
constexpr int64_t kChunksPerThread = 32;

template <class J> void run_jobs(const std::vector<J>& jobs) {
  if (jobs.empty()) return;
  std::vector<int64_t> first(jobs.size() + 1, 0);
  int64_t elements = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    first[i + 1] = first[i] + jobs[i].layout.blocks;
    elements += jobs[i].layout.numel;
  }
  const int64_t blocks = first.back();
  if (blocks == 0) return;
  const auto run = [&](int64_t begin, int64_t end) {
    size_t i = std::upper_bound(first.begin(), first.end(), begin) - first.begin() - 1;
    for (; begin < end; ++i) {
      const int64_t stop = std::min(end, first[i + 1]);
      if (begin < stop) jobs[i].run(jobs[i], begin - first[i], stop - first[i]);
      begin = std::max(begin, stop);
    }
  };
  // More chunks than threads, so that the step does not wait for a thread that is interrupted.
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t grain = std::max<int64_t>(1, kGrainElements * blocks / elements);
  const int64_t chunk = std::max(grain, blocks / (kChunksPerThread * threads));
  const int64_t chunks = ceil_div(blocks, chunk);
  run_stealing(chunks, threads, [&](int64_t k) { run(k * chunk, std::min(blocks, (k + 1) * chunk)); });
}

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
        u[row + j] = one_minus_dither(u[j]);
      }
    }
    return {u.get(), u.get() + row};
  }

 private:
  std::map<std::pair<int64_t, uint64_t>, std::unique_ptr<float[]>> found_;
};

// The random bits for rounding weights, by block size, step and number of dropped bits; null where no bits
// are dropped.
class WeightRandoms {
 public:
  const uint32_t* at(int64_t block, uint64_t step, WeightStorage storage) {
    const int dropped = dropped_bits(storage);
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

// What the tensors of a step share beside their scalars.
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
    const int64_t k = args.group[i];
    const uint64_t step = next_step(args.steps[i]);
    auto [s, is_new] = scalars.try_emplace({k, step});
    if (is_new) s->second = scalars_of(lr[k], groups[k], grad_factor, step);
    job.scalars = &s->second;
    tables.set(job, step);
    job.run = pick(job);
  }
  run_jobs(jobs);
}

// ---- a step in two passes

template <class Scalars> struct Layer : Job<Scalars> {
  Scalars own;  // what `scalars` points to while it runs
  TrustRule trust;
  Norms<Job<Scalars>> norms;
};

// The elements of one partial sum of squares. It does not depend on the number of threads, so the result does
// not either.
constexpr int64_t kPieceElements = 1 << 15;
// Layers are batched until they have this many elements per thread: few enough for the second pass to find
// them in the caches.
constexpr int64_t kBatchElements = 1 << 16;

template <class L> struct Piece {
  L* layer;
  int64_t begin, end;  // blocks
  int64_t before;      // approximate number of elements of the batch before it
  Squares sum;
};

// The layers of one pass.
template <class L> struct Batch {
  std::vector<Piece<L>> pieces;
  int64_t elements = 0;

  void add(L& layer) {
    const BlockLayout& l = layer.layout;
    const int64_t size = std::max<int64_t>(1, kPieceElements / l.block);
    for (int64_t b = 0; b < l.blocks; b += size)
      pieces.push_back({&layer, b, std::min(b + size, l.blocks), elements + b * (l.numel / l.blocks), {}});
    elements += l.numel;
  }

  // Calls visit(piece) for the pieces of the k-th of `count` ranges, which have equally many elements.
  template <class Visit> void visit_range(int64_t k, int64_t count, Visit&& visit) {
    const auto start = [&](int64_t k) {
      return std::partition_point(pieces.begin(), pieces.end(),
                                  [&](const Piece<L>& p) { return p.before < elements * k / count; });
    };
    std::for_each(start(k), start(k + 1), visit);
  }
};

// The second pass over one batch together with the first over the next. Each thread takes ranges of both,
// half of the threads the second pass first and half the first: so threads wait for each other once per
// batch, and while one computes and writes the other reads. Where cores share a last-level cache, the passes
// one after the other take 1.02 to 1.07 times as long for GPT-2's shapes and 1.16 times for layers of 768 x
// 768 (elsewhere as long); on two cores that many other processes want, where each wait is long, 1.4 times
// for GPT-2's. Ranges have equally many elements, not pieces: where cores have a last-level cache each, that
// makes 0.85 of the time. Four ranges for each thread: with 32, layers of 256 x 256 take 1.08 of the time.
template <class L> void run_passes(Batch<L>& second, Batch<L>& first) {
  const int64_t pieces = (second.elements + first.elements) / kPieceElements;
  const int64_t threads = std::clamp<int64_t>(pieces, 1, torch::stable::get_num_threads());
  const int64_t ranges = std::min(pieces + 1, 4 * threads);
  const auto update = [&](int64_t k) {
    second.visit_range(k, ranges, [](Piece<L>& p) { p.layer->run(*p.layer, p.begin, p.end); });
  };
  const auto sum_squares = [&](int64_t k) {
    first.visit_range(k, ranges, [](Piece<L>& p) {
      if (p.layer->trust.adapt) p.sum = p.layer->norms(*p.layer, p.begin, p.end);
    });
  };
  run_stealing(ranges, threads, [&](int64_t k) {
    const bool update_first = 2 * k < ranges;
    if (update_first) update(k);
    sum_squares(k);
    if (!update_first) update(k);
  });
}

// Calls use(layer, sums of its squares) for each layer of a batch.
template <class L, class Use> void sum_pieces(const Batch<L>& batch, Use&& use) {
  for (auto piece = batch.pieces.begin(); piece != batch.pieces.end();) {
    L& layer = *piece->layer;
    Squares all{0.0, 0.0};
    for (; piece != batch.pieces.end() && piece->layer == &layer; ++piece) {
      all.param += piece->sum.param;
      all.update += piece->sum.update;
    }
    use(layer, all);
  }
}

template <class L> void adapt(L& layer, const Squares& squares) {
  *layer.trust_ratio = layer.trust.adapt ? trust_ratio(squares, layer.trust) : 1.0f;
  set_trust_ratio(layer.own, layer.trust.lr, *layer.trust_ratio);
}

// One of the two passes alone: the first, which writes `squares`, or the second, with the squares of all
// ranks.
template <class L> void run_either_pass(std::vector<L>& layers, Squares* squares, bool squares_only) {
  Batch<L> all, none;
  for (L& layer : layers) {
    layer.scalars = &layer.own;
    all.add(layer);
    if (!squares_only) adapt(layer, squares[&layer - layers.data()]);
  }
  run_passes(squares_only ? none : all, squares_only ? all : none);
  if (squares_only)
    sum_pieces(all, [&](L& layer, const Squares& sum) { squares[&layer - layers.data()] = sum; });
}

template <class L> void run_layers(std::vector<L>& layers, Squares* squares, bool squares_only) {
  if (squares) return run_either_pass(layers, squares, squares_only);
  const int64_t enough = kBatchElements * torch::stable::get_num_threads();
  Batch<L> before, batch;
  const auto advance = [&] {
    run_passes(before, batch);
    sum_pieces(batch, adapt<L>);
    before = std::move(batch);
    batch = {};
  };
  for (L& layer : layers) {
    layer.scalars = &layer.own;
    *layer.trust_ratio = 1.0f;  // stays for a layer without elements
    batch.add(layer);
    if (batch.elements >= enough) advance();
  }
  advance();  // sums the last batch, and updates the one before it
  advance();  // updates the last batch
}

template <class Hyperparameters, class Scalars, class ScalarsOf>
void step_in_two_passes(const StepArgs& args, const StepOp& op, ScalarsOf scalars_of,
                        PickKernel<Scalars> pick, PickNorms<Scalars> pick_norms) {
  const auto groups = args.groups<Hyperparameters>();
  const auto jobs = step_tensors<Layer<Scalars>>(args, op);
  check_trust_ratios(args, jobs, groups);
  const double grad_factor = gradient_factor(args);
  const std::vector<double> lr = read_rates(args);
  if (skipped(args)) return;

  SharedTables tables;
  std::vector<Layer<Scalars>> layers;
  for (size_t i = 0; i < jobs.size(); ++i) {
    Layer<Scalars> job = jobs[i];
    const int64_t k = args.group[i];
    const uint64_t step = next_step(args.steps[i], args.squares_only);
    job.own = scalars_of(lr[k], groups[k], grad_factor, step);
    job.trust = trust_rule(lr[k], groups[k]);
    tables.set(job, step);
    job.run = pick(job);
    job.norms = pick_norms(job);
    add_layers(layers, job, args.trust_ratios[i]);
  }
  run_layers(layers, squares_of(args), args.squares_only);
}

}  // namespace memkern
