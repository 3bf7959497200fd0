"""Records when each storage of a training step is allocated and freed, and finds what is alive at the peak."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..memory import LiveBytes, Storage
from ..quant.layout import is_dense
from .fake_mode import FakeMode

Operator = tuple[Any, ...]
"""An operator, and the shapes of what it returns."""
FORWARD, BACKWARD = "forward", "backward"
CATEGORIES = ("saved", "gradients", "temporaries")
aten = torch.ops.aten
CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}
CHANNELS = 16  # of oneDNN's blocked layouts


def _adds_gradients(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether autograd itself adds two gradients of one tensor, and may write the sum over the first.

    Autograd does so where it holds the only reference to a tensor that is no view, but never with tensors of a subclass
    such as fake tensors. Whether another reference existed shows afterwards: the first is freed only without one.
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
    frame: Any = sys._getframe(4)  # what calls LiveBytes.around
    ours = ("memkern.planner.fake_mode", "torch._dynamo", "torch._compile")
    while frame is not None and frame.f_globals.get("__name__", "").startswith(ours):
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


@dataclasses.dataclass(frozen=True)
class Trace:
    """The storages of a forward and a backward pass, without those that exist before.

    accumulated: when a storage became a parameter's gradient. middle: the clock at the end of the forward pass.
    blocks: the clock at the beginning of each block's forward pass, and when its last gradient was accumulated.
    of_blocks: which gradients are a block's, and when its last was accumulated.
    head: the clock when the output layer's backward pass begins; None where it is not known.
    """

    storages: list[Storage]
    accumulated: dict[Storage, int]
    operators: list[Operator]
    middle: int
    blocks: tuple[tuple[int, int], ...] = ()
    of_blocks: dict[Storage, int] = dataclasses.field(default_factory=dict)
    head: int | None = None

    @property
    def end(self) -> int:
        return len(self.operators)

    @functools.cached_property
    def saved(self) -> int:
        """Bytes alive between the passes."""
        return sum(s.size for s in self.storages if self._is_saved(s))

    def _is_saved(self, s: Storage) -> bool:
        return s.born <= self.middle and (s.died is None or s.died > self.middle + 1)

    @property
    def phases(self) -> dict[str, slice]:
        """The operators of each phase."""
        return {FORWARD: slice(0, self.middle), BACKWARD: slice(self.middle, self.end)}

    def of_elements(self, phase: str) -> list[int]:
        """The operators of a phase, without those of empty tensors: how many there are may depend on all blocks."""
        indices = range(self.end)[self.phases[phase]]
        shapes_of = {i: self.operators[i][1:] for i in indices}
        return [i for i, shapes in shapes_of.items() if not shapes or any(map(all, shapes))]

    def levels(
        self, *, free_gradients: bool, unit: int, devices: int = 1, streamed: bool = False
    ) -> dict[str, list[int]]:
        """Bytes at the beginning and after each operator by category, sizes rounded up to multiples of ``unit``.

        free_gradients: a gradient is freed when it has been accumulated. devices: of several, each keeps its shard of
        a block's gradients (or, with free_gradients, nothing) when the block's last one has been accumulated. streamed:
        as of several, on one device whose gradients leave it; what is in no block has a group of its own.
        """
        changes = {category: [0] * (self.end + 3) for category in CATEGORIES}
        for s in self.storages:
            size = -(-s.size // unit) * unit
            died = max(self.end + 1 if s.died is None else s.died, s.born + 1)
            gradient_from = max(min(self.accumulated.get(s, died), died), s.born)
            other_category = changes["saved" if self._is_saved(s) else "temporaries"]
            other_category[s.born] += size
            other_category[gradient_from] -= size
            if gradient_from < died:
                block_end = self.of_blocks.get(s, gradient_from if streamed else died)
                reduced = max(gradient_from, block_end) if devices > 1 or streamed else gradient_from
                shard = 0 if free_gradients else -(-size // devices)
                changes["gradients"][gradient_from] += size
                changes["gradients"][min(reduced + 1, died)] -= size - shard
                changes["gradients"][died] -= shard
        return {category: list(itertools.accumulate(change))[: self.end + 1] for category, change in changes.items()}


def aligned(few: Trace, many: Trace) -> dict[str, list[tuple[int, int]]] | None:
    """Aligns the points of two traces, the second with one more block: pairs of operator counts, by phase.

    A point of the first trace is aligned from the beginning, or from the end, or both. Of three blocks or more, the
    last is not aligned from the beginning and the first not from the end: what a block holds may be freed in the next
    one, so that they are unlike those between them. None where the traces differ in more than a block.
    """
    points = {}
    for phase in few.phases:
        i, j = few.of_elements(phase), many.of_elements(phase)
        a, b = [few.operators[k] for k in i], [many.operators[k] for k in j]
        first, last, block = _common(a, b), _common(a[::-1], b[::-1]), len(b) - len(a)
        if block > 0:
            if first + last < len(a) + block:
                return None
            # Operators beyond the blocks may be equal by chance: as many as exceed a whole number of blocks.
            common, chance = divmod(first + last - len(a), block)
            excess = chance + (block if common >= 3 else 0)
            first, last = first - excess, last - excess
        elif a != b:
            return None
        begins, ends = few.phases[phase], many.phases[phase]
        points[phase] = [
            (begins.start, ends.start),
            *((k + 1, m + 1) for k, m in zip(i[:first], j, strict=False)),
        ]
        points[phase] += [(begins.stop, ends.stop), *zip(i[::-1][:last], j[::-1], strict=False)]
    return points


def _common(a: Sequence[Operator], b: Sequence[Operator]) -> int:
    """The number of equal operators that both begin with."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((k for k, (x, y) in pairs if x != y), min(len(a), len(b)))


def peaks(
    traces: Sequence[Trace], more: int, *, beside: Callable[[Trace], list[int]] | None = None, **options: Any
) -> dict[str, dict[str, int]]:
    """The largest sum of bytes in each phase, by category.

    traces: one, or two that :func:`aligned` can align, the second with one more block. more: how many blocks the whole
    model has more than the first trace. beside: further bytes at the beginning and after each operator of a trace.
    options: of :meth:`Trace.levels`.

    The bytes at a point of a block are linear in the block's number and in the number of blocks, except for the first
    and the last block. So a phase peaks in one of the two blocks at either end, or outside of the blocks; points are
    aligned from both ends, and their bytes are extrapolated. With three blocks or more that is exact, or errs high.
    """
    points = aligned(traces[0], traces[-1])
    assert points is not None

    def levels(t: Trace) -> dict[str, list[int]]:
        by_category = t.levels(**options)
        if beside is not None:
            temporaries = by_category["temporaries"]
            by_category["temporaries"] = [a + b for a, b in zip(temporaries, beside(t), strict=True)]
        return by_category

    few, many = levels(traces[0]), levels(traces[-1])
    largest = {}
    for phase, pairs in points.items():
        extended = ({c: few[c][i] + more * (many[c][j] - few[c][i]) for c in CATEGORIES} for i, j in pairs)
        largest[phase] = max(extended, key=lambda sizes: sum(sizes.values()))
    return largest


def record(
    mode: FakeMode,
    model: nn.Module,
    held: Iterable[Tensor],
    forward: Any,
    blocks: Sequence[nn.Module] = (),
    head: nn.Module | None = None,
) -> Trace:
    """Runs ``forward()``, which returns the loss, and its backward pass, and records them.

    blocks: of the model, in their order. head: its output layer.
    """
    operators: list[Operator] = []
    sums: dict[Storage, Storage] = {}
    """The first of two gradients by their sum, which autograd overwrites if nothing else refers to it."""
    accumulated: dict[Storage, int] = {}

    def on_operator(func: Any, args: Any, kwargs: Any, out: Any) -> None:
        operators.append((func, *_shapes(out)))
        if size := scratch_bytes(func, args, out):
            live.storages.append(Storage(size, live.clock, live.clock + 1))
        if _adds_gradients(func, args, kwargs):
            first, total = live.storage_of(args[0]), live.storage_of(out)
            if first is not None and total is not None:
                sums[total] = first

    def on_gradient(p: Any) -> None:
        assert p.grad is not None
        storage = live.storage_of(p.grad)
        if storage is not None:
            accumulated[storage] = live.clock
        if p in owners:
            ends[owners[p]] = live.clock
            if storage is not None:
                owned[storage] = owners[p]

    def on_block(block: nn.Module, args: Any) -> None:
        begins.setdefault(block, live.clock)

    def after_head(module: nn.Module, args: Any, out: Any) -> None:
        if isinstance(out, Tensor) and out.requires_grad:
            out.register_hook(lambda _: head_begins.append(live.clock))

    live = LiveBytes([*model.parameters(), *model.buffers(), *held], counted=False, on_operator=on_operator)
    trained = [p for p in model.parameters() if p.requires_grad]
    handles = [p.register_post_accumulate_grad_hook(on_gradient) for p in trained]
    handles += [block.register_forward_pre_hook(on_block) for block in blocks]
    head_begins: list[int] = []
    if head is not None:
        handles.append(head.register_forward_hook(after_head))
    owners = {p: block for block in blocks for p in block.parameters()}
    owned: dict[Storage, nn.Module] = {}
    begins: dict[nn.Module, int] = {}
    ends: dict[nn.Module, int] = {}
    with mode.inside(live.around):
        loss = forward()
        middle = live.clock
        # In this thread, with its modes, on a GPU's fake tensors too: checkpoints run the model again in it.
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()
    del loss
    for handle in handles:
        handle.remove()
    storages = _in_place_sums(live.storages, sums, accumulated)
    clocks = tuple((begins[b], ends[b]) for b in blocks if b in begins and b in ends)
    of_blocks = {storage: ends[block] for storage, block in owned.items()}
    head_clock = max(head_begins, default=None)
    trace = Trace(storages, accumulated, operators, middle, blocks=clocks, of_blocks=of_blocks, head=head_clock)
    model.zero_grad(set_to_none=True)
    return trace


def _shapes(out: Any) -> list[torch.Size]:
    outputs = (out,) if isinstance(out, Tensor) else tree_leaves(out)
    return [x.shape for x in outputs if isinstance(x, Tensor)]


def _in_place_sums(
    storages: Iterable[Storage], sums: dict[Storage, Storage], accumulated: dict[Storage, int]
) -> list[Storage]:
    """The storages, where a sum of gradients that is made in place on a real device is one with its first gradient."""
    merged = []
    firsts = dict(sums)
    for s in storages:
        first = firsts.get(s)
        if first is None or first.size != s.size or first.died != s.born + 1:
            merged.append(s)
            continue
        first.died = s.died
        if s in accumulated:
            accumulated[first] = accumulated[s]
        else:
            accumulated.pop(first, None)
        firsts.update({total: first for total, other in firsts.items() if other is s})
    return merged


def scratch_bytes(func: Any, args: Any, out: Any) -> int:
    """The most bytes that an operator allocates inside on the CPU: for a convolution, copies in oneDNN's layouts.

    These are its input, its weight, and its output or the gradient of that. There the input channels are a multiple of
    16, and half precision is fp32 in the backward pass (lab/tests/test_plan_scratch.py measures it). Where oneDNN has
    no bf16, as without AVX-512, torch makes a matrix of the windows of all outputs.
    """
    if func not in CONVOLUTIONS or args[0].device.type != "cpu":
        return 0
    x, weight = args[:2] if func is aten.convolution.default else args[1:3]
    y: Tensor = out if func is aten.convolution.default else args[0]
    elements = y.numel() + sum(t.numel() // t.shape[1] * -(-t.shape[1] // CHANNELS) * CHANNELS for t in (x, weight))
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        windows = y.numel() // y.shape[1] * (weight.numel() // weight.shape[0])
        return max(4 * elements, weight.element_size() * windows)
    return 4 * elements
