"""When each storage of a training step is allocated and freed, and what is alive at the peak."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FORWARD, BACKWARD = "forward", "backward"
CATEGORIES = ("saved", "gradients", "temporaries")


@dataclasses.dataclass
class Storage:
    """Bytes, and when they are allocated and freed, in operators since the start of the step."""

    size: int
    born: int
    died: int | None = None
    accumulated: int | None = None
    """When it became a parameter's gradient."""


class Recorder(TorchDispatchMode):
    """Notes the storages that operators return, and by weak references when they are freed."""

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self.clock = 0
        self.storages: list[Storage] = []
        self.alive: dict[int, tuple[weakref.ref, Storage | None]] = {}
        self._note(held, counted=False)

    def _note(self, tensors: Iterable[Any], *, counted: bool) -> None:
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self.alive:
                continue
            entry = Storage(storage.nbytes(), self.clock) if counted else None

            def freed(_: weakref.ref, key: int = key, entry: Storage | None = entry) -> None:
                if entry is not None:
                    entry.died = self.clock + 1  # it was there when the last operator had returned
                del self.alive[key]

            self.alive[key] = weakref.ref(storage, freed), entry
            if entry is not None:
                self.storages.append(entry)

    def entry(self, tensor: Tensor) -> Storage | None:
        return self.alive.get(tensor.untyped_storage()._cdata, (None, None))[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Inputs that are not known were allocated before: an output that is a view of one is no new storage.
        self._note(tree_leaves((args, kwargs)), counted=False)
        out = func(*args, **kwargs)
        self.clock += 1
        self._note(tree_leaves(out), counted=True)
        return out


@dataclasses.dataclass(frozen=True)
class Trace:
    """The storages of a forward and a backward pass, without what is there before them."""

    storages: list[Storage]
    middle: int
    """The clock at the end of the forward pass."""
    end: int

    @property
    def saved(self) -> int:
        """Bytes alive between the passes."""
        return sum(s.size for s in self.storages if self._is_saved(s))

    def _is_saved(self, s: Storage) -> bool:
        return s.born <= self.middle and (s.died is None or s.died > self.middle + 1)

    def levels(self, *, free_gradients: bool, unit: int) -> dict[str, dict[str, list[int]]]:
        """Bytes after each operator by phase and category, sizes rounded up to multiples of ``unit``.

        free_gradients: a gradient is freed when it has been accumulated.
        """
        changes = {category: [0] * (self.end + 3) for category in CATEGORIES}
        for s in self.storages:
            size = -(-s.size // unit) * unit
            died = max(self.end + 1 if s.died is None else s.died, s.born + 1)
            until = died if s.accumulated is None else max(min(s.accumulated, died), s.born)
            before = changes["saved" if self._is_saved(s) else "temporaries"]
            before[s.born] += size
            before[until] -= size
            if until < died:
                changes["gradients"][until] += size
                changes["gradients"][until + 1 if free_gradients else died] -= size
        sums = {category: list(itertools.accumulate(change)) for category, change in changes.items()}
        cut = {FORWARD: slice(0, self.middle + 1), BACKWARD: slice(self.middle + 1, self.end + 1)}
        return {phase: {c: level[part] for c, level in sums.items()} for phase, part in cut.items()}


def peaks(
    traces: Sequence[Trace], more: int, *, free_gradients: bool, unit: int
) -> dict[str, dict[str, int]]:
    """The largest sum of bytes in each phase, by category.

    traces: one, or two of the same model with a number of like blocks and with one more; ``more`` is then by how many
    the whole model has more than the first. What is held at a point of a block is linear in the block's number
    and in the number of blocks, so that a phase's peak is in its first or its last block or outside of them: points are
    aligned from the beginning and from the end of the phase, and the bytes of each continued linearly. That is exact.
    """
    found = {}
    few, many = (t.levels(free_gradients=free_gradients, unit=unit) for t in (traces[0], traces[-1]))
    for phase in few:
        levels = {c: _continued(few[phase][c], many[phase][c], more) for c in CATEGORIES}
        sums = [sum(at) for at in zip(*levels.values(), strict=True)]
        at = max(range(len(sums)), key=sums.__getitem__)
        found[phase] = {c: level[at] for c, level in levels.items()}
    return found


def _continued(few: list[int], many: list[int], more: int) -> list[int]:
    half = len(few) // 2
    aligned = [*many[:half], *many[len(many) - (len(few) - half) :]]
    return [a + more * (b - a) for a, b in zip(few, aligned, strict=True)]


def record(model: nn.Module, held: Iterable[Tensor], forward: Any) -> Trace:
    """Runs ``forward()``, which returns the loss, and its backward pass, and records them."""
    recorder = Recorder([*model.parameters(), *model.buffers(), *held])

    def accumulated(p: Tensor) -> None:
        assert p.grad is not None
        entry = recorder.entry(p.grad)
        if entry is not None:
            entry.accumulated = recorder.clock

    handles = [
        p.register_post_accumulate_grad_hook(accumulated) for p in model.parameters() if p.requires_grad
    ]
    with recorder:
        loss = forward()
        middle = recorder.clock
        loss.backward()
    del loss
    for handle in handles:
        handle.remove()
    trace = Trace(recorder.storages, middle, recorder.clock)
    model.zero_grad(set_to_none=True)
    return trace
