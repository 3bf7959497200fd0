// Adam's kernels, whose loop is LAMB's too. Compiled once per instruction set (simd/compile_*.cpp).
#pragma once
#include "cpu/kernels/block.h"

namespace memkern::MEMKERN_ISA {
namespace {

struct AdamRule {
  using Scalars = AdamScalars;
  static MEMKERN_FN F param(F p, F m, F w, const Scalars& s) { return adam_param(p, m, w, s); }
};

// Encodes both moments of a block. Not inlined, as encode().
template <StateKind Kind>
__attribute__((noinline)) void encode_moments(int8_t* m_codes, uint8_t* w_codes, const float* m,
                                              const float* w, const PendingBlock& b, const Dither& dither) {
  if constexpr (Kind == StateKind::kPower) {
    if (b.m_factor != 0.0f && b.w_factor != 0.0f) {
      // The root in m's code is a corrected estimate, while the root in w's code occupies the divider
      // (avx512.h).
      SignedWriter<SignedEstimator> m_writer(m_codes, m, b.m_factor, dither.one_minus_u);
      UnsignedWriter w_writer(w_codes, w, b.w_factor, dither.u);
      for_vectors(b.n, [&](int i, auto, auto store_to) MEMKERN_LAMBDA {
        m_writer.write(i, store_to);
        w_writer.write(i, store_to);
      });
      return;
    }
  }
  encode<Kind>(m_codes, m, b.n, b.m_factor, dither);
  encode<Kind>(w_codes, w, b.n, b.w_factor, dither);
}

// Updates blocks of a tensor whose moments are in codes, for Adam and LAMB. Rule: the parameter's update.
//
// Cycles per 16 elements on Zen 5: 9 for the update, as many as its root and division take alone, 7 for the
// codes, 4 for what a block of 128 needs once. On Zen 4: 21 for the update (root and division: 16), 16 for
// the codes, and 36 in all, as they overlap.
template <class P, StateKind Kind, class Rule>
void adam_update_8bit(const Job<typename Rule::Scalars>& job, int64_t begin, int64_t end) {
  const typename Rule::Scalars s = *job.scalars;
  constexpr bool kPower = Kind == StateKind::kPower;
  const P* start = static_cast<const P*>(job.param) + begin * job.layout.block;
  alignas(64) float buffer[2 * (kBuffer + kPage)];
  float* const m_values = at_page_offset(buffer, start, kPage / 4);
  float* const w_values = at_page_offset(buffer + kBuffer + kPage, start, kPage / 2);
  const auto update = [&](PendingBlock& b, int64_t block) MEMKERN_LAMBDA {
    const Weights<P> weights(job, b.offset);
    const Gradient grad(job, b.offset);
    Moment<int8_t, Kind> first(job.m, job.m_scale, s.beta1, b.offset, block, m_values + b.place);
    Moment<uint8_t, Kind> second(job.v, job.v_scale, kPower ? s.root_beta2 : s.beta2, b.offset, block,
                                 w_values + b.place);
    for_vectors(b.n, [&](int i, auto load_from, auto store_to) MEMKERN_LAMBDA {
      prefetch<kOnce>(i, weights.p, grad, first.codes, second.codes);
      const F x = weights.get(i, load_from);
      // Power codes hold w = sqrt(v).
      F m = first.get(i, load_from), v = second.get(i, load_from);
      if constexpr (kPower) v = v * v;
      adam_moments(m, v, adam_gradient(grad.get(i, load_from), x, s), s);
      const F w = sqrt(v);
      weights.put(i, Rule::param(x, m, w, s), store_to);
      first.put(i, m);
      second.put(i, kPower ? w : v);
    });
    b.m_factor = first.set_scale(b.n);
    b.w_factor = second.set_scale(b.n);
  };
  for_batches(job.layout, begin, end, update, [&](const PendingBlock& b) MEMKERN_LAMBDA {
    encode_moments<Kind>(static_cast<int8_t*>(job.m) + b.offset, static_cast<uint8_t*>(job.v) + b.offset,
                         m_values + b.place, w_values + b.place, b, job.dither);
  });
}

template <class P, class Rule>
void adam_update_fp32(const Job<typename Rule::Scalars>& job, int64_t begin, int64_t end) {
  const typename Rule::Scalars s = *job.scalars;
  for_blocks(job.layout, begin, end, [&](int64_t offset, int n, int64_t) MEMKERN_LAMBDA {
    const Weights<P> weights(job, offset);
    const Gradient grad(job, offset);
    float *m_array = static_cast<float*>(job.m) + offset, *v_array = static_cast<float*>(job.v) + offset;
    for_vectors(n, [&](int i, auto load_from, auto store_to) MEMKERN_LAMBDA {
      const F x = weights.get(i, load_from);
      F m = F(s.beta1) * load_from(m_array + i), v = F(s.beta2) * load_from(v_array + i);
      adam_moments(m, v, adam_gradient(grad.get(i, load_from), x, s), s);
      weights.put(i, Rule::param(x, m, sqrt(v), s), store_to);
      store_to(m_array + i, m);
      store_to(v_array + i, v);
    });
  });
}

// Picks adam_update_8bit or adam_update_fp32, for a tensor's dtypes and codec.
template <class Rule> auto pick_adam_update(const StepTensor& t) {
  return with_param_type(t, [&](auto p) -> decltype(Job<typename Rule::Scalars>::run) {
    using P = decltype(p);
    if (t.kind == StateKind::kPower) return adam_update_8bit<P, StateKind::kPower, Rule>;
    if (t.kind == StateKind::kDynamic) return adam_update_8bit<P, StateKind::kDynamic, Rule>;
    return adam_update_fp32<P, Rule>;
  });
}

}  // namespace

decltype(AdamJob::run) pick_adam_kernel(const StepTensor& t) { return pick_adam_update<AdamRule>(t); }

}  // namespace memkern::MEMKERN_ISA
