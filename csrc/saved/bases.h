// bases.py: what a tensor is a view or a copy of, up the graph, and the operation that made that.
#pragma once

#include <ATen/TensorUtils.h>

#include "derive.h"

namespace memkern::saved {

// storage.version of 0: once changed in place, x need not be what its operation made of its inputs.
inline Kind reach_of(const Tensor& x) { return version_of(x) > 0 ? Kind::kView : Kind::kFunction; }

inline bool has_shape_of(const Tensor& x, Edge edge) { return x.sizes() == at::IntArrayRef(edge.shape()); }

inline Tensor viewed(Edge source, const Tensor& x) {
  auto shape = source.shape();
  if (c10::multiply_integers(shape) != x.numel() || !at::detail::computeStride(x.sizes(), x.strides(), shape))
    return {};
  return x.view(shape);
}

inline Tensor unexpanded(Edge source, Tensor x) {
  auto shape = source.shape();
  if (x.dim() < static_cast<int64_t>(shape.size())) return {};
  while (x.dim() > static_cast<int64_t>(shape.size())) x = x.select(0, 0);
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    if (shape[dim] != x.size(dim)) x = x.narrow(dim, 0, shape[dim]);
  }
  return x;
}

inline Tensor before_the_cast(Edge source, const Tensor& x) {
  if (source.device() != x.device() || !at::isFloatingType(source.dtype()) || is_float8(x.scalar_type()))
    return {};  // float8 is coarser than codes, which the source may have for other users
  // Of a coarser dtype: its values, in it, so that nobody further up takes them for those of a finer one.
  if (finer(source.dtype(), x.scalar_type())) return x;
  return finer(x.scalar_type(), source.dtype()) ? x.to(source.dtype()) : Tensor();
}

// From an operation's output, a view or copy of the whole input, back to the input; undefined where it is no
// view.
inline Tensor back(const Operation& op, Edge edge, Edge source, const Tensor& x) {
  if (is_shaped(op.known)) return viewed(source, x);
  switch (op.known) {
    MEMKERN_CASE(TBackward0) : return x.t();
    MEMKERN_CASE(TransposeBackward0)
        : return x.transpose(MEMKERN_NODE(TransposeBackward0)->dim0, MEMKERN_NODE(TransposeBackward0)->dim1);
    MEMKERN_CASE(PermuteBackward0) : {
      const auto& dims = MEMKERN_NODE(PermuteBackward0)->dims;
      std::vector<int64_t> inverse(dims.size());
      for (size_t i = 0; i < dims.size(); ++i) inverse[(dims[i] + x.dim()) % x.dim()] = i;
      return x.permute(inverse);
    }
    MEMKERN_CASE(ExpandBackward0) : return unexpanded(source, x);
    MEMKERN_CASE(CloneBackward0) : return x;
    MEMKERN_CASE(ToCopyBackward0) : return before_the_cast(source, x);
    default:
      return {};
  }
}

// The furthest edge up the graph whose whole value x holds, and x in its shape.
inline std::pair<Edge, Tensor> base_of(Edge edge, Tensor x, bool views_only) {
  while (true) {
    const Operation& op = *operation(edge.node);
    if (!op.rule || edge.node->num_outputs() == 0) break;
    if (views_only && op.rule->kind != Kind::kView) break;
    Edge source = input(edge.node, 0);
    if (!source || is_leaf(source.node)) break;
    Tensor y = back(op, edge, source, x);
    if (!y.defined() || !has_shape_of(y, source)) break;
    edge = source, x = std::move(y);
  }
  return {edge, std::move(x)};
}

// The codes for the data of an edge, by the operation that computed them, behind views and copies; none: no
// codes.
inline CodecPtr codec_of(Edge edge) {
  const Operation* op;
  while ((op = operation(edge.node))->is_seen_through) {
    edge = input(edge.node, 0);
    if (!edge) return nullptr;
  }
  return op->codec;
}

}  // namespace memkern::saved
