// attention.py: for what attention has saved codes would be too coarse, and when its forward pass is to run
// again.
#pragma once

#include "bases.h"

namespace memkern::saved {

struct Attention {
  double dropout;
  bool is_causal;
  std::optional<double> scale;
};

template <class N> Attention attention_of_class(Node* node) {
  auto* own = static_cast<N*>(node);
  return {own->dropout_p, own->is_causal, own->scale};
}

inline Attention attention_of(Node* node, const Operation& op) {
  switch (op.known) {
    MEMKERN_CASE(ScaledDotProductFlashAttentionBackward0)
        : return attention_of_class<gen::ScaledDotProductFlashAttentionBackward0>(node);
    MEMKERN_CASE(ScaledDotProductEfficientAttentionBackward0)
        : return attention_of_class<gen::ScaledDotProductEfficientAttentionBackward0>(node);
    MEMKERN_CASE(ScaledDotProductCudnnAttentionBackward0)
        : return attention_of_class<gen::ScaledDotProductCudnnAttentionBackward0>(node);
    default:
      return attention_of_class<gen::ScaledDotProductFlashAttentionForCpuBackward0>(node);
  }
}

inline bool is_saved_as(Node* node, const Operation& op, const Value& value, const char* name) {
  return has_saved(node, {getter(op.name, name)}, value);
}

// Root mean square of the norms of rows.
inline double row_norm(const Tensor& x) {
  return norm_of(x.to(at::kFloat)) / std::sqrt(static_cast<double>(x.numel() / x.size(-1)));
}

// Of a few queries of each head, evenly over the sequence.
inline Tensor probabilities(Node* node, const Operation& op, const Tensor& query, const Tensor& key,
                            double scale) {
  const auto& constants = Constants::get();
  int64_t length = query.size(-2), step = (length + constants.sample - 1) / constants.sample;
  // From the middle: the first row of a causal mask stands for itself alone.
  Tensor rows = at::arange(step / 2, length, step, at::TensorOptions().dtype(at::kLong));
  Tensor some = query.index_select(-2, rows).to(at::kFloat) * scale;
  // Grouped-query attention: heads share their keys.
  Tensor grouped = some.reshape({key.size(0), key.size(1), -1, key.size(-1)});
  std::vector<int64_t> shape(some.sizes().begin(), some.sizes().end());
  shape.back() = -1;
  Tensor scores = at::matmul(grouped, key.to(at::kFloat).transpose(-1, -2)).view(shape);
  if (attention_of(node, op).is_causal) {
    Tensor keys = at::arange(key.size(-2), at::TensorOptions().dtype(at::kLong));
    scores = scores.masked_fill(keys > rows.unsqueeze(1), -std::numeric_limits<double>::infinity());
  } else if (auto masks = saved_by(node, getter(op.name, "attn_mask")); masks && !masks->empty()) {
    Tensor mask = masks->front()->tensor(nullptr);
    if (mask.size(-2) > 1) mask = mask.index_select(-2, rows);
    scores = mask.scalar_type() == at::kBool
                 ? scores.masked_fill(mask.logical_not(), -std::numeric_limits<double>::infinity())
                 : scores + mask;
  }
  return scores.softmax(-1).nan_to_num_(0.0);  // rows that see nothing
}

enum Scores : int8_t { kNotLookedAt, kSmall, kSure, kLarge };

// Elsewhere than on a CPU asking would wait for the device: there every forward pass runs again.
inline Scores look_at_scores(Node* node, const Operation& op) {
  const auto& constants = Constants::get();
  auto queries = saved_by(node, getter(op.name, "query")), keys = saved_by(node, getter(op.name, "key"));
  bool is_there = queries && keys && !queries->empty() && !keys->empty();
  if (!Edge{node, 0}.device().is_cpu() || !is_there) return kSure;
  Tensor query = queries->front()->tensor(nullptr), key = keys->front()->tensor(nullptr);
  if (is_fake(query) || is_fake(key) || !query.numel() || !key.numel()) return kSmall;  // before training
  double root = std::sqrt(static_cast<double>(query.size(-1)));
  double scale = attention_of(node, op).scale.value_or(1 / root);
  double deviation = row_norm(query) * row_norm(key) * std::abs(scale) / root;
  if (!(deviation <= constants.largest_score_deviation)) return kLarge;
  Tensor p = probabilities(node, op, query, key, scale);
  Tensor squares = p.square().sum(-1, true);
  double gradient = p.square().mul(at::rsub(p * 2, 1) + squares).sum().item().toDouble();
  double most = constants.largest_sureness * constants.largest_sureness * gradient;
  return squares.sum().item().toDouble() <= most ? kSmall : kSure;
}

inline Scores scores_of(Node* node, const Operation& op) {
  int8_t known = notes_of(node).scores;
  if (known != kNotLookedAt) return Scores(known);
  Scores found = look_at_scores(node, op);
  notes_of(node).scores = found;
  return found;
}

// Whether codes would be too coarse: of queries and keys with large scores, and with dropout.
inline bool stays_exact(Node* node, const Operation& op, const Value& waiting) {
  if (!op.is_attention) return false;
  if (attention_of(node, op).dropout > 0) return true;
  bool has_scores = is_saved_as(node, op, waiting, "query") || is_saved_as(node, op, waiting, "key");
  return has_scores && scores_of(node, op) == kLarge;
}

// Whether a waiting tensor is attention's output, to be computed again.
inline bool runs_again(Node* node, const Operation& op, const Value& waiting) {
  return op.is_attention && attention_of(node, op).dropout == 0 && is_saved_as(node, op, waiting, "output") &&
         scores_of(node, op) != kSmall;
}

}  // namespace memkern::saved
