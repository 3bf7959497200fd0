// Every CPU kernel, for compile_*.cpp to compile for an instruction set: a new one is added here, and
// declared in jobs.h.
#pragma once
#include "cpu/kernels/activation.h"
#include "cpu/kernels/adam.h"
#include "cpu/kernels/blockwise.h"
#include "cpu/kernels/grad_norm.h"
#include "cpu/kernels/lamb.h"
#include "cpu/kernels/lars.h"
#include "cpu/kernels/lion.h"
#include "cpu/kernels/muon.h"
#include "cpu/kernels/sgd.h"

namespace memkern::MEMKERN_ISA {

// In the order of the struct.
const Kernels kKernels{
    adam_kernel,    lion_kernel,   sgd_kernel,           lamb_kernel,       lamb_norms,
    lars_kernel,    lars_norms,    muon_momentum_kernel, muon_apply_kernel, codec_kernel,
    squares_kernel, encode_kernel, levels_kernel,        two_branch_kernel,
};

}  // namespace memkern::MEMKERN_ISA
