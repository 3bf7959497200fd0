"""The host side of a step on many tensors: its table on the device (layout: ``step_table.py``) and its launches.

A plan is cached from step to step: it assigns tensors to launches and holds the table's columns. Every step compares
addresses, dtypes, shapes and groups with the plan's, and makes a new plan where one differs. The header, the groups and
the gradients' addresses may change at each step; they are uploaded when they do.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..quant.layout import FLOATS, BlockLayout, layout_of
from ..schemas import WEIGHT_STATES, StepArgs
from . import step_table as st
from .codec import FP32
from .launch import (
    OPTIONS,
    allocate_outside_of_graphs,
    cdiv,
    event_of,
    is_capturing,
    is_remote,
    options_of,
    rows_of,
    stream_of,
)
from .step_args import KEPT, addresses_of, header_and_group_words, signature_of
from .tile import is_flat, next_power_of_two, vector_of
from .weights import param_dtype

FLAT_BLOCK = 128  # BLOCK_SIZE of tensors with fp32 states, which have no quantization blocks
MAX_PLANS, MAX_WORDS, WORDS_PER_PLAN = 64, 1 << 20, 256
"""The plans that have not been used for the longest time are dropped where there are more than MAX_PLANS and they take
more than MAX_WORDS words of 8 bytes. A plan's memory on the host counts as WORDS_PER_PLAN. So there may be some 3,500
plans of one tensor each: StepInBackward has one for each parameter."""
CONSTANTS = ("KIND", "PARAM_DTYPE", "GRAD_DTYPE", "TILES", "ROWS", "BLOCK_SIZE", "VECTOR", "FLAT")
"""The constexpr arguments of all kernels that plans launch, in the order of their parameters."""


@dataclass
class Launch:
    """One kernel launch, the same at each step: over consecutive slots of the table's ORDER column."""

    programs: int
    first: int = 0
    count: int = 0
    programs_before: int = 0  # in the launches before this one
    constants: dict[str, Any] = field(default_factory=dict)  # of the kernel, in the order of its parameters
    options: dict[str, Any] = field(default_factory=lambda: OPTIONS)
    compiled: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def __call__(self, kernel: Any, *args: Any, **constants: Any) -> None:
        """``kernel[programs](*args, **constants)``. Arguments may differ from step to step in values alone.

        ``constants``: those of this kernel alone, the last of its parameters.
        """
        key = id(kernel), *constants.values()
        compiled = self.compiled.get(key)
        if compiled is None:  # always in the interpreter
            self.compiled[key] = kernel[(self.programs,)](*args, **self.constants, **constants, **self.options)
        else:
            # Calling the compiled kernel skips Triton's cache look-up, 20 us.
            compiled[(self.programs, 1, 1)](*args, *self.constants.values(), *constants.values())


# ---- memory


class DeviceTable:
    """Device memory of a plan, and pinned memory for its upload inside a CUDA graph."""

    def __init__(self, words: int, tensors: int, sums: int, device: torch.device) -> None:
        self.table = torch.empty(words, dtype=torch.int64, device=device)
        self.scalars = torch.empty(tensors * st.SCALARS.value, dtype=torch.float32, device=device)
        self.sums = torch.empty(sums, dtype=torch.float64, device=device)
        self.pinned = _pinned(words, device)

    def upload(self, begin: int, values: Iterable[int], source: Tensor | None = None) -> None:
        """Copies ``values`` to the table from word ``begin`` on, without a synchronization."""
        host = torch.frombuffer(array("q", values), dtype=torch.int64)
        # torch's pinned allocator does not reuse this memory before the copy from it is done.
        source = _pinned(len(host), self.table.device) if source is None else source
        source.copy_(host)
        self.table[begin : begin + len(host)].copy_(source, non_blocking=True)


def _pinned(words: int, device: torch.device) -> Tensor:
    return torch.empty(words, dtype=torch.int64, device="cpu", pin_memory=device.type != "cpu")


# ---- plans


class Plan:
    """A step's table and launches. ``sizes`` and ``memory``: arguments of all kernels.

    The memory is used within ``with plan_for(...) as plan``: a step waits for the plan's last one. Both are on the same
    stream, where it would wait anyway, unless that was destroyed and another one has its handle.
    """

    last_step: torch.Event | None = None  # none for a captured plan, whose memory is the graph's alone

    def __init__(
        self,
        args: StepArgs,
        signature: tuple[Any, ...],
        addresses: list[int],
        tiles: int,
        sums_per_program: int,
    ) -> None:
        self.signature, self.addresses = signature, addresses
        self.header_and_groups: list[int] = []
        self.moments = len(args.moments) // max(1, len(args.params))  # of each tensor
        self.grads = [g.data_ptr() for g in args.grads]
        self.sizes = len(args.lr), len(args.grads)  # groups, tensors
        self.prologue = Launch(cdiv(len(args.grads), st.PROLOGUE_TENSORS.value))
        self.launches: list[Launch] = []
        # For each of the launches one with a program per tensor, which adds that tensor's sums (LAMB, LARS, Muon).
        self.reductions: list[Launch] = []
        self.columns = self._columns(args, tiles)
        self.grads_at = st.HEADER_WORDS.value + self.sizes[0] * st.GROUP_WORDS.value
        words = self.grads_at + len(self.grads) + len(self.columns)
        self.memory_sizes = words, len(self.grads), sums_per_program * sum(x.programs for x in self.launches)
        self.memory: DeviceTable

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *_: object) -> None:
        if self.last_step is not None:
            self.last_step.record()

    def _columns(self, args: StepArgs, tiles: int) -> list[int]:
        """The words of all columns, in the order of step_table.py."""
        n = len(args.grads)
        states, scales = [[0] * n, [0] * n], [[0] * n, [0] * n]
        given_scales = iter(args.scales)
        for k in range(self.moments):
            states[k] = [x.data_ptr() for x in args.moment(k)]
            scales[k] = [0 if x.dtype == torch.float32 else next(given_scales).data_ptr() for x in args.moment(k)]
        params = [p.data_ptr() for p in args.params] or [0] * n
        steps = [s.data_ptr() for s in args.steps] or [0] * n
        block_sizes = [args.block_size[i] for i in args.group] or [FLAT_BLOCK] * n
        layouts = [layout_of(x, b) for x, b in zip(args.params or args.grads, block_sizes, strict=True)]
        given_weight_states = iter(args.weight_states)
        weight_states = [
            next(given_weight_states).data_ptr() if args.storage_of(i) in WEIGHT_STATES else 0 for i in args.group
        ] or [0] * n
        addresses = zip(params, self.grads, *states, weight_states, strict=True)
        order, first_programs = self._assign(args, layouts, [*addresses], tiles)
        columns = (
            params,
            *states,
            *scales,
            steps,
            [x.numel for x in layouts],
            [x.segment for x in layouts],
            [x.block for x in layouts],
            [x.blocks_per_segment for x in layouts],
            [x.blocks for x in layouts],
            list(args.group) or [0] * n,
            order + [0] * (n - len(order)),  # tensors without elements have no slot
            first_programs + [0] * (n - len(order)),
            [x.data_ptr() for x in args.trust_ratios] or [0] * n,
            # COUNTED_STEP: a tensor's layers, one after the other, share the step, which is incremented for the first.
            [0 if i and step == steps[i - 1] else step for i, step in enumerate(steps)],
            weight_states,
        )
        return [*chain.from_iterable(columns)]

    def _assign(
        self, args: StepArgs, layouts: Sequence[BlockLayout], addresses: Sequence[Iterable[int]], tiles: int
    ) -> tuple[list[int], list[int]]:
        """Groups the tensors into launches by their kernel's constants. Returns ORDER and FIRST_PROGRAM."""
        tensors_by_constants: dict[tuple[Any, ...], list[int]] = {}
        for t, (g, layout) in enumerate(zip(args.grads, layouts, strict=True)):
            if layout.numel == 0:
                continue
            if layout.blocks >= 2**31:
                raise ValueError(f"tensor {t} has {layout.blocks} blocks, and Triton's kernels take less than 2^31")
            p = args.params[t] if args.params else g
            coded = self.moments > 0 and args.moments[t].dtype != torch.float32
            storage = args.storage_of(args.group[t]) if args.params else 0
            in_blocks = coded or storage > 0  # the random bits of weights come from the position in a block
            kind = args.codec[args.group[t]] + 1 if coded else FP32.value
            block = next_power_of_two(args.block_size[args.group[t]]) if in_blocks else FLAT_BLOCK
            flat = not in_blocks or is_flat(layout, block)
            if flat:
                layout = layout._replace(segment=layout.numel, block=block)
            has_fp32_states = self.moments > 0 and not coded
            widest = max(p.element_size(), g.element_size(), 4 if has_fp32_states else 1)
            vector = vector_of(layout, widest, addresses[t])
            key = (
                kind,
                param_dtype(FLOATS.index(p.dtype), storage),
                FLOATS.index(g.dtype),
                tiles,
                rows_of(block),
                block,
                vector,
                flat,
            )
            tensors_by_constants.setdefault(key, []).append(t)
        order: list[int] = []
        first_programs: list[int] = []
        programs_before = 0
        for key, tensors in tensors_by_constants.items():
            constants = dict(zip(CONSTANTS, key, strict=True))
            elements_per_program = tiles * constants["ROWS"] * constants["BLOCK_SIZE"]
            first, programs = len(order), 0
            for t in tensors:
                order.append(t)
                first_programs.append(programs)
                layout = layouts[t]
                elements = layout.numel if constants["FLAT"] else layout.blocks * constants["BLOCK_SIZE"]
                programs += cdiv(elements, elements_per_program)
            options = options_of(constants["BLOCK_SIZE"])
            self.launches.append(Launch(programs, first, len(tensors), programs_before, constants, options))
            self.reductions.append(Launch(len(tensors), first, len(tensors), programs_before))
            programs_before += programs
        return order, first_programs


class Plans(OrderedDict[tuple[Any, ...], Plan]):
    """Plans by key, the most recently used last."""

    words = 0

    def add(self, key: tuple[Any, ...], plan: Plan) -> None:
        if (old := self.pop(key, None)) is not None:
            self.words -= words_of(old)
        self[key] = plan
        self.words += words_of(plan)
        while len(self) > MAX_PLANS and self.words > MAX_WORDS:
            self.words -= words_of(self.popitem(last=False)[1])

    def clear(self) -> None:
        super().clear()
        self.words = 0


def words_of(plan: Plan) -> int:
    return WORDS_PER_PLAN + sum(plan.memory_sizes)


def new_table(sizes: tuple[int, int, int], device: torch.device) -> DeviceTable:
    return allocate_outside_of_graphs(lambda: DeviceTable(*sizes, device), device)


_plans = Plans()
# Plans of captured CUDA graphs. A graph may be replayed at any later time, so they are never freed and never reused.
_captured: list[Plan] = []
_spares: dict[tuple[Any, ...], DeviceTable] = {}


def plan_for(
    op: str,
    args: StepArgs,
    device: torch.device,
    check: Callable[[], None],
    tiles: int,
    sums_per_program: int = 0,
) -> Plan:
    """The plan of a step, cached or new, with its table on the device up to date: for a ``with`` statement.

    ``check`` raises unless the arguments fit together; it is called for a new plan only, before anything is changed.
    ``tiles``: how many a program works on, all of one tensor. ``sums_per_program``: fp64 words of ``memory.sums``.
    """
    signature, addresses, grads = signature_of(args), addresses_of(args, *KEPT), addresses_of(args, "grads")
    if is_capturing(device):
        return _captured_plan(op, args, device, check, signature, addresses, tiles, sums_per_program)
    key = op, device, stream_of(device), args.params[0].data_ptr() if args.params else 0, len(grads)
    plan = _plans.get(key)
    if (
        plan is None
        or plan.addresses != addresses
        or plan.signature != signature
        or (plan.grads != grads and any((a ^ b) % 16 for a, b in zip(plan.grads, grads, strict=True)))
    ):
        check()
        words = header_and_group_words(args, device)
        plan = Plan(args, signature, addresses, tiles, sums_per_program)
        plan.memory = new_table(plan.memory_sizes, device)
        plan.last_step = event_of(device)
        plan.header_and_groups = words
        plan.memory.upload(0, chain(words, grads, plan.columns))
        _plans.add(key, plan)
    else:
        words = header_and_group_words(args, device)
        _plans.move_to_end(key)
        if plan.last_step is not None:
            plan.last_step.wait()
        if plan.header_and_groups != words:
            plan.header_and_groups = words
            plan.memory.upload(0, words)
        if plan.grads != grads:
            plan.grads = grads
            plan.memory.upload(plan.grads_at, grads)
    # The memory for a later capture of this step (_captured_plan). The interpreter, on the CPU, has no captures.
    if is_remote(device):
        spare = op, device, plan.memory_sizes
        if spare not in _spares:
            _spares[spare] = new_table(plan.memory_sizes, device)
    return plan


def _captured_plan(op: str, args: StepArgs, device: torch.device, check: Callable[[], None], *plan_args: Any) -> Plan:
    """A new plan, for the CUDA graph that is being captured. Its memory cannot be allocated during the capture.

    So each eager step leaves a spare DeviceTable of its own sizes. The upload becomes a node of the graph, from pinned
    memory that nothing writes afterwards.
    """
    check()
    words = header_and_group_words(args, device)
    plan = Plan(args, *plan_args)
    spare = op, device, plan.memory_sizes
    if spare not in _spares:
        raise RuntimeError(
            f"{op} has no memory prepared to capture a step of these {len(args.grads)} tensors; "
            "run one such step before each capture"
        )
    plan.memory = _spares.pop(spare)
    plan.memory.upload(0, chain(words, plan.grads, plan.columns), plan.memory.pinned)
    _captured.append(plan)
    return plan
