// memkern::quantize_blockwise, quantize_with_norms and dequantize_blockwise on the CPU.
#include <cmath>

#include "common/ops.h"
#include "cpu/step.h"

namespace memkern {

namespace {

// squares: if not null, gets the sum of x^2 of each block.
std::tuple<Tensor, Tensor> quantize(const Tensor& x, int64_t codec, bool is_signed, int64_t block_size,
                                    std::optional<int64_t> step, bool mark_nonfinite,
                                    std::vector<double>* squares) {
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
  if (squares) {
    squares->resize(job.layout.blocks);
    job.squares = squares->data();
  }
  job.run = cpu_kernels().codec(code_kind(codec), float_type(x), is_signed, true);
  run_jobs(std::vector<CodecJob>{job});
  return {codes, scale};
}

}  // namespace

std::tuple<Tensor, Tensor> quantize_blockwise_cpu(Tensor x, int64_t codec, bool is_signed, int64_t block_size,
                                                  std::optional<int64_t> step, bool mark_nonfinite) {
  return quantize(x, codec, is_signed, block_size, step, mark_nonfinite, nullptr);
}

std::tuple<Tensor, Tensor, Tensor> quantize_with_norms_cpu(Tensor x, bool is_signed, int64_t block_size) {
  std::vector<double> squares;
  const auto [codes, scale] = quantize(x, kPower, is_signed, block_size, std::nullopt, false, &squares);
  double of_values = 0.0, of_scales = 0.0;
  const float* scales = static_cast<const float*>(scale.data_ptr());
  for (size_t block = 0; block < squares.size(); ++block) {
    of_values += squares[block];
    of_scales += static_cast<double>(scales[block]) * scales[block];
  }
  Tensor norms = new_tensor(x, {2}, ScalarType::Double);
  double* found = static_cast<double*>(norms.data_ptr());
  found[0] = std::sqrt(of_values);
  found[1] = std::sqrt(of_scales);
  return {codes, scale, norms};
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
