// Division and root of numbers of usual size, correctly rounded.
#pragma once
#include "core/scalar.h"
#include "runtime.h"

namespace memkern {

// Number types for the formulas in core/. Their division and root are the instructions that nvcc emits for
// those of float, without the test of every operand: one test for eight elements (kLeastRoot and the others)
// takes its place. On sm_90 that is 6 instructions in place of 10 for a division, and 5 in place of 10 for a
// root; 6 where the root may be of 0.
template <bool OrZero> struct UsualNumber {
  float x;
  MEMKERN_DEVICE explicit UsualNumber(float value) : x(value) {}
  MEMKERN_DEVICE explicit operator float() const { return x; }

  friend MEMKERN_DEVICE UsualNumber operator+(UsualNumber a, UsualNumber b) { return UsualNumber(a.x + b.x); }
  friend MEMKERN_DEVICE UsualNumber operator-(UsualNumber a, UsualNumber b) { return UsualNumber(a.x - b.x); }
  friend MEMKERN_DEVICE UsualNumber operator*(UsualNumber a, UsualNumber b) { return UsualNumber(a.x * b.x); }

  friend MEMKERN_DEVICE UsualNumber operator/(UsualNumber a, UsualNumber b) {
    const float guess = approximate_reciprocal(b.x);
    const float reciprocal = __fmaf_rn(guess, __fmaf_rn(-b.x, guess, 1.0f), guess);
    const float quotient = a.x * reciprocal;
    // Of the remainder's two signs the one with which a quotient of -0 stays -0.
    return UsualNumber(__fmaf_rn(-reciprocal, __fmaf_rn(b.x, quotient, -a.x), quotient));
  }

  friend MEMKERN_DEVICE UsualNumber sqrt(UsualNumber a) {
    // The sum is a, but for a = 0, whose reciprocal root would be infinite.
    const float guess = approximate_reciprocal_sqrt(OrZero ? a.x + 0x1p-126f : a.x);
    const float root = a.x * guess, half = guess * 0.5f;
    return UsualNumber(__fmaf_rn(__fmaf_rn(-root, root, a.x), half, root));
  }
};
using Usual = UsualNumber<false>;
using UsualOrZero = UsualNumber<true>;

// Where roots are taken of 2^-101 to kMostRoot, and numerators are 2^-80 to 2^60 and denominators 2^-51 to
// 2^41, no quotient, remainder or reciprocal on the way leaves the range of normal numbers. A numerator of
// either zero is right as well, and for UsualOrZero a root of +0.
constexpr float kLeastRoot = 0x1p-101f, kMostRoot = 0x1p80f;
constexpr float kLeastNumerator = 0x1p-80f, kMostNumerator = 0x1p60f;
constexpr float kLeastDenominator = 0x1p-51f;

}  // namespace memkern
