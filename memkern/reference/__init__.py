"""The specification: every op in plain PyTorch, in the order of operations that all backends follow.

fp32, IEEE round-to-nearest, one rounding an operation. Written to be read, not to be fast.
"""

from .activation import few_bit_backward, few_bit_backward_from_output, few_bit_encode, few_bit_forward
from .adam import adam_step_, amsgrad_step_
from .blockwise import dequantize_blockwise, quantize_blockwise
from .grad_norm import grad_norm_
from .lamb import lamb_step_
from .lars import lars_step_
from .lion import lion_step_
from .muon import muon_apply_, muon_momentum_
from .sgd import sgd_step_

__all__ = [
    "adam_step_",
    "amsgrad_step_",
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
