// memkern's few-bit activations on CUDA devices. A thread processes a vector of 8 elements, whose bits in a
// plane are one byte.
#include "common/activation_args.h"

#include <algorithm>
#include <limits>

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

MEMKERN_DEVICE Span whole_span(int64_t vector) { return {vector * kVector, kVector, true}; }
MEMKERN_DEVICE Span span_of_vector(const Elementwise& t, int64_t vector) {
  return span_of(vector * kVector, t.numel - vector * kVector, t.aligned);
}

// Calls work(span, vector) for a thread's share of so many vectors: first the whole ones, then the others.
template <int Threads, class Work>
MEMKERN_DEVICE void for_each_vector(const Elementwise& t, int64_t vectors, Work&& work) {
  const uint32_t all = static_cast<uint32_t>(vectors), step = gridDim.x * Threads;
  const uint32_t whole = t.aligned ? static_cast<uint32_t>(t.numel / kVector) : 0;
  uint32_t vector = blockIdx.x * Threads + threadIdx.x;
  for (; vector < whole; vector += step) work(whole_span(vector), vector);
  for (; vector < all; vector += step) work(span_of_vector(t, vector), vector);
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

// Fn < 0: codes only.
template <int Fn> __global__ void __launch_bounds__(kThreads)
    encode_vectors(Elementwise t, float a, float b, const __grid_constant__ EncodeTable table) {
  const int64_t vector = vector_of_thread();
  if (vector >= t.plane) return;
  const Span at = span_of_vector(t, vector);
  float x[kVector];
  load_floats(t.input, t.type, at, x);
  store_planes(t, table.bits, vector, encode(x, table) & first_elements(at.n));
  if constexpr (Fn >= 0) {
#pragma unroll
    for (float& each : x) each = activate<Fn>(each, a, b);
    store_floats(t.result, t.type, at, x);
  }
}

// ---- bf16 forward by a table

// A bf16 tensor has few different values. The result is x / 2 below `low`, x from `identity` on, and -0 from
// -high on; for what lies between, about 3,000 values, each thread block fills a table with result and code
// by the formulas above. 13 instructions per element then, instead of 65 (sm_90), and no more than memory has
// time for.
template <int Fn> struct Bf16Range {
  static constexpr uint32_t kLow = 0x3B00;       // 2^-9: from here on the second factor can change a bit
  static constexpr uint32_t kIdentity = 0x4040;  // 3
  static constexpr uint32_t kHigh = 0x40C0;      // 6: there erf and tanh are 1 in fp32
  static constexpr uint32_t kFirst = kLow - 1;   // stands for all below kLow, as kHigh for all above
  static constexpr int kEntries = 2 * static_cast<int>(kHigh - kFirst + 1);  // of both signs
};

constexpr int kTableThreads = MEMKERN_TABLE_THREADS,
              kTableBlocks = 2048 / kTableThreads;  // of a multiprocessor
// The least elements that are worth filling the tables.
constexpr int64_t kTableNumel = 1 << 19;

MEMKERN_DEVICE constexpr uint32_t both(uint32_t half) { return half | half << 16; }

// The result in the upper half; bit p of the code at 4 p, so that those of four elements, each shifted by one
// more, add up to nibbles of the planes.
template <int Fn>
MEMKERN_DEVICE uint32_t table_entry(uint32_t bf16, float a, float b, const EncodeTable& table) {
  const float x[1] = {float_of(bf16 << 16)};
  const Planes planes = encode(x, table);
  const uint32_t code = (planes & 1) | (planes >> 4 & 0x10) | (planes >> 8 & 0x100) | (planes >> 12 & 0x1000);
  return to_bf16x2(0.0f, activate<Fn>(x[0], a, b)) | code;
}

// Looks up a vector: its results, and the planes of its codes.
template <int Fn> MEMKERN_DEVICE Planes look_up(Raw& raw, const uint32_t* table) {
  using Range = Bf16Range<Fn>;
  uint32_t nibbles[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    const uint32_t pair = raw.word[i], magnitude = pair & both(0x7FFF);
    const uint32_t clamped =
        min_bf16x2(max_bf16x2(magnitude, both(Range::kFirst)), both(Range::kHigh));  // NaN: kFirst
    // In bytes, of both.
    const uint32_t place = ((clamped - both(Range::kFirst)) << 3) | (less_bf16x2(pair, 0) & both(4));
    const char* bytes = reinterpret_cast<const char*>(table);
    const uint32_t low = *reinterpret_cast<const uint32_t*>(bytes + (place & 0xFFFF)),
                   high = *reinterpret_cast<const uint32_t*>(bytes + (place >> 16));
    nibbles[i / 2] += (low + (high << 1)) << 2 * (i % 2);
    // NaN and -inf become NaN; to others -0 is added.
    uint32_t y = fma_bf16x2(magnitude, both(0x8000), __byte_perm(low, high, 0x7632));
    const uint32_t half = fma_bf16x2(pair, both(0x3F00), both(0x8000));
    const uint32_t small = less_bf16x2(magnitude, both(Range::kLow)),
                   not_large = less_bf16x2(pair, both(Range::kIdentity));
    y = (half & small) | (y & ~small);
    raw.word[i] = (y & not_large) | (pair & ~not_large);
  }
  // Of both words nibbles 0 to 3, to bytes; then the inner nibbles of each half change places.
  const Planes planes = __byte_perm(nibbles[0], nibbles[1], 0x5140);
  const uint32_t change = (planes ^ planes >> 4) & both(0x00F0);
  return planes ^ change ^ change << 4;
}

template <int Fn, int Bits> __global__ void __launch_bounds__(kTableThreads, kTableBlocks)
    forward_by_table(Elementwise t, float a, float b, const __grid_constant__ EncodeTable thresholds) {
  constexpr ConstantType<FloatType::kBf16> type;
  __shared__ uint32_t table[Bf16Range<Fn>::kEntries];
  for (int i = threadIdx.x; i < Bf16Range<Fn>::kEntries; i += kTableThreads)
    table[i] = table_entry<Fn>(Bf16Range<Fn>::kFirst + i / 2 + (i % 2 << 15), a, b, thresholds);
  __syncthreads();

  for_each_vector<kTableThreads>(t, t.plane, [&](const Span& at, int64_t vector) {
    Raw raw = load_raw(t.input, type, at);
    const Planes planes = look_up<Fn>(raw, table);
    store_raw(t.result, type, at, raw);
    store_planes(t, Bits, vector, planes & first_elements(at.n));
  });
}

// ---- fp32 and fp16 forward by comparisons in a fixed order

// In a Gray code of so many bits, the highest of them the sign's: how often |x| flips a plane on its way up
// from 0. One time more than where the derivative is monotone, as GELU's goes over 1 and comes back.
MEMKERN_FN constexpr int flips_of_plane(int bits, int plane) {
  return plane < bits - 1 ? (1 << (bits - 2 - plane)) + (plane < bits - 2) : 0;
}

// The thresholds that flip a plane; infinity, which nothing is above, for those that a table does not have.
struct PlaneThresholds {
  float of_plane[kMaxBits - 1][flips_of_plane(kMaxBits, 0)];
};

// The same codes as encode(). A bit is the XOR of its plane's comparisons, which takes no instruction of its
// own, so that only the bits are brought together and not the comparisons: 38 instructions per element, of
// which GELU is 25, instead of 53 (sm_90, fp32).
template <int Bits>
MEMKERN_DEVICE Planes encode_by_planes(const float (&x)[kVector], const PlaneThresholds& thresholds) {
  Planes planes = 0;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
#pragma unroll
    for (int p = 0; p < Bits; ++p) {
      bool bit = p == Bits - 1 && x[i] < 0.0f;
#pragma unroll
      for (int k = 0; k < flips_of_plane(Bits, p); ++k) bit ^= fabsf(x[i]) > thresholds.of_plane[p][k];
      planes |= bit ? 1u << (8 * p + i) : 0u;
    }
  }
  return planes;
}

template <int Fn, FloatType Type, int Bits> __global__ void __launch_bounds__(kThreads, kResidentBlocks)
    forward_by_planes(Elementwise t, float a, float b, const __grid_constant__ PlaneThresholds thresholds) {
  constexpr ConstantType<Type> type;
  for_each_vector<kThreads>(t, t.plane, [&](const Span& at, int64_t vector) {
    float x[kVector];
    load_floats(t.input, type, at, x);
    store_planes(t, Bits, vector, encode_by_planes<Bits>(x, thresholds) & first_elements(at.n));
#pragma unroll
    for (float& each : x) each = activate<Fn>(each, a, b);
    store_floats(t.result, type, at, x);
  });
}

// ---- backward

struct LevelTable {
  int bits;
  float level[1 << kMaxBits];
};

// The codes of two elements choose a pair of levels.
template <FloatType Type, int Bits> __global__ void __launch_bounds__(kThreads)
    multiply_by_levels(Elementwise t, const __grid_constant__ LevelTable table) {
  constexpr ConstantType<Type> type;
  // Bits 2 p and 2 p + 1 of an index are from plane p.
  __shared__ float2 levels[1 << 2 * Bits];
  for (int i = threadIdx.x; i < 1 << 2 * Bits; i += kThreads) {
    const auto code = [](int bits) {
      return (bits & 1) | (bits >> 1 & 2) | (bits >> 2 & 4) | (bits >> 3 & 8);
    };
    levels[i] = {table.level[code(i)], table.level[code(i >> 1)]};
  }
  __syncthreads();
  for_each_vector<kThreads>(t, ceil_div(t.numel, kVector), [&](const Span& at, int64_t vector) {
    const Raw raw = load_raw(t.input, type, at);
    const Planes planes = load_planes(t, Bits, vector);
    float grad[kVector];
    to_floats(raw, type, grad);
#pragma unroll
    for (int i = 0; i < kVector; i += 2) {
      // The bits at 0, 8, 16 and 24, and those beside them, come together from 24 on; no two others of the
      // product meet.
      const float2 level = levels[(planes >> i & 3 * kElementBits) * 0x01041040u >> 24];
      grad[i] = grad[i] * level.x;
      grad[i + 1] = grad[i + 1] * level.y;
    }
    store_floats(t.result, type, at, grad);
  });
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

// Whether a table is one of those that PlaneThresholds has room for.
bool thresholds_by_plane(const Thresholds& from, PlaneThresholds& thresholds) {
  if (from.symmetry != kOdd) return false;
  for (auto& plane : thresholds.of_plane) std::ranges::fill(plane, std::numeric_limits<float>::infinity());
  int count[kMaxBits] = {};
  for (int i = 0; i < from.count; ++i)
    for (int p = 0; p < from.bits; ++p)
      if (from.flip[i] >> p & 1) {
        if (count[p] == flips_of_plane(from.bits, p)) return false;
        thresholds.of_plane[p][count[p]++] = from.threshold[i];
      }
  return true;
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

int64_t blocks_for(const Elementwise& t, int threads = kThreads) { return ceil_div(t.plane, threads); }

// Calls use(k) with k as a constant, first <= k < first + Count; false: it is none of these.
template <int First, int Count, class Use> bool with_constant(int64_t k, Use&& use) {
  return [&]<int... I>(std::integer_sequence<int, I...>) {
    return ((k == First + I && (use(std::integral_constant<int, First + I>{}), true)) || ...);
  }(std::make_integer_sequence<int, Count>{});
}

template <class Use> void with_activation(int64_t fn, Use&& use) {
  STD_TORCH_CHECK((with_constant<0, kActivations>(fn, use)), "fn must be from 0 to ", kActivations - 1,
                  ", got ", fn);
}

template <class Use> void with_bits(int bits, Use&& use) { with_constant<1, kMaxBits>(bits, use); }

int64_t resident_blocks(const Elementwise& t) {
  return std::min(blocks_for(t), kResidentBlocks * multiprocessors());
}

template <int Fn> constexpr bool kHasFastForward = Fn == kGelu || Fn == kGeluTanh;

// The forward pass by a kernel of its own; false: there is none for such a tensor and table.
template <int Fn>
bool fast_forward(const Elementwise& t, float a, float b, const Thresholds& thresholds, cudaStream_t stream) {
  constexpr const char* kName = "few_bit_forward";
  if (t.type == FloatType::kBf16) {
    if (!t.aligned || t.numel < kTableNumel) return false;
    const int64_t blocks = std::min(blocks_for(t, kTableThreads), kTableBlocks * multiprocessors());
    with_bits(thresholds.bits, [&](auto bits) {
      launch_checked<kTableThreads>(kName, forward_by_table<Fn, bits()>, blocks, stream, t, a, b,
                                    encode_table(thresholds));
    });
    return true;
  }
  PlaneThresholds by_plane;
  if (!thresholds_by_plane(thresholds, by_plane)) return false;
  with_bits(thresholds.bits, [&](auto bits) {
    const auto kernel = t.type == FloatType::kFp32 ? forward_by_planes<Fn, FloatType::kFp32, bits()>
                                                   : forward_by_planes<Fn, FloatType::kFp16, bits()>;
    launch_checked(kName, kernel, resident_blocks(t), stream, t, a, b, by_plane);
  });
  return true;
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
  const Thresholds table = thresholds_of(bits, thresholds, flips, symmetry);
  const int64_t numel = flat_layout(x, "x", kGroup).numel;
  const DeviceScope scope(x);
  Tensor y = empty_like(x, x.scalar_type());
  Tensor codes = torch::stable::new_empty(x, {bits, plane_bytes(numel)}, ScalarType::Byte);
  const Elementwise t = elementwise(x, &y, codes, numel);
  with_activation(fn, [&](auto number) {
    const float first = static_cast<float>(a), second = static_cast<float>(b);
    if constexpr (kHasFastForward<number()>)
      if (fast_forward<number()>(t, first, second, table, scope.stream)) return;
    launch_checked("few_bit_forward", encode_vectors<number()>, blocks_for(t), scope.stream, t, first, second,
                   encode_table(table));
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
  with_bits(table.bits, [&](auto bits) {
    const auto kernel = t.type == FloatType::kFp32   ? multiply_by_levels<FloatType::kFp32, bits()>
                        : t.type == FloatType::kBf16 ? multiply_by_levels<FloatType::kBf16, bits()>
                                                     : multiply_by_levels<FloatType::kFp16, bits()>;
    launch_checked("few_bit_backward", kernel, resident_blocks(t), scope.stream, t, table);
  });
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
