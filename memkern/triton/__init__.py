"""The ops as Triton kernels, for CUDA and ROCm devices: the bits of :mod:`memkern.reference`.

Functions have the ops' names and take their arguments. Each family has a module: ``adam``, ``lamb``, ``lars``,
``lion``, ``sgd``, ``muon``, ``grad_norm``, ``blockwise``, ``activation``. Kernels share ``codec``, ``block_state``
and ``tile``; steps on many tensors share ``step_table``, ``tensor_table``, ``launch_step``, ``squares`` and
``trust_ratio``.
"""

from .activation import (
    few_bit_backward,
    few_bit_backward_from_output,
    few_bit_encode,
    few_bit_forward,
)
from .adam import adam_step_
from .blockwise import dequantize_blockwise, quantize_blockwise
from .grad_norm import grad_norm_
from .lamb import lamb_step_
from .lars import lars_step_
from .lion import lion_step_
from .muon import muon_apply_, muon_momentum_
from .sgd import sgd_step_

__all__ = [
    "adam_step_",
    "dequantize_blockwise",
    "few_bit_backward",
    "few_bit_backward_from_output",
    "few_bit_encode",
    "few_bit_forward",
    "grad_norm_",
    "lamb_step_",
    "lars_step_",
    "lion_step_",
    "muon_apply_",
    "muon_momentum_",
    "quantize_blockwise",
    "sgd_step_",
]
