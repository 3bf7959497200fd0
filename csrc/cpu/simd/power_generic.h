// The power codec's encoder by the formulas of csrc/core/power.h, for instruction sets without one of their
// own.
#pragma once
#include "core/power.h"

namespace memkern::MEMKERN_ISA {
namespace {

MEMKERN_FN F nearest_signed(F x, F factor) { return power_encode_signed(x, factor); }

struct SignedEncoder {
  F factor;
  MEMKERN_FN explicit SignedEncoder(float factor_) : factor(factor_) {}
  MEMKERN_FN F encode(F x, F one_minus_u) { return power_encode_signed(x, factor, one_minus_u); }
};

// The encoder for use beside an UnsignedEncoder: AVX-512 has one of its own.
using SignedEstimator = SignedEncoder;

template <int Levels> struct UnsignedEncoder {
  F factor;
  MEMKERN_FN explicit UnsignedEncoder(float factor_) : factor(factor_) {}
  MEMKERN_FN F encode(F x, F u) { return power_encode_unsigned<Levels>(x, factor, u); }
};

}  // namespace
}  // namespace memkern::MEMKERN_ISA
