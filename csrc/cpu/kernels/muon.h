// Muon's kernels: the momentum, and the update of the parameter. Compiled once per instruction set
// (simd/compile_*.cpp).
#pragma once
#include "cpu/kernels/block.h"

namespace memkern::MEMKERN_ISA {
namespace {

template <StateKind Kind> void muon_momentum_8bit(const Job<MuonScalars>& job, int64_t begin, int64_t end) {
  const MuonScalars s = *job.scalars;
  bf16* const updates = static_cast<bf16*>(static_cast<const MuonJob&>(job).update);
  alignas(64) float buffer[kBuffer];
  const auto update = [&](PendingBlock& b, int64_t block) MEMKERN_LAMBDA {
    const Gradient grad(job, b.offset);
    bf16* u = updates + b.offset;
    Moment<int8_t, Kind> first(job.m, job.m_scale, 1.0f, b.offset, block, buffer + b.place);
    for_vectors(b.n, [&](int i, auto load_from, auto store_to) MEMKERN_LAMBDA {
      F m = first.get(i, load_from);
      store_to(u + i, muon_momentum(grad.get(i, load_from), m, s));
      first.put(i, m);
    });
    b.m_factor = first.set_scale(b.n);
  };
  for_batches(job.layout, begin, end, update, [&](const PendingBlock& b) MEMKERN_LAMBDA {
    encode<Kind>(static_cast<int8_t*>(job.m) + b.offset, buffer + b.place, b.n, b.m_factor, job.dither);
  });
}

void muon_momentum_fp32(const Job<MuonScalars>& job, int64_t begin, int64_t end) {
  const MuonScalars s = *job.scalars;
  bf16* const updates = static_cast<bf16*>(static_cast<const MuonJob&>(job).update);
  for_blocks(job.layout, begin, end, [&](int64_t offset, int n, int64_t) MEMKERN_LAMBDA {
    const Gradient grad(job, offset);
    float* m_array = static_cast<float*>(job.m) + offset;
    for_vectors(n, [&](int i, auto load_from, auto store_to) MEMKERN_LAMBDA {
      F m = load_from(m_array + i);
      store_to(updates + offset + i, muon_momentum(grad.get(i, load_from), m, s));
      store_to(m_array + i, m);
    });
  });
}

template <class P> void muon_apply_blocks(const Job<MuonScalars>& job, int64_t begin, int64_t end) {
  const MuonScalars s = *job.scalars;
  const bf16* const updates = static_cast<const bf16*>(static_cast<const MuonJob&>(job).update);
  for_blocks(job.layout, begin, end, [&](int64_t offset, int n, int64_t) MEMKERN_LAMBDA {
    const Weights<P> weights(job, offset);
    for_vectors(n, [&](int i, auto load_from, auto store_to) MEMKERN_LAMBDA {
      const F o = load_from(updates + offset + i);
      weights.put(i, muon_parameter(weights.get(i, load_from), o, s), store_to);
    });
  });
}

}  // namespace

decltype(Job<MuonScalars>::run) pick_muon_momentum_kernel(const StepTensor& t) {
  if (t.kind == StateKind::kPower) return muon_momentum_8bit<StateKind::kPower>;
  if (t.kind == StateKind::kDynamic) return muon_momentum_8bit<StateKind::kDynamic>;
  return muon_momentum_fp32;
}

decltype(Job<MuonScalars>::run) pick_muon_apply_kernel(const StepTensor& t) {
  return with_param_type(
      t, [](auto p) -> decltype(Job<MuonScalars>::run) { return muon_apply_blocks<decltype(p)>; });
}

}  // namespace memkern::MEMKERN_ISA
