// The functions that the formulas in core/ call on numbers, for float. csrc/cpu/simd/ has them for vectors.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

// Always inlined: a function compiled for AVX-512 must not become the one copy that the linker keeps.
#ifdef __CUDACC__
#define MEMKERN_FN __host__ __device__ __forceinline__
#else
#define MEMKERN_FN inline __attribute__((always_inline))
#endif
#define MEMKERN_LAMBDA __attribute__((always_inline))

namespace memkern {

MEMKERN_FN float abs(float x) { return fabsf(x); }
MEMKERN_FN float sqrt(float x) { return sqrtf(x); }
MEMKERN_FN float fma(float x, float y, float z) { return fmaf(x, y, z); }
MEMKERN_FN float floor(float x) { return floorf(x); }
MEMKERN_FN float rint(float x) { return rintf(x); }
MEMKERN_FN float copysign(float magnitude, float sign) { return copysignf(magnitude, sign); }
// Both give b where a or b is NaN, like the vector instructions.
MEMKERN_FN float min(float a, float b) { return a < b ? a : b; }
MEMKERN_FN float max(float a, float b) { return a > b ? a : b; }
MEMKERN_FN bool greater(float a, float b) { return a > b; }
MEMKERN_FN bool is_nan(float x) { return x != x; }
MEMKERN_FN bool is_finite(float x) { return fabsf(x) <= 3.402823466e38f; }
MEMKERN_FN float select(bool yes, float a, float b) { return yes ? a : b; }

MEMKERN_FN uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
MEMKERN_FN float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

}  // namespace memkern
