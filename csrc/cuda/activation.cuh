// What kernels of few-bit activations share: the activations, codes in bit planes, a thread's vectors. A
// thread processes a vector of 8 elements, whose bits in a plane are one byte.
#pragma once
#include "common/activation_args.h"
#include "core/activation.h"
#include "core/scalar.h"
#include "core/tables.h"
#include "tile.cuh"

namespace memkern {

// Activations of one element in fp32, by the formulas of torch's CUDA kernels, so that a result rounded to 16
// bits is torch's except for rare ties, and no less exact.

MEMKERN_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// The parameters:
//                  a            b
//   softplus       beta         threshold
//   leaky ReLU     slope
//   hardtanh       min_val      max_val
//   ELU, CELU      alpha
//   threshold      threshold    value
//   shrinking      lambd        lambd rounded to the dtype of x, with which torch's hardshrink compares x
template <int Fn> MEMKERN_DEVICE float activate(float x, float a, float b) {
  if constexpr (Fn == kGelu) return x * 0.5f * (1.0f + erff(x * 0x1.6a09e6p-1f));  // sqrt(1/2)
  if constexpr (Fn == kGeluTanh) {
    const float inner = 0x1.988454p-1f * fmaf(0x1.6e4e26p-5f, x * x * x, x);  // sqrt(2/pi), 0.044715
    return 0.5f * x * (1.0f + tanhf(inner));
  }
  if constexpr (Fn == kSilu) return x / (1.0f + expf(-x));
  if constexpr (Fn == kTanh) return tanhf(x);
  if constexpr (Fn == kSigmoid) return sigmoid(x);
  if constexpr (Fn == kSoftplus) return x * a > b ? x : log1pf(expf(x * a)) / a;
  if constexpr (Fn == kMish) return x * tanhf(log1pf(expf(x)));
  if constexpr (Fn == kHardswish) return x * fminf(fmaxf(x + 3.0f, 0.0f), 6.0f) * 0x1.555556p-3f;  // 1/6
  if constexpr (Fn == kQuickGelu) return x * sigmoid(1.702f * x);
  if constexpr (Fn == kRelu) return x < 0.0f ? 0.0f : x;
  if constexpr (Fn == kLeakyRelu) return x > 0.0f ? x : x * a;
  if constexpr (Fn == kHardtanh) return x < a ? a : x > b ? b : x;
  if constexpr (Fn == kElu) return x > 0.0f ? x : expm1f(x) * a;
  if constexpr (Fn == kCelu) return x > 0.0f ? x : expm1f(x / a) * a;
  if constexpr (Fn == kSelu)
    return x > 0.0f ? x * 0x1.0cfabep+0f : expm1f(x) * 0x1.c212ccp+0f;  // scale, scale alpha
  if constexpr (Fn == kLogsigmoid) return (x < 0.0f ? x : 0.0f) - log1pf(expf(-fabsf(x)));
  if constexpr (Fn == kSoftsign) return x / (1.0f + fabsf(x));
  if constexpr (Fn == kTanhshrink) return x - tanhf(x);
  if constexpr (Fn == kHardsigmoid)
    return x < -3.0f ? 0.0f : x > 3.0f ? 1.0f : (x + 3.0f) * 0x1.555556p-3f;  // 1/6
  if constexpr (Fn == kHardshrink) return fabsf(x) <= b ? 0.0f : x;
  if constexpr (Fn == kSoftshrink) return fabsf(x) <= a ? 0.0f : x > 0.0f ? x - a : x + a;
  if constexpr (Fn == kThreshold) return x <= a ? b : x;
}

// The codes of a vector: bit 8 p + i is bit p of element i's code. So byte p is the vector's byte of plane p.
using Planes = uint32_t;
constexpr Planes kElementBits = 0x01010101u;  // the bits of element 0; shifted left by i, those of element i

// Thresholds as kernels take them. An element above threshold[k] has the bits of a code flipped that flip[k]
// names: bit 8 p for bit p of the code, as element 0 has in Planes.
struct EncodeTable {
  int count, bits, symmetry;
  float threshold[kMaxThresholds];
  Planes flip[kMaxThresholds];
};

// A kernel's arrays of numel elements, and their codes. plane: bytes of a bit plane. aligned: input and
// result start on 16 bytes.
struct Elementwise {
  const void* input;  // x, or the gradient
  void* result;
  uint8_t* codes;
  int64_t numel, plane;
  FloatType type;
  bool aligned;
};

MEMKERN_DEVICE int64_t vector_of_thread() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

MEMKERN_DEVICE Span full_span(int64_t vector) { return {vector * kVector, kVector, true}; }
MEMKERN_DEVICE Span span_of_vector(const Elementwise& t, int64_t vector) {
  return span_of(vector * kVector, t.numel - vector * kVector, t.aligned);
}

MEMKERN_DEVICE int warp_lane() { return static_cast<int>(threadIdx.x) % kWarp; }
// A warp's 32 full vectors of fp32, 256 elements, in Parts. Lane l holds two halves of different vectors:
//   elements 4 l to 4 l + 3                of vector l / 2: its first half if l is even, else its second
//   elements 128 + 4 l to 128 + 4 l + 3    of vector 16 + l / 2: the same half
MEMKERN_DEVICE Parts warp_parts(int64_t vector) {
  return {(vector - warp_lane()) * kVector + warp_lane() * (kVector / 2), kWarp * kVector / 2};
}

// Calls work(at, vector) for a thread's share of `vectors` vectors: first the full ones, then the others.
// `at` is a Span or, with InParts in full warps, Parts.
template <int Threads, bool InParts = false, class Work>
MEMKERN_DEVICE void for_each_vector(const Elementwise& t, int64_t vectors, Work&& work) {
  const uint32_t count = static_cast<uint32_t>(vectors), step = gridDim.x * Threads;
  const uint32_t full = t.aligned ? static_cast<uint32_t>(t.numel / kVector) : 0;
  uint32_t vector = blockIdx.x * Threads + threadIdx.x;
  if constexpr (InParts)
    for (; vector < full / kWarp * kWarp; vector += step) work(warp_parts(vector), vector);
  for (; vector < full; vector += step) work(full_span(vector), vector);
  for (; vector < count; vector += step) work(span_of_vector(t, vector), vector);
}

// The codes of up to 8 elements.
template <int N> MEMKERN_DEVICE Planes encode(const float (&x)[N], const EncodeTable& table) {
  Planes planes = 0;
  for (int k = 0; k < table.count; ++k) {
    const float threshold = table.threshold[k];
    uint32_t above = 0;
#pragma unroll
    for (int i = 0; i < N; ++i)
      above |= (table.symmetry == kPlain ? x[i] : abs(x[i])) > threshold ? 1u << i : 0u;
    // Bit i of `above` is element i's comparison. The product is a copy of `above`, which has 8 bits, in
    // each byte whose lowest bit `flip` has.
    planes ^= above * table.flip[k];
  }
  if (table.symmetry == kOdd) {
    uint32_t negative = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) negative |= x[i] < 0.0f ? 1u << i : 0u;
    planes ^= negative << 8 * (table.bits - 1);
  }
  return planes;
}

// The bits of elements 0 to n - 1 in all planes.
MEMKERN_DEVICE Planes first_elements(int n) { return ((1u << n) - 1) * kElementBits; }

MEMKERN_DEVICE void store_planes(const Elementwise& t, int bits, int64_t vector, Planes planes) {
  uint8_t* p = t.codes + vector;
#pragma unroll
  for (int plane = 0; plane < kMaxBits; ++plane, p += t.plane)
    if (plane < bits) *p = static_cast<uint8_t>(planes >> 8 * plane);
}

MEMKERN_DEVICE Planes load_planes(const Elementwise& t, int bits, int64_t vector) {
  Planes planes = 0;
  const uint8_t* p = t.codes + vector;
#pragma unroll
  for (int plane = 0; plane < kMaxBits; ++plane, p += t.plane)
    if (plane < bits) planes |= static_cast<Planes>(*p) << 8 * plane;
  return planes;
}

// The planes of a vector of which this thread has all elements, in a Span.
MEMKERN_DEVICE void store_planes(const Elementwise& t, int bits, const Span& at, int64_t vector,
                                 Planes planes) {
  store_planes(t, bits, vector, planes & first_elements(at.n));
}
MEMKERN_DEVICE Planes load_planes(const Elementwise& t, int bits, const Span&, int64_t vector) {
  return load_planes(t, bits, vector);
}

// The planes of a warp's vectors in Parts. Lanes 2 k and 2 k + 1 have the halves of vectors k and 16 + k.
// Lane 2 k stores vector k, with the second half from its neighbour, and lane 2 k + 1 stores vector 16 + k,
// with the first half from its neighbour. Each sends the half that it does not store.
constexpr Planes kFirstHalf = 0x0F0F0F0Fu;
MEMKERN_DEVICE void store_planes(const Elementwise& t, int bits, const Parts&, int64_t vector,
                                 Planes planes) {
  const int lane = warp_lane();
  const bool odd = lane % 2 != 0;
  const Planes first = planes & kFirstHalf, second = planes >> 4 & kFirstHalf;
  const Planes received = __shfl_xor_sync(kAllLanes, odd ? first : second, 1);
  store_planes(t, bits, vector - lane + lane / 2 + (odd ? kWarp / 2 : 0),
               odd ? received | second << 4 : first | received << 4);
}
// Lane l loads the planes of vector l, and takes its halves of vectors l / 2 and 16 + l / 2 from their lanes.
MEMKERN_DEVICE Planes load_planes(const Elementwise& t, int bits, const Parts&, int64_t vector) {
  const Planes own = load_planes(t, bits, vector);
  const int lane = warp_lane(), shift = lane % 2 * 4;
  const Planes first = __shfl_sync(kAllLanes, own, lane / 2),
               second = __shfl_sync(kAllLanes, own, kWarp / 2 + lane / 2);
  return (first >> shift & kFirstHalf) | (second >> shift & kFirstHalf) << 4;
}

}  // namespace memkern
