"""Takes a block out of the recorded trace of a model with like blocks: the trace of a model with one block less."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from ..memory import Storage
from .trace import Trace


class _Place(NamedTuple):
    """A clock of a trace as the pass, the block, and the operators since the block's beginning.

    In place of a block: -1 before the first one's forward pass and after its backward pass, and the number of blocks
    between the last one's passes.
    """

    backward: bool
    block: int
    offset: int


class _Passes:
    """The clocks at which blocks' passes begin, the loss begins, and the last backward pass ends."""

    def __init__(self, trace: Trace) -> None:
        begins, ends = zip(*trace.blocks, strict=True)
        self.count = len(begins)
        self.forward: tuple[int, ...] = begins
        self.backward: tuple[int, ...] = (*ends[1:], trace.middle)
        self.end: int = ends[0]
        self.loss: int = begins[-1] + (begins[-1] - begins[-2])

    def is_ordered(self) -> bool:
        clocks = [*self.forward, self.loss, *self.backward[::-1], self.end]
        return clocks == sorted(clocks)

    def place(self, clock: int) -> _Place:
        """The place of an operator, or of the last one before a storage was freed."""
        if clock > self.end:
            return _Place(True, -1, clock - self.end)
        if clock > self.backward[-1]:
            block = next(i for i, begin in enumerate(self.backward) if clock > begin)
            return _Place(True, block, clock - self.backward[block])
        if clock > self.loss:
            return _Place(False, self.count, clock - self.loss)
        block = next((i for i in reversed(range(self.count)) if clock > self.forward[i]), -1)
        return _Place(False, block, clock - (self.forward[block] if block >= 0 else 0))


def without_block(trace: Trace, out: int) -> Trace | None:
    """The trace that the model without block ``out`` has, neither its first nor one of its last two.

    What a block holds until another one's pass is held until that of the block that comes in its place. None where
    the block's operators are not those of the next one, or where the blocks do not run one after another.
    """
    if len(trace.blocks) < out + 3 or not (old := _Passes(trace)).is_ordered():
        return None
    forward, ahead = old.forward[out : out + 2], old.forward[out + 2]
    backward, behind = (old.backward[out], old.backward[out - 1]), old.backward[out + 1]
    operators = trace.operators
    if (
        operators[slice(*forward)] != operators[forward[1] : ahead]
        or operators[slice(*backward)] != operators[behind : backward[0]]
    ):
        return None
    kept = operators[: forward[0]] + operators[forward[1] : backward[0]] + operators[backward[1] :]
    clocks = tuple(pair for i, pair in enumerate(trace.blocks) if i != out)
    less, less_back = forward[1] - forward[0], backward[1] - backward[0]
    moved = tuple(
        (begin - less * (i >= out), end - less - less_back * (i < out)) for i, (begin, end) in enumerate(clocks)
    )
    made = dataclasses.replace(
        trace,
        storages=[],
        accumulated={},
        of_blocks={},
        operators=kept,
        middle=trace.middle - less,
        blocks=moved,
        head=None if trace.head is None else trace.head - less,
    )
    return made if _move_storages(trace, made, old, _Passes(made), out) else None


def _move_storages(trace: Trace, made: Trace, old: _Passes, new: _Passes, out: int) -> bool:
    """Fills ``made`` with the storages of blocks other than ``out``; False where one is held too long."""

    def moved(clock: int, born: int) -> int | None:
        backward, block, offset = old.place(clock)
        if block < 0:
            return offset + (new.end if backward else 0)
        if block == old.count:
            return offset + new.loss
        if born in (-1, old.count):
            block -= block > out  # its place from the nearer end
        elif abs(block - born) > 1:
            return None
        else:
            block -= born > out
        begins = new.backward if backward else new.forward
        return begins[block] + offset if 0 <= block < new.count else None

    for s in trace.storages:
        born = old.place(s.born).block
        if born == out:
            continue
        at = moved(s.born, born)
        died = None if s.died is None else moved(s.died - 1, born)
        if at is None or (s.died is not None and died is None):
            return False
        copy = Storage(s.size, at, None if died is None else max(died + 1, at))
        made.storages.append(copy)
        for clocks, found in ((trace.accumulated, made.accumulated), (trace.of_blocks, made.of_blocks)):
            if s in clocks:
                clock = moved(clocks[s], born)
                if clock is None:
                    return False
                found[copy] = clock
    return True
