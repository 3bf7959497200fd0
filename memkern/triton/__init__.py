"""The ops as Triton kernels, for CUDA and ROCm devices: the bits of :mod:`memkern.reference`.

Functions have the ops' names and take their arguments. ``codec``, ``tiles``, ``moment`` and ``table`` are what the
kernels share.
"""

from .adam import adam_step_
from .blockwise import dequantize_blockwise, quantize_blockwise
from .grad_norm import grad_norm_
from .lion import lion_step_

__all__ = ["adam_step_", "dequantize_blockwise", "grad_norm_", "lion_step_", "quantize_blockwise"]
