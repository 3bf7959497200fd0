// Bias corrections in fp64, the same bits on every backend.
#pragma once
#include "scalar.h"

namespace memkern {

// beta^step by binary exponentiation: multiplications only.
MEMKERN_FN double power_of(double beta, uint64_t step) {
  double result = 1.0, square = beta;
  for (; step; step >>= 1) {
    if (step & 1) result *= square;
    square *= square;
  }
  return result;
}

}  // namespace memkern
