"""CUDA and Triton kernels without a GPU: a PTX emulator, checks of every access, a CUDA runtime, machine code."""
