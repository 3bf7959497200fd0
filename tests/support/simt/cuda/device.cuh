// csrc/cuda/device.cuh for the CPU: the instructions that it has in PTX, and the launch of a kernel.
#pragma once
#include <simt.h>

#include "cpu/simd/half.h"

#define MEMKERN_DEVICE __device__ __forceinline__

namespace memkern {

// With errors as a GPU may have them: the next float above or below the rounded quotient, for some numbers.
inline float approximate_reciprocal(float x) {
  const float quotient = 1.0f / x;
  const uint32_t kind = bits_of(x) * 2654435769u >> 30;
  return kind > 1 || !(std::fabs(quotient) < 1e38f) ? quotient : std::nextafterf(quotient, kind ? INFINITY : 0.0f);
}
inline float approximate_reciprocal_sqrt(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
inline float max_or_nan(float a, float b) { return a != a || b != b ? NAN : a > b ? a : b; }
inline uint32_t to_bf16x2(float low, float high) {
  return to_bf16(low).bits | static_cast<uint32_t>(to_bf16(high).bits) << 16;
}
inline uint32_t to_fp16x2(float low, float high) {
  return to_fp16(low).bits | static_cast<uint32_t>(to_fp16(high).bits) << 16;
}
// Two bf16 numbers in a word: f of each pair of halves.
template <class F> uint32_t of_halves(F&& f) { return f(0) | f(16) << 16; }
inline uint32_t half_of(uint32_t x, int shift) { return x >> shift & 0xFFFF; }
inline float bf16_of(uint32_t x, int shift) { return float_of(half_of(x, shift) << 16); }
inline uint32_t min_bf16x2(uint32_t a, uint32_t b) {
  return of_halves([=](int k) { return half_of(bf16_of(b, k) < bf16_of(a, k) || bf16_of(a, k) != bf16_of(a, k) ? b : a, k); });
}
inline uint32_t max_bf16x2(uint32_t a, uint32_t b) {
  return of_halves([=](int k) { return half_of(bf16_of(b, k) > bf16_of(a, k) || bf16_of(a, k) != bf16_of(a, k) ? b : a, k); });
}
// Exact in double for what the kernels multiply, and so rounded once.
inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  return of_halves([=](int k) -> uint32_t {
    return to_bf16(static_cast<float>(static_cast<double>(bf16_of(a, k)) * bf16_of(b, k) + bf16_of(c, k))).bits;
  });
}
inline float fp16_to_float(uint32_t bits) { return to_float(fp16{static_cast<uint16_t>(bits)}); }
// With errors as a GPU may have them: the next float below or above the root, alternating.
inline float approximate_sqrt(float x) {
  if (!(x >= 0x1p-126f)) return x != x || x < 0 ? NAN : 0.0f;
  const float root = std::sqrt(x);
  const double excess = static_cast<double>(root) * root - x;
  const bool up = bits_of(x) * 2654435769u >> 31;
  if (excess == 0 || up == (excess > 0)) return root;
  return std::nextafterf(root, up ? INFINITY : 0.0f);
}

using SharedAddress = uintptr_t;
inline SharedAddress shared_address(void* shared) { return reinterpret_cast<SharedAddress>(shared); }
template <class T> T load_shared(SharedAddress at) {
  T x;
  std::memcpy(&x, reinterpret_cast<const void*>(at), sizeof(T));
  return x;
}
inline void store_shared(SharedAddress at, uint32_t x) { std::memcpy(reinterpret_cast<void*>(at), &x, sizeof(x)); }


template <int Bytes> const void* element(const void* array, uint32_t i) {
  return static_cast<const char*>(array) + uint64_t{i} * Bytes;
}

// At once; lab/emulators/ptx_threads.py has the copies of nvcc's code arrive as late as they may.
template <int Bytes> void copy_async(SharedAddress shared, const void* global) {
  std::memcpy(reinterpret_cast<void*>(shared), global, Bytes);
}
inline void commit_copies() {}
template <int Groups> void wait_for_copies() {}

inline uint32_t sign_bytes(float a, float b) {
  // Bytes 2 and 3 repeat byte 0 of a, as the instruction's selector says.
  return (bits_of(a) >> 31 ? 0xFFu : 0u) | (bits_of(b) >> 31 ? 0xFF00u : 0u) | (bits_of(a) & 0xFF) * 0x01010000u;
}

inline bool slow_fp64() { return simt::slow_fp64(); }

template <int Threads, class... Params, class... Args>
void launch(void (*kernel)(Params...), int64_t blocks, cudaStream_t, const Args&... args) {
  if (simt::machine.launcher) {
    const std::vector<char> params = simt::packed<Params...>(args...);
    simt::machine.launcher(reinterpret_cast<const void*>(kernel), blocks, Threads, params.data(), params.size());
    return;
  }
  const std::function<void()> call = [=] {
    simt::run([=] { kernel(args...); }, blocks, Threads);
  };
  if (simt::capturing())
    simt::machine.recorded.push_back(call);
  else
    call();
}

}  // namespace memkern
