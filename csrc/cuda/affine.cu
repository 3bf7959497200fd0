// memkern::quantize_affine and memkern::dequantize_affine on CUDA devices.
#include "block_state.cuh"
#include "common/affine_args.h"
#include "common/ops.h"
#include "launch.h"
#include "tile.cuh"

namespace memkern {

struct AffineTensor {
  void* values;
  void* codes;  // int8, or two in a byte
  float* scale;
  int32_t* zero_point;
  const float *low, *high;  // the ranges, where they are given
  Blocks blocks;
  int32_t blocks_per_scale, bits;
  FloatType type;
  bool aligned;  // values and codes start on 16 bytes
};

// The range [low, high] takes in the finite elements of a vector.
MEMKERN_DEVICE void widen(float& low, float& high, const float (&x)[kVector]) {
  float least = INFINITY, most = -INFINITY;
#pragma unroll
  for (const float each : x) {  // fminf and fmaxf skip NaN
    least = fminf(least, each);
    most = fmaxf(most, each);
  }
  if (least == -INFINITY || most == INFINITY) {
    least = INFINITY, most = -INFINITY;
#pragma unroll
    for (const float each : x) {
      least = fminf(least, is_finite(each) ? each : NAN);
      most = fmaxf(most, is_finite(each) ? each : NAN);
    }
  }
  low = fminf(low, least);
  high = fmaxf(high, most);
}

// The parameters of the finite elements of a group of lanes.
MEMKERN_DEVICE AffineParameters group_parameters(float low, float high, const LaneGroup& group, int bits) {
  low = -max_over_lanes(-low, group.width() / 2);
  high = max_over_lanes(high, group.width() / 2);
  if (low > high) low = high = 0.0f;
  return affine_parameters(low, high, bits);
}

// The codes of a vector, each in a byte. place: of the first element in the tensor's memory. Adding 1.5 *
// 2^23 rounds to a whole number, in the low bits.
MEMKERN_DEVICE Codes affine_codes(const float (&x)[kVector], const AffineParameters& p, int bits,
                                  int64_t place, const Rounding& rounding) {
  const float least = static_cast<float>(affine_least(bits)), most = static_cast<float>(affine_most(bits));
  const auto clipped = [&](float t) { return fminf(fmaxf(t, least), most); };
  uint32_t code[kVector];
  if (rounding.nearest) {
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      code[i] = bits_of(clipped(affine_place(x[i], p.scale, p.zero_point)) + kRound);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float u = rounding.u(static_cast<int>(static_cast<uint32_t>(place) + i));
      code[i] = bits_of(__fadd_rd(clipped(affine_place(x[i], p.scale, p.zero_point, u)), kRound));
    }
  }
  return pack(code);
}

// Codes of 4 bits, two in a byte: from bytes, and to bytes in which 8 is added to each.
MEMKERN_DEVICE uint32_t to_halves(const Codes& codes) {
  const uint32_t a = codes.x & 0x0F0F0F0Fu, b = codes.y & 0x0F0F0F0Fu;
  return __byte_perm(a | a >> 4, b | b >> 4, 0x6420);
}
MEMKERN_DEVICE uint32_t from_halves(uint32_t two_bytes) {
  const uint32_t spread = (two_bytes | two_bytes << 8) & 0x00FF00FFu;
  return ((spread | spread << 4) & 0x0F0F0F0Fu) ^ 0x08080808u;
}

// A vector starts on a whole byte: AffineLayout::has_whole_bytes().
MEMKERN_DEVICE void store_halves(void* array, const Span& at, uint32_t halves) {
  uint8_t* p = static_cast<uint8_t*>(array) + at.offset / 2;
  if (at.whole) {
    __stcs(reinterpret_cast<uint32_t*>(p), halves);
  } else {
    if (at.n < kVector) halves &= (1u << 4 * at.n) - 1;
#pragma unroll
    for (int i = 0; i < kVector; i += 2)
      if (i < at.n) p[i / 2] = static_cast<uint8_t>(halves >> 4 * i);
  }
}

// A vector may start anywhere. 8 is added to each code.
MEMKERN_DEVICE Codes load_halves(const void* array, const Span& at) {
  const uint8_t* p = static_cast<const uint8_t*>(array);
  if (at.whole) {
    const uint32_t word = __ldcs(reinterpret_cast<const uint32_t*>(p + at.offset / 2));
    return {from_halves(word & 0xFFFFu), from_halves(word >> 16)};
  }
  uint32_t word[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kVector; ++i)
    if (i < at.n) word[i / 4] |= static_cast<uint32_t>(affine_half(p, at.offset + i) + 8) << 8 * (i % 4);
  return {word[0], word[1]};
}

// The index of a block's scale.
template <bool Runs> MEMKERN_DEVICE int64_t scale_of(const AffineTensor& t, int64_t block) {
  return Runs ? block / t.blocks_per_scale : block;
}

// Given: the ranges are. Halves: two codes in a byte.
template <bool Given, bool Halves> __global__ void __launch_bounds__(kThreads)
    quantize_affine_tiles(AffineTensor t, Rounding rounding) {
  const LaneGroup group(t.blocks.block);
  __shared__ Tile tile;
  if (threadIdx.x == 0) tile.start(t.blocks, blockIdx.x, group);
  __syncthreads();
  for_each_block(t.blocks, tile, group, [&](const BlockSpan& block) {
    float low = INFINITY, high = -INFINITY;
    AffineParameters p{1.0f, 0.0f};
    const int64_t k = scale_of<Given>(t, block.index);
    if constexpr (Given) p = affine_parameters(t.low[k], t.high[k], t.bits);
    // A block of one vector per lane is read once; a larger one once for its range, and again to be
    // quantized.
    const int iterations = Given || group.vectors == 1 ? group.vectors : 2 * group.vectors;
    for (int iteration = 0; iteration < iterations; ++iteration) {
      const bool range_pass = !Given && iteration < group.vectors;
      const bool store_pass = iteration >= iterations - group.vectors;
      const int turn = Given || range_pass ? iteration : iteration - group.vectors;
      const int j = (turn * group.width() + group.lane()) * kVector;
      const Span at = span_of(block.start + j, block.n - j, t.aligned);
      float x[kVector];
      load_floats(t.values, t.type, at, x);
      if (range_pass) {
        if (at.n < kVector) {
#pragma unroll
          for (int i = 0; i < kVector; ++i)
            if (i >= at.n) x[i] = NAN;
        }
        widen(low, high, x);
      }
      if (!Given && iteration == group.vectors - 1) p = group_parameters(low, high, group, t.bits);
      if (store_pass) {
        const Codes codes = affine_codes(x, p, t.bits, at.offset, rounding);
        if constexpr (Halves)
          store_halves(t.codes, at, to_halves(codes));
        else
          store_codes(t.codes, at, codes);
      }
    }
    if (group.lane() == 0 && block.n > 0 && (!Given || k * t.blocks_per_scale == block.index)) {
      __stcs(t.scale + k, p.scale);
      t.zero_point[k] = static_cast<int32_t>(p.zero_point);
    }
  });
}

// Runs: blocks have a scale in common.
template <bool Runs, bool Halves> __global__ void __launch_bounds__(kThreads)
    dequantize_affine_tiles(AffineTensor t) {
  const LaneGroup group(t.blocks.block);
  __shared__ Tile tile;
  if (threadIdx.x == 0) tile.start(t.blocks, blockIdx.x, group);
  __syncthreads();
  for_each_block(t.blocks, tile, group, [&](const BlockSpan& block) {
    const int64_t k = scale_of<Runs>(t, block.index);
    const float scale = t.scale[k], zero_point = static_cast<float>(t.zero_point[k]);
    for (int iteration = 0; iteration < group.vectors; ++iteration) {
      const int j = (iteration * group.width() + group.lane()) * kVector;
      const Span at = span_of(block.start + j, block.n - j, t.aligned);
      const Codes codes = Halves ? load_halves(t.codes, at) : load_codes(t.codes, at);
      float x[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const uint32_t word = i < 4 ? codes.x : codes.y;
        const float q = Halves ? code_value<false>(word, i % 4) - 8.0f : code_value<true>(word, i % 4);
        x[i] = affine_decode(q, scale, zero_point);
      }
      store_floats(t.values, t.type, at, x);
    }
  });
}

// Codes whose pairs cross the ends of blocks: a thread for each byte.
static __global__ void __launch_bounds__(kThreads)
    pack_pairs(const int8_t* codes, int64_t numel, uint8_t* halves) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (2 * i < numel) halves[i] = affine_pair(codes[2 * i], 2 * i + 1 < numel ? codes[2 * i + 1] : 0);
}

namespace {

AffineTensor affine_tensor(const AffineLayout& layout, const Tensor& values, const Tensor& codes,
                           const Tensor& scale, const Tensor& zero_point, int64_t bits) {
  check_blocks(layout.blocks);
  void *x = values.data_ptr(), *q = codes.data_ptr();
  AffineTensor t{};
  t.values = x;
  t.codes = q;
  t.scale = static_cast<float*>(scale.data_ptr());
  t.zero_point = static_cast<int32_t*>(zero_point.data_ptr());
  t.blocks = codec_blocks(layout.blocks);
  t.blocks_per_scale = static_cast<int32_t>(layout.blocks_per_scale);
  t.bits = static_cast<int32_t>(bits);
  t.type = float_type(values);
  t.aligned = on_16_bytes(x) && on_16_bytes(q);
  return t;
}

// Calls use(first, second) with both as constants.
template <class Use> void with_constants(bool first, bool second, Use&& use) {
  const auto with_second = [&](auto constant) {
    second ? use(constant, std::true_type{}) : use(constant, std::false_type{});
  };
  first ? with_second(std::true_type{}) : with_second(std::false_type{});
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> quantize_affine_cuda(Tensor x, const std::optional<Tensor>& low,
                                                        const std::optional<Tensor>& high, int64_t bits,
                                                        std::optional<int64_t> block_size,
                                                        std::optional<int64_t> seed) {
  Ints shape;
  const AffineLayout layout = check_quantize_affine(x, low, high, bits, block_size, &shape);
  STD_TORCH_CHECK(!low || (same_device(*low, x) && same_device(*high, x)),
                  "low and high must be on the device of x");
  const DeviceScope scope(x);
  Tensor codes = empty_affine_codes(x, bits);
  Tensor scale = torch::stable::new_empty(x, shape, ScalarType::Float);
  Tensor zero_point = torch::stable::new_empty(x, shape, ScalarType::Int);
  const bool halves = bits == 4 && layout.has_whole_bytes();
  const Tensor target = bits == 8 || halves ? codes : empty_like(x, ScalarType::Char);
  AffineTensor t = affine_tensor(layout, x, target, scale, zero_point, bits);
  if (low) {
    t.low = static_cast<const float*>(low->data_ptr());
    t.high = static_cast<const float*>(high->data_ptr());
  }
  const Rounding rounding{!seed, static_cast<uint32_t>(seed.value_or(0))};
  with_constants(low.has_value(), halves, [&](auto given, auto in_halves) {
    launch_checked("quantize_affine", quantize_affine_tiles<given(), in_halves()>, tiles_of(t.blocks),
                   scope.stream, t, rounding);
  });
  if (bits == 4 && !halves)
    launch_checked("quantize_affine", pack_pairs, ceil_div(codes.numel(), kThreads), scope.stream,
                   static_cast<const int8_t*>(target.data_ptr()), x.numel(),
                   static_cast<uint8_t*>(codes.data_ptr()));
  return {codes, scale, zero_point};
}

Tensor dequantize_affine_cuda(Tensor codes, Tensor scale, Tensor zero_point, int64_t bits,
                              std::optional<int64_t> block_size, Ints shape, ScalarType dtype) {
  STD_TORCH_CHECK(same_device(scale, codes) && same_device(zero_point, codes),
                  "scale and zero_point must be on the device of codes");
  const DeviceScope scope(codes);
  Tensor values = empty_affine_values(codes, bits, shape, dtype);
  const AffineLayout layout = check_dequantize_affine(values, scale, zero_point, block_size);
  const AffineTensor t = affine_tensor(layout, values, codes, scale, zero_point, bits);
  with_constants(layout.blocks_per_scale > 1, bits == 4, [&](auto runs, auto halves) {
    launch_checked("dequantize_affine", dequantize_affine_tiles<runs(), halves()>, tiles_of(t.blocks),
                   scope.stream, t);
  });
  return values;
}

}  // namespace memkern
