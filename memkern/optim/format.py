"""How a parameter's state is stored: the options that its codes are read with."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..options import STATE_BITS
from ..quant.codec import CODECS, POWER4
from ..schemas import StepOp

Group = dict[str, Any]

# 1-D tensors stay fp32 up to this many times min_8bit_size: biases and norms are small and matter, while the flat
# shards that data-parallel wrappers make are far larger.
MIN_1D_FACTOR = 16


class Format(NamedTuple):
    """A group's options that say how states are stored."""

    state_bits: Any
    block_size: int
    codec: str
    master_weights: str | None

    @classmethod
    def of(cls, group: Group) -> Format:
        """The format that a group asks for. ``state_bits`` is a tuple where a file or a checkpoint has a list."""
        given = group["state_bits"]
        state_bits = tuple(given) if isinstance(given, list) else given
        return cls(state_bits, group["block_size"], group["codec"], group["master_weights"])

    @property
    def has_codes(self) -> bool:
        """Whether moments are stored as codes, of tensors that are large enough."""
        return self.state_bits != 32

    @property
    def has_4bit_codes(self) -> bool:
        """Whether the second moment's codes have 4 bits."""
        return self.state_bits == (8, 4)

    @property
    def codec_number(self) -> int:
        """The codec as the ops take it."""
        return POWER4 if self.state_bits == (8, 4) else CODECS[self.codec]

    def packs(self, codes: Tensor) -> bool:
        """Whether a moment's codes are those of 4 bits, two in a byte."""
        return self.has_4bit_codes and codes.dtype == torch.uint8


def takes_8bit_state(p: Tensor, group: Group) -> bool:
    """Whether a parameter's moments are stored in 8 bits: the group asks for it and the tensor is large enough."""
    least = group["min_8bit_size"] * (MIN_1D_FACTOR if p.dim() <= 1 else 1)
    return Format.of(group).has_codes and p.numel() >= least


def check_state_bits(group: Group, op: StepOp) -> None:
    """Raises ValueError unless ``state_bits`` has one of its values, which the optimizer and the codec have."""
    given = Format.of(group).state_bits
    if given not in STATE_BITS:
        allowed = "8, 32 or (8, 4)" if op.has_4bit_codes else "8 or 32"
        raise ValueError(f"state_bits must be {allowed}, got {group['state_bits']!r}")
    if given == (8, 4) and not op.has_4bit_codes:
        raise ValueError("state_bits must be 8 or 32, got (8, 4), which is for Adam and AdamW")
    if given == (8, 4) and group["codec"] != "power":
        raise ValueError(f"state_bits=(8, 4) needs codec='power', got codec={group['codec']!r}")
