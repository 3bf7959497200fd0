"""How an operation uses a saved tensor, and what it may therefore be given in place of it."""

from __future__ import annotations

import dataclasses
import enum

import torch

from .codecs import BLOCK_SIZE
from .saved_value import Value, finer


class Use(enum.Enum):
    """How an operation uses a value in its backward pass: exactly, from codes, or its shape alone."""

    EXACT = "exact"
    CODED = "coded"
    SHAPE = "shape"


@dataclasses.dataclass(frozen=True, slots=True)
class Need:
    """What a user needs of the value that it gets.

    exact: no codes in it. rounded: it may be computed anew to within rounding, as the rows of norms are. clipped: it
    may be log-probabilities that end at a smallest one, as the user reads the shape alone. coarse: codes may lose most
    of a block beside its largest value. block_size: the largest of codes.
    """

    exact: bool
    rounded: bool = True
    clipped: bool = False
    coarse: bool = True
    block_size: int = BLOCK_SIZE

    def is_met_by(self, value: Value, dtype: torch.dtype | None) -> bool:
        """Whether a value serves, precise to ``dtype`` (None: to its own)."""
        return (
            value.fresh()
            and not (self.exact and value.lossy)
            and (self.rounded or not value.rounded)
            and (self.clipped or not value.clipped)
            and (self.coarse or not value.coarse)
            and value.block_size <= self.block_size
            and (value.lossy or finer(value.precision, dtype or value.dtype))
        )


SAME_BITS = Need(exact=True, rounded=False)
EXACT = Need(exact=True)
CODES = Need(exact=False)
SHAPE = Need(exact=False, clipped=True)
OF_USE = {Use.EXACT: SAME_BITS, Use.CODED: CODES, Use.SHAPE: SHAPE}
"""Where nothing is known of the data."""
OF_USE_EXACTLY = {Use.EXACT: SAME_BITS, Use.CODED: EXACT, Use.SHAPE: EXACT}
"""The same where nothing is stored in codes."""
