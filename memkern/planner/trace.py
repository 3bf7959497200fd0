"""When each storage of a training step is allocated and freed, and what is alive at the peak."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FORWARD, BACKWARD = "forward", "backward"


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
                    entry.died = self.clock
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
class Peak:
    """The largest sum of bytes in a phase, by what holds them."""

    saved: int
    gradients: int
    temporaries: int

    @property
    def total(self) -> int:
        return self.saved + self.gradients + self.temporaries


@dataclasses.dataclass
class Trace:
    """A forward and a backward pass. Without what is there before: parameters, buffers, the batch."""

    storages: list[Storage]
    middle: int
    """The clock at the end of the forward pass."""
    end: int

    @property
    def saved(self) -> int:
        """Bytes alive between the passes."""
        return sum(
            s.size for s in self.storages if s.born <= self.middle and (s.died or self.end) > self.middle
        )

    def peaks(self, *, free_gradients: bool, unit: int) -> dict[str, Peak]:
        """The peak of each phase. ``free_gradients``: a gradient is freed when it has been accumulated. Sizes are
        rounded up to multiples of ``unit``, as the allocator does."""
        storages = []
        for s in self.storages:
            died = self.end if s.died is None else s.died
            if free_gradients and s.accumulated is not None:
                died = min(died, s.accumulated + 1)
            storages.append((s.born, died, -(-s.size // unit) * unit, s))
        change = [0] * (self.end + 2)
        for born, died, size, _ in storages:
            change[born] += size
            change[max(died, born + 1)] -= size
        level = list(itertools.accumulate(change))
        found = {}
        for phase, first, last in ((FORWARD, 0, self.middle), (BACKWARD, self.middle + 1, self.end)):
            at = max(range(first, max(last, first) + 1), key=level.__getitem__)
            sums = {"saved": 0, "gradients": 0, "temporaries": 0}
            for born, died, size, s in storages:
                if born <= at < max(died, born + 1):
                    sums[self._category(s, at)] += size
            found[phase] = Peak(**sums)
        return found

    def _category(self, s: Storage, at: int) -> str:
        if s.accumulated is not None and s.accumulated <= at:
            return "gradients"
        survives = s.born <= self.middle and (s.died is None or s.died > self.middle)
        return "saved" if survives else "temporaries"


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
