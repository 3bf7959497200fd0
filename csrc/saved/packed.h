// packed.py, peek.py and built.py: what autograd holds in place of a tensor, and what a node has saved.
#pragma once

#include "values.h"

namespace memkern::saved {

// A later one at each call, on whatever thread.
inline int64_t now() {
  static int64_t clock = 0;
  return clock++;
}

// The object that autograd holds in place of a tensor.
struct Packed {
  PyObject_HEAD ValuePtr value;
  ScalarType dtype;
  int64_t time;
  std::optional<at::DimVector> stride;
};

inline PyTypeObject g_packed_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

inline PyObject* new_packed(ValuePtr value, const Tensor& x, bool plain = true) {
  auto* packed = reinterpret_cast<Packed*>(g_packed_type.tp_alloc(&g_packed_type, 0));
  if (!packed) throw py::error_already_set();
  value->uses += 1;
  new (&packed->value) ValuePtr(std::move(value));
  new (&packed->stride) std::optional<at::DimVector>();
  packed->dtype = x.scalar_type(), packed->time = now();
  if (plain && is_dense(x)) packed->stride.emplace(x.strides());
  return reinterpret_cast<PyObject*>(packed);
}

// A value's tensor in the dtype and with the strides of the one that was packed.
inline Tensor fitted(const Packed& packed, Tensor x) {
  if (x.scalar_type() != packed.dtype) x = x.to(packed.dtype);
  if (!packed.stride || x.strides() == at::IntArrayRef(*packed.stride)) return x;
  return at::empty_strided(x.sizes(), *packed.stride, x.options()).copy_(x);
}

// None where the tensor was saved without these hooks.
inline Packed* packed_of(const SavedVariable& saved) {
  if (!saved.has_hooks()) return nullptr;
  auto hook = saved.retrieve_unpack_hook_data();
  if (!hook) return nullptr;
  PyObject* object = hook->second.ptr(getPyInterpreter());
  return Py_TYPE(object) == &g_packed_type ? reinterpret_cast<Packed*>(object) : nullptr;
}

using Values = c10::SmallVector<ValuePtr, 3>;

// peek.saved_by: the values of what a node has saved; empty where that is None, no value where it is freed or
// unknown.
inline std::optional<Values> saved_by(Node* node, Getter get) {
  if (!get) return std::nullopt;
  std::vector<const SavedVariable*> saved;
  get(node, saved);
  if (saved.empty()) return std::nullopt;
  Values found;
  bool has_others = false;
  for (auto* each : saved) {
    if (Packed* packed = packed_of(*each)) found.push_back(packed->value);
    has_others |= each->has_hooks();
  }
  if (!found.empty()) return found;
  if (has_others) return std::nullopt;
  auto raw = saved[0]->get_raw_data();
  if (raw && raw->defined()) {
    if (raw->dim() > 0) return std::nullopt;
    found.push_back(c10::make_intrusive<Number>(*raw));  // autograd packs no numbers
    return found;
  }
  try {
    if (!saved[0]->unpack(node->getptr()).defined()) return found;  // None was saved
  } catch (const std::exception&) {
  }
  return std::nullopt;  // freed
}

inline bool has_saved(Node* node, const std::vector<Getter>& getters, const Value& value) {
  std::vector<const SavedVariable*> saved;
  for (Getter get : getters) get(node, saved);
  return std::any_of(saved.begin(), saved.end(), [&](const SavedVariable* each) {
    Packed* packed = packed_of(*each);
    return packed && packed->value.get() == &value;
  });
}

// ---- built.py

inline void note_built(Node* node) { notes_of(node).built = now(); }

inline bool has_times_since(Node* node, int64_t time) {
  const Notes* notes = known_notes(node);
  if (notes && notes->built >= time) return true;
  std::vector<const SavedVariable*> saved;
  for (Getter get : operation(node)->saved) get(node, saved);
  return std::any_of(saved.begin(), saved.end(), [&](const SavedVariable* each) {
    Packed* packed = packed_of(*each);
    return packed && packed->time >= time;
  });
}

inline bool is_built_since(Node* node, int64_t time) {
  constexpr size_t kMostNodes = 16;
  c10::SmallVector<Node*, 32> nodes{node};
  for (size_t i = 0; i < kMostNodes && i < nodes.size(); ++i) {
    if (has_times_since(nodes[i], time)) return true;
    for (const auto& edge : nodes[i]->next_edges()) {
      if (edge.function && !is_leaf(edge.function.get())) nodes.push_back(edge.function.get());
    }
  }
  return false;
}

// ---- leaves.py

struct KnownLeaf {
  c10::weak_intrusive_ptr<c10::TensorImpl> leaf;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  uint32_t version;
  int64_t time;
};

class Leaves {  // of a thread
 public:
  void note(const Tensor& leaf) {
    if (!is_plain(leaf) || !leaf.has_storage()) return;
    auto found = known_.find(leaf.unsafeGetTensorImpl());
    if (found != known_.end() && is_same(found->second, leaf)) return;
    if (found != known_.end()) known_.erase(found);
    known_.emplace(leaf.unsafeGetTensorImpl(),
                   KnownLeaf{c10::weak_intrusive_ptr<c10::TensorImpl>(leaf.getIntrusivePtr()),
                             leaf.storage().getWeakStorageImpl(), version_of(leaf), now()});
  }
  void note_again() {
    std::vector<Tensor> alive;
    for (auto it = known_.begin(); it != known_.end();) {
      if (auto leaf = it->second.leaf.lock()) {
        alive.emplace_back(std::move(leaf));
        ++it;
      } else {
        it = known_.erase(it);
      }
    }
    for (auto& leaf : alive) note(leaf);
  }
  bool is_unchanged_since(const Tensor& leaf, Node* node) const {
    auto found = known_.find(leaf.unsafeGetTensorImpl());
    return found != known_.end() && is_same(found->second, leaf) && is_present(leaf) &&
           is_built_since(node, found->second.time);
  }

 private:
  static bool is_same(const KnownLeaf& known, const Tensor& leaf) {
    return !known.leaf.expired() && known.version == version_of(leaf) && !known.storage.expired() &&
           known.storage._unsafe_get_target() == leaf.storage().unsafeGetStorageImpl();
  }
  ska::flat_hash_map<c10::TensorImpl*, KnownLeaf> known_;
};

inline Leaves& leaves() {
  static thread_local Leaves own;
  return own;
}

}  // namespace memkern::saved
