// Correctly rounded division and square root without range checks: the fast path of most vectors.
#pragma once
#include "core/scalar.h"
#include "cuda/device.cuh"

namespace memkern {

// Number types for the formulas in core/. nvcc's correctly rounded division and root of floats are a few
// instructions for operands in a middle range, and a branch to a slow path for others. These types do without
// that branch: the caller checks the range once for a vector of 8 elements (kMinRadicand and the others). On
// sm_90 a division takes 6 instructions instead of 10, and a root 5 instead of 10; a root that allows +0 as
// well (AllowZero) takes 6.
template <bool AllowZero> struct FastFloat {
  float x;
  MEMKERN_DEVICE explicit FastFloat(float value) : x(value) {}
  MEMKERN_DEVICE explicit operator float() const { return x; }

  friend MEMKERN_DEVICE FastFloat operator+(FastFloat a, FastFloat b) { return FastFloat(a.x + b.x); }
  friend MEMKERN_DEVICE FastFloat operator-(FastFloat a, FastFloat b) { return FastFloat(a.x - b.x); }
  friend MEMKERN_DEVICE FastFloat operator*(FastFloat a, FastFloat b) { return FastFloat(a.x * b.x); }

  friend MEMKERN_DEVICE FastFloat operator/(FastFloat a, FastFloat b) {
    const float guess = approximate_reciprocal(b.x);
    const float reciprocal = __fmaf_rn(guess, __fmaf_rn(-b.x, guess, 1.0f), guess);
    const float quotient = a.x * reciprocal;
    // quotient - reciprocal * (b * quotient - a), and not quotient + reciprocal * (a - b * quotient), which
    // would make a quotient of -0 (a = -0) +0.
    return FastFloat(__fmaf_rn(-reciprocal, __fmaf_rn(b.x, quotient, -a.x), quotient));
  }

  friend MEMKERN_DEVICE FastFloat sqrt(FastFloat a) {
    // AllowZero's sum is a for all a of the range but 0, whose reciprocal root would be infinite.
    const float guess = approximate_reciprocal_sqrt(AllowZero ? a.x + 0x1p-126f : a.x);
    const float root = a.x * guess, half = guess * 0.5f;
    return FastFloat(__fmaf_rn(__fmaf_rn(-root, root, a.x), half, root));
  }
};
using Fast = FastFloat<false>;
using FastOrZero = FastFloat<true>;

// As good as fp32 allows in few instructions: an approximate root and an approximate reciprocal, each off by
// up to 2^-23 of itself (PTX ISA: sqrt.approx, rcp.approx), and products fused with the subtraction that
// follows.
struct Approximate {
  struct Product {
    float a, b;
    MEMKERN_DEVICE operator Approximate() const { return Approximate(a * b); }
  };
  float x;
  MEMKERN_DEVICE explicit Approximate(float value) : x(value) {}
  MEMKERN_DEVICE explicit operator float() const { return x; }

  friend MEMKERN_DEVICE Approximate operator+(Approximate a, Approximate b) { return Approximate(a.x + b.x); }
  friend MEMKERN_DEVICE Product operator*(Approximate a, Approximate b) { return {a.x, b.x}; }
  friend MEMKERN_DEVICE Approximate operator-(Approximate a, Product b) {
    return Approximate(__fmaf_rn(-b.a, b.b, a.x));
  }
  friend MEMKERN_DEVICE Approximate operator/(Approximate a, Approximate b) {
    return Approximate(a.x * approximate_reciprocal(b.x));
  }
  friend MEMKERN_DEVICE Approximate sqrt(Approximate a) { return Approximate(approximate_sqrt(a.x)); }
};

// x / divisor, correctly rounded, from the divisor's rounded reciprocal: for the divisors 127^2 and 255^2,
// which are those of power codes, and x from kMinDividend on (tests/gpu/test_division.py tries every
// mantissa).
constexpr float kMinDividend = 0x1p-100f;
MEMKERN_DEVICE float divide(float x, float divisor, float reciprocal) {
  const float quotient = x * reciprocal;
  return __fmaf_rn(__fmaf_rn(-divisor, quotient, x), reciprocal, quotient);
}

// The range: with radicands from kMinRadicand to kMaxRadicand, numerators from kMinNumerator to kMaxNumerator
// and denominators from kMinDenominator to kMaxDenominator, all quotients, remainders and reciprocals on the
// way are normal numbers. Numerators of +0 and -0 are right too; so are radicands of +0, except in Fast.
constexpr float kMinRadicand = 0x1p-101f, kMaxRadicand = 0x1p40f;
constexpr float kMinNumerator = 0x1p-64f, kMaxNumerator = 0x1p60f;
constexpr float kMinDenominator = 0x1p-51f, kMaxDenominator = 0x1p21f;
// A quotient's product with a step size of at least this is a normal number.
constexpr float kMinStepSize = 0x1p-40f;

}  // namespace memkern
