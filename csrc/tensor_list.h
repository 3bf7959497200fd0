// A list of tensors as an op gets it. A step of 148 tensors hands over 1,036 with their states; as
// torch::stable::Tensors they took 216 us, a block of memory and Python's lock for each, and so they take
// 143.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/shim_utils.h>

#include <array>
#include <vector>

#include "python_lock.h"
#include "recall.h"

#ifndef STABLE_TORCH_ERROR_CODE_CHECK  // its name before torch 2.12
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif

namespace memkern {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// torch's number for a dtype -> the dtype. torch's own conversion asks it for one number after the other.
inline ScalarType scalar_type_of(int32_t number) {
  namespace stable = torch::stable::detail;
  static const auto known = [] {
    std::array<ScalarType, 64> table;
    table.fill(ScalarType::Undefined);
    for (ScalarType t : {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half, ScalarType::Double,
                         ScalarType::Char, ScalarType::Byte})
      table.at(stable::to<int32_t>(stable::from(t))) = t;
    return table;
  }();
  const bool is_known = number >= 0 && number < 64 && known[number] != ScalarType::Undefined;
  return is_known ? known[number] : stable::to<ScalarType>(stable::from(number));
}

// A tensor that somebody else keeps alive.
class TensorRef {
 public:
  explicit TensorRef(AtenTensorHandle handle) : handle_(handle) {}
  TensorRef(const Tensor& t) : handle_(t.get()) {}

  AtenTensorHandle get() const { return handle_; }
  void* data_ptr() const { return ask<void*>(aoti_torch_get_data_ptr); }
  int64_t dim() const { return ask<int64_t>(aoti_torch_get_dim); }
  int64_t numel() const { return ask<int64_t>(aoti_torch_get_numel); }
  const int64_t* sizes() const { return ask<int64_t*>(aoti_torch_get_sizes); }
  const int64_t* strides() const { return ask<int64_t*>(aoti_torch_get_strides); }
  bool is_contiguous() const { return ask<bool>(aoti_torch_is_contiguous); }
  bool is_cpu() const { return ask<int32_t>(aoti_torch_get_device_type) == aoti_torch_device_type_cpu(); }
  int32_t get_device() const { return ask<int32_t>(aoti_torch_get_device_index); }
  ScalarType scalar_type() const { return scalar_type_of(ask<int32_t>(aoti_torch_get_dtype)); }

  // One that keeps it alive.
  Tensor keep() const { return Tensor(ask<AtenTensorHandle>(aoti_torch_new_tensor_handle)); }

  // Asks the cache for these bytes of the tensor's own record, to which the handle leads in two steps (in
  // torch so far; a hint may be wrong). With cold caches a step of 148 tensors ends in 80 us instead of 140.
  void prefetch(int from, int to) const {
    for (int i = from; i < to; i += 64) __builtin_prefetch(record() + i);
  }
  void note() const { Recall::note(handle_, record()); }

 private:
  AtenTensorHandle handle_;

  const char* record() const { return *reinterpret_cast<const char* const*>(handle_); }

  template <class T> T ask(AOTITorchError (*question)(AtenTensorHandle, T*)) const {
    T answer;
    STABLE_TORCH_ERROR_CODE_CHECK(question(handle_, &answer));
    return answer;
  }
};

// Owns its tensors.
class Tensors {
 public:
  // Ends the list.
  explicit Tensors(StableListHandle list) {
    size_t size;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_list_size(list, &size));
    refs_.reserve(size);
    for (size_t i = 0; i < size; ++i) {
      StableIValue item;
      STABLE_TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, i, &item));
      refs_.emplace_back(torch::stable::detail::to<AtenTensorHandle>(item));
      refs_.back().prefetch(64, 192);
      refs_.back().note();
    }
    STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_list(list));
  }
  ~Tensors() {
    if (empty()) return;
    const PythonLock lock;
    for (const TensorRef& t : refs_) t.prefetch(0, 64);
    for (const TensorRef& t : refs_) aoti_torch_delete_tensor_object(t.get());
  }
  Tensors(Tensors&&) = default;

  size_t size() const { return refs_.size(); }
  bool empty() const { return refs_.empty(); }
  const TensorRef* data() const { return refs_.data(); }
  const TensorRef* begin() const { return refs_.data(); }
  const TensorRef* end() const { return refs_.data() + refs_.size(); }
  TensorRef operator[](size_t i) const { return refs_[i]; }

 private:
  std::vector<TensorRef> refs_;
};

}  // namespace memkern

HIDDEN_NAMESPACE_BEGIN(torch, stable, detail)
// TORCH_BOX makes an op's arguments with this.
template <> struct ToImpl<memkern::Tensors> {
  static memkern::Tensors call(StableIValue list, uint64_t, bool) {
    return memkern::Tensors(to<StableListHandle>(list));
  }
};
HIDDEN_NAMESPACE_END(torch, stable, detail)
