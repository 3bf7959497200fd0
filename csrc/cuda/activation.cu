// memkern's few-bit activations on CUDA devices. A thread processes a vector of 8 elements, whose bits in a
// plane are one byte.
#include "common/activation_args.h"

#include "core/activation.h"
#include "core/scalar.h"
#include "core/tables.h"
#include "device.cuh"
#include "launch.h"
#include "vector.cuh"

namespace memkern {

// Activations of one element in fp32, by the formulas of torch's CUDA kernels, so that a result rounded to 16
// bits is theirs but for rare ties, and no less exact.

MEMKERN_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// a, b: softplus' beta and threshold, leaky ReLU's slope, hardtanh's bounds.
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
}

// The codes of a vector: byte p holds the 8 elements' bits of plane p.
using Planes = uint32_t;
constexpr Planes kElementBits = 0x01010101u;  // of element 0; << i: of element i

// Thresholds as kernels take them: `flip` is a code whose bits are spread over the planes' bytes.
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

MEMKERN_DEVICE int64_t vector_of_thread() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

MEMKERN_DEVICE Span span_of_vector(const Elementwise& t, int64_t vector) {
  return span_of(vector * kVector, t.numel - vector * kVector, t.aligned);
}

// The codes of the first n elements; bits of others are 0.
MEMKERN_DEVICE Planes encode(const float (&x)[kVector], int n, const EncodeTable& table) {
  Planes planes = 0;
  float u[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) u[i] = table.symmetry == kPlain ? x[i] : abs(x[i]);
  for (int k = 0; k < table.count; ++k) {
    const float threshold = table.threshold[k];
    const Planes flip = table.flip[k];
#pragma unroll
    for (int i = 0; i < kVector; ++i) planes ^= u[i] > threshold ? flip << i : 0u;
  }
  if (table.symmetry == kOdd) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) planes ^= x[i] < 0.0f ? 1u << (8 * (table.bits - 1) + i) : 0u;
  }
  return planes & ((1u << n) - 1) * kElementBits;
}

MEMKERN_DEVICE void store_planes(const Elementwise& t, int bits, int64_t vector, Planes planes) {
  for (int p = 0; p < bits; ++p) t.codes[p * t.plane + vector] = static_cast<uint8_t>(planes >> 8 * p);
}

MEMKERN_DEVICE Planes load_planes(const Elementwise& t, int bits, int64_t vector) {
  Planes planes = 0;
  for (int p = 0; p < bits; ++p) planes |= static_cast<Planes>(t.codes[p * t.plane + vector]) << 8 * p;
  return planes;
}

// Fn < 0: codes only.
template <int Fn> __global__ void __launch_bounds__(kThreads)
    encode_vectors(Elementwise t, float a, float b, const __grid_constant__ EncodeTable table) {
  const int64_t vector = vector_of_thread();
  if (vector >= t.plane) return;
  const Span at = span_of_vector(t, vector);
  float x[kVector];
  load_floats(t.input, t.type, at, x);
  store_planes(t, table.bits, vector, encode(x, at.n, table));
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
  const int64_t vector = vector_of_thread();
  const Span at = span_of_vector(t, vector);
  if (at.n == 0) return;
  const Raw raw = load_raw(t.input, t.type, at);
  const Planes planes = load_planes(t, table.bits, vector);
  float grad[kVector];
  to_floats(raw, t.type, grad);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    // The bits at 0, 8, 16 and 24 come together at 24 to 27; no two others of the product meet.
    const unsigned code = (planes >> i & kElementBits) * 0x01020408u >> 24 & 15u;
    grad[i] = grad[i] * levels[code];
  }
  store_floats(t.result, t.type, at, grad);
}

static __global__ void __launch_bounds__(kThreads)
    multiply_by_valley(Elementwise t, const void* output, FloatType output_type, bool output_aligned,
                       const __grid_constant__ Valley valley) {
  const int64_t vector = vector_of_thread();
  const Span at = span_of_vector(t, vector);
  if (at.n == 0) return;
  const Span output_at = span_of(at.offset, t.numel - at.offset, output_aligned);
  const Raw raw = load_raw(t.input, t.type, at), raw_output = load_raw(output, output_type, output_at);
  const Planes rising = load_planes(t, 1, vector);
  float grad[kVector], y[kVector];
  to_floats(raw, t.type, grad);
  to_floats(raw_output, output_type, y);
#pragma unroll
  for (int i = 0; i < kVector; ++i)
    grad[i] = grad[i] * valley_derivative(y[i], (rising >> i & 1u) != 0, valley);
  store_floats(t.result, t.type, at, grad);
}

namespace {

EncodeTable encode_table(const Thresholds& from) {
  EncodeTable table{from.count, from.bits, from.symmetry};
  for (int i = 0; i < from.count; ++i) {
    table.threshold[i] = from.threshold[i];
    for (int p = 0; p < from.bits; ++p) table.flip[i] |= (from.flip[i] >> p & 1u) << 8 * p;
  }
  return table;
}

Elementwise elementwise(const Tensor& input, const Tensor* result, const Tensor& codes, int64_t numel) {
  void *x = input.data_ptr(), *y = result ? result->data_ptr() : nullptr;
  return {x,
          y,
          static_cast<uint8_t*>(codes.data_ptr()),
          numel,
          plane_bytes(numel),
          float_type(input),
          on_16_bytes(x) && on_16_bytes(y)};
}

int64_t blocks_for(const Elementwise& t) { return (t.plane + kThreads - 1) / kThreads; }

// Calls use(number) with an activation's number as a constant.
template <class Use> void with_activation(int64_t fn, Use&& use) {
  const bool known = [&]<int... Fn>(std::integer_sequence<int, Fn...>) {
    return ((fn == Fn && (use(std::integral_constant<int, Fn>{}), true)) || ...);
  }(std::make_integer_sequence<int, kActivations>{});
  STD_TORCH_CHECK(known, "fn must be from 0 to ", kActivations - 1, ", got ", fn);
}

}  // namespace

Tensor few_bit_encode_cuda(Tensor x, int64_t bits, Doubles thresholds, Ints flips, int64_t symmetry) {
  const EncodeTable table = encode_table(thresholds_of(bits, thresholds, flips, symmetry));
  const int64_t numel = flat_layout(x, "x", kGroup).numel;
  const DeviceScope scope(x);
  Tensor codes = torch::stable::new_empty(x, {bits, plane_bytes(numel)}, ScalarType::Byte);
  const Elementwise t = elementwise(x, nullptr, codes, numel);
  launch_checked("few_bit_encode", encode_vectors<-1>, blocks_for(t), scope.stream, t, 0.0f, 0.0f, table);
  return codes;
}

std::tuple<Tensor, Tensor> few_bit_forward_cuda(Tensor x, int64_t fn, double a, double b, int64_t bits,
                                                Doubles thresholds, Ints flips, int64_t symmetry) {
  const EncodeTable table = encode_table(thresholds_of(bits, thresholds, flips, symmetry));
  const int64_t numel = flat_layout(x, "x", kGroup).numel;
  const DeviceScope scope(x);
  Tensor y = empty_like(x, x.scalar_type());
  Tensor codes = torch::stable::new_empty(x, {bits, plane_bytes(numel)}, ScalarType::Byte);
  const Elementwise t = elementwise(x, &y, codes, numel);
  with_activation(fn, [&](auto number) {
    launch_checked("few_bit_forward", encode_vectors<number()>, blocks_for(t), scope.stream, t,
                   static_cast<float>(a), static_cast<float>(b), table);
  });
  return {y, codes};
}

Tensor few_bit_backward_cuda(Tensor grad, Tensor codes, Doubles levels) {
  const int64_t numel = flat_layout(grad, "grad", kGroup).numel;
  check_planes(codes, numel);
  STD_TORCH_CHECK(same_device(codes, grad), "codes must be on grad's device");
  LevelTable table{static_cast<int>(codes.sizes()[0])};
  check_levels(levels, table.bits, table.level);
  const DeviceScope scope(grad);
  Tensor result = empty_like(grad, grad.scalar_type());
  const Elementwise t = elementwise(grad, &result, codes, numel);
  launch_checked("few_bit_backward", multiply_by_levels, blocks_for(t), scope.stream, t, table);
  return result;
}

Tensor few_bit_backward_from_output_cuda(Tensor grad, Tensor output, Tensor codes, double minimum,
                                         Doubles falling, Doubles rising, double falling_reach,
                                         double rising_reach) {
  const int64_t numel = flat_layout(grad, "grad", kGroup).numel;
  check_output(output, grad);
  check_planes(codes, numel);
  STD_TORCH_CHECK(codes.sizes()[0] == 1, "codes must have one row, got ", codes.sizes()[0]);
  STD_TORCH_CHECK(same_device(codes, grad) && same_device(output, grad),
                  "output and codes must be on grad's device");
  const Valley valley = valley_of(minimum, falling, rising, falling_reach, rising_reach);
  const DeviceScope scope(grad);
  Tensor result = empty_like(grad, grad.scalar_type());
  const Elementwise t = elementwise(grad, &result, codes, numel);
  launch_checked("few_bit_backward_from_output", multiply_by_valley, blocks_for(t), scope.stream, t,
                 output.data_ptr(), float_type(output), on_16_bytes(output.data_ptr()), valley);
  return result;
}

}  // namespace memkern
