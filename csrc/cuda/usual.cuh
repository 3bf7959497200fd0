// Division and root of numbers of usual size, correctly rounded.
#pragma once
#include "../core/scalar.h"
#include "runtime.h"

namespace memkern {

// A number type for the formulas in core/. Its division and root are the instructions that nvcc emits for
// those of float, without the test of every operand: one test for eight elements (kLeastRoot and the others)
// takes its place. On sm_90 that is 6 instructions in place of 10 for a division, and 5 in place of 10 for a
// root.
struct Usual {
  float x;
  MEMKERN_DEVICE explicit Usual(float value) : x(value) {}
  MEMKERN_DEVICE explicit operator float() const { return x; }
};
MEMKERN_DEVICE Usual operator+(Usual a, Usual b) { return Usual(a.x + b.x); }
MEMKERN_DEVICE Usual operator-(Usual a, Usual b) { return Usual(a.x - b.x); }
MEMKERN_DEVICE Usual operator*(Usual a, Usual b) { return Usual(a.x * b.x); }

// Where roots are taken of 2^-101 to kMostRoot, and numerators are 2^-80 to 2^60 and denominators 2^-51 to
// 2^41, no quotient, remainder or reciprocal on the way leaves the range of normal numbers.
constexpr float kLeastRoot = 0x1p-101f, kMostRoot = 0x1p80f;
constexpr float kLeastNumerator = 0x1p-80f, kMostNumerator = 0x1p60f;

MEMKERN_DEVICE Usual operator/(Usual a, Usual b) {
  const float guess = approximate_reciprocal(b.x);
  const float reciprocal = __fmaf_rn(guess, __fmaf_rn(-b.x, guess, 1.0f), guess);
  const float quotient = a.x * reciprocal;
  return Usual(__fmaf_rn(reciprocal, __fmaf_rn(-b.x, quotient, a.x), quotient));
}

MEMKERN_DEVICE Usual sqrt(Usual a) {
  const float guess = approximate_reciprocal_sqrt(a.x);
  const float root = a.x * guess, half = guess * 0.5f;
  return Usual(__fmaf_rn(__fmaf_rn(-root, root, a.x), half, root));
}

}  // namespace memkern
