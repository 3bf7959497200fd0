// memkern::quantize_blockwise and dequantize_blockwise on the CPU.
#include "common/ops.h"
#include "cpu/step.h"

namespace memkern {

std::tuple<Tensor, Tensor> quantize_blockwise_cpu(Tensor x, int64_t codec, bool is_signed, int64_t block_size,
                                                  std::optional<int64_t> step, bool mark_nonfinite) {
  check_codec(codec);
  check_block_size(block_size);
  MEMKERN_CHECK(is_float_type(x.scalar_type()), "x must be float32, bfloat16 or float16");
  CodecJob job{};
  job.layout = layout_of(x, block_size, "x");
  Tensor codes = empty_like(x, is_signed ? ScalarType::Char : ScalarType::Byte);
  Tensor scale = new_tensor(x, scale_shape(job.layout), ScalarType::Float);
  Dithers dithers;
  if (step) job.dither = dithers.at(job.layout.block, static_cast<uint64_t>(*step));
  job.mark_nonfinite = mark_nonfinite;
  job.values = address_of(x, "x");
  job.codes = codes.data_ptr();
  job.scale = static_cast<float*>(scale.data_ptr());
  job.run = cpu_kernels().codec(code_kind(codec), float_type(x), is_signed, true);
  run_jobs(std::vector<CodecJob>{job});
  return {codes, scale};
}

Tensor dequantize_blockwise_cpu(Tensor codes, Tensor scale, int64_t codec, int64_t block_size,
                                ScalarType dtype) {
  check_codec(codec);
  check_block_size(block_size);
  const bool is_signed = codes.scalar_type() == ScalarType::Char;
  MEMKERN_CHECK(is_signed || codes.scalar_type() == ScalarType::Byte, "codes must be int8 (signed) or uint8");
  MEMKERN_CHECK(is_float_type(dtype), "dtype must be float32, bfloat16 or float16");
  CodecJob job{};
  job.layout = layout_of(codes, block_size, "codes");
  check_scale(scale, job.layout, "codes");
  Tensor values = empty_like(codes, dtype);
  job.values = values.data_ptr();
  job.codes = address_of(codes, "codes");
  job.scale = static_cast<float*>(address_of(scale, "scale"));
  job.run = cpu_kernels().codec(code_kind(codec), float_type(values), is_signed, false);
  run_jobs(std::vector<CodecJob>{job});
  return values;
}

}  // namespace memkern
