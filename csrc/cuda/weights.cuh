// Vectors of bf16 weights that are not just rounded to the nearest: with their rounding errors or a copy in
// fp32, or stochastically rounded. For types other than KeptWeights these functions do nothing beside.
#pragma once
#include "core/weights.h"
#include "step_table.cuh"

namespace memkern {

// What the weight state has of a vector: fp32 in 8 words, 16-bit errors in the first 4, 8-bit ones in 2.
template <class Type> MEMKERN_DEVICE Raw load_weight_state(const TensorRecord& t, Type type, const Span& at) {
  Raw raw{};
  if constexpr (std::is_same_v<Type, KeptWeights>) {
    if (t.weight_storage == WeightStorage::kFp32) return load_raw(t.weight_state, FloatType::kFp32, at);
    if (t.weight_storage == WeightStorage::kError16) return load_raw(t.weight_state, type, at);
    if (t.weight_storage == WeightStorage::kError8) {
      const Codes errors = load_codes(t.weight_state, at);
      raw.word[0] = errors.x;
      raw.word[1] = errors.y;
    }
  }
  return raw;
}

// From the bf16 values of a vector to its weights.
template <class Type>
MEMKERN_DEVICE void join_weights(const TensorRecord& t, Type type, const Raw& state, float (&p)[kVector]) {
  if constexpr (std::is_same_v<Type, KeptWeights>) {
    const WeightStorage storage = t.weight_storage;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (storage == WeightStorage::kFp32) {
        p[i] = float_of(state.word[i]);
      } else if (storage == WeightStorage::kError16) {
        const int32_t error = static_cast<int32_t>(state.word[i / 2] << 16 * (1 - i % 2)) >> 16;
        p[i] = float_of(join_weight(bits_of(p[i]), static_cast<uint32_t>(error)));
      } else if (storage == WeightStorage::kError8) {
        const int32_t error = static_cast<int32_t>(state.word[i / 4] << 8 * (3 - i % 4)) >> 24;
        p[i] = float_of(join_weight(bits_of(p[i]), static_cast<uint32_t>(error) << 8));
      }
    }
  }
}

MEMKERN_FN int dropped_bits(WeightStorage storage) {
  return storage == WeightStorage::kStochastic ? kWeightDroppedStochastic
         : storage == WeightStorage::kError8   ? kWeightDroppedError8
                                               : 0;
}

// From the weights of a vector to its bf16 values; returns what is stored beside them. position(i): element
// i's place in its block.
template <class Type, class Position> MEMKERN_DEVICE Raw split_weights(const TensorRecord& t, Type type,
                                                                       uint32_t step, Position position,
                                                                       float (&p)[kVector]) {
  Raw raw{};
  if constexpr (std::is_same_v<Type, KeptWeights>) {
    if (t.weight_storage == WeightStorage::kFp32) return to_raw(p, FloatType::kFp32);
    const int dropped = dropped_bits(t.weight_storage);
    const uint32_t mask = (1u << dropped) - 1;
    uint32_t error[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      uint32_t weight;
      split_weight(bits_of(p[i]), weight_random(position(i), step, dropped), mask, weight, error[i]);
      const bool finite = is_finite(p[i]);
      error[i] = finite ? error[i] : 0;
      p[i] = finite ? float_of(weight) : p[i];
    }
    // The low halves of the errors, or their second bytes.
    if (t.weight_storage == WeightStorage::kError8) {
#pragma unroll
      for (int i = 0; i < kVector; i += 4)
        raw.word[i / 4] = __byte_perm(__byte_perm(error[i], error[i + 1], 0x0051),
                                      __byte_perm(error[i + 2], error[i + 3], 0x0051), 0x5410);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; i += 2) raw.word[i / 2] = __byte_perm(error[i], error[i + 1], 0x5410);
    }
  }
  return raw;
}

template <class Type>
MEMKERN_DEVICE void store_weight_state(const TensorRecord& t, Type type, const Span& at, const Raw& raw) {
  if constexpr (std::is_same_v<Type, KeptWeights>) {
    if (t.weight_storage == WeightStorage::kFp32)
      store_raw(t.weight_state, FloatType::kFp32, at, raw);
    else if (t.weight_storage == WeightStorage::kError16)
      store_raw(t.weight_state, type, at, raw);
    else if (t.weight_storage == WeightStorage::kError8)
      store_codes(t.weight_state, at, {raw.word[0], raw.word[1]});
  }
}

// The place in its block of an element of a tensor whose states have no blocks of their own.
MEMKERN_DEVICE uint32_t position_in_block(const Blocks& b, int64_t offset) {
  return static_cast<uint32_t>(offset % b.segment % b.block);
}

// Calls work(type) with the type of a tensor's parameter.
template <class Work> MEMKERN_DEVICE void with_param_type(const TensorRecord& t, Work work) {
  if (keeps_weights(t))
    work(KeptWeights{});
  else
    work(t.param_type);
}

}  // namespace memkern
