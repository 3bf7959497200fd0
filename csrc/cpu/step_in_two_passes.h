// A step with trust ratios (LAMB, LARS) on the CPU: the first pass sums the squares of each layer, the second
// updates. On CUDA devices: csrc/cuda/launch_trust_ratios.h.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "common/trust_ratios.h"
#include "cpu/step.h"

namespace memkern {

// A layer of a tensor, as a job of its own: its blocks are stepped with one trust ratio.
template <class Scalars> struct Layer : Job<Scalars> {
  Scalars own;  // the layer's scalars, which contain its trust ratio; Job::scalars points to them
  TrustRule trust;
  Norms<Job<Scalars>> norms;  // the first pass's kernel
};

// The elements of one partial sum of squares. Their number does not depend on the number of threads, so that
// the result does not either.
constexpr int64_t kPieceElements = 1 << 15;
// Layers are added to a batch until it has this many elements per thread: few enough for the second pass to
// find them in the caches.
constexpr int64_t kBatchElements = 1 << 16;

// Some blocks of a layer: what a thread takes at a time, with one partial sum.
template <class L> struct Piece {
  L* layer;
  int64_t begin, end;  // blocks
  int64_t before;      // about how many elements of the batch are in the pieces before this one
  Squares sum;
};

// The layers that a pass goes over together, in pieces.
template <class L> struct Batch {
  std::vector<Piece<L>> pieces;
  int64_t elements = 0;

  void add(L& layer) {
    const BlockLayout& l = layer.layout;
    const int64_t size = std::max<int64_t>(1, kPieceElements / l.block);  // of a piece, in blocks
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

// Runs the second pass over one batch and the first pass over the next batch together. Threads take ranges
// of both batches; half of the ranges begin with the second pass and half with the first. So threads wait
// for each other once per batch, and while some compute and write, others read. One pass after the other
// would take, as multiples of the time:
//   cores that share a last-level cache       1.02 to 1.07 (GPT-2's shapes), 1.16 (768 x 768)
//   two cores that many other processes use   1.4 (GPT-2's shapes): each wait is long
//   other cores                               1
// Ranges have equally many elements: with equally many pieces, cores with a cache each would take 1 / 0.85
// of the time. A thread has four ranges: with 32, layers of 256 x 256 take 1.08 of the time.
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

// Adds the pieces' sums, and calls use(layer, sums of its squares) for each layer of a batch.
template <class L, class Use> void sum_pieces(const Batch<L>& batch, Use&& use) {
  for (auto piece = batch.pieces.begin(); piece != batch.pieces.end();) {
    L& layer = *piece->layer;
    Squares sum{0.0, 0.0};
    for (; piece != batch.pieces.end() && piece->layer == &layer; ++piece) {
      sum.param += piece->sum.param;
      sum.update += piece->sum.update;
    }
    use(layer, sum);
  }
}

// Computes the layer's trust ratio, for args.trust_ratios and for the layer's scalars.
template <class L> void adapt(L& layer, const Squares& squares) {
  *layer.trust_ratio = layer.trust.adapt ? trust_ratio(squares, layer.trust) : 1.0f;
  set_trust_ratio(layer.own, layer.trust.lr, *layer.trust_ratio);
}

// One of the two passes alone, for shards, whose sums are reduced between the passes: with squares_only the
// first, which writes `squares`, else the second, which reads them.
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

// Both passes, by batches of layers; if `squares` is not null, one pass alone (run_either_pass).
template <class L> void run_layers(std::vector<L>& layers, Squares* squares, bool squares_only) {
  if (squares) return run_either_pass(layers, squares, squares_only);
  const int64_t batch_elements = kBatchElements * torch::stable::get_num_threads();
  Batch<L> previous, batch;
  const auto advance = [&] {
    run_passes(previous, batch);
    sum_pieces(batch, adapt<L>);
    previous = std::move(batch);
    batch = {};
  };
  for (L& layer : layers) {
    layer.scalars = &layer.own;
    *layer.trust_ratio = 1.0f;  // stays for a layer without elements
    batch.add(layer);
    if (batch.elements >= batch_elements) advance();
  }
  advance();  // sums the last batch, and updates the one before it
  advance();  // updates the last batch
}

// The ops lamb_step_ and lars_step_ (csrc/cpu/steps.cpp) on the CPU. Checks the arguments, makes a job of
// each layer and runs both passes, or one where `args` has squares. scalars_of(lr, hyperparameters, factor of
// the gradients, step) makes a layer's scalars; `pick` and `pick_norms` return the kernels of the second and
// the first pass for the layer's dtypes and codec.
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
    const int64_t group = args.group[i];
    const uint64_t step = next_step(args.steps[i], args.squares_only);
    job.own = scalars_of(lr[group], groups[group], grad_factor, step);
    job.trust = trust_rule(lr[group], groups[group]);
    tables.set(job, step);
    job.run = pick(job);
    job.norms = pick_norms(job);
    add_layers(layers, job, args.trust_ratios[i]);
  }
  run_layers(layers, squares_of(args), args.squares_only);
}

}  // namespace memkern
