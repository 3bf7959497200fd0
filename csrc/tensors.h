// Tensors of LibTorch's stable ABI as the kernels want them: checked, with their block layout.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <string>
#include <vector>

#include "core/job.h"
#include "core/tables.h"

namespace memkern {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using Ints = std::vector<int64_t>;
using Doubles = std::vector<double>;

inline bool is_float_type(ScalarType t) {
  return t == ScalarType::Float || t == ScalarType::BFloat16 || t == ScalarType::Half;
}

inline FloatType float_type(ScalarType t) {
  return t == ScalarType::BFloat16 ? FloatType::kBf16
         : t == ScalarType::Half   ? FloatType::kFp16
                                   : FloatType::kFp32;
}
inline FloatType float_type(const Tensor& t) { return float_type(t.scalar_type()); }

inline StateKind code_kind(int64_t codec) {
  return codec == kPower ? StateKind::kPower : StateKind::kDynamic;
}

inline std::string name_of(const char* name, size_t i) {
  return std::string(name) + "[" + std::to_string(i) + "]";
}

inline void check_block_size(int64_t block_size) {
  STD_TORCH_CHECK(block_size % 8 == 0 && block_size >= kMinBlockSize && block_size <= kMaxBlockSize,
                  "block_size must be a multiple of 8 from ", kMinBlockSize, " to ", kMaxBlockSize, ", got ",
                  block_size);
}

inline void check_codec(int64_t codec) {
  STD_TORCH_CHECK(codec == kPower || codec == kDynamic, "codec must be ", kPower, " (power) or ", kDynamic,
                  " (dynamic), got ", codec);
}

inline BlockLayout layout_of(const Tensor& t, int64_t block_size, const char* name) {
  BlockLayout layout;
  STD_TORCH_CHECK(block_layout(t.sizes().data(), t.strides().data(), t.dim(), block_size, &layout), name,
                  " must be dense (its elements must fill one run of memory); use contiguous() or clone()");
  return layout;
}

// The elements of a lie in memory as those of b do (a dimension of size 1 lies anywhere).
inline bool same_layout(const Tensor& a, const Tensor& b) {
  const auto as = a.sizes(), bs = b.sizes(), at = a.strides(), bt = b.strides();
  if (as.size() != bs.size()) return false;
  bool same = true, empty = false;
  for (size_t d = 0; d < as.size(); ++d) {
    if (as[d] != bs[d]) return false;
    if (as[d] == 0) empty = true;
    if (as[d] != 1 && at[d] != bt[d]) same = false;
  }
  return same || empty;
}

// A CPU kernel gets no other tensors: the dispatcher has seen to that.
inline bool same_device(const Tensor& a, const Tensor& b, bool on_cpu) {
  return on_cpu || (!a.is_cpu() && a.get_device() == b.get_device());
}

// An empty tensor laid out as x is.
inline Tensor empty_like(const Tensor& x, ScalarType dtype) {
  Tensor y = torch::stable::new_empty(x, {x.numel()}, dtype);
  AtenTensorHandle view;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(y.get(), x.dim(), x.sizes().data(), x.strides().data(), 0, &view));
  return Tensor(view);
}

inline std::vector<int64_t> scale_shape(const BlockLayout& l) {
  if (l.long_rows) return {l.numel / l.segment, l.blocks_per_segment};
  return {l.blocks};
}

inline void check_scale(const Tensor& scale, const BlockLayout& layout, const char* name) {
  const auto got = scale.sizes();
  const bool fits = layout.long_rows ? got.size() == 2 && got[0] == layout.numel / layout.segment &&
                                           got[1] == layout.blocks_per_segment
                                     : got.size() == 1 && got[0] == layout.blocks;
  STD_TORCH_CHECK(fits && scale.scalar_type() == ScalarType::Float && scale.is_contiguous(), "the scale of ",
                  name, " must be contiguous float32 with ", layout.blocks, " entries, got ", scale.numel());
}

}  // namespace memkern
