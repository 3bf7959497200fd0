// Nodes of the autograd graph: what Python's tables say of their operations, and what they have saved.
#pragma once

#include "torch.h"

namespace memkern::saved {

// users.py: how large the gradient may be that comes to an operation's output, and of which elements it is.
enum State : int8_t { kUnknown, kBounded, kReduced, kAmplified };
enum Elements : int8_t { kNotTold, kSparse, kDense };
enum class UserKind : int8_t { kProduct, kSmooth, kLinear, kSingular };
enum class Kind : int8_t { kView, kCopy, kFunction };  // rules.Kind

using Getter = void (*)(Node*, std::vector<const SavedVariable*>&);

struct Attribute {
  Getter get = nullptr;  // none where torch has no such attribute
  bool is_named = false, is_optional = false;
};

struct Rule {
  Kind kind;
  bool is_rounding, is_uncoded, takes_any;
  std::vector<Attribute> inputs, extra;
  py::object make;
  int cost() const { return kind == Kind::kFunction; }
};

struct User {
  UserKind kind = UserKind::kSingular;
  std::vector<Getter> coded, shape;
};

struct Codec;
using CodecPtr = std::shared_ptr<const Codec>;

// The operations that are known here by more than the tables.
// clang-format off
#define MEMKERN_OPERATIONS(X)                                                                              \
  X(AliasBackward0) X(ViewBackward0) X(UnsafeViewBackward0) X(ReshapeAliasBackward0) X(UnsqueezeBackward0) \
  X(SqueezeBackward0) X(SqueezeBackward1) X(SqueezeBackward2) X(TBackward0) X(TransposeBackward0)          \
  X(PermuteBackward0) X(ExpandBackward0) X(SliceBackward0) X(SplitBackward0) X(SplitWithSizesBackward0)    \
  X(SelectBackward0) X(UnbindBackward0) X(CloneBackward0) X(ToCopyBackward0) X(EmbeddingBackward0)         \
  X(CatBackward0) X(NegBackward0) X(AddBackward0) X(SubBackward0) X(MulBackward0) X(MulBackward1)          \
  X(DivBackward0) X(SiluBackward0) X(GeluBackward0) X(ReluBackward0) X(SigmoidBackward0) X(TanhBackward0)  \
  X(NativeLayerNormBackward0) X(FusedRmsNormBackward0) X(PowBackward0) X(HardswishBackward0)               \
  X(ScaledDotProductFlashAttentionForCpuBackward0) X(ScaledDotProductFlashAttentionBackward0)              \
  X(ScaledDotProductEfficientAttentionBackward0) X(ScaledDotProductCudnnAttentionBackward0)
// clang-format on

enum class Known : int8_t {
  kOther,
#define MEMKERN_NAME(N) k##N,
  MEMKERN_OPERATIONS(MEMKERN_NAME)
#undef MEMKERN_NAME
};

// An operation: a row of each table, by the name that users.operation gives.
struct Operation {
  std::string name;
  Known known = Known::kOther;
  bool is_leaf = false;
  bool has_own_type = false;  // one of torch's own nodes, or a Python function's (packed.is_last_use)
  std::unique_ptr<Rule> rule;
  User user;
  CodecPtr codec;
  std::vector<Getter> saved;
  // What data_needs.py, users.py and attention.py ask about names.
  bool is_seen_through, is_copy, is_mean, is_picking, is_log_softmax, is_attention, bears_coarse_result;
  bool has_mask, has_jumps, is_glu, asks_python;
  std::optional<double> tail;
};

inline std::unordered_map<std::string, std::unordered_map<std::string, Getter>> g_getters;

template <class N, SavedVariable N::* kMember>
void saved_one(Node* node, std::vector<const SavedVariable*>& found) {
  found.push_back(&(static_cast<N*>(node)->*kMember));
}

template <class N, std::vector<SavedVariable> N::* kMember>
void saved_list(Node* node, std::vector<const SavedVariable*>& found) {
  for (const auto& each : static_cast<N*>(node)->*kMember) found.push_back(&each);
}

inline PyObject* object_of(Node* node) { return node->pyobj_slot()->load_pyobj(); }

inline void saved_by_python(Node* node, std::vector<const SavedVariable*>& found) {
  auto* object = reinterpret_cast<THPFunction*>(object_of(node));
  if (!object || object->has_freed_buffers) return;
  for (const auto& each : object->saved_variables) found.push_back(&each);
}

inline void fill_getters() {
#define SAVED(N, A) g_getters[#N]["_saved_" #A] = &saved_one<gen::N, &gen::N::A##_>;
#define SAVED_LIST(N, A) g_getters[#N]["_saved_" #A] = &saved_list<gen::N, &gen::N::A##_>;
#include "saved/nodes.inc"
#undef SAVED
#undef SAVED_LIST
}

inline Getter getter(const std::string& operation, std::string name) {
  if (name == "saved_tensors") return saved_by_python;
  if (name.rfind("_saved_", 0) != 0) name = "_saved_" + name;
  auto found = g_getters.find(operation);
  if (found == g_getters.end()) return nullptr;
  auto it = found->second.find(name);
  return it == found->second.end() ? nullptr : it->second;
}

inline Attribute attribute(const std::string& operation, std::string name) {
  Attribute a;
  a.is_named = !name.empty();
  a.is_optional = a.is_named && name[0] == '*';
  if (a.is_optional) name.erase(0, 1);
  if (a.is_named) a.get = getter(operation, name);
  return a;
}

CodecPtr to_codec(const py::object& codec);  // codecs.h

inline std::vector<Getter> getters(const std::string& operation, const py::handle& names) {
  std::vector<Getter> found;
  for (auto each : names) {
    if (Getter get = getter(operation, each.cast<std::string>())) found.push_back(get);
  }
  return found;
}

inline std::unique_ptr<Rule> to_rule(const std::string& name, const py::object& given) {
  if (given.is_none()) return nullptr;
  auto rule = std::make_unique<Rule>();
  rule->kind = Kind(given.attr("kind").cast<int>());
  rule->is_rounding = given.attr("exactness").cast<std::string>() == "rounding";
  rule->is_uncoded = given.attr("uncoded").cast<bool>();
  py::object inputs = given.attr("inputs");
  rule->takes_any = inputs.is_none();
  if (!rule->takes_any) {
    for (auto each : inputs) rule->inputs.push_back(attribute(name, each.cast<std::string>()));
  }
  for (auto each : given.attr("extra")) rule->extra.push_back(attribute(name, each.cast<std::string>()));
  rule->make = given.attr("make");
  return rule;
}

inline Known known_operation(const std::string& name) {
  static const std::unordered_map<std::string, Known> known = {
#define MEMKERN_NAME(N) {#N, Known::k##N},
      MEMKERN_OPERATIONS(MEMKERN_NAME)
#undef MEMKERN_NAME
  };
  auto found = known.find(name);
  return found == known.end() ? Known::kOther : found->second;
}

// Of one of torch's own nodes, or of a Python function; the tables are asked once for each.
inline Operation* make_operation(const std::string& name, bool is_python, bool has_own_type) {
  auto* op = new Operation;  // of each type of node; never freed
  op->name = name, op->has_own_type = has_own_type;
  py::dict facts = call("facts", name);
  auto is = [&](const char* fact) { return facts[fact].cast<bool>(); };
  if (!is_python) op->known = known_operation(name);
  op->rule = to_rule(name, facts["rule"]);
  py::object user = facts["user"];
  static const char* const kKinds[] = {"product", "smooth", "linear", "singular"};
  auto kind = user.attr("kind").cast<std::string>();
  op->user.kind = UserKind(std::find(kKinds, kKinds + 4, kind) - kKinds);
  op->user.coded = getters(name, user.attr("coded"));
  op->user.shape = getters(name, user.attr("shape"));
  op->codec = to_codec(facts["codec"]);
  if (is_python) {
    op->saved.push_back(saved_by_python);
  } else if (auto found = g_getters.find(name); found != g_getters.end()) {
    for (auto& each : found->second) op->saved.push_back(each.second);
  }
  op->is_seen_through = is("is_seen_through"), op->is_copy = is("is_copy"), op->is_mean = is("is_mean");
  op->is_picking = is("is_picking"), op->is_log_softmax = is("is_log_softmax");
  op->is_attention = is("is_attention"), op->bears_coarse_result = is("bears_coarse_result");
  op->has_mask = is("has_mask"), op->has_jumps = is("has_jumps");
  op->is_glu = is("is_glu"), op->asks_python = is("asks_python");
  if (!facts["tail"].is_none()) op->tail = facts["tail"].cast<double>();
  return op;
}

inline bool is_named_as_its_type(PyObject* object, Node* node) {
  std::string type = Py_TYPE(object)->tp_name, name = node->name();
  auto last = [](const std::string& text, char mark) { return text.substr(text.rfind(mark) + 1); };
  return last(type, '.') == last(name, ':');
}

// users.operation: by the node's C++ class, and of Python functions by their class.
inline Operation* operation(Node* node) {
  static ska::flat_hash_map<void*, Operation*> by_class;  // by the table of virtual functions
  static ska::flat_hash_map<PyTypeObject*, Operation*> by_type;
  void* table = *reinterpret_cast<void**>(node);
  auto known = by_class.find(table);
  if (known != by_class.end() && known->second) return known->second;
  if (known == by_class.end()) {
    py::object object = node_object(node);
    if (!PyObject_TypeCheck(object.ptr(), &THPFunctionType)) {
      auto* op = make_operation(node->name(), false, is_named_as_its_type(object.ptr(), node));
      op->is_leaf = dynamic_cast<ag::AccumulateGrad*>(node) != nullptr;
      return by_class[table] = op;
    }
    by_class[table] = nullptr;  // of all Python functions
  }
  py::object object = node_object(node);
  auto it = by_type.find(Py_TYPE(object.ptr()));
  if (it != by_type.end()) return it->second;
  auto name = call("own_function", object).cast<std::string>();
  Py_INCREF(Py_TYPE(object.ptr()));  // a later class must not get its address
  return by_type[Py_TYPE(object.ptr())] =
             make_operation(name, true, is_named_as_its_type(object.ptr(), node));
}

inline bool is_leaf(Node* node) { return operation(node)->is_leaf; }

inline const Tensor& variable_of(Node* leaf) { return static_cast<ag::AccumulateGrad*>(leaf)->variable; }

// ---- edges

// Output nr of a node; the graph holds the node. None: an input that needs no gradient.
struct Edge {
  Node* node = nullptr;
  uint32_t nr = 0;
  explicit operator bool() const { return node != nullptr; }
  bool operator==(const Edge& other) const { return node == other.node && nr == other.nr; }
  const ag::InputMetadata& about() const { return node->input_metadata(nr); }
  ScalarType dtype() const { return about().dtype().toScalarType(); }
  at::Device device() const { return about().device(); }
  at::DimVector shape() const {
    at::DimVector sizes;
    for (const auto& each : about().shape_as_dim_vector())
      sizes.push_back(each.guard_int(__FILE__, __LINE__));
    return sizes;
  }
  int64_t numel() const {
    auto sizes = shape();
    return c10::multiply_integers(sizes);
  }
};

inline Edge input(Node* node, size_t i) {
  const auto& edge = node->next_edge(i);
  return {edge.function.get(), edge.input_nr};
}

// ---- what is noted of a node

// A node's sequence number is its thread's own, and no address: that may be another node's later.
struct NodeKey {
  uint64_t thread, seq;
  explicit NodeKey(Node* node) : thread(node->thread_id()), seq(node->sequence_nr()) {}
  bool operator==(const NodeKey& other) const { return thread == other.thread && seq == other.seq; }
};

struct NodeKeyHash {
  size_t operator()(const NodeKey& key) const { return (key.seq * 0x9E3779B97F4A7C15u) ^ (key.thread << 17); }
};

constexpr uint64_t kNever = uint64_t{1} << 62;  // sequence numbers of AccumulateGrad are larger

struct Notes {
  Node* node = nullptr;
  int8_t state = -1, elements = -1;  // of gradients that arrive, once undecided.py has looked
  int64_t built = -1;                // built.py
  int8_t scores = 0;                 // attention.py
};

// Of dead nodes, too, as a node does not say when it is freed: when there are too many, those are forgotten
// that nobody has asked for while as many others were noted. Both take 12 MB in the end.
inline ska::flat_hash_map<NodeKey, Notes, NodeKeyHash> g_notes, g_old_notes;
constexpr size_t kMostNotes = size_t{1} << 15;

inline const Notes* known_notes(Node* node) {
  for (const auto* notes : {&g_notes, &g_old_notes}) {
    auto found = notes->find(NodeKey(node));
    if (found != notes->end() && found->second.node == node) return &found->second;
  }
  return nullptr;
}

inline Notes& notes_of(Node* node) {
  Notes& notes = g_notes[NodeKey(node)];
  if (notes.node == node) return notes;
  notes = {node};
  auto old = g_old_notes.find(NodeKey(node));
  if (old != g_old_notes.end() && old->second.node == node) notes = old->second;
  return notes;
}

inline void forget_old_notes() {
  if (g_notes.size() < kMostNotes) return;
  g_old_notes = std::move(g_notes);
  g_notes.clear();
}

}  // namespace memkern::saved
