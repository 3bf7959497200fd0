// The arguments of the few-bit activations' ops: checks, and their conversion to core/activation.h's structs.
#pragma once
#include "common/tensors.h"
#include "core/activation.h"

namespace memkern {

// Checks a table of thresholds and converts it; memkern/fewbit/levels.py says what flips and symmetry are.
inline Thresholds thresholds_of(int64_t bits, const Doubles& thresholds, const Ints& flips,
                                int64_t symmetry) {
  MEMKERN_CHECK(bits >= 1 && bits <= kMaxBits, "bits must be from 1 to ", kMaxBits, ", got ", bits);
  MEMKERN_CHECK(thresholds.size() == flips.size() && thresholds.size() <= kMaxThresholds,
                "thresholds and flips must have as many entries, at most ", kMaxThresholds, ", got ",
                thresholds.size(), " and ", flips.size());
  MEMKERN_CHECK(symmetry == kPlain || symmetry == kEven || symmetry == kOdd, "symmetry must be one of ",
                kPlain, ", ", kEven, ", ", kOdd, ", got ", symmetry);
  Thresholds table{static_cast<int>(bits), static_cast<int>(symmetry), static_cast<int>(flips.size())};
  for (size_t i = 0; i < flips.size(); ++i) {
    MEMKERN_CHECK(flips[i] >= 0 && flips[i] < 1 << bits, "flips must be from 0 to ", (1 << bits) - 1,
                  ", got ", flips[i]);
    table.threshold[i] = static_cast<float>(thresholds[i]);
    table.flip[i] = static_cast<uint8_t>(flips[i]);
  }
  return table;
}

// Checks that codes are the bit planes of `numel` elements.
inline void check_planes(const Tensor& codes, int64_t numel) {
  MEMKERN_CHECK(codes.scalar_type() == ScalarType::Byte && codes.dim() == 2 && codes.is_contiguous(),
                "codes must be contiguous uint8 with a row per bit");
  const int64_t bits = codes.sizes()[0], bytes = codes.sizes()[1];
  MEMKERN_CHECK(bits >= 1 && bits <= kMaxBits && bytes == plane_bytes(numel), "codes of ", numel,
                " elements must have 1 to ", kMaxBits, " rows of ", plane_bytes(numel), " bytes, got ", bits,
                " of ", bytes);
}

// Checks the levels, one per code, and writes them to the table in fp32, followed by zeros.
inline void fill_levels(const Doubles& levels, int64_t bits, float (&table)[1 << kMaxBits]) {
  MEMKERN_CHECK(levels.size() == size_t{1} << bits, "levels must have ", 1 << bits,
                " entries, one per code, got ", levels.size());
  for (size_t i = 0; i < size_t{1} << kMaxBits; ++i)
    table[i] = i < levels.size() ? static_cast<float>(levels[i]) : 0.0f;
}

// Checks the fields of TwoBranch, which core/activation.h explains, and converts them.
inline TwoBranch two_branch_of(double minimum, const Doubles& falling, const Doubles& rising,
                               double falling_reach, double rising_reach) {
  MEMKERN_CHECK(falling.size() == rising.size() && !rising.empty() && rising.size() <= kMaxCoefficients,
                "falling and rising must have as many coefficients, 1 to ", kMaxCoefficients, ", got ",
                falling.size(), " and ", rising.size());
  TwoBranch two_branch{static_cast<int>(rising.size()), static_cast<float>(minimum)};
  const double reach[2] = {falling_reach, rising_reach};
  const Doubles* polynomial[2] = {&falling, &rising};
  for (int side = 0; side < 2; ++side) {
    two_branch.reach[side] = static_cast<float>(reach[side]);
    two_branch.scale[side] = static_cast<float>(2.0 / reach[side]);
    for (size_t i = 0; i < rising.size(); ++i)
      two_branch.polynomial[side][i] = static_cast<float>((*polynomial[side])[i]);
  }
  return two_branch;
}

// Checks the activation's output, from which few_bit_backward_from_output computes the derivative.
inline void check_output(const Tensor& output, const Tensor& grad) {
  MEMKERN_CHECK(is_float_type(output.scalar_type()) && same_layout(output, grad),
                "output must be float32, bfloat16 or float16 and have grad's shape and strides");
}

}  // namespace memkern
