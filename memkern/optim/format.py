"""The format of a parameter's state: which options say how it is stored, and when it has 8 bits."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..quant.codec import CODECS
from ..techniques.options import STATE_BITS

Group = dict[str, Any]  # a parameter group of an optimizer

# 1-D tensors stay fp32 up to this many times min_8bit_size: biases and norms are small and matter, while the flat
# shards that data-parallel wrappers make are far larger.
MIN_1D_FACTOR = 16


class Format(NamedTuple):
    """A group's options that say how states are stored."""

    state_bits: int
    block_size: int
    codec: str
    master_weights: str | None

    @classmethod
    def of(cls, group: Group) -> Format:
        """The format that a group asks for."""
        return cls(group["state_bits"], group["block_size"], group["codec"], group["master_weights"])

    @property
    def has_codes(self) -> bool:
        """Whether moments are stored as codes, where a tensor is large enough (:func:`takes_8bit_state`)."""
        return self.state_bits != 32

    @property
    def codec_number(self) -> int:
        """The codec as the number that ops take."""
        return CODECS[self.codec]


def takes_8bit_state(p: Tensor, group: Group) -> bool:
    """Whether a parameter's moments are stored in 8 bits: the group asks for it and the tensor is large enough."""
    least = group["min_8bit_size"] * (MIN_1D_FACTOR if p.dim() <= 1 else 1)
    return Format.of(group).has_codes and p.numel() >= least


def check_state_bits(group: Group) -> None:
    """Raises ValueError unless ``state_bits`` has one of its values."""
    if group["state_bits"] not in STATE_BITS:
        raise ValueError(f"state_bits must be 8 or 32, got {group['state_bits']!r}")
