// Few-bit activations: a lane takes eight elements, whose bits of one plane are one byte.
#pragma once
#include "activation_functions.cuh"
#include "core/activation.h"
#include "lanes.cuh"

namespace memkern {

// Bits of eight elements: byte p holds plane p's.
using Planes = uint32_t;
constexpr Planes kOfElement = 0x01010101u;  // an element's bit in every plane, shifted by its place

// Thresholds as a kernel takes them.
struct EncodeTable {
  int count, bits, symmetry;
  float threshold[kMaxThresholds];
  Planes flip[kMaxThresholds];
};

struct Elementwise {
  const void* input;  // x, or the gradient
  void* result;
  uint8_t* codes;
  int64_t numel, plane;
  FloatType type;
  bool aligned;
};

MEMKERN_DEVICE int64_t lane_of_grid() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }

MEMKERN_DEVICE Span span_of_lane(const Elementwise& t, int64_t lane) {
  return span_of(lane * kEight, t.numel - lane * kEight, t.aligned);
}

// The bits of the elements that are there; zeros for the others.
MEMKERN_DEVICE Planes encode(const float (&x)[kEight], int n, const EncodeTable& table) {
  Planes planes = 0;
  float u[kEight];
#pragma unroll
  for (int i = 0; i < kEight; ++i) u[i] = table.symmetry == kPlain ? x[i] : abs(x[i]);
  for (int k = 0; k < table.count; ++k) {
    const float threshold = table.threshold[k];
    const Planes flip = table.flip[k];
#pragma unroll
    for (int i = 0; i < kEight; ++i) planes ^= u[i] > threshold ? flip << i : 0u;
  }
  if (table.symmetry == kOdd) {
#pragma unroll
    for (int i = 0; i < kEight; ++i) planes ^= x[i] < 0.0f ? 1u << (8 * (table.bits - 1) + i) : 0u;
  }
  return planes & ((1u << n) - 1) * kOfElement;
}

MEMKERN_DEVICE void store_planes(const Elementwise& t, int bits, int64_t lane, Planes planes) {
  for (int p = 0; p < bits; ++p) t.codes[p * t.plane + lane] = static_cast<uint8_t>(planes >> 8 * p);
}

MEMKERN_DEVICE Planes load_planes(const Elementwise& t, int bits, int64_t lane) {
  Planes planes = 0;
  for (int p = 0; p < bits; ++p) planes |= static_cast<Planes>(t.codes[p * t.plane + lane]) << 8 * p;
  return planes;
}

// Fn < 0: codes only.
template <int Fn> __global__ void __launch_bounds__(kThreads)
    encode_eights(Elementwise t, float a, float b, const __grid_constant__ EncodeTable table) {
  const int64_t lane = lane_of_grid();
  if (lane >= t.plane) return;
  const Span at = span_of_lane(t, lane);
  float x[kEight];
  load_floats(t.input, t.type, at, x);
  store_planes(t, table.bits, lane, encode(x, at.n, table));
  if constexpr (Fn >= 0) {
#pragma unroll
    for (float& each : x) each = activate<Fn>(each, a, b);
    store_floats(t.result, t.type, at, x);
  }
}

struct LevelTable {
  int bits;
  float level[1 << kMaxBits];
};

static __global__ void __launch_bounds__(kThreads)
    multiply_by_levels(Elementwise t, const __grid_constant__ LevelTable table) {
  __shared__ float levels[1 << kMaxBits];
  if (threadIdx.x < 1 << kMaxBits) levels[threadIdx.x] = table.level[threadIdx.x];
  __syncthreads();
  const int64_t lane = lane_of_grid();
  const Span at = span_of_lane(t, lane);
  if (at.n == 0) return;
  const Raw raw = load_raw(t.input, t.type, at);
  const Planes planes = load_planes(t, table.bits, lane);
  float grad[kEight];
  to_floats(raw, t.type, grad);
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    // The bits at 0, 8, 16 and 24 come together at 24 to 27; no two others of the product meet.
    const unsigned code = (planes >> i & kOfElement) * 0x01020408u >> 24 & 15u;
    grad[i] = grad[i] * levels[code];
  }
  store_floats(t.result, t.type, at, grad);
}

static __global__ void __launch_bounds__(kThreads)
    multiply_by_valley(Elementwise t, const void* output, FloatType output_type, bool output_aligned,
                       const __grid_constant__ Valley valley) {
  const int64_t lane = lane_of_grid();
  const Span at = span_of_lane(t, lane);
  if (at.n == 0) return;
  const Span output_at = span_of(at.offset, t.numel - at.offset, output_aligned);
  const Raw raw = load_raw(t.input, t.type, at), raw_output = load_raw(output, output_type, output_at);
  const Planes rising = load_planes(t, 1, lane);
  float grad[kEight], y[kEight];
  to_floats(raw, t.type, grad);
  to_floats(raw_output, output_type, y);
#pragma unroll
  for (int i = 0; i < kEight; ++i)
    grad[i] = grad[i] * valley_derivative(y[i], (rising >> i & 1u) != 0, valley);
  store_floats(t.result, t.type, at, grad);
}

}  // namespace memkern
