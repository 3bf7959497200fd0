// SGD's kernels: its update in Lion's loop. Compiled once per instruction set (simd/compile_*.cpp).
#pragma once
#include "cpu/kernels/lion.h"

namespace memkern::MEMKERN_ISA {
namespace {

struct SgdRule {
  using Scalars = SgdScalars;
  static MEMKERN_FN void update(F& p, F g, F& m, const Scalars& s) { sgd_update(p, g, m, s); }
};

}  // namespace

decltype(SgdJob::run) pick_sgd_kernel(const StepTensor& t) { return pick_lion_update<SgdRule>(t); }

}  // namespace memkern::MEMKERN_ISA
