// Tensors of LibTorch's stable ABI, as all ops use them: checks and their errors, dtypes, memory layouts, new
// tensors.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/step_tensor.h"
#include "core/tables.h"

#ifndef STABLE_TORCH_ERROR_CODE_CHECK  // torch before 2.12 has it under the other name
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif

// Throws std::runtime_error, a RuntimeError in Python, unless the condition holds. Like STD_TORCH_CHECK
// without the C++ file and line, which say nothing to users.
#define MEMKERN_CHECK(condition, ...) \
  if (!(condition)) throw std::runtime_error(::memkern::message_of(__VA_ARGS__))

namespace memkern {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using Ints = std::vector<int64_t>;
using Doubles = std::vector<double>;

template <class... Args> std::string message_of(const Args&... args) {
  std::ostringstream text;
  ((text << args), ...);
  return text.str();
}

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
  MEMKERN_CHECK(block_size % 8 == 0 && block_size >= kMinBlockSize && block_size <= kMaxBlockSize,
                "block_size must be a multiple of 8 from ", kMinBlockSize, " to ", kMaxBlockSize, ", got ",
                block_size);
}

inline void check_codec(int64_t codec) {
  MEMKERN_CHECK(codec == kPower || codec == kDynamic, "codec must be ", kPower, " (power) or ", kDynamic,
                " (dynamic), got ", codec);
}

// The address of a tensor's elements. Throws where its storage has been resized to nothing, as FSDP does with
// weights to save memory. name: the tensor's name for the error, in parts.
template <class... Name> void* address_of(const Tensor& t, const Name&... name) {
  void* const address = t.data_ptr();
  MEMKERN_CHECK(address != nullptr || t.numel() == 0, message_of(name...),
                " has no memory: its storage has been freed");
  return address;
}

// A tensor's sizes and strides, in elements: how it lies in memory.
struct Shape {
  int64_t dims;
  const int64_t *sizes, *strides;
  Shape(const Tensor& t) : dims(t.dim()), sizes(t.sizes().data()), strides(t.strides().data()) {}
  Shape(const Ints& sizes, const Ints& strides)
      : dims(static_cast<int64_t>(sizes.size())), sizes(sizes.data()), strides(strides.data()) {}
};

inline BlockLayout layout_of(const Shape& t, int64_t block_size, const char* name) {
  BlockLayout layout;
  MEMKERN_CHECK(block_layout(t.sizes, t.strides, t.dims, block_size, &layout), name,
                " must be dense (its elements must fill one run of memory); use contiguous() or clone()");
  return layout;
}

// The layout of x as one segment, cut every `block` elements.
inline BlockLayout flat_layout(const Tensor& x, const char* name, int64_t block) {
  MEMKERN_CHECK(is_float_type(x.scalar_type()), name, " must be float32, bfloat16 or float16");
  return flat_layout(layout_of(x, kMinBlockSize, name).numel, block);
}

// Whether a and b have equal sizes and their elements the same order in memory (a dimension of size 1 may
// have any stride).
inline bool same_layout(const Shape& a, const Shape& b) {
  if (a.dims != b.dims) return false;
  bool same_strides = true, empty = false;
  for (int64_t d = 0; d < a.dims; ++d) {
    if (a.sizes[d] != b.sizes[d]) return false;
    if (a.sizes[d] == 0) empty = true;
    if (a.sizes[d] != 1 && a.strides[d] != b.strides[d]) same_strides = false;
  }
  return same_strides || empty;
}

// The device of a step's tensors. On the CPU nothing needs to be compared: the dispatcher calls a CPU kernel
// with CPU tensors only.
struct DeviceOf {
  bool on_cpu = true;
  int32_t device = 0;
  explicit DeviceOf(const Tensors& tensors) {
    if (tensors.empty()) return;
    on_cpu = tensors[0].is_cpu();
    device = tensors[0].get_device();
  }
  bool holds(const Tensor& t) const { return on_cpu || (t.get_device() == device && !t.is_cpu()); }
};

// Whether a tensor's elements fill one run of memory.
inline bool is_dense(const Shape& x) {
  BlockLayout layout;
  return block_layout(x.sizes, x.strides, x.dims, kMinBlockSize, &layout);
}

// A tensor as it is where it is dense, else a dense copy.
inline Tensor dense(const Tensor& x) { return is_dense(x) ? x : torch::stable::contiguous(x); }

// An uninitialized tensor on the device of x. Not from torch's dispatcher: its boxed arguments would take a
// tenth of an op's time on the host for two results.
inline Tensor new_tensor(const Tensor& x, const Shape& shape, ScalarType dtype) {
  int32_t device_type, device_index;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(x.get(), &device_index));
  const auto dtype_number = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(shape.dims, shape.sizes, shape.strides, dtype_number,
                                                         device_type, device_index, &handle));
  return Tensor(handle);
}
inline Tensor new_tensor(const Tensor& x, const std::vector<int64_t>& sizes, ScalarType dtype) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<int64_t>(sizes[d], 1);
  return new_tensor(x, Shape(sizes, strides), dtype);
}

// An uninitialized tensor with the sizes and strides of x, which must be dense: other strides lead past numel
// elements.
inline Tensor empty_like(const Tensor& x, ScalarType dtype) {
  MEMKERN_CHECK(is_dense(x), "empty_like takes a dense tensor");
  return new_tensor(x, Shape(x), dtype);
}

inline std::vector<int64_t> scale_shape(const BlockLayout& l) {
  if (l.long_rows) return {l.numel / l.segment, l.blocks_per_segment};
  return {l.blocks};
}

inline void check_scale(const Tensor& scale, const BlockLayout& layout, const char* name) {
  const Shape shape(scale);
  const int64_t *sizes = shape.sizes, dims = shape.dims;
  const bool fits = layout.long_rows ? dims == 2 && sizes[0] == layout.numel / layout.segment &&
                                           sizes[1] == layout.blocks_per_segment
                                     : dims == 1 && sizes[0] == layout.blocks;
  MEMKERN_CHECK(fits && scale.scalar_type() == ScalarType::Float && scale.is_contiguous(), "the scale of ",
                name, " must be contiguous float32 with ", layout.blocks, " entries, got ", scale.numel());
}

}  // namespace memkern
