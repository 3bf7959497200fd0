// undecided.py: saved tensors whose user is not known yet.
#pragma once

#include "data_needs.h"

namespace memkern::saved {

struct Store;
class Undecided;

// A tensor that is held unchanged until its user is known.
struct Waiting final : Value {
  Tensor x;
  uint32_t version;
  c10::intrusive_ptr<Store> store;
  NodePtr node;                // of the tensor's edge; none where it is the user itself, or was built anew
  std::optional<NodeKey> own;  // of a node that saves its own result: holding it would be a reference cycle
  uint32_t nr = 0;
  uint64_t seq, order;
  std::shared_ptr<Undecided> home;

  Waiting(const Tensor& given, Edge edge, c10::intrusive_ptr<Store> store, uint64_t seq);
  // The tensor's edge, where user is the node that saves it; none if the tensor is not its. No user: any.
  Edge edge_of(Node* user) const {
    if (!user) return node ? Edge{node.get(), nr} : Edge{};
    const auto& sources = user->next_edges();
    if (node) {
      for (const auto& each : sources) {
        if (each.function == node && each.input_nr == nr) return {node.get(), nr};
      }
      return {};
    }
    if (!own) return {};
    if (NodeKey(user) == *own) return {user, nr};
    for (const auto& each : sources) {
      if (each.function && each.input_nr == nr && NodeKey(each.function.get()) == *own)
        return {each.function.get(), nr};
    }
    return {};
  }
  bool is_fresh() const override { return version_of(x) == version && is_present(x); }
  bool is_work() const override { return false; }
  Tensor tensor(Of*) override {
    check_version("a tensor", version_of(x), version, x);
    return x;
  }
};

inline Waiting& waiting_of(const Packed& packed) { return static_cast<Waiting&>(*packed.value); }

struct Decided {
  py::object object;
  Use use;
  Node* node;
  Packed& packed() const { return *reinterpret_cast<Packed*>(object.ptr()); }
};

// The waiting tensors of a thread, by the sequence number of the node that saves them.
class Undecided {
 public:
  static const std::shared_ptr<Undecided>& here() {
    static thread_local auto own = std::make_shared<Undecided>();
    return own;
  }
  void add(Packed& packed) { entries_[waiting_of(packed).seq].push_back(&packed); }
  void remove(uint64_t seq, Packed& packed) {
    auto found = entries_.find(seq);
    if (found == entries_.end()) return;
    auto& all = found->second;
    all.erase(std::remove(all.begin(), all.end(), &packed), all.end());
    if (all.empty()) entries_.erase(found);
  }
  void look(Node* node, int state, int elements);
  void give_up(const py::object& hooks);

 private:
  using Entry = c10::SmallVector<Packed*, 2>;  // each takes itself out when it is freed
  ska::flat_hash_map<uint64_t, Entry> entries_;

  void decide(Node* node, const Operation& op, const User& row, uint64_t seq, std::vector<Decided>& found);
};

// How log-softmax uses its log-probabilities; none if no operation after it tells.
inline std::optional<Use> use_of_logarithms(Node* node) {
  const Notes& notes = notes_of(node);
  if (notes.state >= kReduced || notes.elements == kDense) return Use::kExact;
  return notes.elements == kSparse ? std::optional(Use::kShape) : std::nullopt;
}

inline void Undecided::decide(Node* node, const Operation& op, const User& row, uint64_t seq,
                              std::vector<Decided>& found) {
  auto entry = entries_.find(seq);
  int state = notes_of(node).state;
  Entry left;
  for (Packed* packed : entry->second) {
    const Waiting& value = waiting_of(*packed);
    std::optional<Use> use;
    if (!value.edge_of(node)) {
      left.push_back(packed);
      continue;
    }
    if (has_saved(node, row.shape, value)) {
      use = Use::kShape;
    } else if (!has_saved(node, row.coded, value)) {
      use = Use::kExact;
    } else if (op.is_log_softmax) {
      use = use_of_logarithms(node);
    } else if (row.kind == UserKind::kProduct || state == kBounded ||
               (state == kReduced && is_square(node, op))) {
      use = Use::kCoded;
    } else if (state >= kReduced) {
      use = Use::kExact;
    }
    if (use) {
      found.push_back({py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(packed)), *use, node});
    } else {
      left.push_back(packed);
    }
  }
  if (left.empty()) {
    entries_.erase(entry);
  } else {
    entry->second = std::move(left);
  }
}

// Whether a node whose tensors have been decided is now seen to need them exactly.
inline bool is_too_late_for_codes(Node* node, const Operation& op, const User& row) {
  if (op.is_log_softmax) return use_of_logarithms(node) == Use::kExact;
  return row.kind == UserKind::kSmooth && notes_of(node).state >= kReduced && !is_square(node, op);
}

// Replaces the codes of what this node saved by the tensor itself, where somebody still holds it.
inline void exact_again(Node* node, const User& row) {
  Values values;
  for (Getter get : row.coded) {
    if (auto found = saved_by(node, get)) values.append(found->begin(), found->end());
  }
  while (!values.empty()) {
    ValuePtr value = values.pop_back_val();
    if (value->type == Type::kStored) {
      if (value->is_lossy()) static_cast<Stored&>(*value).hold_if_alive({});
      value->stay_exact();
    } else if (value->type == Type::kComputed) {
      auto& inputs = static_cast<Computed&>(*value).inputs;
      values.append(inputs.begin(), inputs.end());
    }
  }
}

}  // namespace memkern::saved
