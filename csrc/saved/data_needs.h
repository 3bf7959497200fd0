// users.py and data_needs.py: what an operation allows, and what the data of a tensor ask of its codes.
#pragma once

#include "attention.h"

namespace memkern::saved {

// ---- users.py

inline bool is_square(Node* node, const Operation& op) {
  if (op.known == Known::kPowBackward0) return static_cast<gen::PowBackward0*>(node)->exponent.equal(2);
  return op.known == Known::kMulBackward0 && node->next_edge(0) == node->next_edge(1);
}

// The row of a node; of a power it depends on the exponent, of a division on the divisor.
inline const User& user_of(Node* node, const Operation& op) {
  static const User &unknown = *new User, &scaled = *new User{UserKind::kLinear, {}, {}};
  static const User& smooth = *new User{UserKind::kSmooth, {}, {}};
  if (op.known == Known::kPowBackward0) {
    const at::Scalar& exponent = static_cast<gen::PowBackward0*>(node)->exponent;
    if (exponent.isComplex()) return unknown;
    double number = exponent.toDouble();
    if (!(number >= 1) || number != std::floor(number)) return unknown;
    static const double most = call("most_exponent").cast<double>();
    return number <= most ? op.user : smooth;
  }
  if (op.known != Known::kDivBackward0 || node->next_edge(1).function) return op.user;
  try {
    Tensor other = static_cast<gen::DivBackward0*>(node)->other_.unpack(node->getptr());
    return other.defined() && other.dim() == 0 ? scaled : op.user;
  } catch (const c10::Error&) {  // freed
    return op.user;
  }
}

inline bool is_mean_of_many(Node* node, const Operation& op) {
  constexpr int64_t kMany = 32;
  if (!op.is_mean) return false;
  Edge source = input(node, 0);
  return source && source.numel() >= kMany * Edge{node, 0}.numel();
}

// How large the gradient may be at a node's inputs, given that at its output.
inline int passed_on(const User& row, Node* node, const Operation& op, int state) {
  if (row.kind == UserKind::kProduct) return kBounded;
  if (row.kind == UserKind::kSingular) return kAmplified;
  if (state < kReduced) return state;
  if (state == kReduced && is_square(node, op)) return kBounded;
  if (state == kAmplified && is_mean_of_many(node, op)) return kReduced;
  return state;
}

inline int spread(const User& row, const Operation& op, int elements) {
  if (op.is_picking) return kSparse;
  return row.kind != UserKind::kLinear || op.is_mean ? kDense : elements;
}

// ---- data_needs.py

// What is coded in place of x: (x - mean) * inverse; no inverse for 1.
struct Normalization {
  Tensor mean, inverse;
};

// The mean over tokens, where it is too large for codes of the values themselves. On a CPU only.
inline std::optional<Normalization> token_mean(const Tensor& x, at::IntArrayRef dims) {
  if (!is_on_cpu(x) || !has_codes(x.scalar_type())) return std::nullopt;
  Tensor mean = x.mean(dims, true, at::kFloat);
  double tokens = static_cast<double>(x.numel() / mean.numel());
  double whole = at::linalg_vector_norm(x, 2, std::nullopt, false, at::kFloat).item().toDouble();
  double of_means = norm_of(mean), largest = Constants::get().largest_mean;
  double energy = whole * whole, of_mean = tokens * (of_means * of_means);
  if (!(of_mean > largest * largest * (energy - of_mean))) return std::nullopt;
  return Normalization{mean, {}};
}

inline std::optional<Normalization> mean_of_attention(Node* node, const Tensor& data,
                                                      bool before_views = false) {
  if (!operation(node)->is_attention || data.dim() < 2) return std::nullopt;
  if (!before_views) return token_mean(data, {-2});
  std::vector<int64_t> dims(data.dim() - 1);
  std::iota(dims.begin(), dims.end(), 0);
  return token_mean(data, dims);
}

// The length of the runs in x's memory that belong together, given the same by dimension.
inline int64_t run_of(const Tensor& x, at::IntArrayRef shared) {
  std::vector<int64_t> dims;
  for (int64_t dim = 0; dim < x.dim(); ++dim) {
    if (x.size(dim) > 1) dims.push_back(dim);
  }
  std::stable_sort(dims.begin(), dims.end(), [&](int64_t a, int64_t b) { return x.stride(a) < x.stride(b); });
  int64_t length = 1;
  for (int64_t dim : dims) {
    length *= shared[dim];
    if (shared[dim] < x.size(dim)) break;
  }
  return length;
}

inline bool is_product_of_rows(Node* node, const Operation& op) {
  if (op.known != Known::kMulBackward0) return false;
  bool is_one[2];
  for (int i = 0; i < 2; ++i) {
    Edge source = input(node, i);
    if (!source || is_leaf(source.node)) return false;
    auto shape = source.shape();
    if (shape.empty()) return false;
    is_one[i] = shape.back() == 1;
  }
  return is_one[0] != is_one[1];
}

// The block size for which no block of x's codes holds values of several rows of a norm; none if there is
// none.
inline std::optional<int64_t> block_size_for(Node* node, const Operation& op, const Tensor& x) {
  const auto& constants = Constants::get();
  int64_t dims = 1;
  if (op.known == Known::kFusedRmsNormBackward0) {
    dims = static_cast<int64_t>(static_cast<gen::FusedRmsNormBackward0*>(node)->normalized_shape.size());
  } else if (!is_square(node, op) && !is_product_of_rows(node, op)) {
    return constants.block_size;
  }
  int64_t first = x.dim() - dims;
  if (first <= 0) return constants.block_size;
  std::vector<int64_t> shared(x.sizes().begin(), x.sizes().end());
  std::fill(shared.begin(), shared.begin() + first, 1);
  int64_t size = std::gcd(run_of(x, shared), constants.block_size);
  if (size >= constants.smallest_block) return size;
  if (!is_on_cpu(x)) return std::nullopt;
  Tensor largest = x.abs();  // in steps, each of which frees the one before
  largest = largest.amax(-1);
  largest = largest.to(at::kFloat);
  double least = largest.amin().item().toFloat(), most = largest.amax().item().toFloat();
  return most <= constants.largest_spread * least ? std::optional(constants.block_size) : std::nullopt;
}

// Whether all values are where a function's derivative is so small that codes of x are too coarse for it.
inline bool is_in_tail(Node* node, const Operation& op, const Tensor& x) {
  if (!op.tail || !is_on_cpu(x) || x.numel() == 0) return false;
  bool is_pair = op.is_glu && !has_shape_of(x, {node, 0});
  return (is_pair ? x.chunk(2, -1)[0] : x).amax().item().toDouble() < *op.tail;  // of gate and up
}

// mean.abs() * inverse is larger somewhere, or inverse.amax() > most_spread * inverse.amin(), or one is NaN.
struct Spread {
  bool has_large_mean = false, is_wide = false;
  Spread(const Tensor& mean, const Tensor& inverse, float largest, float most_spread) {
    Tensor means = mean.contiguous(), inverses = inverse.contiguous();
    const float *m = means.const_data_ptr<float>(), *d = inverses.const_data_ptr<float>();
    float least = std::numeric_limits<float>::infinity(), most = -least;
    bool has_nan = false;
    for (int64_t i = 0; i < inverses.numel(); ++i) {
      has_large_mean |= std::abs(m[i]) * d[i] > largest;
      has_nan |= d[i] != d[i];
      least = std::min(least, d[i]);
      most = std::max(most, d[i]);
    }
    is_wide = has_nan || !(most <= most_spread * least);
  }
};

// For a layer norm's input, by the norm's statistics, if a mean is large or a block of codes would hold
// values of large and of small deviation; elsewhere than on a CPU always.
inline std::optional<Normalization> of_layer_norm(Node* node, const Operation& op, const Tensor& x) {
  const auto& constants = Constants::get();
  if (is_fake(x)) return std::nullopt;
  auto means = saved_by(node, getter(op.name, "result1")),
       inverses = saved_by(node, getter(op.name, "result2"));
  if (!means || !inverses || means->empty() || inverses->empty()) return std::nullopt;
  Tensor mean = means->front()->tensor(nullptr).to(at::kFloat);
  if (mean.numel() == 0) return std::nullopt;
  Tensor inverse = inverses->front()->tensor(nullptr).to(at::kFloat);
  if (x.is_cpu() && mean.sizes() == inverse.sizes()) {
    Spread found(mean, inverse, static_cast<float>(constants.largest_deviations),
                 static_cast<float>(constants.largest_spread));
    std::vector<int64_t> shared;
    for (int64_t dim = 0; dim < x.dim(); ++dim) shared.push_back(x.size(dim) / mean.size(dim));
    bool is_whole = run_of(x, shared) % constants.block_size == 0;
    if (!found.has_large_mean && (is_whole || !found.is_wide)) return std::nullopt;
  }
  return Normalization{mean, inverse};
}

struct DataNeed {
  Need need;
  std::optional<Normalization> normalization;
};

inline DataNeed from_python(const py::tuple& found) {
  py::object given = found[0], normalization = found[1];
  auto is = [&](const char* name) { return given.attr(name).cast<bool>(); };
  DataNeed result{
      {is("exact"), is("rounded"), is("clipped"), is("coarse"), given.attr("block_size").cast<int64_t>()},
      {}};
  if (!normalization.is_none()) {
    py::object inverse = normalization.attr("inverse");
    result.normalization = {to_tensor(normalization.attr("mean")),
                            inverse.is_none() ? Tensor() : to_tensor(inverse)};
  }
  return result;
}

// What a node that may get codes of x needs for these data, and what is coded in place of x.
inline DataNeed need_of(Node* node, const Operation& op, const Tensor& x, const ValuePtr& waiting) {
  if (op.asks_python) return from_python(call("need_of", node_object(node), x, waiting));
  if (is_in_tail(node, op, x) || stays_exact(node, op, *waiting)) return {Need::same_bits(), {}};
  auto size = block_size_for(node, op, x);
  if (!size) return {Need::same_bits(), {}};
  Need need{false};
  need.is_coarse = user_of(node, op).kind != UserKind::kSmooth || op.bears_coarse_result;
  need.block_size = *size;
  if (op.known == Known::kNativeLayerNormBackward0) return {need, of_layer_norm(node, op, x)};
  bool is_shown =
      op.is_attention && (is_saved_as(node, op, *waiting, "key") || is_saved_as(node, op, *waiting, "value"));
  return {need, is_shown ? mean_of_attention(node, x) : std::nullopt};
}

}  // namespace memkern::saved
