// Arguments of the steps with trust ratios (LAMB, LARS): splits a step's tensors into layers, and checks the
// arguments that only these steps have. core/trust_ratio.h has the ratio's formula.
#pragma once
#include "common/step_args.h"
#include "core/trust_ratio.h"

namespace memkern {

// Appends a tensor's layers, each with a trust ratio of its own.
template <class J> void add_layers(std::vector<J>& layers, J tensor, const Tensor& trust_ratios) {
  const int64_t count = trust_ratios.numel();
  tensor.trust_ratio = static_cast<float*>(trust_ratios.data_ptr());
  for (int64_t k = 0; k < count; ++k) layers.push_back(layer_of(tensor, k, count));
}

// Checks that every layer has a trust ratio and, if squares are given, a row of them.
template <class J, class Hyperparameters>
void check_trust_ratios(const StepArgs& args, const std::vector<J>& tensors,
                        const std::vector<Hyperparameters>& groups) {
  const DeviceOf device(args.params);
  int64_t layers = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t requested = static_cast<int64_t>(groups[args.group[i]].layers);
    const int64_t count = layer_count(tensors[i].layout, args.params[i].dim(), requested);
    MEMKERN_CHECK(count > 0, "layers must divide the rows of ", name_of("params", i), ", ",
                  tensors[i].layout.rows, ", and end where a block of ", tensors[i].layout.block,
                  " elements does, got ", requested);
    const Tensor& ratios = args.trust_ratios[i];
    MEMKERN_CHECK(ratios.scalar_type() == ScalarType::Float && ratios.dim() == 1 && ratios.numel() == count &&
                      ratios.is_contiguous() && device.holds(ratios),
                  name_of("trust_ratios", i), " must be contiguous float32 of shape (", count,
                  ",) on its parameter's device");
    address_of(ratios, "trust_ratios[", i, ']');
    layers += count;
  }
  MEMKERN_CHECK(args.squares || !args.squares_only, "squares_only needs squares to write to");
  if (!args.squares) return;
  const Tensor& squares = *args.squares;
  MEMKERN_CHECK(
      squares.scalar_type() == ScalarType::Double && squares.dim() == 2 && squares.size(0) == layers &&
          squares.size(1) == 2 && squares.is_contiguous() && (tensors.empty() || device.holds(squares)),
      "squares must be contiguous float64 of shape (", layers, ", 2) on the device of the parameters");
  address_of(squares, "squares");
}

// The argument squares, a row per layer; null where it is not given.
inline Squares* squares_of(const StepArgs& args) {
  return args.squares ? static_cast<Squares*>(args.squares->data_ptr()) : nullptr;
}

}  // namespace memkern
