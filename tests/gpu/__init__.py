"""The CUDA and Triton kernels, compiled for the CPU or interpreted; test_gpu.py and test_activation.py need a GPU."""
