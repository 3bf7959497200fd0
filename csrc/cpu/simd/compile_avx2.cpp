// The CPU kernels for AVX2. The pragma comes first: every function below is compiled for it.
#if defined(__x86_64__) && defined(__GNUC__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,f16c,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c,fma")
#endif
#include "cpu/simd/avx2.h"
#define MEMKERN_ISA avx2
#include "cpu/simd/power_generic.h"

#include "cpu/kernels/all.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
