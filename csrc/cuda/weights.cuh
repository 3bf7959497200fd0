// Loads and stores vectors of weights. bf16 weights may have rounding errors beside them or be rounded
// stochastically.
#pragma once
#include "core/weights.h"
#include "step_table.cuh"

namespace memkern {

// The type of a bf16 result that is written in a parameter's place, and not read.
struct Written : ConstantType<FloatType::kBf16> {};

// A vector of a parameter as it is in memory.
template <class Type> struct RawWeights : Raw {};
// With its weight state: 8 errors, of 16 bits in 4 words of `state` or of 8 bits in 2.
template <> struct RawWeights<MasterWeights> : Raw {
  Raw state;
};

template <class Type, class At>
MEMKERN_DEVICE RawWeights<Type> load_weights(const TensorRecord& t, Type type, const At& at) {
  if constexpr (std::is_same_v<Type, Written>) return {};
  RawWeights<Type> raw{load_raw(t.param, type, at)};
  if constexpr (std::is_same_v<Type, MasterWeights>) {
    if (t.weight_storage == WeightStorage::kError16) {
      raw.state = load_raw(t.weight_state, type, at);
    } else if (t.weight_storage == WeightStorage::kError8) {
      const Codes errors = load_codes(t.weight_state, at);
      raw.state.word[0] = errors.x;
      raw.state.word[1] = errors.y;
    }
  }
  return raw;
}

// The loaded weights in fp32, with their errors.
template <class Type> MEMKERN_DEVICE void join_weights(const TensorRecord& t, Type type,
                                                       const RawWeights<Type>& raw, float (&p)[kVector]) {
  if constexpr (std::is_same_v<Type, Written>) return;
  to_floats(raw, type, p);
  if constexpr (std::is_same_v<Type, MasterWeights>) {
    const WeightStorage storage = t.weight_storage;
    const uint32_t (&state)[kVector] = raw.state.word;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const uint32_t bits = bits_of(p[i]);
      if (storage == WeightStorage::kError16) {
        const int32_t error = static_cast<int32_t>(state[i / 2] << 16 * (1 - i % 2)) >> 16;
        p[i] = unless_nan(float_of(join_weight(bits, static_cast<uint32_t>(error))), p[i]);
      } else if (storage == WeightStorage::kError8) {
        const int32_t error = static_cast<int32_t>(state[i / 4] << 8 * (3 - i % 4)) >> 24;
        p[i] = unless_nan(float_of(join_weight(bits, static_cast<uint32_t>(error) << 8)), p[i]);
      }
    }
  }
}

// Stores the bf16 values of a vector, and its errors in 16 bits or, Bytes, in 8.
template <bool Bytes, class Position> MEMKERN_DEVICE void store_split(const TensorRecord& t, const Span& at,
                                                                      uint32_t step, Position position,
                                                                      const float (&p)[kVector]) {
  const int dropped = dropped_bits(t.weight_storage);
  const uint32_t mask = (1u << dropped) - 1;
  Raw weights, errors;
#pragma unroll
  for (int i = 0; i < kVector; i += 2) {
    uint32_t weight[2], error[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float x = p[i + k];
      // Infinities and this NaN have no error.
      const uint32_t bits = x == x ? bits_of(x) : 0x7FC00000u;
      split_weight(bits, weight_random(position(i + k), step, dropped), mask, weight[k], error[k]);
    }
    weights.word[i / 2] = __byte_perm(weight[0], weight[1], 0x7632);
    // The stored part of both errors: byte 1 of each (Bytes; the low 8 bits are 0), or the low half.
    const uint32_t pair = __byte_perm(error[0], error[1], Bytes ? 0x0051 : 0x5410);
    if constexpr (Bytes)
      errors.word[i / 4] = i % 4 == 0 ? pair : __byte_perm(errors.word[i / 4], pair, 0x5410);
    else
      errors.word[i / 2] = pair;
  }
  store_raw(t.param, FloatType::kBf16, at, weights);
  if constexpr (Bytes)
    store_codes(t.weight_state, at, {errors.word[0], errors.word[1]});
  else if (t.weight_storage == WeightStorage::kError16)
    store_raw(t.weight_state, FloatType::kBf16, at, errors);
}

// Stores a vector of a parameter. position(i): element i's place in its block.
template <class Type, class At, class Position>
MEMKERN_DEVICE void store_weights(const TensorRecord& t, Type type, const At& at, uint32_t step,
                                  Position position, const float (&p)[kVector]) {
  if constexpr (!std::is_same_v<Type, MasterWeights>) {
    store_floats(t.param, type, at, p);
  } else if (t.weight_storage == WeightStorage::kError8) {
    store_split<true>(t, at, step, position, p);
  } else {
    store_split<false>(t, at, step, position, p);
  }
}

// The place in its block of an element of a tensor whose states have no blocks of their own.
MEMKERN_DEVICE uint32_t position_in_block(const Blocks& b, int64_t offset) {
  return static_cast<uint32_t>(offset % b.segment % b.block);
}

}  // namespace memkern
