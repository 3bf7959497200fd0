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

from ..memory import LiveBytes, Storage, tensor_bytes
from ..quant.layout import is_dense
from .fake_mode import FakeMode

Operator = tuple[Any, ...]
"""An operator, and the shapes of what it returns."""
FORWARD, BACKWARD = "forward", "backward"
CATEGORIES = ("saved", "gradients", "temporaries")
aten = torch.ops.aten
CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}
CHANNELS = 16  # in a block of oneDNN's layouts; input channels are padded to a multiple


def _adds_gradients(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether autograd itself adds two gradients of one tensor, and may write the sum over the first.

    Autograd adds in place where the first gradient is no view, and autograd holds the only reference to it. With fake
    tensors, as with any subclass, it never does. Whether there were other references is known later: without any the
    first gradient is freed right after the sum (:func:`_in_place_sums`).
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
    """Whether autograd's engine itself calls the operator, rather than the backward of a function in Python."""
    frame: Any = sys._getframe(4)  # this function, _adds_gradients, on_operator and LiveBytes.around are above it
    ours = ("memkern.planner.fake_mode", "torch._dynamo", "torch._compile")
    while frame is not None and frame.f_globals.get("__name__", "").startswith(ours):
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


@dataclasses.dataclass(frozen=True)
class Trace:
    """The storages of a forward and a backward pass, without those that exist before.

    All times are clocks: a clock counts the operators that have run so far.

    accumulated: by a parameter's gradient, when it was accumulated.
    forward_end: when the forward pass ended. block_clocks: for each block in turn, when its forward pass began, and
    when its last gradient was accumulated. block_ends: the latter by each gradient of a block. output_begin: when the
    output layer's backward pass began; None where this is not known. batch: bytes of inputs and labels.
    """

    storages: list[Storage]
    accumulated: dict[Storage, int]
    operators: list[Operator]
    forward_end: int
    block_clocks: tuple[tuple[int, int], ...] = ()
    block_ends: dict[Storage, int] = dataclasses.field(default_factory=dict)
    output_begin: int | None = None
    batch: int = 0

    @property
    def end(self) -> int:
        """The clock at the end of the backward pass."""
        return len(self.operators)

    @functools.cached_property
    def saved(self) -> int:
        """Bytes alive between the passes."""
        return sum(s.size for s in self.storages if self._is_saved(s))

    def _is_saved(self, s: Storage) -> bool:
        return s.born <= self.forward_end and (s.died is None or s.died > self.forward_end + 1)

    @property
    def phases(self) -> dict[str, slice]:
        """The operators of each phase."""
        return {FORWARD: slice(0, self.forward_end), BACKWARD: slice(self.forward_end, self.end)}

    def operator_numbers(self, phase: str) -> list[int]:
        """Indices of a phase's operators, without those whose results are all empty: their number may depend on all
        blocks."""
        indices = range(self.end)[self.phases[phase]]
        shapes_of = {i: self.operators[i][1:] for i in indices}
        return [i for i, shapes in shapes_of.items() if not shapes or any(0 not in shape for shape in shapes)]

    def live_bytes(
        self, *, free_gradients: bool, unit: int, devices: int = 1, weights_on_host: bool = False
    ) -> dict[str, list[int]]:
        """Bytes at each clock by category, sizes rounded up to multiples of ``unit``.

        free_gradients: whether gradients are freed: each one when it has been accumulated, or as below.
        devices: how many. Of several, each keeps its shard of a block's gradients once the block's last gradient has
            been accumulated; with free_gradients it keeps nothing then.
        weights_on_host: the same for gradients that go to the host from one device; those outside of blocks one by one.
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
                block_end = self.block_ends.get(s, gradient_from if weights_on_host else died)
                reduced_at = max(gradient_from, block_end) if devices > 1 or weights_on_host else gradient_from
                kept_size = 0 if free_gradients else -(-size // devices)  # the shard, on one device the whole gradient
                changes["gradients"][gradient_from] += size
                changes["gradients"][min(reduced_at + 1, died)] -= size - kept_size
                changes["gradients"][died] -= kept_size
        return {category: list(itertools.accumulate(change))[: self.end + 1] for category, change in changes.items()}


def aligned(few: Trace, many: Trace) -> dict[str, list[tuple[int, int]]] | None:
    """Aligns two traces, the second with one more block: by phase, pairs of clocks at the same place in the model.

    A clock of the first trace is aligned by the operators before it, by the operators after it, or by both. Of three
    blocks or more, the last is not aligned from the beginning and the first not from the end: what a block holds may
    be freed in the next block, so that the first and the last block are unlike those between them. Returns None where
    the traces differ in more than a block.
    """
    clocks = {}
    for phase in few.phases:
        few_indices, many_indices = few.operator_numbers(phase), many.operator_numbers(phase)
        a, b = [few.operators[i] for i in few_indices], [many.operators[i] for i in many_indices]
        # Counts of operators: of equal ones at the beginning, of equal ones at the end, and of one block.
        from_begin, from_end, block = _common(a, b), _common(a[::-1], b[::-1]), len(b) - len(a)
        if block > 0:
            if from_begin + from_end < len(a) + block:
                return None
            # Operators beyond the blocks may be equal by chance: as many as exceed a whole number of blocks.
            common_blocks, by_chance = divmod(from_begin + from_end - len(a), block)
            excess = by_chance + (block if common_blocks >= 3 else 0)
            from_begin, from_end = from_begin - excess, from_end - excess
        elif a != b:
            return None
        few_range, many_range = few.phases[phase], many.phases[phase]
        clocks[phase] = [  # from the beginning, after each operator; from the end, before each
            (few_range.start, many_range.start),
            *((i + 1, j + 1) for i, j in zip(few_indices[:from_begin], many_indices, strict=False)),
            (few_range.stop, many_range.stop),
            *zip(few_indices[::-1][:from_end], many_indices[::-1], strict=False),
        ]
    return clocks


def _common(a: Sequence[Operator], b: Sequence[Operator]) -> int:
    """The number of equal operators that both begin with."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def peaks(
    traces: Sequence[Trace],
    more_blocks: int,
    *,
    extra_bytes: Callable[[Trace], list[int]] | None = None,
    **options: Any,
) -> dict[str, dict[str, int]]:
    """The largest sum of bytes in each phase, by category.

    traces: one, or two that :func:`aligned` can align, the second with one more block. more_blocks: how many blocks the
    whole model has more than the first trace. extra_bytes: returns further bytes at each clock of a trace, which count
    as temporaries. options: of :meth:`Trace.live_bytes`.

    The bytes at a place in a block are linear in the block's number and in the number of blocks, except for the first
    and the last block. So a phase peaks in one of the two blocks at either end, or outside of the blocks; clocks are
    aligned from both ends, and their bytes are extrapolated. With three blocks or more that is exact, or errs high.
    """
    aligned_clocks = aligned(traces[0], traces[-1])
    assert aligned_clocks is not None

    def bytes_of(t: Trace) -> dict[str, list[int]]:
        by_category = t.live_bytes(**options)
        if extra_bytes is not None:
            temporaries = by_category["temporaries"]
            by_category["temporaries"] = [a + b for a, b in zip(temporaries, extra_bytes(t), strict=True)]
        return by_category

    few, many = bytes_of(traces[0]), bytes_of(traces[-1])
    largest = {}
    for phase, pairs in aligned_clocks.items():
        extended = ({c: few[c][i] + more_blocks * (many[c][j] - few[c][i]) for c in CATEGORIES} for i, j in pairs)
        largest[phase] = max(extended, key=lambda sizes: sum(sizes.values()))
    return largest


def record(
    mode: FakeMode,
    model: nn.Module,
    held: Sequence[Tensor],
    forward: Any,
    blocks: Sequence[nn.Module] = (),
    head: nn.Module | None = None,
) -> Trace:
    """Runs ``forward()``, which returns the loss, and its backward pass, and records them.

    held: the batch's tensors. blocks: the model's, in their order. head: its output layer.
    """
    operators: list[Operator] = []
    firsts: dict[Storage, Storage] = {}  # by the sum of two gradients: the first one, which autograd may overwrite
    accumulated: dict[Storage, int] = {}
    block_of = {p: block for block in blocks for p in block.parameters()}
    block_of_gradient: dict[Storage, nn.Module] = {}
    forward_begins: dict[nn.Module, int] = {}  # clocks, by block
    backward_ends: dict[nn.Module, int] = {}
    output_begins: list[int] = []

    def on_operator(func: Any, args: Any, kwargs: Any, out: Any) -> None:
        operators.append((func, *_shapes(out)))
        if size := scratch_bytes(func, args, out):
            live.storages.append(Storage(size, live.clock, live.clock + 1))
        if _adds_gradients(func, args, kwargs):
            first, total = live.storage_of(args[0]), live.storage_of(out)
            if first is not None and total is not None:
                firsts[total] = first

    def on_gradient(p: Any) -> None:
        assert p.grad is not None
        storage = live.storage_of(p.grad)
        if storage is not None:
            accumulated[storage] = live.clock
        if p in block_of:
            backward_ends[block_of[p]] = live.clock
            if storage is not None:
                block_of_gradient[storage] = block_of[p]

    def before_block(block: nn.Module, args: Any) -> None:
        forward_begins.setdefault(block, live.clock)

    def after_head(module: nn.Module, args: Any, out: Any) -> None:
        if isinstance(out, Tensor) and out.requires_grad:
            out.register_hook(lambda _: output_begins.append(live.clock))

    trained = [p for p in model.parameters() if p.requires_grad]
    existing = [*model.parameters(), *model.buffers(), *held]
    live = LiveBytes(existing, counted=False, device=trained[0].device.type, on_operator=on_operator)
    handles = [p.register_post_accumulate_grad_hook(on_gradient) for p in trained]
    handles += [block.register_forward_pre_hook(before_block) for block in blocks]
    if head is not None:
        handles.append(head.register_forward_hook(after_head))
    with mode.inside(live.around):
        loss = forward()
        forward_end = live.clock
        # In this thread, with its modes, on a GPU's fake tensors too: checkpoints run the model again in it.
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()
    del loss
    for handle in handles:
        handle.remove()
    storages = _in_place_sums(live.storages, firsts, accumulated)
    model.zero_grad(set_to_none=True)
    run = [b for b in blocks if b in forward_begins and b in backward_ends]
    block_clocks = tuple((forward_begins[b], backward_ends[b]) for b in run)
    block_ends = {storage: backward_ends[block] for storage, block in block_of_gradient.items()}
    output_begin = max(output_begins, default=None)
    clocks = (forward_end, block_clocks, block_ends, output_begin)
    return Trace(storages, accumulated, operators, *clocks, tensor_bytes(held))


def _shapes(out: Any) -> list[torch.Size]:
    outputs = (out,) if isinstance(out, Tensor) else tree_leaves(out)
    return [x.shape for x in outputs if isinstance(x, Tensor)]


def _in_place_sums(
    storages: Iterable[Storage], firsts: dict[Storage, Storage], accumulated: dict[Storage, int]
) -> list[Storage]:
    """The storages, with one for a sum of gradients and its first gradient where a real device adds them in place.

    firsts: by each sum, its first gradient. ``accumulated`` is changed with the storages.
    """
    merged = []
    firsts = dict(firsts)
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
