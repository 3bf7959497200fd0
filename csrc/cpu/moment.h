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
template <class T, class X> MEMKERN_FN void store_part(T* p, X x, int count) {
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
        [](auto* p, auto x) MEMKERN_LAMBDA { store(p, x); });
  if (const int left = n - i; left > 0)
    body(
        i, [left](const auto* p) MEMKERN_LAMBDA { return load_part(p, left); },
        [left](auto* p, auto x) MEMKERN_LAMBDA { store_part(p, x, left); });
}

// The codes that the formula itself gives, for a block where an estimate was not sure.
__attribute__((noinline)) void encode_exactly(uint8_t* codes, const float* values, int n, float inv,
                                              const float* rounding) {
  for_vectors(n, [&](int i, auto, auto store_to) MEMKERN_LAMBDA {
    store_to(codes + i, power_encode_unsigned(load(values + i), F(inv), load(rounding + i)));
  });
}

// What is put, before it is encoded. Apart from Moment, so that the compiler keeps a Moment in registers: an int8_t
// store may alias anything that lies in memory, and reloading doubled the time of a step.
struct Buffer {
  alignas(64) float values[kMaxBlockSize + kLanes];

  __attribute__((noinline)) float largest_finite(int n, bool is_signed) const {
    float found = 0.0f;
    for (int i = 0; i < n; ++i)
      if (memkern::is_finite(values[i]))
        found = memkern::max(is_signed ? fabsf(values[i]) : values[i], found);
    return found;
  }
};

template <class Code, StateKind Kind> struct Moment {
  static constexpr bool kSigned = std::is_same_v<Code, int8_t>;
  using Stored = std::conditional_t<Kind == StateKind::kFp32, float, Code>;

  Stored* state;
  float* scale;
  const float* rounding;  // what the unsigned power codec adds before it rounds down, for each place of the block
  Buffer& buffer;
  F unit, largest;
  float inv;

  MEMKERN_FN Moment(void* states, float* scales, const float* rounding_, int64_t offset, int64_t block, Buffer& buffer_)
      : state(static_cast<Stored*>(states) + offset),
        scale(scales + block),
        rounding(rounding_),
        buffer(buffer_),
        unit(Kind == StateKind::kPower ? power_unit(*scale, kSigned ? kPowerLevelsSigned : kPowerLevelsUnsigned)
             : Kind == StateKind::kDynamic ? *scale
                                           : 1.0f),
        largest(0.0f),
        inv(0.0f) {}

  // The moment at place i. Unsigned power codes hold w = sqrt(v): v = w * w.
  template <class Load> MEMKERN_FN F get(int i, Load load_from) const {
    const F x = decoded(i, load_from);
    return Kind == StateKind::kPower && !kSigned ? x * x : x;
  }

  // What is stored at place i.
  template <class Load> MEMKERN_FN F decoded(int i, Load load_from) const {
    const F stored = load_from(state + i);
    if constexpr (Kind == StateKind::kPower) {
      return power_decode<kSigned>(stored, unit);
    } else if constexpr (Kind == StateKind::kDynamic) {
      alignas(64) float lane[kLanes];
      store(lane, stored);
      for (int k = 0; k < kLanes; ++k)
        lane[k] = dynamic_decode<kSigned>(static_cast<uint8_t>(static_cast<int>(lane[k])));
      return load(lane) * unit;
    } else {
      return stored;
    }
  }

  // Keeps what is to be stored at place i: the moment, or w = sqrt(v) for unsigned power codes.
  template <class Store> MEMKERN_FN void put(int i, F x, Store store_to) {
    if constexpr (Kind == StateKind::kFp32) {
      store_to(state + i, x);
    } else {
      store(buffer.values + i, x);
      largest = max(kSigned ? abs(x) : x, largest);  // skips NaN; finish() sees to infinity
    }
  }

  // Stores the scale of the n values that were put. False where they are stored as zeros, and that is done.
  MEMKERN_FN bool set_scale(int n) {
    float s = max_of(largest);
    if (!memkern::is_finite(s)) s = buffer.largest_finite(n, kSigned);
    *scale = s;
    if (usable_inverse(s, &inv)) return true;
    std::memset(state, 0, n);
    return false;
  }

  MEMKERN_FN void encode(int n) const {
    const float* values = buffer.values;
    if constexpr (Kind == StateKind::kDynamic) {
      for (int i = 0; i < n; ++i) state[i] = static_cast<Code>(dynamic_encode<kSigned>(values[i], inv));
    } else if constexpr (kSigned) {
      SignedEncoder encoder(inv);
      for_vectors(n, [&](int i, auto, auto store_to) MEMKERN_LAMBDA {
        store_to(state + i, encoder.encode(load(values + i)));
      });
    } else {
      UnsignedEncoder encoder(inv);
      for_vectors(n, [&](int i, auto, auto store_to) MEMKERN_LAMBDA {
        store_to(state + i, encoder.encode(load(values + i), load(rounding + i)));
      });
      if (!encoder.sure()) encode_exactly(state, values, n, inv, rounding);
    }
  }

  // Encodes the block of n values that were put.
  MEMKERN_FN void finish(int n) {
    if constexpr (Kind != StateKind::kFp32)
      if (set_scale(n)) encode(n);
  }
};

// finish() of both, in one loop where that can be: see power_avx512.h.
template <StateKind Kind>
MEMKERN_FN void finish(Moment<int8_t, Kind>& first, Moment<uint8_t, Kind>& second, int n) {
  if constexpr (Kind == StateKind::kPower) {
    const bool has_first = first.set_scale(n), has_second = second.set_scale(n);
    if (has_first && has_second) {
      SignedEncoder m(first.inv);
      UnsignedEncoder w(second.inv);
      for_vectors(n, [&](int i, auto, auto store_to) MEMKERN_LAMBDA {
        store_to(first.state + i, m.encode(load(first.buffer.values + i)));
        store_to(second.state + i, w.encode(load(second.buffer.values + i), load(second.rounding + i)));
      });
      if (!w.sure()) encode_exactly(second.state, second.buffer.values, n, second.inv, second.rounding);
    } else if (has_first) {
      first.encode(n);
    } else if (has_second) {
      second.encode(n);
    }
  } else {
    first.finish(n);
    second.finish(n);
  }
}

}  // namespace
}  // namespace memkern::MEMKERN_ISA
