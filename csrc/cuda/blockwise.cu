// memkern::quantize_blockwise and memkern::dequantize_blockwise on CUDA devices.
#include <algorithm>

#include "block_state.cuh"
#include "common/ops.h"
#include "launch.h"
#include "vector_codes.cuh"

namespace memkern {

struct CodecTensor {
  void* values;
  void* codes;
  float* scale;
  Blocks blocks;
  FloatType type;
  bool aligned;  // values and codes start on 16 bytes
  bool mark_nonfinite = false;

  // A lane's absmax where some value is not finite: that of the finite values, or infinity where such blocks
  // are marked, so that the block's absmax is infinity too.
  template <bool Signed> MEMKERN_DEVICE float absmax_of_nonfinite(const float (&x)[kVector]) const {
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
          vector_max = t.absmax_of_nonfinite<Signed>(x);
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

// ---- power codes, rounded to the nearest, of full blocks in aligned arrays: what is saved for a backward
// pass

// Vectors of a thread block's tile, which follow one another. The last tile has fewer.
constexpr int kVectorsPerThread = 8, kCodecTile = kVectorsPerThread * kThreads;

// The vectors of a thread block: `end` of them from `start` on; lane: the thread's place in its block.
struct CodecTile {
  int64_t start;
  int end, lane;

  MEMKERN_DEVICE explicit CodecTile(const Blocks& blocks)
      : start(int64_t{blockIdx.x} * kCodecTile), lane(threadIdx.x % kBlockLanes) {
    const int64_t left = blocks.blocks * kBlockLanes - start;
    end = left < kCodecTile ? static_cast<int>(left) : kCodecTile;
  }
  // A thread without a vector has one of the last block, which it does not store.
  MEMKERN_DEVICE int64_t vector(int i) const { return start + (i < end ? i : end - kBlockLanes + lane); }
  MEMKERN_DEVICE Span span(int i) const { return {vector(i) * kVector, kVector, true}; }
};

template <bool Signed> MEMKERN_DEVICE ScaleFormula scale_formula() {
  constexpr float kSquare = levels_of(Signed) * levels_of(Signed);
  return {kSquare, 1.0f / kSquare, 1.0f, false};
}

template <FloatType Type, bool Signed> __global__ void __launch_bounds__(kThreads, kCodecBlocks)
    quantize_full_blocks(CodecTensor t) {
  constexpr ConstantType<Type> type;
  constexpr int kLevels = levels_of(Signed);
  constexpr uint32_t kDoubt = Signed ? kSignedBias : kBias<kLevels, false>;
  const CodecTile tile(t.blocks);
  const ScaleFormula formula = scale_formula<Signed>();
  int index = static_cast<int>(threadIdx.x);
  // The next vector is loaded before this one is used.
  Raw next = arrived(load_raw(t.values, type, tile.span(index)), t.blocks);
  for (int first = 0; first < tile.end; first += kThreads, index += kThreads) {
    const Raw raw = next;
    next = load_raw(t.values, type, tile.span(index + kThreads));
    float x[kVector];
    to_floats(raw, type, x);
#pragma unroll
    for (float& each : x) each = storable<Signed>(each);
    float absmax = absmax_or_nan<Signed>(x);
    const bool finite = is_finite(absmax);
    if (any_lane(!finite) && !finite) absmax = t.absmax_of_nonfinite<Signed>(x);
    float scale = max_over_lanes(absmax, kBlockLanes / 2);
    const float factor = formula.factor(scale);
    std::conditional_t<Signed, SignedSums, PositiveSums> sums;
    Codes codes = encode_to_nearest(x, factor, sums);
    recompute_doubtful(sums, kDoubt, codes, [&](int i) {
      if constexpr (Signed)
        return static_cast<uint32_t>(static_cast<int>(power_encode_signed(x[i], factor)));
      else
        return static_cast<uint32_t>(power_encode_unsigned<kLevels>(x[i], factor, 0.5f));
    });
    if (any_lane(!finite || (!Signed && factor == 0.0f)))
      codes = encode_exactly<StateKind::kPower, Signed>(x, factor, 0, Rounding{true, 0});
    if (index >= tile.end) continue;
    if (tile.lane == 0) t.store_scale(tile.vector(index) / kBlockLanes, scale);
    store_codes(t.codes, tile.span(index), codes);
  }
}

// Vectors of codes that a thread loads together: with one at a time it would wait for most of the memory's
// latency.
constexpr int kDecodedTogether = 4;
static_assert(kVectorsPerThread % kDecodedTogether == 0);

// fp32 values are stored in parts, half a block from each other.
template <FloatType Type, bool Signed> __global__ void __launch_bounds__(kThreads)
    dequantize_full_blocks(CodecTensor t) {
  constexpr ConstantType<Type> type;
  const CodecTile tile(t.blocks);
  const ScaleFormula formula = scale_formula<Signed>();
  const auto place = [&](int i) {
    if constexpr (Type == FloatType::kFp32)
      return Parts{(tile.vector(i) - tile.lane) * kVector + tile.lane * kVector / 2, kFullBlock / 2};
    else
      return tile.span(i);
  };
  for (int index = static_cast<int>(threadIdx.x); index - static_cast<int>(threadIdx.x) < tile.end;
       index += kDecodedTogether * kThreads) {
    Codes codes[kDecodedTogether];
    float scale[kDecodedTogether];
#pragma unroll
    for (int k = 0; k < kDecodedTogether; ++k) {
      codes[k] = load_codes(t.codes, place(index + k * kThreads));
      scale[k] = __ldcs(t.scale + tile.vector(index + k * kThreads) / kBlockLanes);
    }
#pragma unroll
    for (int k = 0; k < kDecodedTogether; ++k) {
      float x[kVector];
      decode<StateKind::kPower, Signed>(codes[k], formula.unit(scale[k]), x);
      if (index + k * kThreads < tile.end) store_floats(t.values, type, place(index + k * kThreads), x);
    }
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

// Calls use(type) with the type as a constant.
template <class Use> void with_type(FloatType type, Use&& use) {
  switch (type) {
    case FloatType::kFp32:
      return use(std::integral_constant<FloatType, FloatType::kFp32>{});
    case FloatType::kBf16:
      return use(std::integral_constant<FloatType, FloatType::kBf16>{});
    default:
      return use(std::integral_constant<FloatType, FloatType::kFp16>{});
  }
}

bool takes_full_blocks(const CodecTensor& t) { return fast_paths() && t.aligned && are_full(t.blocks); }
int64_t codec_tiles(const Blocks& blocks) { return ceil_div(blocks.blocks * kBlockLanes, kCodecTile); }

CodecTensor codec_tensor(const Tensor& values, const Tensor& codes, const Tensor& scale,
                         const BlockLayout& layout) {
  check_blocks(layout);
  void *x = address_of(values, "x"), *q = address_of(codes, "codes");
  return {x,
          q,
          static_cast<float*>(address_of(scale, "scale")),
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
  Tensor scale = new_tensor(x, scale_shape(layout), ScalarType::Float);
  CodecTensor t = codec_tensor(x, codes, scale, layout);
  t.mark_nonfinite = mark_nonfinite;
  const Rounding rounding{!step, static_cast<uint32_t>(step.value_or(0))};
  with_codec(codec, is_signed, [&](auto kind, auto sign) {
    if (kind() == StateKind::kPower && !step && takes_full_blocks(t)) {
      with_type(t.type, [&](auto type) {
        launch_checked("quantize_blockwise", quantize_full_blocks<type(), sign()>, codec_tiles(t.blocks),
                       scope.stream, t);
      });
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
    if (kind() == StateKind::kPower && takes_full_blocks(t)) {
      with_type(t.type, [&](auto type) {
        launch_checked("dequantize_blockwise", dequantize_full_blocks<type(), sign()>, codec_tiles(t.blocks),
                       scope.stream, t);
      });
      return;
    }
    launch_checked("dequantize_blockwise", dequantize_tiles<kind(), sign()>, tiles_of(t.blocks), scope.stream,
                   t);
  });
  return values;
}

}  // namespace memkern
