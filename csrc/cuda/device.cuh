// CUDA's instructions as functions, and the launch of a kernel. tests/support/simt/cuda/device.cuh has the
// same functions for the CPU, where the tests run the kernels.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#define MEMKERN_DEVICE __device__ __forceinline__

namespace memkern {

// The root with a relative error of up to 2^-23 (PTX ISA, sqrt.approx.f32), in one instruction.
MEMKERN_DEVICE float approximate_sqrt(float x) {
  float root;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(x));
  return root;
}

// First approximations for a division and a root, which Newton steps refine.
MEMKERN_DEVICE float approximate_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
MEMKERN_DEVICE float approximate_reciprocal_sqrt(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The maximum, NaN if either is.
MEMKERN_DEVICE float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// Two floats rounded to nearest even, the first in the low half.
MEMKERN_DEVICE uint32_t to_bf16x2(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
MEMKERN_DEVICE uint32_t to_fp16x2(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
MEMKERN_DEVICE float fp16_to_float(uint32_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<uint16_t>(bits)));
  return x;
}

// Minimum and maximum of the bf16 numbers in two words; of a number and a NaN, the number.
MEMKERN_DEVICE uint32_t min_bf16x2(uint32_t a, uint32_t b) {
  uint32_t smaller;
  asm("min.bf16x2 %0, %1, %2;" : "=r"(smaller) : "r"(a), "r"(b));
  return smaller;
}
MEMKERN_DEVICE uint32_t max_bf16x2(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}
MEMKERN_DEVICE uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

// An address in shared memory, in a register. From a pointer, the compiler would compute it anew in every
// iteration of a loop.
using SharedAddress = uint32_t;
MEMKERN_DEVICE SharedAddress shared_address(void* shared) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(shared));
}
// T: uint4, uint2 or uint32_t.
template <class T> MEMKERN_DEVICE T load_shared(SharedAddress at) {
  T x;
  if constexpr (sizeof(T) == 16)
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(at)
                 : "memory");
  else if constexpr (sizeof(T) == 8)
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(at) : "memory");
  else
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return x;
}
MEMKERN_DEVICE void store_shared(SharedAddress at, uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}

// The address of element i, of `Bytes` bytes, in one instruction. The compiler takes four.
template <int Bytes> MEMKERN_DEVICE const void* element(const void* array, uint32_t i) {
  uint64_t address;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(address) : "r"(i), "n"(Bytes), "l"(array));
  return reinterpret_cast<const void*>(address);
}

// Copies 16, 8 or 4 bytes from global to shared memory while the thread goes on, without registers (sm_80 and
// later). Copies until commit_copies() are a group; the thread may read them once it has waited for the
// group.
template <int Bytes> MEMKERN_DEVICE void copy_async(SharedAddress to, const void* global) {
  if constexpr (Bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(global), "n"(Bytes) : "memory");
}
MEMKERN_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all groups but the last `Groups` have arrived.
template <int Groups> MEMKERN_DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Groups) : "memory");
}

// Bytes 0 and 1: 0xFF where a and where b has its sign bit set, else 0. A digit 8 + k of prmt's selector
// repeats the sign of byte k (3: a's highest, 7: b's highest); __byte_perm has no such mode.
MEMKERN_DEVICE uint32_t sign_bytes(float a, float b) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, 0x00FB;" : "=r"(bytes) : "r"(__float_as_uint(a)), "r"(__float_as_uint(b)));
  return bytes;
}

// Whether fp64 runs at 1/64 of fp32's rate, and not at 1/2 (CUDA C++ Programming Guide, arithmetic
// instructions).
MEMKERN_DEVICE constexpr bool slow_fp64() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 700 && __CUDA_ARCH__ != 800 && __CUDA_ARCH__ != 900 && \
    __CUDA_ARCH__ != 1000
  return true;
#else
  return false;
#endif
}

template <int Threads, class... Params, class... Args>
void launch(void (*kernel)(Params...), int64_t blocks, cudaStream_t stream, const Args&... args) {
  kernel<<<static_cast<unsigned>(blocks), Threads, 0, stream>>>(args...);
}

}  // namespace memkern
