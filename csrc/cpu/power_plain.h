// The power codec's encoder by the formulas of csrc/core/power.h, for instruction sets without one of their own.
#pragma once
#include "../core/power.h"

namespace memkern::MEMKERN_ISA {
namespace {

struct SignedEncoder {
  F inv;
  MEMKERN_FN explicit SignedEncoder(float inv_) : inv(inv_) {}
  MEMKERN_FN F encode(F x) { return power_encode_signed(x, inv); }
};

struct UnsignedEncoder {
  F inv;
  MEMKERN_FN explicit UnsignedEncoder(float inv_) : inv(inv_) {}
  MEMKERN_FN F encode(F x, F u) { return power_encode_unsigned(x, inv, u); }
  MEMKERN_FN bool sure() const { return true; }
};

}  // namespace
}  // namespace memkern::MEMKERN_ISA
