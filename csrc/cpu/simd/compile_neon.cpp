// The CPU kernels for 64-bit ARM, which always has NEON, FMA and fp16's conversions: no flags are needed.
#if defined(__aarch64__)
#include "cpu/simd/neon.h"
#define MEMKERN_ISA neon
#include "cpu/simd/power_generic.h"

#include "cpu/kernels/all.h"
#endif
