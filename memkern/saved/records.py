"""What is stored for one device: the tensors of a value, and those that leave or come back together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .codecs import Layout
from .host_pool import Piece

STAYS, HELD, LEAVING, AWAY, EARLY, BACK = range(6)
"""States of a record: on the device and not copied; the same, while somebody else holds the memory, so that a copy
would free nothing; on its way; on the host alone; coming or come back and not asked for yet; asked for."""


class Transfer:
    """Records that leave or come back together, with one event. waited: the stream that has waited for it."""

    __slots__ = ("alive", "event", "nbytes", "number", "records", "waited")

    def __init__(self, records: list[Record], event: Any, number: int) -> None:
        self.records, self.event, self.number, self.waited = records, event, number, _NO_STREAM
        self.nbytes, self.alive = sum(record.nbytes for record in records), len(records)


_NO_STREAM = object()


class Record:
    """The tensors of one stored value. small: those that stay; None in the places of the others."""

    __slots__ = (
        "alive", "back", "hosts", "index", "layouts", "left", "nbytes", "pieces", "small", "state", "stream", "tensors"
    )  # fmt: skip

    def __init__(self, data: Sequence[Tensor], large: list[Tensor], nbytes: int, index: int) -> None:
        self.tensors: list[Tensor] | None = large
        self.small = None if len(large) == len(data) else [None if any(x is y for y in large) else x for x in data]
        self.nbytes, self.index, self.alive, self.state = nbytes, index, True, STAYS
        self.pieces: list[Piece] | None = None
        self.hosts: list[Tensor] | None = None  # in the piece, where it is one
        self.layouts: list[Layout] = []  # else
        self.left: Transfer | None = None
        self.back: Transfer | None = None
        self.stream: Any = None  # on which the tensors that came back were allocated

    def found(self) -> list[Tensor]:
        """All tensors, which are there."""
        assert self.tensors is not None
        if self.small is None:
            return self.tensors
        large = iter(self.tensors)
        return [next(large) if x is None else x for x in self.small]
