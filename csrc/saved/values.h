// saved_value.py: values that stand for saved tensors.
//
// All of this runs under the interpreter's lock, in the hooks that autograd calls and where it frees what it
// holds.
#pragma once

#include "data.h"

namespace memkern::saved {

struct Value;
using ValuePtr = c10::intrusive_ptr<Value>;

// Gives the tensors of other values, to one that is made of them.
struct Of {
  virtual Tensor operator()(Value& value) = 0;
  virtual ~Of() = default;
};

struct EdgeKey {
  NodeKey node;
  uint32_t nr;
  explicit EdgeKey(Edge edge) : node(edge.node), nr(edge.nr) {}
  bool operator==(const EdgeKey& other) const { return node == other.node && nr == other.nr; }
};

struct EdgeKeyHash {
  size_t operator()(const EdgeKey& key) const { return NodeKeyHash()(key.node) + key.nr; }
};

struct Registered {
  Node* node;
  Value* value;  // takes itself out of all edges when it is freed
};

inline ska::flat_hash_map<EdgeKey, Registered, EdgeKeyHash> g_registered;

enum class Type : int8_t { kLeaf, kComputed, kNumber, kStored, kWaiting, kUsed, kPython };

// The members are those of the class in Python.
struct Value : c10::intrusive_ptr_target {
  const Type type;
  ScalarType dtype, precision;
  bool is_rounded = false, is_clipped = false;
  int functions = 0, steps = 0;
  int64_t uses = 0;
  c10::SmallVector<EdgeKey, 1> keys;  // of the edges that it is registered at

  Value(Type type, ScalarType dtype, ScalarType precision) : type(type), dtype(dtype), precision(precision) {}
  ~Value() override { Value::release_resources(); }
  // Where there are weak references, it is destroyed with the last of them.
  void release_resources() override {
    for (const EdgeKey& key : keys) {
      auto found = g_registered.find(key);
      if (found != g_registered.end() && found->second.value == this) g_registered.erase(found);
    }
    keys.clear();
  }
  virtual bool is_lossy() const { return false; }
  virtual bool is_coarse() const { return false; }
  virtual bool is_managed() const { return false; }
  virtual int64_t block_size() const { return 0; }
  virtual bool is_fresh() const = 0;
  virtual Tensor tensor(Of* of) = 0;  // of: none for the tensors themselves, which takes no uses off
  virtual bool is_work() const { return true; }
  virtual bool is_at_hand() const { return false; }
  virtual void stay_exact() {}
};

inline ValuePtr share(Value* value) { return ValuePtr::reclaim_copy(value); }

inline ValuePtr registered(Edge edge) {
  auto found = g_registered.find(EdgeKey(edge));
  if (found == g_registered.end() || found->second.node != edge.node) return {};
  Value* value = found->second.value;
  // While its members are freed, whose owners may ask, it is still there.
  return c10::raw::intrusive_ptr::use_count(value) ? share(value) : ValuePtr();
}

inline bool is_registered(Edge edge) { return bool(registered(edge)); }

inline void register_value(Edge edge, Value& value) {
  if (edge.node->sequence_nr() > kNever) return;
  Registered& place = g_registered[EdgeKey(edge)];
  if (place.node == edge.node && place.value == &value) return;
  place = {edge.node, &value};
  value.keys.emplace_back(edge);
}

struct Leaf final : Value {
  Tensor leaf;
  uint32_t version;
  at::DimVector shape;
  at::Device device;
  Tensor variable;  // of which the leaf is the memory, else none
  mutable std::optional<bool> managed;

  explicit Leaf(const Tensor& x)
      : Value(Type::kLeaf, x.scalar_type(), x.scalar_type()),
        leaf(x),
        version(version_of(x)),
        device(x.device()) {
    if (is_plain(x)) shape = x.sizes();
  }
  // The leaf with the memory that it has now, whatever its .data is later.
  static ValuePtr as_it_is(const Tensor& x) {
    auto value = c10::make_intrusive<Leaf>(x.tensor_data());
    value->variable = x;
    return value;
  }
  bool is_managed() const override {
    if (!managed) managed = variable.defined() && saved::is_managed(variable);
    return *managed;
  }
  bool is_fresh() const override { return version_of(leaf) == version && is_present(leaf); }
  bool is_work() const override { return false; }
  bool is_at_hand() const override { return true; }
  Tensor tensor(Of*) override {
    check_version("a parameter or another leaf", version_of(leaf), version, leaf);
    bool has_shape = !is_plain(leaf) || leaf.sizes() == shape;  // a nested tensor's has symbols
    if (!has_shape || leaf.scalar_type() != dtype || leaf.device() != device)
      call("check_place", leaf, at::IntArrayRef(shape), dtype, py::cast(device));
    return leaf.tensor_data();
  }
};

using Function = std::function<Tensor(at::ArrayRef<Tensor>)>;

struct Computed final : Value {
  Function function;
  c10::SmallVector<ValuePtr, 3> inputs, bases;
  bool stays_exact = false;

  Computed(Function function, c10::SmallVector<ValuePtr, 3> inputs, ScalarType dtype, ScalarType precision,
           int cost)
      : Value(Type::kComputed, dtype, precision), function(std::move(function)) {
    make_of(std::move(inputs), cost);
  }
  // Is from now on the same as another value of its edge.
  void become(ValuePtr value) {
    function = [](at::ArrayRef<Tensor> x) { return x[0]; };
    precision = value->precision, is_rounded = value->is_rounded;
    make_of({std::move(value)}, 0);
  }
  void make_of(c10::SmallVector<ValuePtr, 3> values, int cost) {
    c10::SmallVector<ValuePtr, 3> found;
    functions = steps = 0;
    for (auto& value : values) {
      value->uses += 1;
      functions = std::max(functions, value->functions), steps = std::max(steps, value->steps);
      if (value->type != Type::kComputed || static_cast<Computed&>(*value).bases.empty()) {
        found.push_back(value);
      } else {
        auto& below = static_cast<Computed&>(*value).bases;
        found.append(below.begin(), below.end());
      }
    }
    functions += cost, steps += 1;
    inputs = std::move(values), bases = std::move(found);
  }
  template <class F> bool any(F&& is) const {
    return std::any_of(bases.begin(), bases.end(), [&](const ValuePtr& base) { return is(*base); });
  }
  bool is_lossy() const override {
    return any([](const Value& base) { return base.is_lossy(); });
  }
  bool is_coarse() const override {
    return any([](const Value& base) { return base.is_coarse(); });
  }
  bool is_managed() const override {
    return any([](const Value& base) { return base.is_managed(); });
  }
  bool is_fresh() const override {
    return !any([](const Value& base) { return !base.is_fresh(); });
  }
  int64_t block_size() const override {
    int64_t most = 0;
    for (auto& base : bases) most = std::max(most, base->block_size());
    return most;
  }
  void stay_exact() override {
    if (stays_exact) return;
    stays_exact = true;
    for (auto& value : inputs) value->stay_exact();
  }
  Tensor tensor(Of* of) override {
    c10::SmallVector<Tensor, 4> found;
    for (auto& value : inputs) found.push_back(of ? (*of)(*value) : value->tensor(nullptr));
    return function(found);
  }
};

struct Number final : Value {
  Tensor number;
  explicit Number(const Tensor& x) : Value(Type::kNumber, x.scalar_type(), x.scalar_type()), number(x) {}
  bool is_fresh() const override { return true; }
  bool is_work() const override { return false; }
  Tensor tensor(Of*) override { return number; }
};

// In place of a value whose last user has run (packed.py).
struct Used final : Value {
  Used() : Value(Type::kUsed, at::kFloat, at::kFloat) {}
  bool is_fresh() const override { return false; }
  Tensor tensor(Of*) override {
    call("raise_used");
    return {};
  }
};

// A value that Python made, such as attention's output that is computed again.
struct PythonValue final : Value {
  py::object object;
  explicit PythonValue(const py::object& value)
      : Value(Type::kPython, value.attr("dtype").cast<ScalarType>(),
              value.attr("precision").cast<ScalarType>()),
        object(value) {
    functions = value.attr("functions").cast<int>(), steps = value.attr("steps").cast<int>();
  }
  bool is(const char* name) const { return object.attr(name).cast<bool>(); }
  bool is_lossy() const override { return is("lossy"); }
  bool is_coarse() const override { return is("coarse"); }
  bool is_managed() const override { return is("managed"); }
  int64_t block_size() const override { return object.attr("block_size").cast<int64_t>(); }
  bool is_fresh() const override { return object.attr("fresh")().cast<bool>(); }
  Tensor tensor(Of* of) override;
  void stay_exact() override { object.attr("stay_exact")(); }
};

inline int64_t g_spared = 0;  // bytes that all live codes save
inline int64_t g_coded = 0;   // live values that are in codes, or have been

struct Stored final : Value {
  Data data;
  CodecPtr codec, codec_before;
  Layout layout;
  c10::VariableVersion counter;
  uint32_t version = 0;
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> source;
  int64_t offset = 0, spares = 0;
  bool coarse = false, managed, was_coded = false;

  Stored(const Tensor& x, ScalarType dtype, const CodecPtr& codec, const DestinationPtr& destination)
      : Value(Type::kStored, dtype, x.scalar_type()),
        data(leaves(x, destination) ? destination : nullptr),
        managed(saved::is_managed(x)) {
    watch(x);
    if (codec) encode(x, codec);
    // Hooks around ours know parameters by identity.
    if (!this->codec) hold(data.have_hooks() && !x.requires_grad() ? x : detached(x));
  }
  // What the model holds does not go to the host.
  static bool leaves(const Tensor& x, const DestinationPtr& destination) {
    return destination && (destination->hooks || !call("is_parameter", x).cast<bool>());
  }
  Tensor detached(const Tensor& x) const { return data.stay() ? x.tensor_data() : x.detach(); }
  ~Stored() override { Stored::release_resources(); }
  void release_resources() override {
    g_spared -= spares, g_coded -= was_coded;
    spares = 0, was_coded = false;
    data.clear(), source.reset(), codec = codec_before = nullptr;
    Value::release_resources();
  }
  void watch(const Tensor& x) {
    counter = x.unsafeGetTensorImpl()->version_counter(), version = version_of(x);
  }
  void hold(const Tensor& x, bool may_leave = true) {
    data.give({x}, may_leave);
    codec = codec_before = nullptr, precision = x.scalar_type(), coarse = false;
    g_spared -= spares, spares = 0;
  }
  void encode(const Tensor& x, const CodecPtr& given) {
    auto encoded = saved::encode(*given, x);
    if (!encoded) return;
    int64_t nbytes = 0;
    for (auto& each : encoded->data) nbytes += each.nbytes();
    data.give(std::move(encoded->data));
    codec = given, precision = dtype, coarse = encoded->is_coarse;
    layout = {at::DimVector(x.sizes()), at::DimVector(x.strides()), x.scalar_type()};
    g_spared -= spares, spares = x.nbytes() - nbytes, g_spared += spares;
    if (given->is_lossy && !was_coded) was_coded = true, ++g_coded;
    if (is_fake(x)) return;
    source.emplace(x.storage().getWeakStorageImpl());
    offset = x.storage_offset();
  }
  bool is_lossy() const override { return codec && codec->is_lossy; }
  bool is_coarse() const override { return coarse; }
  bool is_managed() const override { return managed; }
  int64_t block_size() const override { return is_lossy() ? codec->block_size : 0; }
  bool is_fresh() const override {
    return counter.current_version() == version && (!is_at_hand() || is_present(data.front()));
  }
  bool is_work() const override { return codec != nullptr; }
  bool is_at_hand() const override { return codec == nullptr && data.stay(); }
  void stay_exact() override { codec_before = nullptr; }
  Tensor tensor(Of*) override {
    Data::Tensors found = data.take();
    if (codec) return decode(*codec, found, layout, dtype);
    if (!data.have_hooks()) check_version("a tensor", counter.current_version(), version, found[0]);
    return found[0].scalar_type() == dtype ? found[0] : found[0].to(dtype);
  }
  // Goes back to the tensor itself, where its storage is held by somebody else anyway.
  void hold_if_alive(const std::vector<c10::StorageImpl*>& passing) {
    if (!codec || !source || data.have_hooks() || !is_fresh()) return;
    auto storage = source->lock();
    if (!storage || std::find(passing.begin(), passing.end(), storage.get()) != passing.end()) return;
    int64_t needed =
        at::detail::computeStorageNbytes(layout.shape, layout.stride, at::elementSize(layout.dtype), offset);
    if (storage->nbytes() < static_cast<size_t>(needed)) return;  // set_ would enlarge what was freed
    Tensor x = at::empty({0}, at::TensorOptions().dtype(layout.dtype).device(storage->device()));
    x.set_(c10::Storage(storage), offset, layout.shape, layout.stride);
    CodecPtr before = codec;
    hold(x, false);
    source.reset(), codec_before = before;
  }
  // Returns to codes: the other owner will free the tensor soon.
  void encode_again() {
    if (!codec_before || !is_fresh()) return;
    CodecPtr before = std::move(codec_before);
    codec_before = nullptr;
    encode(Tensor(data.front()), before);
  }
  void upgrade(const Tensor& x) {
    source.reset();
    watch(x);
    hold(detached(x));
  }
};

}  // namespace memkern::saved
