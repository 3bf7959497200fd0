// A "vector" of one float, for any processor, with the types and functions of avx2.h, avx512.h and neon.h. A
// mask is a bool. The functions that are not here are those of core/scalar.h for floats.
#pragma once
#include "core/scalar.h"
#include "core/tables.h"
#include "cpu/simd/half.h"

namespace memkern::generic {

using F = float;
using I = uint32_t;  // bits of F
constexpr int kLanes = 1;

MEMKERN_FN I to_bits(F x) { return memkern::bits_of(x); }
MEMKERN_FN F from_bits(I u) { return float_of(u); }

MEMKERN_FN F load(const float* p) { return *p; }
MEMKERN_FN F load(const bf16* p) { return to_float(*p); }
MEMKERN_FN F load(const fp16* p) { return to_float(*p); }
MEMKERN_FN F load(const int8_t* p) { return *p; }
MEMKERN_FN F load(const uint8_t* p) { return *p; }
MEMKERN_FN I load(const uint32_t* p) { return *p; }
MEMKERN_FN I load(const error16* p) { return static_cast<I>(static_cast<int32_t>(p->units)); }
MEMKERN_FN I load(const error8* p) { return static_cast<I>(static_cast<int32_t>(p->units)) << 8; }
MEMKERN_FN void store(error16* p, I error) { p->units = static_cast<int16_t>(error); }
MEMKERN_FN void store(error8* p, I error) { p->units = static_cast<int8_t>(error >> 8); }
MEMKERN_FN void store(float* p, F x) { *p = x; }
MEMKERN_FN void store(bf16* p, F x) { *p = to_bf16(x); }
MEMKERN_FN void store(fp16* p, F x) { *p = to_fp16(x); }
MEMKERN_FN void store(int8_t* p, F x) { *p = static_cast<int8_t>(x); }
MEMKERN_FN void store(uint8_t* p, F x) { *p = static_cast<uint8_t>(x); }
MEMKERN_FN float max_of(F x) { return x; }
MEMKERN_FN uint32_t bits_of(bool mask) { return mask; }
MEMKERN_FN bool mask_of(uint32_t bits) { return bits != 0; }

// A table of 2^Bits levels. at(): the level of each lane's code; bits[p] has bit p of all lanes' codes.
template <int Bits> struct LevelTable {
  const float* levels;
  MEMKERN_FN explicit LevelTable(const float* table) : levels(table) {}
  MEMKERN_FN F at(const uint32_t* bits) const {
    uint32_t code = 0;
    for (int p = 0; p < Bits; ++p) code |= bits[p] << p;
    return levels[code];
  }
};

// A sum of squares in fp64, where a square is exact.
struct SquareSum {
  double sum = 0.0;
  MEMKERN_FN void add(F x) { sum += static_cast<double>(x) * x; }
  MEMKERN_FN void add(const float* x) { add(*x); }
  MEMKERN_FN double total() const { return sum; }
};

}  // namespace memkern::generic
