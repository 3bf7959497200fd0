// The CPU kernels for AVX2. The pragma comes first: every function below is compiled for it.
#if defined(__x86_64__) && defined(__GNUC__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif
#include "simd_avx2.h"
#define MEMKERN_ISA avx2
#include "power_plain.h"

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
