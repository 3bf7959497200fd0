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

inline Tensor in_an_ops_dtype(const Tensor& x) {
  return has_codes(x.scalar_type()) || x.scalar_type() == at::kBool ? x : x.to(at::kFloat);
}

inline Tensor attention_statistics(const Tensor& query, const Tensor& key, const std::optional<Tensor>& mask,
                                   bool is_causal, double scale) {
  using Signature = Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&, bool, double, int64_t);
  return host_op<Signature, kAttentionStatistics>().call(query, key, mask, is_causal, scale,
                                                         Constants::get().sample);
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
  std::optional<Tensor> mask;
  bool is_causal = attention_of(node, op).is_causal;
  auto masks = is_causal ? std::nullopt : saved_by(node, getter(op.name, "attn_mask"));
  if (masks && !masks->empty()) mask = in_an_ops_dtype(masks->front()->tensor(nullptr));
  Tensor found = attention_statistics(in_an_ops_dtype(query), in_an_ops_dtype(key), mask, is_causal, scale);
  const double* sums = found.const_data_ptr<double>();
  double width = static_cast<double>(query.size(-1));
  double deviations = sums[0] / (query.numel() / width) * (sums[1] / (key.numel() / width));
  double deviation = std::sqrt(deviations) * std::abs(scale) / root;
  if (!(deviation <= constants.largest_score_deviation)) return kLarge;
  return sums[2] <= constants.largest_sureness * constants.largest_sureness * sums[3] ? kSmall : kSure;
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
