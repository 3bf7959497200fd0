// The arguments of quantize_affine and dequantize_affine, checked: the same for every device.
#pragma once
#include <algorithm>

#include "common/tensors.h"
#include "core/affine.h"

namespace memkern {

inline void check_affine_bits(int64_t bits) {
  STD_TORCH_CHECK(bits == 8 || bits == 4, "bits must be 8 or 4, got ", bits);
}

// A tensor's blocks, and how many of them have a scale in common: one, or those of a run.
struct AffineLayout {
  BlockLayout blocks;
  int64_t blocks_per_scale = 1;

  // Whether every byte with two codes of 4 bits is within a block.
  bool has_whole_bytes() const {
    const bool one_segment = blocks.segment == blocks.numel;
    return (blocks.block % 2 == 0 || blocks.blocks_per_segment == 1) &&
           (blocks.segment % 2 == 0 || one_segment);
  }
};

// Blocks of block_size, or without one as many equal runs of memory as `per_scale` has entries.
inline AffineLayout affine_layout(const Shape& x, const char* name, std::optional<int64_t> block_size,
                                  const Tensor* per_scale) {
  if (block_size) {
    check_block_size(*block_size);
    return {layout_of(x, *block_size, name)};
  }
  STD_TORCH_CHECK(per_scale != nullptr, "block_size must be given where low and high are not");
  BlockLayout l = layout_of(x, kMinBlockSize, name);
  const int64_t runs = per_scale->numel();
  STD_TORCH_CHECK(runs > 0 && l.numel > 0 && l.numel % runs == 0, name,
                  " must divide into as many runs as there are scales, ", runs, ", got ", l.numel,
                  " elements");
  l.rows = runs;
  l.segment = l.numel / runs;
  l.block = l.segment < kAffineRun ? l.segment : kAffineRun;
  l.blocks_per_segment = ceil_div(l.segment, l.block);
  l.blocks = runs * l.blocks_per_segment;
  return {l, l.blocks_per_segment};
}

// The shape of what there is one of per scale; per_scale: one such tensor.
inline Ints affine_scale_shape(const AffineLayout& layout, std::optional<int64_t> block_size,
                               const Tensor* per_scale) {
  if (block_size) return scale_shape(layout.blocks);
  return {per_scale->sizes().begin(), per_scale->sizes().end()};
}

inline void check_per_scale(const Tensor& t, const char* name, ScalarType dtype, const Ints& shape) {
  const bool fits = t.dim() == static_cast<int64_t>(shape.size()) &&
                    std::equal(shape.begin(), shape.end(), t.sizes().begin());
  STD_TORCH_CHECK(fits && t.scalar_type() == dtype && t.is_contiguous(), name, " must be contiguous ",
                  dtype == ScalarType::Int ? "int32" : "float32",
                  " with an entry per scale, in the shape of scale; got ", t.numel(), " entries");
}

// Fills in the shape of the scales.
inline AffineLayout check_quantize_affine(const Tensor& x, const std::optional<Tensor>& low,
                                          const std::optional<Tensor>& high, int64_t bits,
                                          std::optional<int64_t> block_size, Ints* shape) {
  check_affine_bits(bits);
  STD_TORCH_CHECK(is_float_type(x.scalar_type()), "x must be float32, bfloat16 or float16");
  STD_TORCH_CHECK(bits == 8 || x.is_contiguous(), "x must be contiguous for bits=4");
  STD_TORCH_CHECK(low.has_value() == high.has_value(), "low and high must be given together");
  const AffineLayout layout = affine_layout(x, "x", block_size, low ? &*low : nullptr);
  *shape = affine_scale_shape(layout, block_size, low ? &*low : nullptr);
  if (low) {
    check_per_scale(*low, "low", ScalarType::Float, *shape);
    check_per_scale(*high, "high", ScalarType::Float, *shape);
  }
  return layout;
}

// Of the values, as empty_affine_values makes them.
inline AffineLayout check_dequantize_affine(const Tensor& values, const Tensor& scale,
                                            const Tensor& zero_point, std::optional<int64_t> block_size) {
  const AffineLayout layout = affine_layout(values, "codes", block_size, &scale);
  const Ints shape = affine_scale_shape(layout, block_size, &scale);
  check_per_scale(scale, "scale", ScalarType::Float, shape);
  check_per_scale(zero_point, "zero_point", ScalarType::Int, shape);
  return layout;
}

// Codes of 8 bits are laid out as x is; those of 4 are two in a byte, and x is contiguous.
inline Tensor empty_affine_codes(const Tensor& x, int64_t bits) {
  return bits == 8 ? empty_like(x, ScalarType::Char)
                   : torch::stable::new_empty(x, {(x.numel() + 1) / 2}, ScalarType::Byte);
}

// An empty tensor for the values of the codes.
inline Tensor empty_affine_values(const Tensor& codes, int64_t bits, const Ints& shape, ScalarType dtype) {
  check_affine_bits(bits);
  STD_TORCH_CHECK(is_float_type(dtype), "dtype must be float32, bfloat16 or float16");
  STD_TORCH_CHECK(codes.scalar_type() == (bits == 8 ? ScalarType::Char : ScalarType::Byte), "codes must be ",
                  bits == 8 ? "int8 for bits=8" : "uint8 for bits=4");
  int64_t numel = 1;
  for (const int64_t size : shape) {
    STD_TORCH_CHECK(size >= 0, "shape must not be negative, got ", size);
    numel *= size;
  }
  if (bits == 4) {
    STD_TORCH_CHECK(codes.dim() == 1 && codes.is_contiguous() && codes.numel() == (numel + 1) / 2,
                    "codes must be contiguous with ", (numel + 1) / 2, " bytes, got ", codes.numel());
    return torch::stable::new_empty(codes, shape, dtype);
  }
  STD_TORCH_CHECK(codes.dim() == static_cast<int64_t>(shape.size()) && codes.numel() == numel,
                  "shape must be that of codes");
  layout_of(codes, kMinBlockSize, "codes");
  return empty_like(codes, dtype);
}

}  // namespace memkern
