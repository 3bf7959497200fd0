// rules.py: the functions that compute an operation's output again. Those that are not here Python makes.
#pragma once

#include "packed.h"

namespace memkern::saved {

inline std::optional<int64_t> to_int(const std::optional<c10::SymInt>& size) {
  return size ? std::optional<int64_t>(size->guard_int(__FILE__, __LINE__)) : std::nullopt;
}
inline int64_t to_int(const c10::SymInt& size) { return size.guard_int(__FILE__, __LINE__); }

using Inputs = at::ArrayRef<Tensor>;

// Of one of torch's own nodes, by its class.
#define MEMKERN_CASE(N) case Known::k##N
#define MEMKERN_NODE(N) static_cast<gen::N*>(edge.node)

inline bool is_shaped(Known known) {
  switch (known) {
    MEMKERN_CASE(AliasBackward0)
        : MEMKERN_CASE(ViewBackward0)
        : MEMKERN_CASE(UnsafeViewBackward0)
        : MEMKERN_CASE(ReshapeAliasBackward0)
        : MEMKERN_CASE(UnsqueezeBackward0)
        : MEMKERN_CASE(SqueezeBackward0)
        : MEMKERN_CASE(SqueezeBackward1) : MEMKERN_CASE(SqueezeBackward2) : return true;
    default:
      return false;
  }
}

inline Function split_function(const Operation& op, Edge edge) {
  int64_t nr = edge.nr;
  if (op.known == Known::kSplitBackward0) {
    int64_t dim = MEMKERN_NODE(SplitBackward0)->dim, size = to_int(MEMKERN_NODE(SplitBackward0)->split_size);
    return [=](Inputs x) { return x[0].narrow(dim, nr * size, std::min(size, x[0].size(dim) - nr * size)); };
  }
  const auto& sizes = MEMKERN_NODE(SplitWithSizesBackward0)->split_sizes;
  int64_t dim = MEMKERN_NODE(SplitWithSizesBackward0)->dim, start = 0, size = to_int(sizes[nr]);
  for (int64_t i = 0; i < nr; ++i) start += to_int(sizes[i]);
  return [=](Inputs x) { return x[0].narrow(dim, start, size); };
}

inline Function view_function(const Operation& op, Edge edge) {
  if (is_shaped(op.known)) return [shape = edge.shape()](Inputs x) { return at::reshape(x[0], shape); };
  switch (op.known) {
    MEMKERN_CASE(TBackward0) : return [](Inputs x) { return at::t(x[0]); };
    MEMKERN_CASE(TransposeBackward0) : {
      int64_t first = MEMKERN_NODE(TransposeBackward0)->dim0, second = MEMKERN_NODE(TransposeBackward0)->dim1;
      return [=](Inputs x) { return at::transpose(x[0], first, second); };
    }
    MEMKERN_CASE(PermuteBackward0)
        : return [dims = MEMKERN_NODE(PermuteBackward0)->dims](Inputs x) { return at::permute(x[0], dims); };
    MEMKERN_CASE(ExpandBackward0) : return [shape = edge.shape()](Inputs x) { return x[0].expand(shape); };
    MEMKERN_CASE(SliceBackward0) : {
      auto* node = MEMKERN_NODE(SliceBackward0);
      return [dim = node->dim, start = to_int(node->start), end = to_int(node->end),
              step = to_int(node->step)](Inputs x) { return at::slice(x[0], dim, start, end, step); };
    }
    MEMKERN_CASE(SplitBackward0) : MEMKERN_CASE(SplitWithSizesBackward0) : return split_function(op, edge);
    MEMKERN_CASE(SelectBackward0) : {
      int64_t dim = MEMKERN_NODE(SelectBackward0)->dim, index = to_int(MEMKERN_NODE(SelectBackward0)->index);
      return [=](Inputs x) { return x[0].select(dim, index); };
    }
    default:
      return {};
  }
}

inline Function unary_function(const Operation& op, Edge edge) {
  switch (op.known) {
    MEMKERN_CASE(CloneBackward0) : return [](Inputs x) { return x[0]; };
    MEMKERN_CASE(NegBackward0) : return [](Inputs x) { return at::neg(x[0]); };
    MEMKERN_CASE(SiluBackward0) : return [](Inputs x) { return at::silu(x[0]); };
    MEMKERN_CASE(GeluBackward0)
        : return [kind = std::string(MEMKERN_NODE(GeluBackward0)->approximate)](Inputs x) {
            return at::gelu(x[0], kind);
          };
    MEMKERN_CASE(ReluBackward0) : return [](Inputs x) { return at::relu(x[0]); };
    MEMKERN_CASE(SigmoidBackward0) : return [](Inputs x) { return at::sigmoid(x[0]); };
    MEMKERN_CASE(TanhBackward0) : return [](Inputs x) { return at::tanh(x[0]); };
    MEMKERN_CASE(HardswishBackward0) : return [](Inputs x) { return at::hardswish(x[0]); };
    MEMKERN_CASE(MulBackward1)
        : return [number = MEMKERN_NODE(MulBackward1)->other](Inputs x) { return at::mul(x[0], number); };
    default:
      return {};
  }
}

inline bool is_given(const SavedVariable& saved) {
  auto raw = saved.get_raw_data();
  return saved.has_hooks() || (raw && raw->defined());
}

inline Function norm_function(const Operation& op, Edge edge) {
  ScalarType dtype = edge.dtype();
  if (op.known == Known::kFusedRmsNormBackward0) {
    return [dtype](Inputs x) {
      Tensor y = x[0].to(at::kFloat).mul(x[1]);
      return (x.size() > 2 ? y.mul_(x[2]) : y).to(dtype);
    };
  }
  bool has_weight = is_given(MEMKERN_NODE(NativeLayerNormBackward0)->weight_);
  return [dtype, has_weight](Inputs x) {
    Tensor y = x[0].to(at::kFloat).sub(x[1]).mul_(x[2]);
    if (has_weight) y = y.mul_(x[3]);
    if (x.size() - 3 > size_t{has_weight}) y = y.add_(x.back());
    return y.to(dtype);
  };
}

inline Function other_function(const Operation& op, Edge edge) {
  switch (op.known) {
    MEMKERN_CASE(EmbeddingBackward0) : return [](Inputs x) { return at::embedding(x[0], x[1]); };
    MEMKERN_CASE(CatBackward0)
        : return [dim = MEMKERN_NODE(CatBackward0)->dim](Inputs x) { return at::cat(x, dim); };
    MEMKERN_CASE(AddBackward0)
        : return [alpha = MEMKERN_NODE(AddBackward0)->alpha](Inputs x) { return at::add(x[0], x[1], alpha); };
    MEMKERN_CASE(SubBackward0)
        : return [alpha = MEMKERN_NODE(SubBackward0)->alpha](Inputs x) { return at::sub(x[0], x[1], alpha); };
    MEMKERN_CASE(MulBackward0) : return [](Inputs x) { return at::mul(x[0], x[1]); };
    MEMKERN_CASE(DivBackward0) : return [](Inputs x) { return at::div(x[0], x[1]); };
    MEMKERN_CASE(NativeLayerNormBackward0)
        : MEMKERN_CASE(FusedRmsNormBackward0) : return norm_function(op, edge);
    default:
      return {};
  }
}

// Makes Python's function; None where the rule is not for this edge or the node is freed.
inline Function python_function(const Rule& rule, Edge edge) {
  py::object made = call("make", rule.make, node_object(edge.node), edge.nr);
  if (made.is_none()) return {};
  return [made](Inputs x) { return to_tensor(made(*to_tuple(x))); };
}

// The function that computes an edge anew; none where the rule is not for it.
inline Function function_of(const Operation& op, Edge edge) {
  if (op.known == Known::kToCopyBackward0) {
    Edge source = input(edge.node, 0);
    if (source && source.device() != edge.device()) return {};
    return [dtype = edge.dtype()](Inputs x) { return x[0].to(dtype); };
  }
  for (auto* make : {view_function, unary_function, other_function}) {
    if (Function found = make(op, edge)) return found;
  }
  return python_function(*op.rule, edge);
}

}  // namespace memkern::saved
