// memkern::quantize_blockwise and memkern::dequantize_blockwise on CUDA devices.
#include "blockwise_kernel.cuh"
#include "common/ops.h"
#include "host.h"

namespace memkern {
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
          blocks_of(layout),
          float_type(values),
          on_16_bytes(x) && on_16_bytes(q)};
}

}  // namespace

std::tuple<Tensor, Tensor> quantize_blockwise_cuda(Tensor x, int64_t codec, bool is_signed,
                                                   int64_t block_size, std::optional<int64_t> step) {
  check_codec(codec);
  check_block_size(block_size);
  STD_TORCH_CHECK(is_float_type(x.scalar_type()), "x must be float32, bfloat16 or float16");
  const BlockLayout layout = layout_of(x, block_size, "x");
  const OnDevice on(x);
  Tensor codes = empty_like(x, is_signed ? ScalarType::Char : ScalarType::Byte);
  Tensor scale = torch::stable::new_empty(x, scale_shape(layout), ScalarType::Float);
  const CodecTensor t = codec_tensor(x, codes, scale, layout);
  const Rounding rounding{!step, static_cast<uint32_t>(step.value_or(0))};
  with_codec(codec, is_signed, [&](auto kind, auto sign) {
    launch_checked("quantize_blockwise", quantize_tiles<kind(), sign()>, tiles_of(t.blocks), on.stream, t,
                   rounding);
  });
  return {codes, scale};
}

Tensor dequantize_blockwise_cuda(Tensor codes, Tensor scale, int64_t codec, int64_t block_size,
                                 ScalarType dtype) {
  check_codec(codec);
  check_block_size(block_size);
  const bool is_signed = codes.scalar_type() == ScalarType::Char;
  STD_TORCH_CHECK(is_signed || codes.scalar_type() == ScalarType::Byte,
                  "codes must be int8 (signed) or uint8");
  STD_TORCH_CHECK(is_float_type(dtype), "dtype must be float32, bfloat16 or float16");
  const BlockLayout layout = layout_of(codes, block_size, "codes");
  check_scale(scale, layout, "codes");
  STD_TORCH_CHECK(same_device(scale, codes), "scale must be on the device of codes");
  const OnDevice on(codes);
  Tensor values = empty_like(codes, dtype);
  const CodecTensor t = codec_tensor(values, codes, scale, layout);
  with_codec(codec, is_signed, [&](auto kind, auto sign) {
    launch_checked("dequantize_blockwise", dequantize_tiles<kind(), sign()>, tiles_of(t.blocks), on.stream,
                   t);
  });
  return values;
}

}  // namespace memkern
