// What the resolver of saved tensors uses of torch's C++ interface, which is another one in every version of
// torch.
#pragma once

#include <ATen/ATen.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <structmember.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <unordered_map>
#include <vector>

namespace memkern::saved {

namespace py = pybind11;
namespace ag = torch::autograd;
namespace gen = torch::autograd::generated;
using ag::Node;
using ag::SavedVariable;
using at::ScalarType;
using at::Tensor;
using NodePtr = c10::intrusive_ptr<Node>;

// ---- Python: memkern/saved/native.py has a function for everything rare

inline PyObject* g_native = nullptr;  // the module, never freed

template <class... Args> py::object call(const char* name, Args&&... args) {
  return py::handle(g_native).attr(name)(std::forward<Args>(args)...);
}

inline py::object node_object(Node* node) {
  return py::reinterpret_steal<py::object>(ag::functionToPyObject(node->getptr()));
}

inline Tensor to_tensor(const py::object& object) { return THPVariable_Unpack(object.ptr()); }

// ---- tensors

inline constexpr int kDtypes = static_cast<int>(ScalarType::NumOptions);

// Whether every value of dtype b is one of a: saved_value.finer, asked once for each pair.
inline bool finer(ScalarType a, ScalarType b) {
  static std::array<int8_t, kDtypes * kDtypes> known{};
  if (a == b) return true;
  auto& found = known[static_cast<int>(a) * kDtypes + static_cast<int>(b)];
  if (!found) found = call("finer", a, b).cast<bool>() ? 1 : 2;
  return found == 1;
}

inline bool is_float8(ScalarType dtype) { return at::isFloatingType(dtype) && at::elementSize(dtype) == 1; }

// Those of quant/layout.py's FLOATS.
inline bool has_codes(ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

inline bool is_fake(const Tensor& x) {
  return x.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
}

inline bool is_on_cpu(const Tensor& x) { return x.is_cpu() && !is_fake(x); }

inline bool is_dense(const Tensor& x) {
  return x.is_contiguous() || x.is_non_overlapping_and_dense() || x.numel() == 0;
}

inline uint32_t version_of(const Tensor& x) { return static_cast<uint32_t>(x._version()); }

// storage.is_plain, of a tensor that Python may have seen.
inline bool is_plain(PyObject* object, const Tensor& x) {
  static PyObject* parameter = call("parameter_class").release().ptr();
  static PyObject* fake = call("fake_class").release().ptr();
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  return (type == THPVariableClass || type == parameter || type == fake) && x.layout() == at::kStrided;
}

inline bool is_plain(const Tensor& x) {
  PyObject* object = x.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  return object ? is_plain(object, x) : x.layout() == at::kStrided;
}

// storage.is_present: whether a tensor has memory; FSDP frees that of weights.
inline bool is_present(const Tensor& x) {
  if (!x.has_storage() || x.numel() == 0 || x.is_meta() || is_fake(x) || !is_plain(x)) return true;
  return x.storage().data() != nullptr;
}

// storage.check_present raises where the storage is too small.
inline void check_present(const Tensor& x) {
  if (!x.has_storage() || is_fake(x) || !is_plain(x)) return;
  size_t needed = (x.numel() + x.storage_offset()) * x.itemsize();
  if (x.storage().nbytes() < needed) call("check_present", x);
}

inline void check_version(const char* what, uint32_t now, uint32_t then, const Tensor& x) {
  if (now != then) call("raise_changed", what, now, then, x);
}

// storage.is_managed: only a parameter, or a view of one, can be.
inline bool is_managed(const Tensor& x) {
  const Tensor base = x.is_view() ? Tensor(x._base()) : x;
  PyObject* object = base.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  if (!object || reinterpret_cast<PyObject*>(Py_TYPE(object)) == THPVariableClass) return false;
  return call("is_managed", x).cast<bool>();
}

}  // namespace memkern::saved
