"""Every bf16 weight beside rounding errors that no step would keep for it, as after edits of weights."""

from __future__ import annotations

import torch
from torch import Tensor

BF16 = torch.bfloat16


def hostile(storage: str) -> tuple[Tensor, Tensor]:
    """Weights and errors of shape (1024, 512): every bf16 value eight times, beside eight errors that a state can hold,
    the largest and the smallest among them. storage: a value of master_weights.
    """
    patterns = torch.arange(2**16).repeat_interleave(8)
    p = torch.where(patterns >= 2**15, patterns - 2**16, patterns).short().view(BF16)
    if storage == "bf16+8":
        state = torch.tensor([-128, -127, -1, 0, 1, 77, 126, 127], dtype=torch.int8).repeat(2**16)
    else:
        state = torch.tensor([-32768, -32767, -1, 0, 1, 12345, 32766, 32767], dtype=torch.int16).repeat(2**16)
    return p.view(-1, 512), state.view(-1, 512)
