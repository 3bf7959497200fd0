// Quantizes a tensor's blocks, and dequantizes them. Compiled once per instruction set (simd/compile_*.cpp).
#pragma once
#include "cpu/kernels/block.h"

namespace memkern::MEMKERN_ISA {
namespace {

MEMKERN_FN bool all_finite(const float* values, int n) {
  F zeros(0.0f);  // the sum of 0 * value: NaN where a value is NaN or infinite
  for_vectors(n, [&](int i, auto load_from, auto)
                     MEMKERN_LAMBDA { zeros = zeros + load_from(values + i) * F(0.0f); });
  float lane[kLanes];
  store(lane, zeros);
  for (float sum : lane)
    if (sum != sum) return false;
  return true;
}

// An optimizer's Moment, and PendingBlock's m_factor, serve for a tensor's codes; its decay is 1.
template <class T, class Code, StateKind Kind>
void quantize_blocks(const CodecJob& job, int64_t begin, int64_t end) {
  alignas(64) float values[kBuffer];
  const auto gather = [&](PendingBlock& b, int64_t block) MEMKERN_LAMBDA {
    const T* x = static_cast<const T*>(job.values) + b.offset;
    Moment<Code, Kind> moment(job.codes, job.scale, 1.0f, b.offset, block, values + b.place);
    for_vectors(b.n, [&](int i, auto load_from, auto) MEMKERN_LAMBDA {
      const F value = load_from(x + i);
      // Unsigned codes are for x >= 0. An x below 2^-149, the least float above 0, is stored as 0: all x < 0,
      // and -0.
      moment.put(i, kIsSigned<Code> ? value : select(greater(F(0x1p-149f), value), F(0.0f), value));
    });
    b.m_factor = moment.set_scale(b.n);
    if (!job.mark_nonfinite) return;
    if (all_finite(values + b.place, b.n)) {
      // Decoding a larger scale would round up to infinity, though no value of this block is infinite.
      *moment.scale = memkern::min(*moment.scale, kLargestMarkedScale);
    } else {
      *moment.scale = NAN;
      b.m_factor = 0.0f;
    }
  };
  for_batches(job.layout, begin, end, gather, [&](const PendingBlock& b) MEMKERN_LAMBDA {
    encode<Kind>(static_cast<Code*>(job.codes) + b.offset, values + b.place, b.n, b.m_factor, job.dither);
  });
}

template <class T, class Code, StateKind Kind>
void dequantize_blocks(const CodecJob& job, int64_t begin, int64_t end) {
  for_blocks(job.layout, begin, end, [&](int64_t offset, int n, int64_t block) MEMKERN_LAMBDA {
    T* x = static_cast<T*>(job.values) + offset;
    const Moment<Code, Kind> moment(job.codes, job.scale, 1.0f, offset, block, nullptr);
    for_vectors(n, [&](int i, auto load_from, auto store_to)
                       MEMKERN_LAMBDA { store_to(x + i, moment.get(i, load_from)); });
  });
}

template <class T, class Code> decltype(CodecJob::run) pick_for_types(StateKind kind, bool quantize) {
  if (kind == StateKind::kPower)
    return quantize ? quantize_blocks<T, Code, StateKind::kPower>
                    : dequantize_blocks<T, Code, StateKind::kPower>;
  return quantize ? quantize_blocks<T, Code, StateKind::kDynamic>
                  : dequantize_blocks<T, Code, StateKind::kDynamic>;
}

}  // namespace

decltype(CodecJob::run) pick_codec_kernel(StateKind kind, FloatType values, bool is_signed, bool quantize) {
  return with_type(values, [&](auto t) {
    using T = decltype(t);
    return is_signed ? pick_for_types<T, int8_t>(kind, quantize) : pick_for_types<T, uint8_t>(kind, quantize);
  });
}

}  // namespace memkern::MEMKERN_ISA
