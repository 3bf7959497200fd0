"""The ops as Triton kernels, for CUDA and ROCm devices: the bits of :mod:`memkern.reference`.

Functions have the ops' names and take their arguments. ``codec``, ``tiles``, ``moment`` and ``table`` are what the
kernels share.
"""

from .blockwise import dequantize_blockwise, quantize_blockwise

__all__ = ["dequantize_blockwise", "quantize_blockwise"]
