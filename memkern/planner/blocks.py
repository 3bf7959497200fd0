"""Takes a block out of the trace of a model with like blocks: the rest is the trace of a model with one block less."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from ..memory import Storage
from .trace import Trace


class _Place(NamedTuple):
    """A clock of a trace, given by the pass, the block's number, and the operators since the block's pass began.

    Outside of the blocks ``block`` is -1 before the first one's forward pass and after its backward pass, and the
    number of blocks after the last one's forward pass and before its backward pass.
    """

    backward: bool  # False from the beginning up to where the last block's backward pass begins
    block: int
    offset: int


class _Passes:
    """The clocks at which the blocks' passes and the loss begin, and at which the first block's backward pass ends."""

    def __init__(self, trace: Trace) -> None:
        begins, ends = zip(*trace.block_clocks, strict=True)
        self.count = len(begins)
        self.forward: tuple[int, ...] = begins
        self.backward: tuple[int, ...] = (*ends[1:], trace.forward_end)
        self.end: int = ends[0]
        self.loss: int = begins[-1] + (begins[-1] - begins[-2])

    def is_ordered(self) -> bool:
        clocks = [*self.forward, self.loss, *self.backward[::-1], self.end]
        return clocks == sorted(clocks)

    def place(self, clock: int) -> _Place:
        """The place of a clock. A storage that is freed at the beginning of a block belongs to the one before."""
        if clock > self.end:
            return _Place(True, -1, clock - self.end)
        if clock > self.backward[-1]:
            block = next(i for i, begin in enumerate(self.backward) if clock > begin)
            return _Place(True, block, clock - self.backward[block])
        if clock > self.loss:
            return _Place(False, self.count, clock - self.loss)
        block = next((i for i in reversed(range(self.count)) if clock > self.forward[i]), -1)
        return _Place(False, block, clock - (self.forward[block] if block >= 0 else 0))


def without_block(trace: Trace, removed: int) -> Trace | None:
    """The trace of the model without block number ``removed``, which is not the first and not one of the last two.

    What was held until some other block's pass is then held until the pass of the block that has that one's place. None
    if the block's operators are not those of the next one, or if the blocks do not run one after another.
    """
    if len(trace.block_clocks) < removed + 3 or not (passes := _Passes(trace)).is_ordered():
        return None
    forward, next_forward = passes.forward[removed : removed + 2], passes.forward[removed + 2]
    backward, next_backward = (passes.backward[removed], passes.backward[removed - 1]), passes.backward[removed + 1]
    operators = trace.operators
    if (
        operators[slice(*forward)] != operators[forward[1] : next_forward]
        or operators[slice(*backward)] != operators[next_backward : backward[0]]
    ):
        return None
    remaining = operators[: forward[0]] + operators[forward[1] : backward[0]] + operators[backward[1] :]
    clocks = tuple(pair for i, pair in enumerate(trace.block_clocks) if i != removed)
    length, length_back = forward[1] - forward[0], backward[1] - backward[0]
    moved_clocks = tuple(
        (begin - length * (i >= removed), end - length - length_back * (i < removed))
        for i, (begin, end) in enumerate(clocks)
    )
    shorter = dataclasses.replace(
        trace,
        storages=[],
        accumulated={},
        block_ends={},
        operators=remaining,
        forward_end=trace.forward_end - length,
        block_clocks=moved_clocks,
        output_begin=None if trace.output_begin is None else trace.output_begin - length,
    )
    return shorter if _move_storages(trace, shorter, passes, _Passes(shorter), removed) else None


def _move_storages(trace: Trace, shorter: Trace, old: _Passes, new: _Passes, removed: int) -> bool:
    """Fills ``shorter`` with the storages of the other blocks; False where one is held over several blocks."""

    def moved(clock: int, born: int) -> int | None:
        """The clock in ``shorter`` for one in ``trace``, of a storage that was born in block number ``born``."""
        backward, block, offset = old.place(clock)
        if block < 0:
            return offset + (new.end if backward else 0)
        if block == old.count:
            return offset + new.loss
        if born in (-1, old.count):
            block -= block > removed  # of blocks behind the removed one the number changes
        elif abs(block - born) > 1:
            return None
        else:
            block -= born > removed
        begins = new.backward if backward else new.forward
        return begins[block] + offset if 0 <= block < new.count else None

    for s in trace.storages:
        born = old.place(s.born).block
        if born == removed:
            continue
        born_at = moved(s.born, born)
        died_at = None if s.died is None else moved(s.died - 1, born)
        if born_at is None or (s.died is not None and died_at is None):
            return False
        copy = Storage(s.size, born_at, None if died_at is None else max(died_at + 1, born_at))
        shorter.storages.append(copy)
        by_gradient = (trace.accumulated, shorter.accumulated), (trace.block_ends, shorter.block_ends)
        for clocks, shorter_clocks in by_gradient:
            if s in clocks:
                clock = moved(clocks[s], born)
                if clock is None:
                    return False
                shorter_clocks[copy] = clock
    return True
