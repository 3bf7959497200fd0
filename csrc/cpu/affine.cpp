// memkern::quantize_affine and memkern::dequantize_affine on the CPU.
#include "common/affine_args.h"

#include "common/ops.h"
#include "cpu/parallel.h"

namespace memkern {
namespace {

AffineJob affine_job(const AffineLayout& layout, const Tensor& values, const Tensor& codes,
                     const Tensor& scale, const Tensor& zero_point, int64_t bits) {
  AffineJob job{};
  job.values = values.data_ptr();
  job.codes = codes.data_ptr();
  job.scale = static_cast<float*>(scale.data_ptr());
  job.zero_point = static_cast<int32_t*>(zero_point.data_ptr());
  job.blocks_per_scale = layout.blocks_per_scale;
  job.bits = static_cast<int>(bits);
  job.layout = layout.blocks;
  return job;
}

// Of codes whose pairs cross the ends of blocks, once all of them are there.
void pack_pairs(const int8_t* codes, int64_t numel, uint8_t* halves) {
  torch::stable::parallel_for(0, (numel + 1) / 2, kGrainElements, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      halves[i] = affine_pair(codes[2 * i], 2 * i + 1 < numel ? codes[2 * i + 1] : 0);
  });
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> quantize_affine_cpu(Tensor x, const std::optional<Tensor>& low,
                                                       const std::optional<Tensor>& high, int64_t bits,
                                                       std::optional<int64_t> block_size,
                                                       std::optional<int64_t> seed) {
  Ints shape;
  const AffineLayout layout = check_quantize_affine(x, low, high, bits, block_size, &shape);
  Tensor codes = empty_affine_codes(x, bits);
  Tensor scale = torch::stable::new_empty(x, shape, ScalarType::Float);
  Tensor zero_point = torch::stable::new_empty(x, shape, ScalarType::Int);
  const bool packed = bits == 4 && layout.has_whole_bytes();
  const Tensor target = bits == 8 || packed ? codes : empty_like(x, ScalarType::Char);
  AffineJob job = affine_job(layout, x, target, scale, zero_point, bits);
  job.packed = packed;
  if (low) {
    job.low = static_cast<const float*>(low->data_ptr());
    job.high = static_cast<const float*>(high->data_ptr());
  }
  job.run = MEMKERN_PICK(affine_kernel, float_type(x), true, seed.has_value());
  job.seed = static_cast<uint32_t>(seed.value_or(0));
  run_jobs(std::vector<AffineJob>{job});
  if (bits == 4 && !packed)
    pack_pairs(static_cast<const int8_t*>(target.data_ptr()), x.numel(),
               static_cast<uint8_t*>(codes.data_ptr()));
  return {codes, scale, zero_point};
}

Tensor dequantize_affine_cpu(Tensor codes, Tensor scale, Tensor zero_point, int64_t bits,
                             std::optional<int64_t> block_size, Ints shape, ScalarType dtype) {
  Tensor values = empty_affine_values(codes, bits, shape, dtype);
  const AffineLayout layout = check_dequantize_affine(values, scale, zero_point, block_size);
  AffineJob job = affine_job(layout, values, codes, scale, zero_point, bits);
  job.packed = bits == 4;
  job.run = MEMKERN_PICK(affine_kernel, float_type(values), false, false);
  run_jobs(std::vector<AffineJob>{job});
  return values;
}

}  // namespace memkern
