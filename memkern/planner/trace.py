"""When each storage of a training step is allocated and freed, and what is alive at the peak."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..quant.layout import is_dense

Operator = tuple[Any, ...]
"""Its name, and the shapes of what it returns."""
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
    added: Storage | None = None
    """The first of two gradients whose sum this is: autograd adds in place where nothing else refers to that."""


class Recorder(TorchDispatchMode):
    """Notes the storages that operators return, and by weak references when they are freed."""

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self.clock = 0
        self.storages: list[Storage] = []
        self.alive: dict[int, tuple[weakref.ref, Storage | None]] = {}
        self.operators: list[Operator] = []
        self._note(held, counted=False)

    def _note(self, tensors: Iterable[Any], *, counted: bool) -> None:
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or tensor.device.type == "meta":  # has no bytes
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
        added = self.entry(args[0]) if _adds_gradients(func, args, kwargs) else None
        out = func(*args, **kwargs)
        self.clock += 1
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self._note(results, counted=True)
        self.operators.append((str(func), *(tuple(x.shape) for x in results)))
        if added is not None and (total := self.entry(out)) is not None:
            total.added = added
        return out

    def joined(self) -> list[Storage]:
        """The storages, where a sum of gradients that is made in place on a real device is one with its first."""
        found = []
        for s in self.storages:
            first = s.added
            if first is None or first.size != s.size or first.died != s.born + 1:
                found.append(s)
                continue
            first.died, first.accumulated = s.died, s.accumulated
            for other in self.storages:
                if other.added is s:
                    other.added = first
        return found


def _adds_gradients(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether autograd itself adds two gradients of one tensor, and may write the sum over the first.

    It does so where it holds the only reference to a tensor that is no view, but never with tensors of a subclass such
    as fake ones. That the first is freed now, so that no other reference was there, is seen afterwards.
    """
    if func is not torch.ops.aten.add.Tensor or kwargs or torch.is_grad_enabled() or len(args) != 2:
        return False
    first, second = args
    return (
        isinstance(second, Tensor)
        and first.shape == second.shape
        and first.dtype == second.dtype
        and first._base is None
        and is_dense(first.shape, first.stride())
        and _called_by_autograd()
    )


def _called_by_autograd() -> bool:
    """Whether it is the engine that calls, and not a Python function's backward."""
    frame: Any = sys._getframe(2)
    while frame is not None and ("__torch_dispatch__" in frame.f_code.co_name or _is_wrapper(frame)):
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


def _is_wrapper(frame: Any) -> bool:
    return frame.f_globals.get("__name__", "").startswith(("torch._dynamo", "torch._compile"))


@dataclasses.dataclass(frozen=True)
class Trace:
    """The storages of a forward and a backward pass, without what is there before them."""

    storages: list[Storage]
    operators: list[Operator]
    middle: int
    """The clock at the end of the forward pass."""

    @property
    def end(self) -> int:
        return len(self.operators)

    @property
    def saved(self) -> int:
        """Bytes alive between the passes."""
        return sum(s.size for s in self.storages if self._is_saved(s))

    def _is_saved(self, s: Storage) -> bool:
        return s.born <= self.middle and (s.died is None or s.died > self.middle + 1)

    @property
    def phases(self) -> dict[str, slice]:
        """The operators of each."""
        return {FORWARD: slice(0, self.middle), BACKWARD: slice(self.middle, self.end)}

    def levels(self, *, free_gradients: bool, unit: int) -> dict[str, list[int]]:
        """Bytes at the beginning and after each operator by category, sizes rounded up to multiples of ``unit``.

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
        return {
            category: list(itertools.accumulate(change))[: self.end + 1]
            for category, change in changes.items()
        }


def aligned(few: Trace, many: Trace) -> dict[str, list[tuple[int, int]]] | None:
    """Of each phase the points, counted in operators, of two traces of which the second has one more like block.

    Each point of the first is aligned from the beginning, up to the end of the last block, or from the end, or both;
    None where the traces are not as said.
    """
    points = {}
    for phase in few.phases:
        i, j = few.phases[phase], many.phases[phase]
        a, b = few.operators[i], many.operators[j]
        first, last, block = _common(a, b), _common(a[::-1], b[::-1]), len(b) - len(a)
        if block > 0:
            if first + last < len(a) + block:
                return None
            # Beyond the blocks some operators are the same by chance: together as many as are over whole blocks.
            chance = (first + last - len(a)) % block
            first, last = first - chance, last - chance
        elif a != b:
            return None
        points[phase] = [(i.start + k, j.start + k) for k in range(first + 1)]
        points[phase] += [(i.stop - k, j.stop - k) for k in range(last + 1)]
    return points


def _common(a: Sequence[Operator], b: Sequence[Operator]) -> int:
    """How many operators both begin with."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((k for k, (x, y) in pairs if x != y), min(len(a), len(b)))


def peaks(
    traces: Sequence[Trace], more: int, *, free_gradients: bool, unit: int
) -> dict[str, dict[str, int]]:
    """The largest sum of bytes in each phase, by category.

    traces: one, or two of the same model with a number of like blocks and with one more, which :func:`aligned` can
    align; ``more`` is then by how many the whole model has more than the first. What is held at a point of a block is
    linear in the block's number and in the number of blocks, so that a phase's peak is in its first or its last block
    or outside of them: points are aligned from the beginning and from the end of the phase, and the bytes of each
    continued linearly. That is exact.
    """
    points = aligned(traces[0], traces[-1])
    assert points is not None
    few, many = (t.levels(free_gradients=free_gradients, unit=unit) for t in (traces[0], traces[-1]))
    found = {}
    for phase, pairs in points.items():
        at = ({c: few[c][i] + more * (many[c][j] - few[c][i]) for c in CATEGORIES} for i, j in pairs)
        found[phase] = max(at, key=lambda sizes: sum(sizes.values()))
    return found


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
    trace = Trace(recorder.joined(), recorder.operators, middle)
    model.zero_grad(set_to_none=True)
    return trace
