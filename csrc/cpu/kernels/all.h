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

const Kernels kKernels{
    .adam = adam_kernel,
    .lion = lion_kernel,
    .sgd = sgd_kernel,
    .lamb = lamb_kernel,
    .lamb_norms = lamb_norms,
    .lars = lars_kernel,
    .lars_norms = lars_norms,
    .muon_momentum = muon_momentum_kernel,
    .muon_apply = muon_apply_kernel,
    .codec = codec_kernel,
    .squares = squares_kernel,
    .encode = encode_kernel,
    .levels = levels_kernel,
    .two_branch = two_branch_kernel,
};

}  // namespace memkern::MEMKERN_ISA
