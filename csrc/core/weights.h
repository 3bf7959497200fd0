// How a step rounds and stores bf16 parameters (formulas: WEIGHTS of memkern/quant/codec.py). I is uint32_t
// or a vector of such: the bits of fp32.
#pragma once
#include "core/scalar.h"
#include "core/tables.h"

namespace memkern {

// Random bits for position j of a block at a step: whole numbers below 2^dropped.
MEMKERN_FN uint32_t weight_random(uint32_t j, uint32_t step, int dropped) {
  return dropped == 0 ? 0 : (j * kWeightJ + step * kWeightStep) >> (32 - dropped);
}

// The fp32 bits of a weight, from those of its bf16 value and its error.
template <class I> MEMKERN_FN I join_weight(I p, I error) { return p + error; }

// The weight that a step starts from: `joined` (p with its error), or its bf16 value p where that is NaN. No
// step leaves an error that makes a NaN of a number, but p may be edited and the error stay: 0 with a
// negative error has the bits of a NaN.
template <class F> MEMKERN_FN F unless_nan(F joined, F p) { return select(is_nan(joined), p, joined); }

// Splits the fp32 bits of a finite weight into those of its bf16 value and the error, whose dropped bits
// are 0.
template <class I> MEMKERN_FN void split_weight(I u, I random, uint32_t dropped_mask, I& p, I& error) {
  u = (u + random) & I(~dropped_mask);
  p = (u + I(0x8000u)) & I(0xFFFF0000u);
  error = u - p;
}

}  // namespace memkern
