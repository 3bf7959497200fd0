// The CPU kernels for AVX-512. The pragma comes first: every function below is compiled for it.
#if defined(__x86_64__) && defined(__GNUC__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,f16c,fma,avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC target("avx2,f16c,fma,avx512f,avx512bw,avx512dq,avx512vl")
#endif
#include "cpu/simd/avx512.h"
#define MEMKERN_ISA avx512
#include "cpu/kernels/all.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
