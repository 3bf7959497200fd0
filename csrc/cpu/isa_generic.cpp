// The CPU kernels in plain C++.
#include "simd_generic.h"
#define MEMKERN_ISA generic
#include "power_plain.h"

#include "activation_kernel.h"
#include "adam_kernel.h"
#include "blockwise_kernel.h"
#include "lamb_kernel.h"
#include "lars_kernel.h"
#include "lion_kernel.h"
#include "squares_kernel.h"
