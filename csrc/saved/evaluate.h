// evaluation.py and the unpack hook: computes the tensors that autograd asks for in a backward pass.
#pragma once

#include "store.h"

namespace memkern::saved {

// The tensors of one backward pass that will be asked for again.
class Pass final : public Of {
 public:
  Tensor operator()(Value& value) override {
    value.uses -= 1;
    auto known = find(value);
    Tensor x =
        known != cached_.end() && version_of(known->x) == known->version ? known->x : value.tensor(this);
    check_present(x);
    known = find(value);  // what it is made of may have been cached meanwhile
    if (value.uses <= 0) {
      if (known != cached_.end()) cached_.erase(known);
    } else if (value.is_work() && (!value.is_lossy() || is_worth(x))) {
      if (known != cached_.end()) {
        known->x = x, known->version = version_of(x);
      } else {
        cached_.push_back({share(&value), x, version_of(x)});
      }
      if (cached_.size() > kMostCached) cached_.erase(cached_.begin());
    }
    return x;
  }
  void end() { cached_.clear(); }

 private:
  static constexpr size_t kMostCached = 8;
  struct Cached {
    ValuePtr value;
    Tensor x;
    uint32_t version;
  };
  std::vector<Cached> cached_;

  std::vector<Cached>::iterator find(const Value& value) {
    return std::find_if(cached_.begin(), cached_.end(),
                        [&](const Cached& each) { return each.value.get() == &value; });
  }
  // Whether codes save so much now that caching x keeps the peak below torch's.
  bool is_worth(const Tensor& x) const {
    auto bytes = static_cast<int64_t>(2 * x.nbytes());
    for (const auto& each : cached_) bytes += static_cast<int64_t>(each.x.nbytes());
    return g_spared >= bytes || g_spared + call("spared").cast<int64_t>() >= bytes;
  }
};

using PassPtr = std::shared_ptr<Pass>;

// Freed by the engine, also after an error, which does not hold the interpreter's lock.
inline PassPtr new_pass() {
  return PassPtr(new Pass, [](Pass* pass) {
    py::gil_scoped_acquire gil;
    delete pass;
  });
}

// Of the backward pass that runs in this thread; outside of one, of this call.
inline PassPtr current_pass() {
  static auto& passes = *new ska::flat_hash_map<int, std::weak_ptr<Pass>>;
  int task = ag::get_current_graph_task_id();
  if (task == -1) return new_pass();
  if (auto found = passes.find(task); found != passes.end()) {
    if (PassPtr pass = found->second.lock()) return pass;
  }
  for (auto it = passes.begin(); it != passes.end();)
    it = it->second.expired() ? passes.erase(it) : std::next(it);
  PassPtr pass = new_pass();
  passes[task] = pass;
  ag::Engine::get_default_engine().queue_callback([pass] {
    py::gil_scoped_acquire gil;
    pass->end();
  });
  return pass;
}

// The tensor of a value that autograd asks for.
inline Tensor evaluate(Value& value) {
  if (value.is_at_hand()) {  // nothing to compute, and nothing to cache
    value.uses -= 1;
    Tensor x = value.tensor(nullptr);
    check_present(x);
    return x;
  }
  PassPtr pass = current_pass();
  try {
    return (*pass)(value);
  } catch (...) {
    pass->end();
    throw;
  }
}

// packed.is_last_use: whether one of torch's own nodes asks in its backward pass, and the graph is freed
// then.
inline bool is_last_use() {
  static auto* engine = reinterpret_cast<PyCodeObject*>(call("engine_code").release().ptr());
  if (PyFrameObject* frame = PyEval_GetFrame()) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    Py_DECREF(code);
    if (code != engine) return false;
  }
  NodePtr node = ag::get_current_node();
  if (!node) return false;
  PyObject* object = object_of(node.get());
  return (!object || Py_REFCNT(object) <= 1) && operation(node.get())->has_own_type &&
         ag::get_current_graph_task_id() != -1 && !ag::get_current_graph_task_keep_graph();
}

inline Tensor unpack(Packed& packed) {
  bool is_last = is_last_use();
  at::NoGradGuard no_grad;
  ValuePtr value = packed.value;
  Tensor x = evaluate(*value);
  static const ValuePtr& used = *new ValuePtr(c10::make_intrusive<Used>());
  // Frees codes before a cast or the operation allocates, torch when it is done.
  if (is_last && value->type != Type::kWaiting && packed.value == value) packed.value = used;
  value.reset();
  return fitted(packed, std::move(x));
}

// ---- values of Python, and in Python

inline ValuePtr to_value(const py::handle& object) {
  if (py::isinstance<Value>(object)) return object.cast<ValuePtr>();
  return c10::make_intrusive<PythonValue>(py::reinterpret_borrow<py::object>(object));
}

inline py::object to_object(const ValuePtr& value) {
  return value->type == Type::kPython ? static_cast<PythonValue&>(*value).object : py::cast(value);
}

// The function that a value in Python gets to ask for what it is made of.
inline Tensor PythonValue::tensor(Of* of) {
  py::cpp_function ask([of](const py::object& value) -> Tensor {
    if (!py::isinstance<Value>(value))
      return to_tensor(value.attr("tensor")(py::handle(g_native).attr("direct")));
    auto found = value.cast<ValuePtr>();
    return of ? (*of)(*found) : found->tensor(nullptr);
  });
  return to_tensor(object.attr("tensor")(ask));
}

// The same, the other way.
struct PythonOf final : Of {
  py::object function;
  explicit PythonOf(const py::object& function) : function(function) {}
  Tensor operator()(Value& value) override { return to_tensor(function(to_object(share(&value)))); }
};

}  // namespace memkern::saved
