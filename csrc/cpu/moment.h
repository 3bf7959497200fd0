// One moment of one block: read from its storage, gathered while the block is updated, stored again.
// Compiled once per instruction set (isa_*.cpp).
#pragma once
#include <cstring>
#include <type_traits>

#include "../core/dynamic.h"
#include "../core/power.h"
#include "half.h"
#include "kernels.h"

namespace memkern::MEMKERN_ISA {
namespace {

// Calls f(T()) with the C++ type of a float dtype.
template <class Call> auto with_type(FloatType t, Call f) {
  return t == FloatType::kBf16 ? f(bf16()) : t == FloatType::kFp16 ? f(fp16()) : f(float());
}

template <class T> MEMKERN_FN F load_part(const T* p, int count) {
  T all[kLanes] = {};
  std::memcpy(all, p, count * sizeof(T));
  return load(all);
}
template <class T> MEMKERN_FN void store_part(T* p, F x, int count) {
  T all[kLanes];
  store(all, x);
  std::memcpy(p, all, count * sizeof(T));
}

// Calls body(i, load, store) for each vector of [0, n); the last may be short: lanes past n read 0, write nothing.
template <class Body> MEMKERN_FN void for_vectors(int n, Body&& body) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes)
    body(
        i, [](const auto* p) MEMKERN_LAMBDA { return load(p); },
        [](auto* p, F x) MEMKERN_LAMBDA { store(p, x); });
  if (const int left = n - i; left > 0)
    body(
        i, [left](const auto* p) MEMKERN_LAMBDA { return load_part(p, left); },
        [left](auto* p, F x) MEMKERN_LAMBDA { store_part(p, x, left); });
}

template <class Code, StateKind Kind> struct Moment {
  static constexpr bool kSigned = std::is_same_v<Code, int8_t>;
  using Stored = std::conditional_t<Kind == StateKind::kFp32, float, Code>;

  Stored* state;
  float* scale;
  const float* rounding;  // what the unsigned power codec adds before it rounds down, for each place of the block
  float unit;
  F largest;
  alignas(64) float values[Kind == StateKind::kFp32 ? 1 : kMaxBlockSize + kLanes];

  MEMKERN_FN void begin(void* all_states, float* scales, const float* rounding_, int64_t offset, int64_t block) {
    state = static_cast<Stored*>(all_states) + offset;
    scale = scales + block;
    rounding = rounding_;
    largest = F(0.0f);
    if constexpr (Kind == StateKind::kPower)
      unit = power_unit(*scale, kSigned ? kPowerLevelsSigned : kPowerLevelsUnsigned);
  }

  // The moment at place i. Unsigned power codes hold w = sqrt(v): v = w * w.
  template <class Load> MEMKERN_FN F get(int i, Load load_from) {
    const F x = decoded(i, load_from);
    return Kind == StateKind::kPower && !kSigned ? x * x : x;
  }

  // What is stored at place i.
  template <class Load> MEMKERN_FN F decoded(int i, Load load_from) {
    const F stored = load_from(state + i);
    if constexpr (Kind == StateKind::kPower) {
      return power_decode(stored, F(unit));
    } else if constexpr (Kind == StateKind::kDynamic) {
      alignas(64) float lane[kLanes];
      store(lane, stored);
      for (int k = 0; k < kLanes; ++k)
        lane[k] = dynamic_decode<kSigned>(static_cast<uint8_t>(static_cast<int>(lane[k])));
      return load(lane) * F(*scale);
    } else {
      return stored;
    }
  }

  // Keeps what is to be stored at place i: the moment, or w = sqrt(v) for unsigned power codes.
  template <class Store> MEMKERN_FN void put(int i, F x, Store store_to) {
    if constexpr (Kind == StateKind::kFp32) {
      store_to(state + i, x);
    } else {
      store(values + i, x);
      const F size = kSigned ? abs(x) : x;
      largest = max(largest, select(is_finite(x), size, F(0.0f)));
    }
  }

  // Encodes the block of n values that were put.
  MEMKERN_FN void finish(int n) {
    if constexpr (Kind != StateKind::kFp32) {
      *scale = max_of(largest);
      float inv;
      const bool usable = usable_inverse(*scale, &inv);
      if (!usable) {
        std::memset(state, 0, n);
      } else if constexpr (Kind == StateKind::kPower) {
        for_vectors(n, [&](int i, auto, auto store_to) MEMKERN_LAMBDA {
          const F x = load(values + i);
          if constexpr (kSigned)
            store_to(state + i, power_encode_signed(x, F(inv)));
          else
            store_to(state + i, power_encode_unsigned(x, F(inv), load(rounding + i)));
        });
      } else {
        for (int i = 0; i < n; ++i) state[i] = static_cast<Code>(dynamic_encode<kSigned>(values[i], inv));
      }
    }
  }
};

}  // namespace
}  // namespace memkern::MEMKERN_ISA
