"""The option ``state_bits``: in how many bits a group's moments are stored."""

from __future__ import annotations

from typing import Any

from ..options import STATE_BITS
from ..quant.codec import CODECS, POWER4
from ..schemas import StepOp

Group = dict[str, Any]


def of(group: Group) -> Any:
    """The group's ``state_bits``; a list, as files and checkpoints may have it, is a tuple."""
    given = group["state_bits"]
    return tuple(given) if isinstance(given, list) else given


def check(group: Group, op: StepOp) -> None:
    """Raises ValueError unless the option has one of its values, which the optimizer and the codec have."""
    given = of(group)
    if given not in STATE_BITS:
        allowed = "8, 32 or (8, 4)" if op.has_4bit_codes else "8 or 32"
        raise ValueError(f"state_bits must be {allowed}, got {group['state_bits']!r}")
    if given == (8, 4) and not op.has_4bit_codes:
        raise ValueError("state_bits must be 8 or 32, got (8, 4), which is for Adam and AdamW")
    if given == (8, 4) and group["codec"] != "power":
        raise ValueError(f"state_bits=(8, 4) needs codec='power', got codec={group['codec']!r}")


def are_codes(group: Group) -> bool:
    """Whether moments are stored as codes, of tensors that are large enough."""
    return of(group) != 32


def has_4bit_codes(group: Group) -> bool:
    """Whether the second moment's codes have 4 bits."""
    return of(group) == (8, 4)


def codec_number(group: Group) -> int:
    """The group's codec as the ops take it."""
    return POWER4 if of(group) == (8, 4) else CODECS[group["codec"]]
