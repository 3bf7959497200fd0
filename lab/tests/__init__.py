"""Tests of benchmarks/ and lab/, and of the kernels on emulated GPUs."""
