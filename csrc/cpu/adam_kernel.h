// One block of Adam. Compiled once per instruction set (isa_*.cpp).
#pragma once
#include "moment.h"

namespace memkern::MEMKERN_ISA {
namespace {

template <class P, class G, StateKind Kind> void adam_run(const AdamJob& job, int64_t begin, int64_t end) {
  const AdamScalars s = *job.scalars;
  Buffer first_buffer, second_buffer;
  for_blocks(job.layout, begin, end, [&](int64_t offset, int n, int64_t block) MEMKERN_LAMBDA {
    P* p = static_cast<P*>(job.param) + offset;
    const G* g = static_cast<const G*>(job.grad) + offset;
    Moment<int8_t, Kind> first(job.exp_avg, job.exp_avg_scale, nullptr, offset, block, first_buffer);
    Moment<uint8_t, Kind> second(job.exp_avg_sq, job.exp_avg_sq_scale, job.rounding, offset, block, second_buffer);
    for_vectors(n, [&](int i, auto load_from, auto store_to) MEMKERN_LAMBDA {
      F x = load_from(p + i);
      F m = first.get(i, load_from), v = second.get(i, load_from);
      const F w = adam_update(x, load_from(g + i), m, v, s);
      store_to(p + i, x);
      first.put(i, m, store_to);
      second.put(i, Kind == StateKind::kPower ? w : v, store_to);
    });
    finish(first, second, n);
  });
}

}  // namespace

decltype(AdamJob::run) adam_kernel(StateKind kind, FloatType param, FloatType grad) {
  return with_type(param, [&](auto p) {
    return with_type(grad, [&](auto g) -> decltype(AdamJob::run) {
      using P = decltype(p);
      using G = decltype(g);
      if (kind == StateKind::kPower) return adam_run<P, G, StateKind::kPower>;
      if (kind == StateKind::kDynamic) return adam_run<P, G, StateKind::kDynamic>;
      return adam_run<P, G, StateKind::kFp32>;
    });
  });
}

}  // namespace memkern::MEMKERN_ISA
