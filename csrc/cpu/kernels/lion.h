// Lion's kernels, whose loop is that of SGD and LARS too. Compiled once per instruction set
// (simd/compile_*.cpp).
#pragma once
#include "cpu/kernels/block.h"

namespace memkern::MEMKERN_ISA {
namespace {

struct LionRule {
  using Scalars = LionScalars;
  static MEMKERN_FN void update(F& p, F g, F& m, const Scalars& s) { lion_update(p, g, m, s); }
};

// Updates blocks of a tensor whose moment is in codes, for Lion, SGD and LARS. Rule: the update of the
// parameter and the moment.
template <class P, StateKind Kind, class Rule>
void lion_update_8bit(const Job<typename Rule::Scalars>& job, int64_t begin, int64_t end) {
  const typename Rule::Scalars s = *job.scalars;
  const P* start = static_cast<const P*>(job.param) + begin * job.layout.block;
  alignas(64) float buffer[kBuffer + kPage];
  float* const values = at_page_offset(buffer, start, kPage / 4);
  const auto update = [&](PendingBlock& b, int64_t block) MEMKERN_LAMBDA {
    const Weights<P> weights(job, b.offset);
    const Gradient grad(job, b.offset);
    Moment<int8_t, Kind> first(job.m, job.m_scale, 1.0f, b.offset, block, values + b.place);
    for_vectors(b.n, [&](int i, auto load_from, auto store_to) MEMKERN_LAMBDA {
      prefetch<kOnce>(i, weights.p, grad, first.codes);
      F x = weights.get(i, load_from);
      F m = first.get(i, load_from);
      Rule::update(x, grad.get(i, load_from), m, s);
      weights.put(i, x, store_to);
      first.put(i, m);
    });
    b.m_factor = first.set_scale(b.n);
  };
  for_batches(job.layout, begin, end, update, [&](const PendingBlock& b) MEMKERN_LAMBDA {
    encode<Kind>(static_cast<int8_t*>(job.m) + b.offset, values + b.place, b.n, b.m_factor, job.dither);
  });
}

template <class P, class Rule>
void lion_update_fp32(const Job<typename Rule::Scalars>& job, int64_t begin, int64_t end) {
  const typename Rule::Scalars s = *job.scalars;
  for_blocks(job.layout, begin, end, [&](int64_t offset, int n, int64_t) MEMKERN_LAMBDA {
    const Weights<P> weights(job, offset);
    const Gradient grad(job, offset);
    float* m_array = static_cast<float*>(job.m) + offset;
    for_vectors(n, [&](int i, auto load_from, auto store_to) MEMKERN_LAMBDA {
      F x = weights.get(i, load_from), m = load_from(m_array + i);
      Rule::update(x, grad.get(i, load_from), m, s);
      weights.put(i, x, store_to);
      store_to(m_array + i, m);
    });
  });
}

// Picks lion_update_8bit or lion_update_fp32, for a tensor's dtypes and codec.
template <class Rule> auto pick_lion_update(const StepTensor& t) {
  return with_param_type(t, [&](auto p) -> decltype(Job<typename Rule::Scalars>::run) {
    using P = decltype(p);
    if (t.kind == StateKind::kPower) return lion_update_8bit<P, StateKind::kPower, Rule>;
    if (t.kind == StateKind::kDynamic) return lion_update_8bit<P, StateKind::kDynamic, Rule>;
    return lion_update_fp32<P, Rule>;
  });
}

}  // namespace

decltype(LionJob::run) pick_lion_kernel(const StepTensor& t) { return pick_lion_update<LionRule>(t); }

}  // namespace memkern::MEMKERN_ISA
