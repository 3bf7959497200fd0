// session.py and callers.py: the pack hook.
#pragma once

#include "evaluate.h"

namespace memkern::saved {

// callers.py: what is known of the Python function that runs an operation (native.caller).
enum Caller : int {
  kProduct = 1,  // a linear layer or convolution
  kTells = 2,    // callers.use says how its tensor is used
  kEmbedding = 4,
  kFreezes = 8,        // a layer whose weight may be frozen
  kTorchFunction = 16  // of torch's function modes, which lie in between
};

inline int caller_of(PyFrameObject* frame) {
  static auto& known = *new ska::flat_hash_map<PyCodeObject*, int>;  // holds the code
  PyCodeObject* code = PyFrame_GetCode(frame);
  auto found = known.find(code);
  if (found != known.end()) {
    Py_DECREF(code);
    return found->second;
  }
  constexpr size_t kMost = 4096;
  if (known.size() > kMost) {
    for (auto& each : known) Py_DECREF(each.first);
    known.clear();
  }
  return known[code] = call("caller", py::handle(reinterpret_cast<PyObject*>(frame))).cast<int>();
}

struct Frame {
  py::object object;
  int caller = 0;

  // callers.of: the function that runs an operation.
  static Frame here() {
    PyFrameObject* frame = PyEval_GetFrame();
    if (!frame) return {};
    Frame found{py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(frame)), caller_of(frame)};
    while (found.caller & kTorchFunction) {
      PyFrameObject* back = PyFrame_GetBack(reinterpret_cast<PyFrameObject*>(found.object.ptr()));
      if (!back) break;
      found = {py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(back)), caller_of(back)};
    }
    return found;
  }
  std::optional<Use> use() const {
    if (caller & kProduct) return Use::kCoded;
    if (!(caller & kTells)) return std::nullopt;
    py::object found = call("use", object);
    if (found.is_none()) return std::nullopt;
    auto name = found.attr("value").cast<std::string>();
    return name == "exact" ? Use::kExact : name == "coded" ? Use::kCoded : Use::kShape;
  }
};

inline bool is_cast(const Operation& op) {
  return op.known == Known::kToCopyBackward0 || op.known == Known::kTBackward0;
}

// callers.note_cast: notes the version of a parameter or argument whose cast a linear layer or convolution
// uses.
inline void note_cast(const Frame& frame, Edge edge, uint64_t seq) {
  constexpr uint64_t kNodesOfACall = 8;
  if (!(frame.caller & (kProduct | kFreezes)) || !is_cast(*operation(edge.node))) return;
  Node *last = edge.node, *node = edge.node;
  while (node && seq <= node->sequence_nr() + kNodesOfACall && node->sequence_nr() <= seq) {
    if (!is_cast(*operation(node))) return;
    last = node, node = input(node, 0).node;
  }
  if (!node || !is_leaf(node)) return;
  const Tensor& leaf = variable_of(node);
  PyObject* object = leaf.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  if (!object) return;
  static auto& f_locals = *new py::str("f_locals");
  static auto& parameters = *new py::str("_parameters");
  py::object locals = frame.object.attr(f_locals);
  auto is_among = [&](const py::handle& values) {
    for (auto each : values) {
      if (each.ptr() == object) return true;
    }
    return false;
  };
  py::object own = locals["self"].attr(parameters).attr("values")();
  if (!is_among(own) && !is_among(locals.attr("values")())) return;
  leaves().note(leaf);
  note_built(last);
}

// The hooks of one block; memkern/saved/native.py derives its class in Python from this one.
struct Session {
  PyObject_HEAD PyObject *bits, *frame, *enclosing;
  char opened;
  c10::intrusive_ptr<Store> store;
};

inline PyTypeObject g_session_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

// The session around it, which is of this kind wherever this one is (session.new_session).
inline Session* enclosing_of(const Session& self) {
  if (!self.enclosing || !PyObject_TypeCheck(self.enclosing, &g_session_type)) return nullptr;
  return reinterpret_cast<Session*>(self.enclosing);
}

// Whether the module call that opened it is over.
inline bool is_interrupted(const Session& self) {
  if (!self.frame || self.frame == Py_None) return false;
  static PyObject* clear = PyUnicode_InternFromString("clear");
  PyObject* done = PyObject_CallMethodNoArgs(self.frame, clear);
  if (!done) PyErr_Clear();  // it is executing
  Py_XDECREF(done);
  return done != nullptr;
}

inline bool has_graph(const Tensor& x, bool plain) {
  static py::object& level = *new py::object(call("forward_ad_level"));
  static PyObject* name = PyUnicode_InternFromString("_current_level");
  PyObject* found = PyDict_GetItem(level.ptr(), name);  // a tangent belongs to the tensor itself
  return plain && !(found && PyLong_AsLong(found) >= 0) && !x.is_conj() && !x.is_neg();
}

inline ValuePtr without_node(const Session& self, const Tensor& x, const Frame& frame) {
  if (x.requires_grad()) {
    leaves().note(x);
    return c10::make_intrusive<Leaf>(x);
  }
  if (frame.caller & kEmbedding) {
    py::object weight = call("weight_of", frame.object);
    if (!weight.is_none()) leaves().note(to_tensor(weight));
  }
  if (frame.caller & kFreezes) {
    py::object value = call("frozen_weight", frame.object, x);
    if (!value.is_none()) return to_value(value);
  }
  return self.store->constant(x);
}

inline PyObject* pack_node(const Session& self, const Tensor& x, const NodePtr& node, const Frame& frame,
                           uint64_t seq) {
  Edge edge{node.get(), static_cast<uint32_t>(x.output_nr())};
  auto use = frame.use();
  note_cast(frame, edge, seq);
  // A node with this number may be the one that is being built, and has not saved everything yet.
  if (node->sequence_nr() != seq) {
    int elements = use == Use::kShape ? kSparse : kNotTold;  // of a loss of classes
    Undecided::here()->look(node.get(), use == Use::kCoded ? kBounded : kUnknown, elements);
  }
  if (ValuePtr value = self.store->at_once(x, edge, use)) return new_packed(std::move(value), x);
  bool is_rebuilt = at::sequence_number::peek() - 1 != seq;
  auto waiting = c10::make_intrusive<Waiting>(x, is_rebuilt ? Edge() : edge, self.store, seq);
  PyObject* packed = new_packed(std::move(waiting), x);
  Undecided::here()->add(*reinterpret_cast<Packed*>(packed));
  return packed;
}

inline PyObject* pack(Session& self, PyObject* object) {
  const Tensor& x = THPVariable_Unpack(object);
  if (is_interrupted(self)) {
    call("close_interrupted");
    Py_INCREF(Py_None);
    Py_XSETREF(self.bits, Py_None);  // whatever runs now is not of that call: it is saved as torch does
  }
  if (Session* enclosing = enclosing_of(self); enclosing && !self.opened) return pack(*enclosing, object);
  bool plain = is_plain(object, x);
  if (self.bits == Py_None || !has_graph(x, plain)) return new_packed(self.store->stored(x), x, plain);
  uint64_t seq =
      at::sequence_number::peek() - 1;  // before grad_fn is asked for: of a view that may build a node
  Frame frame = Frame::here();
  NodePtr node = x.grad_fn();
  if (!node) return new_packed(without_node(self, x, frame), x);
  return pack_node(self, x, node, frame, seq);
}

}  // namespace memkern::saved
