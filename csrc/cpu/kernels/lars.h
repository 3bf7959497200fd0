// LARS's kernels: the norms for trust ratios, and the update, in Lion's loop. Compiled once per instruction
// set (simd/compile_*.cpp).
#pragma once
#include "cpu/kernels/lion.h"

namespace memkern::MEMKERN_ISA {
namespace {

struct LarsRule {
  using Scalars = LarsScalars;
  static MEMKERN_FN void update(F& p, F g, F& m, const Scalars& s) { lars_update(p, g, m, s); }
};

// Sums of squares for the trust ratio: `params` of the parameters, `updates` of the new moments, which are
// not stored. In the classic form (memkern/reference/lars.py) the ratio is made of the gradients' norm
// instead, and `updates` sums the gradients' squares. Lanes past the end of a short vector are 0.
template <class P, StateKind Kind> Squares lars_norms(const LarsJob& job, int64_t begin, int64_t end) {
  const LarsScalars s = *job.scalars;
  SquareSum params, updates;
  const auto add_moment = [&](F x, F g, F m) MEMKERN_LAMBDA {
    F d = sgd_gradient(g, s);
    params.add(x);
    updates.add(lars_moment(x, d, m, s));
  };
  for_blocks(job.layout, begin, end, [&](int64_t offset, int n, int64_t block) MEMKERN_LAMBDA {
    const Weights<P> weights(job, offset);
    const Gradient grad(job, offset);
    if (s.classic) {
      for_vectors(n, [&](int i, auto load_from, auto) MEMKERN_LAMBDA {
        prefetch<kAgain>(i, weights.p, grad);
        params.add(weights.get(i, load_from));
        updates.add(sgd_gradient(grad.get(i, load_from), s));
      });
    } else if constexpr (Kind == StateKind::kFp32) {
      const float* m_array = static_cast<const float*>(job.m) + offset;
      for_vectors(n, [&](int i, auto load_from, auto) MEMKERN_LAMBDA {
        prefetch<kAgain>(i, weights.p, grad, m_array);
        add_moment(weights.get(i, load_from), grad.get(i, load_from), load_from(m_array + i));
      });
    } else {
      const Moment<int8_t, Kind> first(job.m, job.m_scale, 1.0f, offset, block, nullptr);
      for_vectors(n, [&](int i, auto load_from, auto) MEMKERN_LAMBDA {
        prefetch<kAgain>(i, weights.p, grad, first.codes);
        add_moment(weights.get(i, load_from), grad.get(i, load_from), first.get(i, load_from));
      });
    }
  });
  return {params.total(), updates.total()};
}

}  // namespace

decltype(LarsJob::run) pick_lars_kernel(const StepTensor& t) { return pick_lion_update<LarsRule>(t); }

Norms<LarsJob> pick_lars_norms(const StepTensor& t) {
  return with_param_type(t, [&](auto p) -> Norms<LarsJob> {
    using P = decltype(p);
    if (t.kind == StateKind::kPower) return lars_norms<P, StateKind::kPower>;
    if (t.kind == StateKind::kDynamic) return lars_norms<P, StateKind::kDynamic>;
    return lars_norms<P, StateKind::kFp32>;
  });
}

}  // namespace memkern::MEMKERN_ISA
