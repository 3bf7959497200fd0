// The CPU kernels in plain C++.
#include "cpu/simd/generic.h"
#define MEMKERN_ISA generic
#include "cpu/simd/power_generic.h"

#include "cpu/kernels/all.h"
