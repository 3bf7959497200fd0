// Loops over vectors with a short last one. Compiled once per instruction set (simd/compile_*.cpp).
#pragma once
#include <cstring>
#include <type_traits>

#include "cpu/kernels/jobs.h"
#include "cpu/simd/half.h"

namespace memkern::MEMKERN_ISA {
namespace {

// Calls f(T()) with the C++ type of a float dtype.
template <class Call> auto with_type(FloatType t, Call f) {
  return t == FloatType::kBf16 ? f(bf16()) : t == FloatType::kFp16 ? f(fp16()) : f(float());
}

template <class T> MEMKERN_FN auto load_part(const T* p, int count) {
  T all[kLanes] = {};
  std::memcpy(all, p, count * sizeof(T));
  return load(all);
}
template <class T, class X> MEMKERN_FN void store_part(T* p, X x, int count) {
  T all[kLanes];
  store(all, x);
  std::memcpy(p, all, count * sizeof(T));
}

MEMKERN_FN auto load_part(const code4x2* p, int count) {
  code4x2 all[kLanes] = {};
  std::memcpy(all, p, (count + 1) / 2);
  return load(all);
}
template <class X> MEMKERN_FN void store_part(code4x2* p, X x, int count) {
  code4x2 all[kLanes];
  store(all, x);
  if (count % 2 != 0) all[count / 2].pair &= 15;  // the second half of the last byte is no element's
  std::memcpy(p, all, (count + 1) / 2);
}

// Where element i is; of codes of 4 bits, the byte.
template <class T> MEMKERN_FN T* element(T* array, int i) { return array + i; }
MEMKERN_FN const code4x2* element(const code4x2* array, int i) { return array + i / 2; }
MEMKERN_FN code4x2* element(code4x2* array, int i) { return array + i / 2; }

// In a body of for_vectors: a vector of codes from element i on.
template <class Code, class Load> MEMKERN_FN F load_code(const Code* codes, int i, Load load_from) {
  if constexpr (std::is_same_v<Code, code4x2> && kLanes == 1)
    return F(static_cast<float>(codes[i / 2].pair >> i % 2 * 4 & 15));
  else
    return load_from(element(codes, i));
}
template <class Code, class X, class Store>
MEMKERN_FN void store_code(Code* codes, int i, X x, Store store_to) {
  if constexpr (std::is_same_v<Code, code4x2> && kLanes == 1) {
    code4x2 second;
    store(&second, x);
    if (i % 2 != 0) codes[i / 2].pair |= second.pair << 4;  // the first one's store has cleared it
    if (i % 2 != 0) return;
  }
  store_to(element(codes, i), x);
}

// Calls body(i, load, store) for each vector of [0, n). In a short last one, lanes past n load 0 and store
// nothing.
template <class Body> MEMKERN_FN void for_vectors(int n, Body&& body) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes)
    body(
        i, [](const auto* p) MEMKERN_LAMBDA { return load(p); },
        [](auto* p, auto x) MEMKERN_LAMBDA { store(p, x); });
  // __builtin_expect: Adam's loop in cache is 3 % faster with it.
  if (const int left = n - i; __builtin_expect(left > 0, 0))
    body(
        i, [left](const auto* p) MEMKERN_LAMBDA { return load_part(p, left); },
        [left](auto* p, auto x) MEMKERN_LAMBDA { store_part(p, x, left); });
}

// Whether this step reads the same memory again: only then does a prefetch leave it in the last-level cache,
// so that there is room for what LAMB's second pass reads again. LAMB's step takes 0.95 of the time for
// GPT-2's shapes, Adam's and Lion's 0.97 to 0.98.
enum Reuse { kOnce = 0, kAgain = 3 };  // __builtin_prefetch's locality

// In a body of for_vectors: prefetches the elements 1024 after i. With two threads on Zen 5, from memory,
// Adam's step takes 0.8 (cores with a last-level cache each) to 0.93 (one for both) of the time, Lion's 0.86
// to 0.94.
template <Reuse R, class... T> MEMKERN_FN void prefetch(int i, const T*... arrays) {
  if constexpr (kLanes > 1) (__builtin_prefetch(element(arrays, i + 1024), 0, R), ...);
}

// In a body of for_vectors: a function that makes lanes past n zero.
template <class Store> MEMKERN_FN auto masked_by(Store store_to) {
  return [store_to](F x) MEMKERN_LAMBDA {
    if constexpr (std::is_empty_v<Store>) {  // a whole vector
      return x;
    } else {
      float lane[kLanes] = {};
      store_to(lane, x);
      return load(lane);
    }
  };
}

}  // namespace
}  // namespace memkern::MEMKERN_ISA
