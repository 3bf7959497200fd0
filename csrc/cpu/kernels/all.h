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
    .adam = pick_adam_kernel,
    .lion = pick_lion_kernel,
    .sgd = pick_sgd_kernel,
    .lamb = pick_lamb_kernel,
    .lamb_norms = pick_lamb_norms,
    .lars = pick_lars_kernel,
    .lars_norms = pick_lars_norms,
    .muon_momentum = pick_muon_momentum_kernel,
    .muon_apply = pick_muon_apply_kernel,
    .codec = pick_codec_kernel,
    .squares = pick_squares_kernel,
    .encode = pick_encode_kernel,
    .levels = pick_levels_kernel,
    .two_branch = pick_two_branch_kernel,
};

}  // namespace memkern::MEMKERN_ISA
