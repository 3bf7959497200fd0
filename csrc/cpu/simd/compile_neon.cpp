// The CPU kernels for 64-bit ARM, which has NEON, FMA and the conversions of fp16 without flags.
#if defined(__aarch64__)
#include "cpu/simd/neon.h"
#define MEMKERN_ISA neon
#include "cpu/simd/power_generic.h"

#include "cpu/kernels/all.h"
#endif
