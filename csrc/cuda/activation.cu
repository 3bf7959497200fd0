// memkern::few_bit_encode, few_bit_forward, few_bit_backward and few_bit_backward_from_output on CUDA
// devices. GELU of bf16 is in bf16_table.cuh.
#include "activation.cuh"

#include <algorithm>
#include <limits>

#include "bf16_table.cuh"
#include "common/activation_args.h"
#include "common/ops.h"
#include "launch.h"

namespace memkern {

// Writes codes and, unless Fn is -1, the results of activation number Fn.
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

// ---- fp32 and fp16 forward by comparisons in a fixed order

// How often a plane of a Gray code of `bits` bits flips while |x| grows from 0. The highest plane is the
// sign's and does not flip. All but the two highest flip once more than for a monotone derivative, because
// GELU's rises above 1 and comes back.
MEMKERN_FN constexpr int flips_of_plane(int bits, int plane) {
  return plane < bits - 1 ? (1 << (bits - 2 - plane)) + (plane < bits - 2) : 0;
}

// The thresholds that flip each plane; for those that a table does not have infinity, which no |x| is above.
struct PlaneThresholds {
  float of_plane[kMaxBits - 1][flips_of_plane(kMaxBits, 0)];
};

// The same codes as encode(). A bit is the XOR of its plane's comparisons, which takes no instructions
// beside the comparisons; then only the bits have to be combined. With the activation this takes 38
// instructions per element, of which GELU takes 25, instead of 53 (sm_90, fp32).
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
  for_each_vector<kThreads, Type == FloatType::kFp32>(t, t.plane, [&](const auto& at, int64_t vector) {
    float x[kVector];
    load_floats(t.input, type, at, x);
    store_planes(t, Bits, at, vector, encode_by_planes<Bits>(x, thresholds));
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

// Multiplies gradients by their codes' levels. The codes of two elements choose a pair of levels.
template <FloatType Type, int Bits> __global__ void __launch_bounds__(kThreads)
    multiply_by_levels(Elementwise t, const __grid_constant__ LevelTable table) {
  constexpr ConstantType<Type> type;
  // Bits 2 p and 2 p + 1 of an index are the first and the second element's bit of plane p.
  __shared__ float2 levels[1 << 2 * Bits];
  for (int i = threadIdx.x; i < 1 << 2 * Bits; i += kThreads) {
    const auto code = [](int bits) {  // the first element's, from bits 0, 2, 4 and 6
      return (bits & 1) | (bits >> 1 & 2) | (bits >> 2 & 4) | (bits >> 3 & 8);
    };
    levels[i] = {table.level[code(i)], table.level[code(i >> 1)]};
  }
  __syncthreads();
  const int64_t vectors = ceil_div(t.numel, kVector);
  for_each_vector<kThreads, Type == FloatType::kFp32>(t, vectors, [&](const auto& at, int64_t vector) {
    const Raw raw = load_raw(t.input, type, at);
    const Planes planes = load_planes(t, Bits, at, vector);
    float grad[kVector];
    to_floats(raw, type, grad);
#pragma unroll
    for (int i = 0; i < kVector; i += 2) {
      // The factor is 2^24 + 2^18 + 2^12 + 2^6. Its term 2^(24 - 6 p) moves plane p's two bits from bit 8 p
      // to bit 24 + 2 p. The other products are below bit 24, without overlaps and so without a carry, or
      // above bit 31.
      const float2 level = levels[(planes >> i & 3 * kElementBits) * 0x01041040u >> 24];
      grad[i] = grad[i] * level.x;
      grad[i + 1] = grad[i + 1] * level.y;
    }
    store_floats(t.result, type, at, grad);
  });
}

static __global__ void __launch_bounds__(kThreads)
    multiply_by_two_branch(Elementwise t, const void* output, FloatType output_type, bool output_aligned,
                           const __grid_constant__ TwoBranch two_branch) {
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
    grad[i] = grad[i] * two_branch_derivative(y[i], (rising >> i & 1u) != 0, two_branch);
  store_floats(t.result, t.type, at, grad);
}

namespace {

EncodeTable encode_table(const Thresholds& thresholds) {
  EncodeTable table{thresholds.count, thresholds.bits, thresholds.symmetry};
  for (int i = 0; i < thresholds.count; ++i) {
    table.threshold[i] = thresholds.threshold[i];
    for (int p = 0; p < thresholds.bits; ++p) table.flip[i] |= (thresholds.flip[i] >> p & 1u) << 8 * p;
  }
  return table;
}

// Sorts a table's thresholds by plane. Returns false where by_plane has no room for them.
bool thresholds_by_plane(const Thresholds& table, PlaneThresholds& by_plane) {
  if (table.symmetry != kOdd) return false;
  for (auto& plane : by_plane.of_plane) std::ranges::fill(plane, std::numeric_limits<float>::infinity());
  int count[kMaxBits] = {};
  for (int i = 0; i < table.count; ++i)
    for (int p = 0; p < table.bits; ++p)
      if (table.flip[i] >> p & 1) {
        if (count[p] == flips_of_plane(table.bits, p)) return false;
        by_plane.of_plane[p][count[p]++] = table.threshold[i];
      }
  return true;
}

Elementwise elementwise(const Tensor& input, const Tensor* result, const Tensor& codes, int64_t numel) {
  void *x = address_of(input, "x"), *y = result ? result->data_ptr() : nullptr;
  return {x,
          y,
          static_cast<uint8_t*>(address_of(codes, "codes")),
          numel,
          plane_bytes(numel),
          float_type(input),
          on_16_bytes(x) && on_16_bytes(y)};
}

int64_t blocks_for(const Elementwise& t, int threads = kThreads) { return ceil_div(t.plane, threads); }

// Calls use(k) with k as a constant, where First <= k < First + Count; else returns false.
template <int First, int Count, class Use> bool with_constant(int64_t k, Use&& use) {
  return [&]<int... I>(std::integer_sequence<int, I...>) {
    return ((k == First + I && (use(std::integral_constant<int, First + I>{}), true)) || ...);
  }(std::make_integer_sequence<int, Count>{});
}

template <class Use> void with_activation(int64_t fn, Use&& use) {
  MEMKERN_CHECK((with_constant<0, kActivations>(fn, use)), "fn must be from 0 to ", kActivations - 1,
                ", got ", fn);
}

template <class Use> void with_bits(int bits, Use&& use) { with_constant<1, kMaxBits>(bits, use); }

int64_t resident_blocks_for(const Elementwise& t, int threads = kThreads) {
  return std::min(blocks_for(t, threads), resident_blocks(threads));
}

template <int Fn> constexpr bool kHasFastForward = Fn == kGelu || Fn == kGeluTanh;

// The forward pass by a kernel of its own. Returns false if there is none for the tensor and the table, or if
// fast paths are off.
template <int Fn> bool fast_forward(const Tensor& x, const Elementwise& t, float a, float b,
                                    const Thresholds& thresholds, cudaStream_t stream) {
  if (!fast_paths()) return false;
  constexpr const char* kName = "few_bit_forward";
  if (t.type == FloatType::kBf16) {
    if (!t.aligned || t.numel < kTableNumel) return false;
    const int64_t blocks = resident_blocks_for(t, kTableThreads);
    const bool from_torch = has_torch_results<Fn>(x, stream);
    with_bits(thresholds.bits, [&](auto bits) {
      launch_checked<kTableThreads>(kName, forward_by_table<Fn, bits()>, blocks, stream, t, from_torch,
                                    encode_table(thresholds));
    });
    return true;
  }
  PlaneThresholds by_plane;
  if (!thresholds_by_plane(thresholds, by_plane)) return false;
  with_bits(thresholds.bits, [&](auto bits) {
    const auto kernel = t.type == FloatType::kFp32 ? forward_by_planes<Fn, FloatType::kFp32, bits()>
                                                   : forward_by_planes<Fn, FloatType::kFp16, bits()>;
    launch_checked(kName, kernel, resident_blocks_for(t), stream, t, a, b, by_plane);
  });
  return true;
}

}  // namespace

Tensor few_bit_encode_cuda(Tensor x, int64_t bits, Doubles thresholds, Ints flips, int64_t symmetry) {
  const EncodeTable table = encode_table(thresholds_of(bits, thresholds, flips, symmetry));
  const int64_t numel = flat_layout(x, "x", kGroup).numel;
  const DeviceScope scope(x);
  Tensor codes = new_tensor(x, {bits, plane_bytes(numel)}, ScalarType::Byte);
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
  Tensor codes = new_tensor(x, {bits, plane_bytes(numel)}, ScalarType::Byte);
  const Elementwise t = elementwise(x, &y, codes, numel);
  with_activation(fn, [&](auto number) {
    const float a_fp32 = static_cast<float>(a), b_fp32 = static_cast<float>(b);
    if constexpr (kHasFastForward<number()>)
      if (fast_forward<number()>(x, t, a_fp32, b_fp32, table, scope.stream)) return;
    launch_checked("few_bit_forward", encode_vectors<number()>, blocks_for(t), scope.stream, t, a_fp32,
                   b_fp32, encode_table(table));
  });
  return {y, codes};
}

Tensor few_bit_backward_cuda(Tensor grad, Tensor codes, Doubles levels) {
  const int64_t numel = flat_layout(grad, "grad", kGroup).numel;
  check_planes(codes, numel);
  MEMKERN_CHECK(same_device(codes, grad), "codes must be on grad's device");
  LevelTable table{static_cast<int>(codes.sizes()[0])};
  fill_levels(levels, table.bits, table.level);
  const DeviceScope scope(grad);
  Tensor result = empty_like(grad, grad.scalar_type());
  const Elementwise t = elementwise(grad, &result, codes, numel);
  with_bits(table.bits, [&](auto bits) {
    const auto kernel = t.type == FloatType::kFp32   ? multiply_by_levels<FloatType::kFp32, bits()>
                        : t.type == FloatType::kBf16 ? multiply_by_levels<FloatType::kBf16, bits()>
                                                     : multiply_by_levels<FloatType::kFp16, bits()>;
    launch_checked("few_bit_backward", kernel, resident_blocks_for(t), scope.stream, t, table);
  });
  return result;
}

Tensor few_bit_backward_from_output_cuda(Tensor grad, Tensor output, Tensor codes, double minimum,
                                         Doubles falling, Doubles rising, double falling_reach,
                                         double rising_reach) {
  const int64_t numel = flat_layout(grad, "grad", kGroup).numel;
  check_output(output, grad);
  check_planes(codes, numel);
  MEMKERN_CHECK(codes.sizes()[0] == 1, "codes must have one row, got ", codes.sizes()[0]);
  MEMKERN_CHECK(same_device(codes, grad) && same_device(output, grad),
                "output and codes must be on grad's device");
  const TwoBranch two_branch = two_branch_of(minimum, falling, rising, falling_reach, rising_reach);
  const void* const y = address_of(output, "output");
  const DeviceScope scope(grad);
  Tensor result = empty_like(grad, grad.scalar_type());
  const Elementwise t = elementwise(grad, &result, codes, numel);
  launch_checked("few_bit_backward_from_output", multiply_by_two_branch, blocks_for(t), scope.stream, t, y,
                 float_type(output), on_16_bytes(y), two_branch);
  return result;
}

}  // namespace memkern
