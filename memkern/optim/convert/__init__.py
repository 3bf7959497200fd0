"""Converts state dicts of torch.optim and bitsandbytes to memkern's, Adam's back to torch, and bf16 models to fp32.

A converted state continues the training that it came from: the same moments, up to the error of the codes
of 8-bit moments, the same step counts, the same hyperparameters. Parameters are matched by their place, so
both optimizers must have the same ones in the same order. No function here changes what it is given.
"""

from .bitsandbytes import from_bitsandbytes_state_dict
from .fp32 import load_fp32_state_dict, to_fp32_state_dict
from .torch import from_torch_state_dict, to_torch_state_dict
from .torch_muon import from_torch_muon_state_dict

__all__ = [
    "from_bitsandbytes_state_dict",
    "from_torch_muon_state_dict",
    "from_torch_state_dict",
    "load_fp32_state_dict",
    "to_fp32_state_dict",
    "to_torch_state_dict",
]
