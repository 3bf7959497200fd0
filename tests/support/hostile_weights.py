"""bf16 weights beside weight states that no step leaves there, as edits of the weights do."""

from __future__ import annotations

import torch
from torch import Tensor

BF16 = torch.bfloat16


def hostile(kept: str) -> tuple[Tensor, Tensor]:
    """Every bf16 value eight times, beside what a state may hold: errors and copies that no step leaves there, too."""
    patterns = torch.arange(2**16).repeat_interleave(8)
    p = torch.where(patterns >= 2**15, patterns - 2**16, patterns).short().view(BF16)
    if kept == "bf16+8":
        state = torch.tensor([-128, -127, -1, 0, 1, 77, 126, 127], dtype=torch.int8).repeat(2**16)
    elif kept == "bf16+16":
        state = torch.tensor([-32768, -32767, -1, 0, 1, 12345, 32766, 32767], dtype=torch.int16).repeat(2**16)
    else:
        # Near p and at both ends of what rounds to it; the next values; other values, infinity and NaN.
        near = torch.tensor([-0x8001, -0x8000, -0x7FFF, 0x1234, 0x8000, 0x8001]).repeat(2**16)
        others = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -2, 0x7F800000, 0, -(2**31), 0x3F800000])
        copies = torch.cat([near.view(-1, 6), others.repeat(2**14).view(-1, 2)], 1).flatten()
        low = torch.where(patterns >= 2**15, patterns - 2**16, patterns) * 2**16
        bits = torch.where(torch.arange(8).repeat(2**16) < 6, low + copies, copies)
        state = ((bits + 2**31) % 2**32 - 2**31).int().view(torch.float32)
    return p.view(-1, 512), state.view(-1, 512)
