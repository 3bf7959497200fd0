// store.py: what one block stores; the value of each saved tensor, found among what is stored already or
// stored anew.
#pragma once

#include "undecided.h"

namespace memkern::saved {

inline int64_t g_min_numel = 0;  // store.MIN_NUMEL, asked by every session

inline bool is_small(const Tensor& x) { return x.numel() < g_min_numel || x.dim() == 0 || x.size(-1) == 1; }

// A constant's place in memory, and its version.
struct Place {
  int64_t offset;
  at::DimVector shape, stride;
  ScalarType dtype;
  uint32_t version;
  explicit Place(const Tensor& x)
      : offset(x.storage_offset()),
        shape(x.sizes()),
        stride(x.strides()),
        dtype(x.scalar_type()),
        version(version_of(x)) {}
  bool operator==(const Place& other) const {
    return offset == other.offset && shape == other.shape && stride == other.stride && dtype == other.dtype &&
           version == other.version;
  }
};

using StoredPtr = c10::intrusive_ptr<Stored>;
using WeakStored = c10::weak_intrusive_ptr<Stored>;

// What a block has stored: values in codes, and constants by their storage.
class BlockNotes {
 public:
  void add(const StoredPtr& stored) {
    if (stored->codec) coded_.emplace_back(stored);
    if (coded_.size() + constants_.size() < most_) return;
    coded_.erase(
        std::remove_if(coded_.begin(), coded_.end(), [](const WeakStored& each) { return each.expired(); }),
        coded_.end());
    for (auto it = constants_.begin(); it != constants_.end();) {
      it = it->second.stored.expired() ? constants_.erase(it) : std::next(it);
    }
    most_ = std::max(kLeast, 2 * (coded_.size() + constants_.size()));
  }
  void add_all(const BlockNotes& other) {
    coded_.insert(coded_.end(), other.coded_.begin(), other.coded_.end());
  }
  std::vector<StoredPtr> coded() const {
    std::vector<StoredPtr> found;
    for (const auto& each : coded_) {
      if (auto stored = each.lock()) found.push_back(std::move(stored));
    }
    return found;
  }
  void add_constant(const Tensor& x, const StoredPtr& stored) {
    auto* storage = x.storage().unsafeGetStorageImpl();
    constants_.erase(storage);
    constants_.emplace(storage, Constant{x.storage().getWeakStorageImpl(), Place(x), WeakStored(stored)});
    add(stored);
  }
  // The value of the same memory, if it is stored and x is as it was.
  StoredPtr constant_of(const Tensor& x) const {
    auto found = constants_.find(x.storage().unsafeGetStorageImpl());
    if (found == constants_.end() || found->second.storage.expired() || !(found->second.place == Place(x)))
      return {};
    return found->second.stored.lock();
  }

 private:
  struct Constant {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    Place place;
    WeakStored stored;
  };
  static constexpr size_t kLeast = 64;
  std::vector<WeakStored> coded_;
  std::unordered_map<c10::StorageImpl*, Constant> constants_;
  size_t most_ = kLeast;
};

struct Store : c10::intrusive_ptr_target {
  const bool exact;
  BlockNotes notes;
  DestinationPtr destination;
  explicit Store(bool exact) : exact(exact) {}

  StoredPtr stored(const Tensor& x, const CodecPtr& codec = nullptr) const {
    return stored(x, codec, x.scalar_type());
  }
  // dtype: that of its edge.
  StoredPtr stored(const Tensor& x, const CodecPtr& codec, ScalarType dtype) const {
    return c10::make_intrusive<Stored>(x, dtype, codec, destination);
  }

  // The value, if the user is known or any user gets the same; else none.
  ValuePtr at_once(const Tensor& x, Edge edge, std::optional<Use> use) {
    if (use) return value(x, edge, *use);
    if (exact) {
      ValuePtr found = value(x, edge, Use::kCoded);
      return found->is_rounded ? ValuePtr() : found;
    }
    if (is_small(x)) return value(x, edge, Use::kExact);
    if (!is_registered(edge) && !operation(edge.node)->is_copy) return {};
    return Derivation(Need::same_bits(), std::min(Kind::kCopy, reach_of(x)), true)
        .value(edge, x.scalar_type());
  }

  // Stores a waiting tensor in the way that its user allows; none: exactly.
  void settle(Packed& packed, Use use, Node* node) {
    ValuePtr kept = packed.value;
    auto& waiting = static_cast<Waiting&>(*kept);
    if (!waiting.is_fresh()) return;  // it was changed in place or freed: it stays what torch would hold
    Edge edge = waiting.edge_of(node);
    if (!edge) {
      packed.value = stored(waiting.x);
    } else if (use == Use::kCoded && !exact && runs_again(node, *operation(node), waiting)) {
      packed.value = c10::make_intrusive<PythonValue>(call("run_again", node_object(node)));
    } else {
      ValuePtr found = value(waiting.x, edge, use, node, kept);
      bool has_sides = found->is_lossy() && operation(node)->has_jumps;
      packed.value = has_sides ? to_its_side(found, waiting.x, node) : found;
    }
    packed.value->uses += 1;
  }

  // Stores a tensor that needs no gradient, exactly: masks in bits, indices in fewer bytes.
  ValuePtr constant(const Tensor& x) {
    if (is_fake(x) || x.numel() < g_min_numel) return stored(x);
    static const CodecPtr& codec = *new CodecPtr(to_codec(call("constant_codec")));
    if (StoredPtr found = notes.constant_of(x)) return found;
    StoredPtr found = stored(x, codec);
    notes.add_constant(x, found);
    return found;
  }

  // Drops codes of tensors that the caller holds anyway, such as cached keys and values.
  void end(const std::vector<Tensor>& passing) {
    std::vector<c10::StorageImpl*> storages;
    for (const auto& x : passing) {
      if (x.has_storage()) storages.push_back(x.storage().unsafeGetStorageImpl());
      const NodePtr& node = x.grad_fn();
      if (exact || !node || !is_plain(x)) continue;
      ValuePtr value =
          registered(base_of({node.get(), static_cast<uint32_t>(x.output_nr())}, x, version_of(x) > 0).first);
      if (!value || value->type != Type::kStored) continue;
      StoredPtr coded = StoredPtr::reclaim_copy(static_cast<Stored*>(value.get()));
      coded->encode_again();
      notes.add(coded);
    }
    for (auto& each : notes.coded()) each->hold_if_alive(storages);
  }

 private:
  // The value of an edge for a user: derived from what is stored, else stored.
  ValuePtr value(const Tensor& x, Edge edge, Use use, Node* node = nullptr, const ValuePtr& waiting = {}) {
    ValuePtr before = registered(edge);
    ValuePtr found = derived_or_stored(x, edge, use, node, waiting);
    // What an earlier user was to compute has lost its inputs to a change in place, and x is still what it
    // saved.
    if (before && before->type == Type::kComputed && version_of(x) == 0 && !before->is_fresh() &&
        !found->is_lossy())
      static_cast<Computed&>(*before).become(found);
    return found;
  }

  ValuePtr derive(const Tensor& x, Edge edge, const Need& need) const {
    return Derivation(need, reach_of(x), !exact).value(edge, x.scalar_type());
  }

  ValuePtr derived_or_stored(const Tensor& x, Edge edge, Use use, Node* node, const ValuePtr& waiting) {
    DataNeed asked{Need::of_use(use, exact), {}};
    if (use == Use::kCoded && !exact && node) {
      const Operation& op = *operation(node);
      if (op.has_mask) {
        if (CodecPtr mask = to_codec(call("mask_of", node_object(node), x))) return masked(x, edge, mask);
      }
      asked = need_of(node, op, x, waiting);
    }
    const auto& [need, normalization] = asked;
    // Codes of others are of x itself, which the node's mean makes too coarse.
    if (ValuePtr found = derive(x, edge, normalization ? Need::exact() : need)) return found;
    auto [base, data] = base_of(edge, x, reach_of(x) == Kind::kView);
    bool is_itself = base == edge;
    CodecPtr codec = normalization ? normalized(*normalization, base, data, need, is_itself ? nullptr : node)
                                   : fitted_codec(base, data, need);
    StoredPtr found = store(base, data, codec);
    if (found->coarse && !need.is_coarse) found->upgrade(data);
    if (is_itself) return found;
    if (ValuePtr derived = derive(x, edge, need)) return derived;
    found = stored(x);
    register_value(edge, *found);
    return found;
  }

  // One bit per element, for an operation that only reads whether x is between two limits. Not shared.
  ValuePtr masked(const Tensor& x, Edge edge, const CodecPtr& mask) {
    if (ValuePtr found = Derivation(Need::exact(), reach_of(x), true).value(edge, x.scalar_type()))
      return found;
    StoredPtr found = stored(x, mask);
    notes.add(found);
    return found;
  }

  // The decoded value on the side of a jump on which x was, where the node's derivative has jumps.
  ValuePtr to_its_side(const ValuePtr& value, const Tensor& x, Node* node) const {
    py::tuple found = call("sides", node_object(node));
    py::object to_side = found[1];
    Function function = [to_side](Inputs inputs) { return to_tensor(to_side(*to_tuple(inputs))); };
    Values inputs{value, stored(x, to_codec(found[0]))};
    return c10::make_intrusive<Computed>(std::move(function), std::move(inputs), value->dtype,
                                         value->precision, 1);
  }

  static CodecPtr codec_for(Edge base, const Tensor& data, const Need& need) {
    if (need.is_exact || is_small(data) || !has_codes(data.scalar_type()) || !has_codes(base.dtype()))
      return nullptr;
    CodecPtr codec = codec_of(base);
    return codec && codec->is_logarithm && !need.is_clipped ? nullptr : codec;
  }

  static CodecPtr normalized_codec(const Normalization& found) {
    py::object inverse = found.inverse.defined() ? py::cast(found.inverse) : py::none();
    Codec codec{Codec::Signs::kSigned,
                true,
                false,
                Constants::get().block_size,
                found.mean,
                found.inverse,
                call("normalized", found.mean, inverse)};
    return std::make_shared<Codec>(std::move(codec));
  }

  static CodecPtr fitted_codec(Edge base, const Tensor& data, const Need& need) {
    CodecPtr codec = codec_for(base, data, need);
    if (!codec) return nullptr;
    if (auto found = mean_of_attention(base.node, data)) return normalized_codec(*found);
    bool is_power = codec->signs != Codec::Signs::kNone;
    return is_power && need.block_size < Constants::get().block_size ? in_blocks_of(codec, need.block_size)
                                                                     : codec;
  }

  // The same, of what is coded in place of the data; viewer: the node, where it has saved a view of them.
  static CodecPtr normalized(const Normalization& given, Edge base, const Tensor& data, const Need& need,
                             Node* viewer) {
    std::optional<Normalization> found = viewer ? mean_of_attention(viewer, data, true) : given;
    if (!found || is_registered(base) || !codec_for(base, data, need)) return nullptr;
    return normalized_codec(*found);
  }

  // Stores the data of an edge, or what was stored of it again in a form that serves all users.
  StoredPtr store(Edge base, Tensor data, const CodecPtr& codec) {
    ScalarType dtype = base.dtype();
    if (!codec && data.scalar_type() != dtype && finer(data.scalar_type(), dtype)) data = data.to(dtype);
    ValuePtr old = registered(base);
    if (old && old->type == Type::kStored && old->is_fresh()) {
      StoredPtr before = StoredPtr::reclaim_copy(static_cast<Stored*>(old.get()));
      if (!codec) {
        ScalarType given = data.scalar_type();
        if (before->is_lossy() || finer(given, dtype) || finer(given, before->precision)) {
          before->upgrade(data);
          before->is_clipped = false;
        }
        return before;
      }
      if (codec->block_size < before->block_size()) {
        before->encode(data, codec);
        return before;
      }
    }
    StoredPtr found = stored(data, codec, dtype);
    found->is_clipped = found->codec && found->codec->is_logarithm;
    register_value(base, *found);
    notes.add(found);
    return found;
  }
};

inline Waiting::Waiting(const Tensor& given, Edge edge, c10::intrusive_ptr<Store> store, uint64_t seq)
    : Value(Type::kWaiting, given.scalar_type(), given.scalar_type()),
      x(given.tensor_data()),
      version(version_of(given)),
      store(std::move(store)),
      nr(edge.nr),
      seq(seq),
      home(Undecided::here()) {
  static uint64_t count = 0;
  order = count++;
  if (!edge) return;
  if (edge.node->sequence_nr() == seq) {
    own.emplace(edge.node);
  } else {
    node = edge.node->getptr();
  }
}

// Walks up the graph and decides the waiting tensors of the nodes that it meets; of those decided before,
// some are now seen to be needed exactly.
inline void Undecided::look(Node* start, int state, int elements) {
  if (entries_.empty() && g_coded == 0) return;
  forget_old_notes();
  struct Step {
    Node* node;
    int state, elements;
  };
  c10::SmallVector<Step, 32> stack{{start, state, elements}};
  std::vector<Decided> found;
  while (!stack.empty()) {
    Step step = stack.pop_back_val();
    Node* node = step.node;
    uint64_t seq = node->sequence_nr();
    if (seq > kNever) continue;
    Notes& notes = notes_of(node);
    if (notes.state >= step.state && notes.elements >= step.elements) continue;
    notes.state = std::max<int>(step.state, notes.state);
    notes.elements = std::max<int>(step.elements, notes.elements);
    int now_state = notes.state, now_elements = notes.elements;
    const Operation& op = *operation(node);
    const User& row = user_of(node, op);
    if (entries_.count(seq)) decide(node, op, row, seq, found);
    if (is_too_late_for_codes(node, op, row)) exact_again(node, row);
    int below = passed_on(row, node, op, now_state), of = spread(row, op, now_elements);
    for (const auto& edge : node->next_edges()) {
      if (edge.function) stack.push_back({edge.function.get(), below, of});
    }
  }
  std::sort(found.begin(), found.end(), [](const Decided& a, const Decided& b) {
    return waiting_of(a.packed()).order < waiting_of(b.packed()).order;
  });
  for (const auto& [object, use, node] : found) {
    Packed& packed = *reinterpret_cast<Packed*>(object.ptr());
    if (packed.value->type != Type::kWaiting) continue;  // another one's settling has replaced it
    Use as = use;
    // Another user of the log-probabilities may have been met since.
    if (use == Use::kShape && operation(node)->is_log_softmax) as = use_of_logarithms(node).value_or(use);
    auto store = waiting_of(packed).store;
    store->settle(packed, as, node);
  }
}

// Stores all waiting tensors exactly, through the hooks around ours, which are about to be closed.
inline void Undecided::give_up(const py::object& hooks) {
  std::vector<Packed*> given;
  for (auto it = entries_.begin(); it != entries_.end();) {
    Entry left;
    for (Packed* packed : it->second) {
      const DestinationPtr& to = waiting_of(*packed).store->destination;
      if (to && to->hooks.is(hooks)) {
        given.push_back(packed);
      } else {
        left.push_back(packed);
      }
    }
    it->second = std::move(left);
    it = it->second.empty() ? entries_.erase(it) : std::next(it);
  }
  std::vector<py::object> alive;  // hooks may free what they like
  std::sort(given.begin(), given.end(),
            [](const Packed* a, const Packed* b) { return waiting_of(*a).order < waiting_of(*b).order; });
  for (Packed* packed : given)
    alive.push_back(py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(packed)));
  for (Packed* packed : given) {
    if (packed->value->type != Type::kWaiting) continue;
    auto store = waiting_of(*packed).store;
    store->settle(*packed, Use::kExact, nullptr);
  }
}

}  // namespace memkern::saved
