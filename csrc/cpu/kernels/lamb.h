// LAMB's kernels: the norms for trust ratios, and the update, in Adam's loop. Compiled once per instruction
// set (simd/compile_*.cpp).
#pragma once
#include "cpu/kernels/adam.h"

namespace memkern::MEMKERN_ISA {
namespace {

struct LambRule {
  using Scalars = LambScalars;
  static MEMKERN_FN F param(F p, F m, F w, const Scalars& s) { return lamb_param(p, m, w, s); }
};

// Sums of squares of the parameters and of their updates. The new moments are computed and not stored. The
// squares are summed in a loop of their own, from a buffer: in one loop, sums that depend on a division fill
// the core's queues, and 16 elements take 15 cycles instead of 13 (Zen 5; with AVX2 33 instead of 26).
template <class P, StateKind Kind> Squares lamb_norms(const LambJob& job, int64_t begin, int64_t end) {
  constexpr bool kPower = Kind == StateKind::kPower;
  SquareSum params, updates;
  alignas(64) float decayed[kBuffer], update[kBuffer];
  const LambScalars s = *job.scalars;
  // mask (masked_by) sets lanes past n to 0, as with eps = 0 their update is 0 / 0.
  const auto put = [&](int i, F x, F m, F v, F g, auto mask) MEMKERN_LAMBDA {
    adam_moments(m, v, adam_gradient(g, x, s), s);
    x = lamb_decayed(x, s);
    store(decayed + i, x);
    store(update + i, mask(lamb_update(x, m, sqrt(v), s)));
  };
  for_blocks(job.layout, begin, end, [&](int64_t offset, int n, int64_t block) MEMKERN_LAMBDA {
    const Weights<P> weights(job, offset);
    const Gradient grad(job, offset);
    if constexpr (Kind == StateKind::kFp32) {
      const float *m_array = static_cast<const float*>(job.m) + offset,
                  *v_array = static_cast<const float*>(job.v) + offset;
      for_vectors(n, [&](int i, auto load_from, auto store_to) MEMKERN_LAMBDA {
        prefetch<kAgain>(i, weights.p, grad, m_array, v_array);
        put(i, weights.get(i, load_from), F(s.beta1) * load_from(m_array + i),
            F(s.beta2) * load_from(v_array + i), grad.get(i, load_from), masked_by(store_to));
      });
    } else {
      const Moment<int8_t, Kind> first(job.m, job.m_scale, s.beta1, offset, block, nullptr);
      const Moment<uint8_t, Kind> second(job.v, job.v_scale, kPower ? s.root_beta2 : s.beta2, offset, block,
                                         nullptr);
      for_vectors(n, [&](int i, auto load_from, auto store_to) MEMKERN_LAMBDA {
        prefetch<kAgain>(i, weights.p, grad, first.codes, second.codes);
        const F v = second.get(i, load_from);
        put(i, weights.get(i, load_from), first.get(i, load_from), kPower ? v * v : v, grad.get(i, load_from),
            masked_by(store_to));
      });
    }
    for (int i = 0; i < n; i += kLanes) {
      params.add(decayed + i);
      updates.add(update + i);
    }
  });
  return {params.total(), updates.total()};
}

}  // namespace

decltype(LambJob::run) pick_lamb_kernel(const StepTensor& t) { return pick_adam_update<LambRule>(t); }

Norms<LambJob> pick_lamb_norms(const StepTensor& t) {
  return with_param_type(t, [&](auto p) -> Norms<LambJob> {
    using P = decltype(p);
    if (t.kind == StateKind::kPower) return lamb_norms<P, StateKind::kPower>;
    if (t.kind == StateKind::kDynamic) return lamb_norms<P, StateKind::kDynamic>;
    return lamb_norms<P, StateKind::kFp32>;
  });
}

}  // namespace memkern::MEMKERN_ISA
