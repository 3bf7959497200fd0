// memkern::quantize_blockwise and memkern::dequantize_blockwise on CUDA devices.
#include <algorithm>

#include "block_state.cuh"
#include "common/ops.h"
#include "launch.h"
#include "tile.cuh"

namespace memkern {

struct CodecTensor {
  void* values;
  void* codes;
  float* scale;
  Blocks blocks;
  FloatType type;
  bool aligned;  // values and codes start on 16 bytes
  bool mark_nonfinite = false;

  // A lane's largest magnitude, where some value is not finite: infinite, and so the block's, where blocks
  // are marked.
  template <bool Signed> MEMKERN_DEVICE float absmax_of_rest(const float (&x)[kVector]) const {
    return mark_nonfinite ? INFINITY : finite_absmax<Signed>(x);
  }
  MEMKERN_DEVICE void store_scale(int64_t block, float absmax) const {
    if (mark_nonfinite) absmax = is_finite(absmax) ? fminf(absmax, kLargestMarkedScale) : NAN;
    __stcs(scale + block, absmax);
  }
};

// Unsigned codes are for x >= 0: negative values, and -0, are stored as 0. NaN stays NaN.
template <bool Signed> MEMKERN_DEVICE float storable(float x) { return Signed || !(x <= 0.0f) ? x : 0.0f; }

template <StateKind Kind, bool Signed> __global__ void __launch_bounds__(kThreads)
    quantize_tiles(CodecTensor t, Rounding rounding) {
  const LaneGroup group(t.blocks.block);
  __shared__ Tile tile;
  if (threadIdx.x == 0) tile.start(t.blocks, blockIdx.x, group);
  fill_dynamic_shared<Kind>();
  __syncthreads();
  for_each_block(t.blocks, tile, group, [&](const BlockSpan& block) {
    float absmax = 0.0f, factor = 0.0f;
    bool finite = true;
    // A block of one vector per lane is read once; a larger one once for its maximum, and again to be
    // quantized.
    const int iterations = group.vectors == 1 ? 1 : 2 * group.vectors;
    for (int iteration = 0; iteration < iterations; ++iteration) {
      const bool max_pass = iteration < group.vectors, store_pass = iteration >= iterations - group.vectors;
      const int j =
          ((max_pass ? iteration : iteration - group.vectors) * group.width() + group.lane()) * kVector;
      const Span at = span_of(block.start + j, block.n - j, t.aligned);
      float x[kVector];
      load_floats(t.values, t.type, at, x);
      for (float& each : x) each = storable<Signed>(each);
      if (max_pass) {
        float vector_max = absmax_or_nan<Signed>(x);
        if (!is_finite(vector_max)) {
          finite = false;
          vector_max = t.absmax_of_rest<Signed>(x);
        }
        absmax = fmaxf(absmax, vector_max);
      }
      if (iteration == group.vectors - 1) {
        absmax = max_over_lanes(absmax, group.width() / 2);
        factor = encode_factor<Kind>(absmax, levels_of(Signed));
        if (group.lane() == 0 && block.n > 0) t.store_scale(block.index, absmax);
      }
      if (store_pass) store_codes(t.codes, at, encode<Kind, Signed>(x, factor, finite, j, rounding));
    }
  });
}

// The same for power codes, rounded to the nearest, of whole blocks in aligned arrays: what is saved for a
// backward pass. 18 instructions per element instead of 26 (sm_90); the bytes of bf16 values leave time
// for 21.
template <FloatType Type, bool Signed> __global__ void __launch_bounds__(kThreads, kCodecBlocks)
    quantize_whole(CodecTensor t) {
  constexpr ConstantType<Type> type;
  const Rounding nearest{true, 0};
  const int64_t vectors = t.blocks.blocks * kWholeLanes;
  const int lane = threadIdx.x % kWholeLanes;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  // All threads make equally many rounds, because they shuffle. Those without a vector load one of the last
  // block and store nothing.
  const auto span = [&](int64_t vector) {
    return Span{(vector < vectors ? vector : vectors - kWholeLanes + lane) * kVector, kVector, true};
  };
  int64_t mine = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  // The next vector is loaded before this one is used.
  Raw next = arrived(load_raw(t.values, type, span(mine)), t.blocks);
  for (int64_t first = mine - threadIdx.x; first < vectors; first += step, mine += step) {
    const bool exists = mine < vectors;
    const Span at = span(mine);
    const Raw raw = next;
    next = load_raw(t.values, type, span(mine + step));
    float x[kVector];
    to_floats(raw, type, x);
    for (float& each : x) each = storable<Signed>(each);
    float absmax = absmax_or_nan<Signed>(x);
    const bool finite = is_finite(absmax);
    if (!finite) absmax = t.absmax_of_rest<Signed>(x);
    absmax = max_over_lanes(absmax, kWholeLanes / 2);
    const float factor = encode_factor<StateKind::kPower>(absmax, levels_of(Signed));
    const Codes codes = encode<StateKind::kPower, Signed>(x, factor, finite, lane * kVector, nearest);
    if (!exists) continue;
    if (lane == 0) t.store_scale(mine / kWholeLanes, absmax);
    store_codes(t.codes, at, codes);
  }
}

template <StateKind Kind, bool Signed> __global__ void __launch_bounds__(kThreads)
    dequantize_tiles(CodecTensor t) {
  const LaneGroup group(t.blocks.block);
  __shared__ Tile tile;
  if (threadIdx.x == 0) tile.start(t.blocks, blockIdx.x, group);
  fill_dynamic_shared<Kind>();
  __syncthreads();
  for_each_block(t.blocks, tile, group, [&](const BlockSpan& block) {
    const float unit =
        block.n > 0 ? decode_unit<Kind>(__ldcs(t.scale + block.index), 1.0f, levels_of(Signed)) : 0.0f;
    for (int iteration = 0; iteration < group.vectors; ++iteration) {
      const int j = (iteration * group.width() + group.lane()) * kVector;
      const Span at = span_of(block.start + j, block.n - j, t.aligned);
      float x[kVector];
      decode<Kind, Signed>(load_codes(t.codes, at), unit, x);
      store_floats(t.values, t.type, at, x);
    }
  });
}

namespace {

// Calls use(kind, sign) with both as constants.
template <class Use> void with_codec(int64_t codec, bool is_signed, Use&& use) {
  using Power = std::integral_constant<StateKind, StateKind::kPower>;
  using Dynamic = std::integral_constant<StateKind, StateKind::kDynamic>;
  const auto with_sign = [&](auto kind) {
    is_signed ? use(kind, std::true_type{}) : use(kind, std::false_type{});
  };
  codec == kPower ? with_sign(Power{}) : with_sign(Dynamic{});
}

CodecTensor codec_tensor(const Tensor& values, const Tensor& codes, const Tensor& scale,
                         const BlockLayout& layout) {
  check_blocks(layout);
  void *x = values.data_ptr(), *q = codes.data_ptr();
  return {x,
          q,
          static_cast<float*>(scale.data_ptr()),
          codec_blocks(layout),
          float_type(values),
          on_16_bytes(x) && on_16_bytes(q)};
}

}  // namespace

std::tuple<Tensor, Tensor> quantize_blockwise_cuda(Tensor x, int64_t codec, bool is_signed,
                                                   int64_t block_size, std::optional<int64_t> step,
                                                   bool mark_nonfinite) {
  check_codec(codec);
  check_block_size(block_size);
  MEMKERN_CHECK(is_float_type(x.scalar_type()), "x must be float32, bfloat16 or float16");
  const BlockLayout layout = layout_of(x, block_size, "x");
  const DeviceScope scope(x);
  Tensor codes = empty_like(x, is_signed ? ScalarType::Char : ScalarType::Byte);
  Tensor scale = torch::stable::new_empty(x, scale_shape(layout), ScalarType::Float);
  CodecTensor t = codec_tensor(x, codes, scale, layout);
  t.mark_nonfinite = mark_nonfinite;
  const Rounding rounding{!step, static_cast<uint32_t>(step.value_or(0))};
  with_codec(codec, is_signed, [&](auto kind, auto sign) {
    if (fast_paths() && kind() == StateKind::kPower && !step && t.aligned && are_whole(t.blocks)) {
      const auto kernel = t.type == FloatType::kFp32   ? quantize_whole<FloatType::kFp32, sign()>
                          : t.type == FloatType::kBf16 ? quantize_whole<FloatType::kBf16, sign()>
                                                       : quantize_whole<FloatType::kFp16, sign()>;
      const int64_t blocks = ceil_div(t.blocks.blocks * kWholeLanes, kThreads);
      launch_checked("quantize_blockwise", kernel, std::min(blocks, kCodecBlocks * multiprocessors()),
                     scope.stream, t);
      return;
    }
    launch_checked("quantize_blockwise", quantize_tiles<kind(), sign()>, tiles_of(t.blocks), scope.stream, t,
                   rounding);
  });
  return {codes, scale};
}

Tensor dequantize_blockwise_cuda(Tensor codes, Tensor scale, int64_t codec, int64_t block_size,
                                 ScalarType dtype) {
  check_codec(codec);
  check_block_size(block_size);
  const bool is_signed = codes.scalar_type() == ScalarType::Char;
  MEMKERN_CHECK(is_signed || codes.scalar_type() == ScalarType::Byte, "codes must be int8 (signed) or uint8");
  MEMKERN_CHECK(is_float_type(dtype), "dtype must be float32, bfloat16 or float16");
  const BlockLayout layout = layout_of(codes, block_size, "codes");
  check_scale(scale, layout, "codes");
  MEMKERN_CHECK(same_device(scale, codes), "scale must be on the device of codes");
  const DeviceScope scope(codes);
  Tensor values = empty_like(codes, dtype);
  const CodecTensor t = codec_tensor(values, codes, scale, layout);
  with_codec(codec, is_signed, [&](auto kind, auto sign) {
    launch_checked("dequantize_blockwise", dequantize_tiles<kind(), sign()>, tiles_of(t.blocks), scope.stream,
                   t);
  });
  return values;
}

}  // namespace memkern
