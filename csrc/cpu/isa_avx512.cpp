// The CPU kernels for AVX-512. The pragma comes first: every function below is compiled for it.
#if defined(__x86_64__) && defined(__GNUC__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,f16c,fma,avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC target("avx2,f16c,fma,avx512f,avx512bw,avx512dq,avx512vl")
#endif
#include "power_avx512.h"
#include "simd_avx512.h"
#define MEMKERN_ISA avx512
#include "activation_kernel.h"
#include "adam_kernel.h"
#include "blockwise_kernel.h"
#include "lamb_kernel.h"
#include "lars_kernel.h"
#include "lion_kernel.h"
#include "squares_kernel.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
