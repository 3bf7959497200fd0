"""The host's side of a step on many tensors: its table on the device (layout: ``multi_tensor.py``) and its launches.

A plan is what stays from step to step: which tensors go to which launch, and their columns. It holds until an address,
a dtype, a shape or a group changes; they are compared at every step. The header, the groups and the gradients'
addresses may change at each step, and are uploaded when they do.
"""

from __future__ import annotations

import struct
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layout import FLOATS, BlockLayout, layout_of
from ..reference.state import check_tensors
from . import multi_tensor as mt
from .codec import FP32, dynamic_tables
from .launch import OPTIONS, cdiv, guard, is_capturing, is_remote, rows_of, stream_of
from .tiles import is_flat, next_power_of_two, vector_of

FLAT_BLOCK = 128  # a row of a tile of tensors that have no blocks
MAX_PLANS = 64
CONSTANTS = (
    "KIND",
    "P",
    "G",
    "TILES",
    "ROWS",
    "BLOCK_SIZE",
    "VECTOR",
    "FLAT",
)  # of the kernels that plans launch


class Moment(NamedTuple):
    """One moment of all tensors: its name, its tensors, the dtype of its codes, a scale for each tensor of codes."""

    name: str
    tensors: Sequence[Tensor]
    code_dtype: torch.dtype
    scales: Sequence[Tensor]


class StepArgs(NamedTuple):
    """What the step ops share. ``hyperparameters``: lists with an entry per group, in the order of the table."""

    params: Sequence[Tensor]  # empty where an op only reads gradients
    grads: Sequence[Tensor]
    moments: Sequence[Moment] = ()
    steps: Sequence[Tensor] | None = None  # layers of one tensor follow each other and have the same
    trust_ratios: Sequence[Tensor] = ()
    group: Sequence[int] = ()
    lr: Sequence[Tensor] = ()
    hyperparameters: Sequence[Sequence[float]] = ()
    codec: Sequence[int] = ()
    block_size: Sequence[int] = ()
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    grad_norm: Tensor | None = None
    max_grad_norm: float = 0.0


@dataclass
class Launch:
    """What one launch works on, the same at each step: a run of slots of the table."""

    programs: int
    first: int = 0
    members: int = 0
    programs_before: int = 0  # of all launches before
    constants: dict[str, Any] = field(default_factory=dict)  # of the kernel, in the order of its parameters
    compiled: dict[int, Any] = field(default_factory=dict)

    def __call__(self, kernel: Any, *args: Any) -> None:
        """``kernel[programs](*args, **constants)``. Arguments may differ from step to step in values alone."""
        compiled = self.compiled.get(id(kernel))
        if compiled is None:  # always in the interpreter
            self.compiled[id(kernel)] = kernel[(self.programs,)](*args, **self.constants, **OPTIONS)
        else:
            # Triton's search for it takes 20 us.
            compiled[(self.programs, 1, 1)](*args, *self.constants.values())


# ---- the table's words


def bits(x: float) -> int:
    return struct.unpack("q", struct.pack("d", x))[0]


def number(x: Tensor | None, name: str, device: torch.device) -> list[int]:
    """Two words for a number. One on the device is read there, by the kernel; one on the host is read here."""
    if x is None:
        return [0, mt.ABSENT.value]
    if x.numel() != 1 or x.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{name} must be a float32 or float64 tensor of one element, got {x.dtype} of shape {tuple(x.shape)}"
        )
    if x.device == device:
        return [x.data_ptr(), (mt.AT_FP32 if x.dtype == torch.float32 else mt.AT_FP64).value]
    if x.device.type != "cpu":
        raise ValueError(f"{name} must be on {device} or on the CPU, got {x.device}")
    return [bits(float(x)), mt.VALUE.value]


def _front(args: StepArgs, device: torch.device) -> list[int]:
    """The header and the groups."""
    front = number(args.grad_scale, "grad_scale", device)
    front += number(args.found_inf, "found_inf", device)
    front += number(args.grad_norm, "grad_norm", device)
    front += [bits(args.max_grad_norm), 0]
    padding = [0] * (mt.GROUP_WORDS.value - 2 - len(args.hyperparameters))
    for i, lr in enumerate(args.lr):
        front += number(lr, "lr", device)
        front += [bits(values[i]) for values in args.hyperparameters]
        front += padding
    return front


def _signature(args: StepArgs) -> tuple[Any, ...]:
    """What a plan depends on, but for addresses. Few objects: 1,000 shapes a step set off the garbage collector."""
    both = args.params, args.grads
    contiguous = [[x.is_contiguous() for x in tensors] for tensors in both]
    return (
        # Not the states' dtypes: where one turns from codes to fp32, its scale goes, and so the list of addresses.
        [[x.dtype for x in tensors] for tensors in both],
        [[x.numel() for x in tensors] for tensors in both],
        contiguous,
        [
            (x.shape, x.stride())
            for tensors, dense in zip(both, contiguous, strict=True)
            if not all(dense)
            for x in tensors
        ],
        [len(values) for values in args.hyperparameters],
        list(args.group),
        list(args.codec),
        list(args.block_size),
    )


def _addresses(args: StepArgs) -> list[int]:
    states = chain.from_iterable((m.tensors, m.scales) for m in args.moments)
    return [
        x.data_ptr()
        for tensors in (args.params, *states, args.steps or (), args.trust_ratios)
        for x in tensors
    ]


# ---- memory


class Room:
    """Device memory of a plan, and pinned memory to fill it from when it is used in a capture."""

    def __init__(self, words: int, tensors: int, sums: int, device: torch.device) -> None:
        self.table = torch.empty(words, dtype=torch.int64, device=device)
        self.scalars = torch.empty(tensors * mt.SCALARS.value, dtype=torch.float32, device=device)
        self.sums = torch.empty(sums, dtype=torch.float64, device=device)
        self.pinned = _pinned(words, device)

    def upload(self, begin: int, values: Iterable[int], source: Tensor | None = None) -> None:
        """Writes words of the table, without waiting."""
        host = torch.frombuffer(array("q", values), dtype=torch.int64)
        # torch hands pinned memory out again only after the copies from it are done.
        source = _pinned(len(host), self.table.device) if source is None else source
        source.copy_(host)
        self.table[begin : begin + len(host)].copy_(source, non_blocking=True)


def _pinned(words: int, device: torch.device) -> Tensor:
    return torch.empty(words, dtype=torch.int64, pin_memory=device.type != "cpu")


# ---- plans


class Plan:
    """``sizes`` and ``room`` are what kernels take; ``prologue`` and ``launches`` how they are launched."""

    def __init__(
        self,
        args: StepArgs,
        signature: tuple[Any, ...],
        addresses: list[int],
        tiles: int,
        sums_per_program: int,
    ) -> None:
        self.signature, self.addresses = signature, addresses
        self.front: list[int] = []
        self.grads = [g.data_ptr() for g in args.grads]
        self.sizes = len(args.lr), len(args.grads)  # groups, tensors
        self.prologue = Launch(cdiv(len(args.grads), mt.PROLOGUE_TENSORS.value))
        self.launches: list[Launch] = []
        self.reductions: list[Launch] = []  # a program for each tensor of a launch
        self.columns = self._columns(args, tiles)
        self.grads_at = mt.HEADER_WORDS.value + self.sizes[0] * mt.GROUP_WORDS.value
        words = self.grads_at + len(self.grads) + len(self.columns)
        self.room_sizes = words, len(self.grads), sums_per_program * sum(x.programs for x in self.launches)
        self.room: Room

    def _columns(self, args: StepArgs, tiles: int) -> list[int]:
        n = len(args.grads)
        states, scales = [[0] * n, [0] * n], [[0] * n, [0] * n]
        for k, moment in enumerate(args.moments):
            states[k] = [x.data_ptr() for x in moment.tensors]
            given = iter(moment.scales)
            scales[k] = [
                next(given).data_ptr() if x.dtype == moment.code_dtype else 0 for x in moment.tensors
            ]
        params = [p.data_ptr() for p in args.params] or [0] * n
        steps = [0] * n if args.steps is None else [s.data_ptr() for s in args.steps]
        block_sizes = [args.block_size[i] for i in args.group] or [FLAT_BLOCK] * n
        layouts = [layout_of(x, b) for x, b in zip(args.params or args.grads, block_sizes, strict=True)]
        addresses = zip(params, self.grads, *states, strict=True)
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
            order + [0] * (n - len(order)),
            first_programs + [0] * (n - len(order)),
            [x.data_ptr() for x in args.trust_ratios] or [0] * n,
            [0 if i and step == steps[i - 1] else step for i, step in enumerate(steps)],
        )
        return [*chain.from_iterable(columns)]

    def _assign(
        self, args: StepArgs, layouts: Sequence[BlockLayout], addresses: Sequence[Iterable[int]], tiles: int
    ) -> tuple[list[int], list[int]]:
        """Sorts the tensors into launches by what is constant in a kernel. Returns ORDER and FIRST_PROGRAM."""
        members: dict[tuple[Any, ...], list[int]] = {}
        for t, (g, layout) in enumerate(zip(args.grads, layouts, strict=True)):
            if layout.numel == 0:
                continue
            if layout.blocks >= 2**31:
                raise ValueError(
                    f"tensor {t} has {layout.blocks} blocks, and Triton's kernels take less than 2^31"
                )
            p = args.params[t] if args.params else g
            coded = any(m.tensors[t].dtype != torch.float32 for m in args.moments)
            kind = args.codec[args.group[t]] + 1 if coded else FP32.value
            block = next_power_of_two(args.block_size[args.group[t]]) if coded else FLAT_BLOCK
            flat = not coded or is_flat(layout, block)
            if flat:
                layout = layout._replace(segment=layout.numel, block=block)
            widest = max(p.element_size(), g.element_size(), 4 if args.moments and not coded else 1)
            vector = vector_of(layout, widest, addresses[t])
            key = (
                kind,
                FLOATS.index(p.dtype),
                FLOATS.index(g.dtype),
                tiles,
                rows_of(block),
                block,
                vector,
                flat,
            )
            members.setdefault(key, []).append(t)
        order: list[int] = []
        first_programs: list[int] = []
        before = 0
        for key, tensors in members.items():
            constants = dict(zip(CONSTANTS, key, strict=True))
            elements = tiles * constants["ROWS"] * constants["BLOCK_SIZE"]
            first, programs = len(order), 0
            for t in tensors:
                order.append(t)
                first_programs.append(programs)
                layout = layouts[t]
                programs += cdiv(
                    layout.numel if constants["FLAT"] else layout.blocks * constants["BLOCK_SIZE"], elements
                )
            self.launches.append(Launch(programs, first, len(tensors), before, constants))
            self.reductions.append(Launch(len(tensors), first, len(tensors), before))
            before += programs
        return order, first_programs


_plans: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()
# A graph may be replayed at any time later: what it reads must stay, and no eager step may write it.
_captured: list[Plan] = []
_spares: dict[tuple[Any, ...], Room] = {}


def plan_for(
    op: str,
    args: StepArgs,
    device: torch.device,
    check: Callable[[], None],
    tiles: int,
    sums_per_program: int = 0,
) -> Plan:
    """The plan of a step, with its table on the device as this step needs it.

    ``check`` raises unless the arguments fit together; it is called where there is no plan for them yet, before
    anything is changed. ``tiles``: of one tensor, for one program. ``sums_per_program``: fp64 words of ``room.sums``.
    """
    signature, addresses = _signature(args), _addresses(args)
    grads = [g.data_ptr() for g in args.grads]
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
        front = _front(args, device)
        plan = Plan(args, signature, addresses, tiles, sums_per_program)
        plan.room = Room(*plan.room_sizes, device)
        plan.front = front
        plan.room.upload(0, chain(front, grads, plan.columns))
        _plans[key] = plan
        if len(_plans) > MAX_PLANS:
            _plans.popitem(last=False)
    else:
        front = _front(args, device)
        _plans.move_to_end(key)
        if plan.front != front:
            plan.front = front
            plan.room.upload(0, front)
        if plan.grads != grads:
            plan.grads = grads
            plan.room.upload(plan.grads_at, grads)
    if is_remote(device):
        spare = op, device, plan.room_sizes
        if spare not in _spares:
            _spares[spare] = Room(*plan.room_sizes, device)
    return plan


def _captured_plan(
    op: str, args: StepArgs, device: torch.device, check: Callable[[], None], *plan_args: Any
) -> Plan:
    """A plan of its own for a graph that is being captured. Nothing can be allocated or uploaded meanwhile.

    So an eager step leaves a room for it; the upload becomes part of the graph, from pinned memory that stays as it is.
    """
    check()
    front = _front(args, device)
    plan = Plan(args, *plan_args)
    spare = op, device, plan.room_sizes
    if spare not in _spares:
        raise RuntimeError(
            f"{op} has no memory prepared to capture a step of these {len(args.grads)} tensors; "
            "run one such step before each capture"
        )
    plan.room = _spares.pop(spare)
    plan.room.upload(0, chain(front, plan.grads, plan.columns), plan.room.pinned)
    _captured.append(plan)
    return plan


# ---- launches


def check_step(args: StepArgs, device: torch.device) -> None:
    check_tensors(
        args.params, args.grads, args.steps, args.group, args.lr, args.hyperparameters, args.moments,
        args.codec, args.block_size,
    )  # fmt: skip
    lists = {"params": args.params, "grads": args.grads, "steps": args.steps or ()}
    for moment in args.moments:
        lists |= {moment.name: moment.tensors, f"the scales of {moment.name}": moment.scales}
    for name, tensors in lists.items():
        for i, x in enumerate(tensors):
            if x.device != device:
                raise ValueError(f"{name}[{i}] must be on {device} like the first parameter, got {x.device}")


def run_step(op: str, args: StepArgs, prologue: Any, kernel: Any, tiles: int = 8) -> None:
    """One step: the prologue, then a launch of ``kernel`` for each combination of constants that occurs."""
    if not args.params:
        check_step(args, torch.device("cpu"))
        return
    device = args.params[0].device
    with guard(device):
        plan = plan_for(op, args, device, lambda: check_step(args, device), tiles)
        table, scalars, tables = plan.room.table, plan.room.scalars, dynamic_tables(device)
        plan.prologue(prologue, table, scalars, *plan.sizes)
        for part in plan.launches:
            part(kernel, table, scalars, tables, *plan.sizes, part.first, part.members)
