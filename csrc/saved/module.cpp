// memkern._saved: the resolver of saved tensors (memkern/saved) in C++, with the same decisions and the same
// words.
//
// The Python files are the specification. This is compiled for one version of torch, whose C++ interface is
// not stable; memkern/saved/native.py loads it where the version is the same, and has the functions for
// everything rare.
#include "session.h"

namespace memkern::saved {
namespace {

// Read from the file before it is loaded.
[[maybe_unused]] __attribute__((used)) const char kStamp[] = "memkern._saved for " MEMKERN_STAMP ";";

// ---- Packed

void packed_dealloc(PyObject* object) {
  auto& packed = *reinterpret_cast<Packed*>(object);
  if (packed.value->type == Type::kWaiting) {
    ValuePtr waiting = packed.value;
    auto& own = static_cast<Waiting&>(*waiting);
    own.home->remove(own.seq, packed);
  }
  packed.value.~ValuePtr();
  packed.stride.~optional();
  Py_TYPE(object)->tp_free(object);
}

PyObject* packed_value(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  return to_object(reinterpret_cast<Packed*>(self)->value).release().ptr();
  END_HANDLE_TH_ERRORS
}

int packed_set_value(PyObject* self, PyObject* value, void*) {
  HANDLE_TH_ERRORS
  auto& packed = *reinterpret_cast<Packed*>(self);
  ValuePtr before = packed.value;
  if (before->type == Type::kWaiting)
    static_cast<Waiting&>(*before).home->remove(static_cast<Waiting&>(*before).seq, packed);
  packed.value = to_value(value);
  return 0;
  END_HANDLE_TH_ERRORS_RET(-1)
}

PyObject* packed_dtype(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  return py::cast(reinterpret_cast<Packed*>(self)->dtype).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* packed_time(PyObject* self, void*) {
  return PyLong_FromLongLong(reinterpret_cast<Packed*>(self)->time);
}

PyObject* packed_fitted(PyObject* self, PyObject* x) {
  HANDLE_TH_ERRORS
  return THPVariable_Wrap(fitted(*reinterpret_cast<Packed*>(self), THPVariable_Unpack(x)));
  END_HANDLE_TH_ERRORS
}

PyGetSetDef packed_members[] = {{"value", packed_value, packed_set_value, nullptr, nullptr},
                                {"dtype", packed_dtype, nullptr, nullptr, nullptr},
                                {"time", packed_time, nullptr, nullptr, nullptr},
                                {}};
PyMethodDef packed_methods[] = {{"fitted", packed_fitted, METH_O, nullptr}, {}};

// ---- Session

PyObject* session_new(PyTypeObject* type, PyObject*, PyObject*) {
  auto* self = reinterpret_cast<Session*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  new (&self->store) c10::intrusive_ptr<Store>();
  return reinterpret_cast<PyObject*>(self);
}

void session_dealloc(PyObject* object) {
  auto& self = *reinterpret_cast<Session*>(object);
  Py_CLEAR(self.bits);
  Py_CLEAR(self.frame);
  Py_CLEAR(self.enclosing);
  self.store.~intrusive_ptr();
  Py_TYPE(object)->tp_free(object);
}

PyObject* session_begin(PyObject* self, PyObject* exact) {
  HANDLE_TH_ERRORS
  reinterpret_cast<Session*>(self)->store = c10::make_intrusive<Store>(exact == Py_True);
  std::tie(g_has_compiled_ops, g_min_numel) = call("settings").cast<std::tuple<bool, int64_t>>();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// send(hooks, offload): where the data of the session's values go; None: not there.
PyObject* session_send(PyObject* object, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *hooks, *offload;
  if (!PyArg_ParseTuple(args, "OO", &hooks, &offload)) return nullptr;
  auto of = [](PyObject* x) { return x == Py_None ? py::object() : py::reinterpret_borrow<py::object>(x); };
  auto& store = *reinterpret_cast<Session*>(object)->store;
  Destination found{of(hooks), of(offload)};
  store.destination =
      found.hooks || found.offload ? std::make_shared<Destination>(std::move(found)) : nullptr;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* session_pack(PyObject* self, PyObject* x) {
  HANDLE_TH_ERRORS
  return pack(*reinterpret_cast<Session*>(self), x);
  END_HANDLE_TH_ERRORS
}

// Notes what is only to be noted (peek.py), else computes it.
PyObject* session_unpack(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  static auto& local = *new py::object(call("peek_local"));
  static auto& name = *new py::str("found");
  py::object found = local.attr(name);
  if (!found.is_none()) {
    found.attr("append")(py::handle(object));
    return THPVariable_Wrap(at::empty({0}));
  }
  return THPVariable_Wrap(unpack(*reinterpret_cast<Packed*>(object)));
  END_HANDLE_TH_ERRORS
}

PyObject* session_look(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  const Tensor& x = THPVariable_Unpack(object);
  const NodePtr& node = x.grad_fn();  // the gradient of a loss is a number
  if (node) Undecided::here()->look(node.get(), x.numel() == 1 ? kBounded : kUnknown, kNotTold);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// At the block's end: gives what it has noted to the block around it, or drops codes of what the caller
// holds.
PyObject* session_finish(PyObject* object, PyObject* passing) {
  HANDLE_TH_ERRORS
  auto& self = *reinterpret_cast<Session*>(object);
  if (Session* enclosing = enclosing_of(self)) {
    enclosing->store->notes.add_all(self.store->notes);
  } else {
    const DestinationPtr& to = self.store->destination;
    if (to && to->hooks) Undecided::here()->give_up(to->hooks);
    std::vector<Tensor> held;
    for (auto each : py::reinterpret_borrow<py::list>(passing))
      held.push_back(THPVariable_Unpack(each.ptr()));
    self.store->end(held);
  }
  self.store->notes = BlockNotes();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef session_methods[] = {{"begin", session_begin, METH_O, nullptr},
                                 {"send", session_send, METH_VARARGS, nullptr},
                                 {"pack", session_pack, METH_O, nullptr},
                                 {"unpack", session_unpack, METH_O | METH_STATIC, nullptr},
                                 {"look", session_look, METH_O, nullptr},
                                 {"finish", session_finish, METH_O, nullptr},
                                 {}};
PyMemberDef session_members[] = {{"bits", T_OBJECT, offsetof(Session, bits), 0, nullptr},
                                 {"frame", T_OBJECT, offsetof(Session, frame), 0, nullptr},
                                 {"enclosing", T_OBJECT, offsetof(Session, enclosing), 0, nullptr},
                                 {"opened", T_BOOL, offsetof(Session, opened), 0, nullptr},
                                 {}};

void ready_types(py::module_& m) {
  g_packed_type.tp_name = "memkern._saved.Packed", g_packed_type.tp_basicsize = sizeof(Packed);
  g_packed_type.tp_flags = Py_TPFLAGS_DEFAULT, g_packed_type.tp_dealloc = packed_dealloc;
  g_packed_type.tp_getset = packed_members, g_packed_type.tp_methods = packed_methods;
  g_session_type.tp_name = "memkern._saved.Session", g_session_type.tp_basicsize = sizeof(Session);
  g_session_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, g_session_type.tp_new = session_new;
  g_session_type.tp_dealloc = session_dealloc, g_session_type.tp_methods = session_methods;
  g_session_type.tp_members = session_members;
  for (auto* type : {&g_packed_type, &g_session_type}) {
    if (PyType_Ready(type)) throw py::error_already_set();
  }
  m.attr("Packed") = py::handle(reinterpret_cast<PyObject*>(&g_packed_type));
  m.attr("Session") = py::handle(reinterpret_cast<PyObject*>(&g_session_type));
}

// ---- values, as Python sees them

void define_values(py::module_& m) {
  py::class_<Value, ValuePtr>(m, "Value")
      .def_readonly("dtype", &Value::dtype)
      .def_readonly("precision", &Value::precision)
      .def_readonly("rounded", &Value::is_rounded)
      .def_readonly("clipped", &Value::is_clipped)
      .def_readonly("functions", &Value::functions)
      .def_readonly("steps", &Value::steps)
      .def_readwrite("uses", &Value::uses)
      .def_property_readonly("lossy", &Value::is_lossy)
      .def_property_readonly("coarse", &Value::is_coarse)
      .def_property_readonly("managed", &Value::is_managed)
      .def_property_readonly("block_size", &Value::block_size)
      .def_property_readonly("bases", [](const Value&) { return py::tuple(); })
      .def("fresh", &Value::is_fresh)
      .def("is_work", &Value::is_work)
      .def("is_at_hand", &Value::is_at_hand)
      .def("stay_exact", &Value::stay_exact)
      .def("tensor", [](Value& value, const py::object& of) {
        PythonOf ask(of);
        return value.tensor(&ask);
      });
  py::class_<Leaf, Value, c10::intrusive_ptr<Leaf>>(m, "Leaf").def_readonly("leaf", &Leaf::leaf);
  auto objects = [](const Values& values) {
    py::tuple found(values.size());
    for (size_t i = 0; i < values.size(); ++i) found[i] = to_object(values[i]);
    return found;
  };
  py::class_<Computed, Value, c10::intrusive_ptr<Computed>>(m, "Computed")
      .def_property_readonly("inputs", [objects](const Computed& value) { return objects(value.inputs); })
      .def_property_readonly("bases", [objects](const Computed& value) { return objects(value.bases); });
  py::class_<Number, Value, c10::intrusive_ptr<Number>>(m, "Number");
  py::class_<Used, Value, c10::intrusive_ptr<Used>>(m, "Used");
  py::class_<Waiting, Value, c10::intrusive_ptr<Waiting>>(m, "Waiting").def_readonly("x", &Waiting::x);
  py::class_<Stored, Value, c10::intrusive_ptr<Stored>>(m, "Stored")
      .def_property_readonly("data", [](const Stored& value) { return value.data.shown(); })
      .def_property_readonly("codec", [](const Stored& value) -> py::object {
        return value.codec ? value.codec->python : py::none();
      });
}

// leaves.note_all: the current versions of all known leaves and of a module's parameters.
void note_parameters(const py::handle& module) {
  static auto& parameters = *new py::str("_parameters");
  static auto& modules = *new py::str("_modules");
  for (auto each : module.attr(parameters).cast<py::dict>()) {
    if (!each.second.is_none()) leaves().note(THPVariable_Unpack(each.second.ptr()));
  }
  for (auto each : module.attr(modules).cast<py::dict>()) {
    if (!each.second.is_none()) note_parameters(each.second);
  }
}

}  // namespace
}  // namespace memkern::saved

PYBIND11_MODULE(_saved, m) {
  using namespace memkern::saved;
  m.doc() = "The resolver of saved tensors in C++; memkern/saved/native.py uses it.";
  fill_getters();
  ready_types(m);
  define_values(m);
  m.def("start", [](const py::object& native) { g_native = py::object(native).release().ptr(); });
  m.def("note_all", [](const py::object& module) {
    leaves().note_again();
    if (!module.is_none()) note_parameters(module);
  });
  m.def("spared", [] { return g_spared; });
  m.def("registered", [] { return g_registered.size(); }, "How many values are registered at edges.");
}
