// needs.py and derive.py: derives the value of an edge from values that are stored.
#pragma once

#include "functions.h"

namespace memkern::saved {

enum class Use : int8_t { kExact, kCoded, kShape };

struct Need {
  bool is_exact, is_rounded = true, is_clipped = false, is_coarse = true;
  int64_t block_size = Constants::get().block_size;

  static Need same_bits() { return {true, false}; }
  static Need exact() { return {true}; }
  static Need of_use(Use use, bool exactly) {
    if (use == Use::kExact) return same_bits();
    if (exactly) return exact();
    return {false, true, use == Use::kShape};
  }
  bool is_met_by(const Value& value, std::optional<ScalarType> dtype) const {
    if (!value.is_fresh()) return false;
    bool lossy = value.is_lossy();
    return !(is_exact && lossy) && (is_rounded || !value.is_rounded) && (is_clipped || !value.is_clipped) &&
           (is_coarse || !value.is_coarse()) && value.block_size() <= block_size &&
           (lossy || finer(value.precision, dtype.value_or(value.dtype)));
  }
};

constexpr int kMostSteps = 40, kMostFunctions = 12;

class Derivation {
 public:
  Derivation(Need need, Kind reach, bool beside_codes)
      : need_(need), reach_(reach), beside_codes_(beside_codes) {}

  // steps: the rules that are left to try one after another; functions: those that compute something.
  ValuePtr value(Edge edge, std::optional<ScalarType> dtype, int steps = kMostSteps,
                 int functions = kMostFunctions) {
    if (ValuePtr value = registered(edge)) {
      bool is_reached = reach_ != Kind::kView || value->type != Type::kComputed;
      if (need_.is_met_by(*value, dtype) && is_reached) {
        if (need_.is_exact) value->stay_exact();
        return value;
      }
    }
    const Operation& op = *operation(edge.node);
    if (!op.rule || steps == 0 || functions < op.rule->cost() || !allows(*op.rule)) return {};
    for (const auto& each : failed_) {
      if (each.edge == edge && each.dtype == dtype && functions <= each.functions) return {};
    }
    ValuePtr value = op.rule->kind == Kind::kView
                         ? seen_through(op, edge, dtype, steps, functions)
                         : applied(op, edge, dtype, steps, functions - op.rule->cost());
    if (!value) failed_.push_back({edge, dtype, functions});
    return value;
  }

 private:
  struct Failed {
    Edge edge;
    std::optional<ScalarType> dtype;
    int functions;
  };
  const Need need_;
  const Kind reach_;
  const bool beside_codes_;
  c10::SmallVector<Failed, 8> failed_;

  bool allows(const Rule& rule) const {
    return rule.kind <= reach_ && !(rule.is_uncoded && beside_codes_) &&
           (!rule.is_rounding || need_.is_rounded);
  }

  // A chain of views, as one function of the tensor that they are views of, whose dtype and device they have.
  ValuePtr seen_through(const Operation& op, Edge edge, std::optional<ScalarType> dtype, int steps,
                        int functions) {
    c10::SmallVector<std::pair<Edge, const Operation*>, 8> views{{edge, &op}};
    ValuePtr value;
    while (true) {
      Node* last = views.back().first.node;
      Edge source = input(last, 0);
      if (!source) return {};
      const Operation& above = *operation(source.node);
      if (above.is_leaf) {
        value = unchanged(source.node, last);
        break;
      }
      if (!above.rule || above.rule->kind != Kind::kView || static_cast<int>(views.size()) == steps ||
          is_registered(source)) {
        value = this->value(source, dtype, steps - static_cast<int>(views.size()), functions);
        break;
      }
      views.emplace_back(source, &above);
    }
    if (!value) return {};
    Function function = composition(views);
    if (!function) return {};
    ScalarType precision = finer(value->precision, value->dtype) ? value->dtype : value->precision;
    auto seen = c10::make_intrusive<Computed>(std::move(function), Values{value}, value->dtype, precision, 0);
    seen->is_rounded = value->is_rounded, seen->is_clipped = value->is_clipped;
    return registered_at(edge, std::move(seen));
  }

  static Function composition(at::ArrayRef<std::pair<Edge, const Operation*>> views) {
    if (views.size() == 1) return function_of(*views[0].second, views[0].first);
    std::vector<Function> functions;
    for (size_t i = views.size(); i-- > 0;) {
      functions.push_back(function_of(*views[i].second, views[i].first));
      if (!functions.back()) return {};
    }
    return [functions = std::move(functions)](Inputs given) {
      Tensor x = given[0];
      for (auto& function : functions) x = function(x);
      return x;
    };
  }

  // The rule's function of the operation's inputs.
  ValuePtr applied(const Operation& op, Edge edge, std::optional<ScalarType> dtype, int steps,
                   int functions) {
    const Rule& rule = *op.rule;
    size_t count = edge.node->num_outputs();
    // Before the way up of the others is tried: of a sum of many layers that would be the whole model.
    for (size_t i = 0; count > 1 && i < count; ++i) {
      if (is_lost(input(edge.node, i))) return {};
    }
    Function function = function_of(op, edge);
    if (!function) return {};
    Values values;
    for (size_t i = 0; i < count; ++i) {
      Edge source = input(edge.node, i);
      if (!source || is_leaf(source.node)) {
        auto found = without_graph(rule, edge.node, source, i);
        if (!found) return {};
        values.append(found->begin(), found->end());
      } else {
        ValuePtr value = this->value(source, needed(rule, edge, source, dtype), steps - 1, functions);
        if (!value) return {};
        values.push_back(std::move(value));
      }
      if (i > 0) continue;
      for (const auto& each : rule.extra) {
        auto found = saved_by(edge.node, each.get);
        if (!found || found->empty()) return {};
        values.append(found->begin(), found->end());
      }
    }
    if (!accepts(op, edge, values)) return {};
    bool rounded = rule.is_rounding, clipped = false;
    for (auto& value : values) rounded |= value->is_rounded, clipped |= value->is_clipped;
    ScalarType precision = precision_of(rule, edge, *values[0]);
    auto result = c10::make_intrusive<Computed>(std::move(function), std::move(values), edge.dtype(),
                                                precision, rule.cost());
    result->is_rounded = rounded, result->is_clipped = clipped;
    return registered_at(edge, std::move(result));
  }

  bool accepts(const Operation& op, Edge edge, const Values& values) const {
    if (op.rule->is_rounding && need_.is_exact && values[1]->dtype != at::kFloat) return false;
    bool to_float8 = is_float8(edge.dtype()), is_cast = op.known == Known::kToCopyBackward0;
    for (auto& value : values) {
      if (to_float8 && value->is_lossy()) return false;
      if (!is_cast && value->is_managed()) return false;
    }
    return std::all_of(values.begin(), values.end(), [](const ValuePtr& value) { return value->is_fresh(); });
  }

  // Argument i of an operation: a leaf as it was when the node was built, or what the node has saved of it.
  std::optional<Values> without_graph(const Rule& rule, Node* node, Edge source, size_t i) const {
    static const Attribute nowhere;
    const Attribute& attribute = !rule.takes_any && i < rule.inputs.size() ? rule.inputs[i] : nowhere;
    std::optional<Values> found;
    if (attribute.is_named) found = saved_by(node, attribute.get);
    bool has_values = found && !found->empty();
    if (!source) {
      if (!has_values && !attribute.is_optional) return std::nullopt;
      return found;
    }
    if (has_values && found->front()->type != Type::kLeaf) {
      if (!found->front()->is_fresh()) return std::nullopt;
      return found;
    }
    ValuePtr leaf = unchanged(source.node, node);
    if (!leaf) return std::nullopt;
    return Values{std::move(leaf)};
  }

  // The leaf as it was when a node was built, if it certainly still is.
  static ValuePtr unchanged(Node* leaf, Node* node) {
    const Tensor& variable = variable_of(leaf);
    return leaves().is_unchanged_since(variable, node) ? Leaf::as_it_is(variable) : ValuePtr();
  }

  // Registers a value, unless it is too far from what is stored.
  static ValuePtr registered_at(Edge edge, ValuePtr value) {
    if (value->functions > kMostFunctions || value->steps > kMostSteps) return {};
    register_value(edge, *value);
    return value;
  }

  // Whether nothing stored can give an input: neither it nor what it is a view of is stored or has a rule.
  static bool is_lost(Edge source) {
    while (source && !is_leaf(source.node) && !is_registered(source)) {
      const Operation& op = *operation(source.node);
      if (!op.rule) return true;
      if (op.rule->kind != Kind::kView) return false;
      source = input(source.node, 0);
    }
    return false;
  }

  // The dtype to which an input must be precise for an output that is precise to dtype.
  static std::optional<ScalarType> needed(const Rule& rule, Edge edge, Edge source,
                                          std::optional<ScalarType> dtype) {
    if (rule.kind == Kind::kFunction) return std::nullopt;
    ScalarType wanted = dtype.value_or(edge.dtype());
    return finer(wanted, source.dtype()) ? std::nullopt : std::optional<ScalarType>(wanted);
  }

  static ScalarType precision_of(const Rule& rule, Edge edge, const Value& source) {
    ScalarType dtype = edge.dtype();
    if (rule.kind == Kind::kFunction) return dtype;
    ScalarType coarser = finer(source.dtype, dtype) ? dtype : source.dtype;
    return finer(source.precision, coarser) ? dtype : source.precision;
  }
};

}  // namespace memkern::saved
