// One block of Lion. Compiled once per instruction set (isa_*.cpp).
#pragma once
#include "moment.h"

namespace memkern::MEMKERN_ISA {
namespace {

template <class P, class G, StateKind Kind> void lion_run(const LionJob& job, int64_t begin, int64_t end) {
  const LionScalars s = *job.scalars;
  Buffer buffer;
  for_blocks(job.layout, begin, end, [&](int64_t offset, int n, int64_t block) MEMKERN_LAMBDA {
    P* p = static_cast<P*>(job.param) + offset;
    const G* g = static_cast<const G*>(job.grad) + offset;
    Moment<int8_t, Kind> first(job.exp_avg, job.exp_avg_scale, nullptr, offset, block, buffer);
    for_vectors(n, [&](int i, auto load_from, auto store_to) MEMKERN_LAMBDA {
      F x = load_from(p + i);
      F m = first.get(i, load_from);
      lion_update(x, load_from(g + i), m, s);
      store_to(p + i, x);
      first.put(i, m, store_to);
    });
    first.finish(n);
  });
}

}  // namespace

decltype(LionJob::run) lion_kernel(StateKind kind, FloatType param, FloatType grad) {
  return with_type(param, [&](auto p) {
    return with_type(grad, [&](auto g) -> decltype(LionJob::run) {
      using P = decltype(p);
      using G = decltype(g);
      if (kind == StateKind::kPower) return lion_run<P, G, StateKind::kPower>;
      if (kind == StateKind::kDynamic) return lion_run<P, G, StateKind::kDynamic>;
      return lion_run<P, G, StateKind::kFp32>;
    });
  });
}

}  // namespace memkern::MEMKERN_ISA
