"""The table of cases: calls of each op whose results are compared with the reference's, on every backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memkern import reference
from memkern.fewbit.levels import Levels
from memkern.fewbit.tables import LEVELS, TWO_BRANCHES
from memkern.quant.codec import ACTIVATIONS, CODECS, WEIGHTS
from memkern.quant.layout import layout_of
from memkern.schemas import STEP_OPS, StepArgs
from tests.support.activation_helpers import LAYOUTS as DENSE
from tests.support.activation_helpers import TABLES, around, values
from tests.support.activation_kernels import ARGUMENTS, assert_near
from tests.support.helpers import FLOATS, LAYOUTS, hard, name_of, tensor
from tests.support.kernels import hard_values as values_of
from tests.support.kernels.arguments import (
    BF16,
    F16,
    F32,
    LAYERWISE,
    MATRICES,
    MIXED,
    MUON,
    SCALER,
    SMALL,
    Gradient,
    arguments,
    hard_gradient,
    with_nonfinite,
)
from tests.support.kernels.hard_values import Edit, off, replaced

Call = list[Any]


class Case(NamedTuple):
    name: str
    op: str
    calls: Callable[[], Iterable[Call]]
    """Each call's arguments, new ones each time."""
    steps: int = 1
    """How often each is called, with other gradients each time."""
    gradient: Gradient = hard_gradient
    near: Callable[[Any, Any, Call], None] | None = None
    """Compares results with the reference's where they may differ."""
    full: bool = False
    """Left to `make test-all`."""
    interpreted: bool = False
    """In Triton's interpreter too, where a thousand elements take a millisecond."""
    emulated: bool = False
    """There, and on emulated GPUs, where they take seconds."""
    orders: bool = False
    """With CUDA's threads in every order (fwd, rev, rand of tests/support/simt)."""


CASES: dict[str, Case] = {}


def add(op: str, title: str, calls: Callable[[], Iterable[Call]], **options: Any) -> None:
    name = f"{op}: {title}"
    assert name not in CASES
    CASES[name] = Case(name, op, calls, **options)


# ---- steps

STEPS, ADAM = tuple(STEP_OPS), ("adam_step_",)
ALL = (*STEPS, *MUON)
SOME = ("odd", "long rows", "one long row", "short rows", "unaligned", "channels_last")
WHOLE = ("whole blocks", "one long row")
POWER: dict[str, Any] = {"kinds": "codes", "codec": (0, 0)}
FRESH: dict[str, Any] = {**POWER, "fresh": True}


def steps(ops: Sequence[str], title: str, edit: Edit | None = None, steps: int = 2, **options: Any) -> None:
    """A case of each op. ``options``: those of Case and those of step_args. ``edit``: of what step_args gives."""
    marks = {key: options.pop(key) for key in {*Case._fields} & {*options} if key != "gradient"}
    for op in ops:
        layouts = {"layouts": MATRICES} if op in MUON and "layouts" not in options else {}

        def calls(op: str = op, layouts: dict[str, Any] = layouts) -> Iterator[Call]:
            args = arguments(op, **layouts, **options)
            first = len(args) - len(StepArgs._fields)
            yield args if edit is None else [*args[:first], *edit(StepArgs(*args[first:]))]

        add(op, title, calls, steps=steps, gradient=options.get("gradient", hard_gradient), **marks)


def steps_and_muon(
    title: str, layouts: Sequence[Any] = SMALL, matrices: Sequence[Any] = MATRICES[:6], **options: Any
) -> None:
    """A case of each op, of few elements: those of STEPS with ``layouts``, and Muon's with ``matrices``."""
    steps(STEPS, title, layouts=layouts, **options)
    steps(MUON, title, layouts=matrices, **options)


for p, g in product(FLOATS, FLOATS):
    usual = p is g or (p, g) == (F32, BF16)
    steps(ALL, f"{name_of(p)}, {name_of(g)} gradients", param=[p], grad=[g], full=not usual, **SCALER)
steps(ALL, "every dtype", interpreted=True, **MIXED)
steps_and_muon("backwards", [*LAYOUTS][::-1], MATRICES[::-1], groups=(1, 0), interpreted=True, **MIXED, **SCALER)
for p, g in ((F32, F32), (BF16, BF16), (F16, F32)):
    codecs = (0, 1) if p is F32 else (0, 0)
    steps_and_muon(f"few, {name_of(p)}", param=[p], grad=[g], codec=codecs, emulated=True, orders=True, **SCALER)
for n in (8, 24, 256, 264, 1000, 4096):
    steps(STEPS, f"blocks of {n}", layouts=SOME, block_size=n, orders=n == 264)
    steps(MUON, f"blocks of {n}", block_size=n)
steps(STEPS, "blocks of 8 and 4096", layouts=SOME, block_size=(8, 4096), interpreted=True, **POWER)
steps(ADAM, "few, blocks of 1024", layouts=SOME[:3], block_size=1024, emulated=True)
for pair, n in product(((1, 2), (2, 3), (3, 0)), (128, 24, 1000)):  # both groups' weight_storage, and block_size
    grad = FLOATS[pair[0] % 3] if n == 24 else BF16
    steps(ALL, f"weights {pair}, blocks of {n}", param=[BF16], grad=[grad], weights=pair, block_size=n, **SCALER)
for pair in ((2, 3), (1, 0)):
    steps_and_muon(f"few, weights {pair}", param=[BF16], grad=[BF16], weights=pair, emulated=True)
for storage, n in product(("bf16+8", "bf16+16"), (128, 256)):
    edit = values_of.beside_hostile_states(storage)
    steps(
        STEPS, f"every weight beside hostile states, {storage}, blocks of {n}", edit, steps=1, full=True,
        layouts=((1024, 512),), param=[BF16], grad=[BF16], weights=[WEIGHTS[storage]] * 2, block_size=n, **POWER,
    )  # fmt: skip
for pair, p in product(((2, 3), (4, 5)), (F32, BF16)):
    steps_and_muon(f"hyperparameters {pair}, {name_of(p)}", groups=pair, param=[p], grad=[p], interpreted=p is F32)
steps_and_muon("codes of both codecs", kinds="codes", codec=(1, 0), block_size=(64, 256), interpreted=True)
steps_and_muon("power codes", **POWER)
steps_and_muon("fp32 states", kinds="fp32")
for title, norm_or_skip in {
    "not clipped": {"grad_norm": torch.tensor(0.5, dtype=torch.float64)},
    "the norm is NaN": {"grad_norm": torch.tensor(math.nan, dtype=torch.float64)},
    "skipped": {"found_inf": torch.tensor(1.0)},
}.items():
    steps_and_muon(title, SMALL[:4], interpreted=True, **{**SCALER, **norm_or_skip})
for field in ("params", "grads", "moments"):
    steps_and_muon(f"unaligned {field}", edit=off(field), **MIXED)
steps_and_muon("no tensors", (), (), interpreted=True)
steps(STEPS, "many tiles of a tensor", layouts=((40, 1000),) * 3, steps=1)
steps(STEPS, "two threads", layouts=((130, 257), (300, 1000)), steps=1)
for op in STEPS:  # in the interpreter the prologues of two cover those of all
    many_steps = {"layouts": ("one element",) * 131, "interpreted": op in ("lamb_step_", "lion_step_")}
    steps([op], "many tensors", **many_steps)
for title, gradient in {
    "squares underflow": values_of.of_size(1e-21),
    "denormal gradients": values_of.of_size(1e-38),
    "squares overflow": values_of.of_size(1e20),
    "zero after the first": values_of.zero_after_the_first,
    "zero gradients": lambda p, seed, dtype: torch.zeros_like(p, dtype=dtype),
    "gradients that are often not finite": values_of.often_not_finite,
}.items():
    steps_and_muon(title, gradient=gradient, steps=3, fresh=True)
strides = ("odd", "long rows", "whole blocks", "channels_last")
steps(STEPS, "gradients of other strides", values_of.other_strides, layouts=strides, steps=1, interpreted=True)
transposed = replaced("grads", lambda args: [g.mT.contiguous().mT for g in args.grads])
steps(MUON[:1], "gradients of other strides", transposed, steps=1, interpreted=True)
for n in (2**20, 2**24 - 2, 2**40):
    late = replaced("steps", lambda args, n=n: [torch.tensor(float(n)) for _ in args.steps])
    steps(STEPS, f"step {n}", late, layouts=("odd", "whole blocks", "long rows"), interpreted=True)
# Dithers pass through their places, and what an approximate root is not sure of is encoded by the formula.
steps(ADAM, "300 steps", steps=300, layouts=((3, 200),) * 3)
steps(ADAM, "30 steps", steps=30, layouts=("odd", "whole blocks"), **FRESH)

# Layers, each with a trust ratio of its own: three, and every row.
LAYERED = ("long rows", "one long row", "whole blocks", "1-D")
steps(LAYERWISE, "three layers", layouts=LAYERED, layers=[3, 1], group=[0, 1, 1, 1], orders=True, **SCALER)
steps(LAYERWISE, "layers of a row", layouts=LAYERED, layers=[0, 1], group=[0, 1, 0, 1], orders=True, **SCALER)
for n in (3, 0):
    layered = {"layouts": ("long rows", "whole blocks") * 2, "block_size": 8, "layers": [n, n]}
    steps(LAYERWISE, f"layers {n}, blocks of 8", interpreted=True, **layered)
squares = torch.tensor([[9.0, 4.0], [0.0, 1.0], [1e3, 0.0], [0.25, 2.0]], dtype=torch.float64)
steps(LAYERWISE, "squares of others", layouts=SOME[:4], squares=squares, interpreted=True)

# CUDA's and Triton's fast paths: whole blocks of power codes, and values of usual sizes.
for scale in (1e-36, 1e-30, 1e-24, 1e-18, 1e-15, 1e-12, 1e12, 1e18, 1e36):
    grads = values_of.of_two_sizes(scale)  # with an eps of 0 and 1e-30, so that it does not hide the root's error
    steps(ADAM, f"gradients of {scale}", gradient=grads, layouts=WHOLE * 2, eps=[0.0, 1e-30], interpreted=True, **FRESH)
for scale in (1e-30, 1e-36, 1e-38):
    edit = values_of.small_moments(scale)
    steps(ADAM, f"small moments, {scale}", edit, steps=1, layouts=WHOLE * 2, interpreted=True, **POWER)
for lr in (0.0, 1e-14, 1e-3, 1.0):
    edit = values_of.large_changes(lr)
    steps(ADAM, f"changes of {lr}", edit, layouts=((64, 1024),), param=[BF16], grad=[BF16], interpreted=True, **POWER)
for p in (F32, BF16):
    options = {"param": [p], "grad": [p], "beta2": [0.5, 0.5], "interpreted": True, **POWER}
    steps(ADAM, f"codes in doubt, {name_of(p)}", values_of.codes_in_doubt, steps=1, layouts=("odd",), **options)
for g, eps, code in product((0.0, -0.0, 1e-3), (1e-8, 1e-30, 0.0), ((0, 0.0), (-1, 0.0), (0, 1.0), (-3, 1e-3))):
    title = f"gradients of {g}, eps {eps}, first moments of code and scale {code}"
    edit = values_of.zeros(g, *code)
    steps(ADAM, title, edit, steps=1, layouts=WHOLE, eps=[eps, eps], interpreted=True, **POWER)
BESIDE = ((40, 1024), (33, 640), "empty", "odd", "whole blocks", "one long row", "unaligned")
for p, pair in ((F32, (0, 0)), (BF16, (0, 0)), (BF16, (1, 2)), (BF16, (3, 0))):
    title = f"whole blocks beside others, {name_of(p)}, weights {pair}"
    steps(STEPS, title, steps=3, layouts=BESIDE, param=[p], grad=[p], codec=(0, 0), weights=pair, **SCALER)
# Tiles of 19 turns, or 30 with one moment: batches of 8, 8 and 3, or of 16 and 14.
for columns, p in product((1024, 1600), (F32, BF16)):
    shape = (300_000 // columns, columns)
    steps(STEPS, f"rows of {columns}, {name_of(p)}", layouts=(shape,), param=[p], grad=[p], **POWER)
# Rows that are no multiple of 128 but of 8: 1,600 is GPT-2-XL's width. Blocks of 96 are shorter than a group of lanes.
RAGGED = ((7, 1600), (3, 200), (40, 96), (2, 1000), (1600,), (40, 1024), (13, 136), (50, 8))
DTYPES = ((F32, F32, (0, 0)), (BF16, BF16, (0, 0)), (F32, F16, (0, 0)), (BF16, BF16, (2, 3)))  # and weight_storage
for (p, g, pair), by, second in product(DTYPES, range(4), (0, 1)):
    dtypes = f"{name_of(p)}, {name_of(g)} gradients {by} on, weights {pair}"
    options = {"param": [p], "grad": [g], "weights": pair, "codec": (0, second), **(SCALER if by == 2 else {})}
    options |= {"steps": 1, "full": by > 1, "layouts": RAGGED, "kinds": "codes"}
    steps(STEPS, f"rows of a multiple of 8, {dtypes}, codecs 0 and {second}", off("grads", by), **options)

# ---- blockwise codes

MODES = ((None, False), (7, False), (None, True))  # step and mark_nonfinite
SIZES = (16, 24, 72, 256, 1000, 1024, 2048, 4096)
SIGNS = {True: "signed", False: "unsigned"}


def quantize(
    title: str,
    inputs: Callable[[], Iterable[Tensor]],
    codecs: Sequence[int] = (0, 1),
    signed: Sequence[bool] = tuple(SIGNS),
    block_sizes: Sequence[int] = (128,),
    modes: Sequence[tuple[int | None, bool]] = MODES,
    **marks: Any,
) -> None:
    """A case with a call for each combination of inputs and of values of each argument."""

    def calls() -> Iterator[Call]:
        for x, codec, sign, n, mode in product(inputs(), codecs, signed, block_sizes, modes):
            yield [x, codec, sign, n, *mode]

    add("quantize_blockwise", title, calls, **marks)


for layout, dtype in product(LAYOUTS, FLOATS):
    inputs = partial(values_of.nonfinite_tensors, [layout], dtype)
    quantize(f"{layout}, {name_of(dtype)}", inputs, block_sizes=(8, 128, 264), interpreted=True)
quantize("few", partial(values_of.nonfinite_tensors, SMALL, *FLOATS), emulated=True)
inputs = partial(values_of.nonfinite_tensors, SOME, F32)
quantize("block sizes", inputs, block_sizes=SIZES, orders=True, interpreted=True)
quantize("large", lambda: [hard((9, 4500), 0)], block_sizes=SIZES)
quantize("two threads", lambda: [hard((300, 1000), 0)])
for dtype, sign in product(FLOATS, SIGNS):
    # On CUDA they have a kernel of their own. Counts of blocks: few, and more than one for all threads at once.
    title = f"whole blocks, {name_of(dtype)}, {SIGNS[sign]}"
    for name, counts in ((title, (1, 5, 261)), (f"few {title}", (5, 33))):
        inputs = partial(values_of.whole_blocks, dtype, sign, *counts)
        quantize(name, inputs, (0,), (sign,), modes=MODES[:1], emulated="few" in name)
quantize("extreme blocks", values_of.extreme_blocks, interpreted=True)
for scale in values_of.SCALES:
    for sign, step in ((True, None), (False, None), (False, 41), (True, 1), (True, 41), (True, 2**40)):
        inputs = partial(values_of.power_boundaries, scale, sign, step)
        title = f"{SIGNS[sign]} power codes beside every boundary of {scale}, step {step}"
        quantize(title, inputs, (0,), (sign,), modes=((step, False),), interpreted=scale in (1.0, 2.0**-126))
    for sign in SIGNS:
        inputs = partial(values_of.dynamic_boundaries, scale, sign)
        title = f"{SIGNS[sign]} dynamic codes beside every boundary of {scale}"
        quantize(title, inputs, (1,), (sign,), (8,), interpreted=scale in (1.0, 2.0**-126))
for n in (1, 3):
    calls = partial(values_of.squares_at_the_dithers_ends, n)
    add("quantize_blockwise", f"squares at the dither's ends, {n} steps", calls, full=True, interpreted=n == 1)


def coded(layouts: Iterable[str], block_sizes: Sequence[int] = (128,)) -> Iterator[Call]:
    """Codes of both codecs and signs, with a scale of NaN, for each dtype that they may come back as."""
    for layout, codec, sign, n, marked in product(layouts, CODECS.values(), SIGNS, block_sizes, (False, True)):
        x = with_nonfinite(tensor(layout)) if marked else tensor(layout)
        for dtype in FLOATS:
            yield [*reference.quantize_blockwise(x, codec, sign, n, None, marked), codec, n, dtype]


def every_code() -> Iterator[Call]:
    for codec, sign, dtype in product(CODECS.values(), SIGNS, FLOATS):
        codes = torch.arange(-128 if sign else 0, 128 if sign else 256).to(torch.int8 if sign else torch.uint8)[None]
        for scale in (0.37, 1e30, 1e-36, 0.0, math.nan):
            yield [codes, torch.full(layout_of(codes, 128).scale_shape, scale), codec, 128, dtype]


for layout in LAYOUTS:
    calls = partial(coded, [layout], (8, 24, 128, 264, 1024))
    add("dequantize_blockwise", layout, calls, interpreted=True)
add("dequantize_blockwise", "few", lambda: coded(SMALL), emulated=True, orders=True)
add("dequantize_blockwise", "every code", every_code, emulated=True)

# ---- norms of gradients


def norms(title: str, grads: Callable[[], Sequence[Tensor]], **marks: Any) -> None:
    for scale in (None, 1024.0):

        def calls(scale: float | None = scale) -> Iterator[Call]:
            norm = torch.full((), -1.0, dtype=torch.float64)
            yield [norm, [*grads()], None if scale is None else torch.tensor(scale)]

        add("grad_norm_", f"{title}, scale {scale}", calls, **marks)


norms(
    "every layout",
    lambda: [tensor(layout, dtype) for layout in LAYOUTS for dtype in FLOATS],
    orders=True,
    interpreted=True,
)
norms("few", lambda: [tensor(layout, FLOATS[i % 3]) for i, layout in enumerate(SMALL)], emulated=True)
norms("several tiles", lambda: [hard((70_001,), 7), hard((1 << 17,), 1).bfloat16(), torch.ones(3)], interpreted=True)
norms("nothing", lambda: [], interpreted=True)
norms("not finite", lambda: [with_nonfinite(hard((2000,), 0))], interpreted=True)
norms("other strides", lambda: [hard((64, 64), 0)[:, ::2], hard((64, 64), 1).t(), torch.ones(()).expand(7, 9)])

# ---- few-bit activations


def encode(title: str, tables: Iterable[Levels], inputs: Callable[[Levels], Iterable[Tensor]], **marks: Any) -> None:
    def calls() -> Iterator[Call]:
        for table in tables:
            for x in inputs(table):
                yield [x, table.bits, *table[2:]]

    add("few_bit_encode", title, calls, **marks)


def backward(layout: str) -> Iterator[Call]:
    for bits, name, dtype in product((1, 2, 3, 4), ("gelu", "tanh", "mish"), FLOATS):
        table, grad = LEVELS[name, bits], values(layout, dtype, seed=1)
        grad[grad == 0] = math.nan
        yield [grad, reference.few_bit_encode(values(layout), bits, *table[2:]), table.levels]


def from_output(layout: str) -> Iterator[Call]:
    for two_branch, (g, y) in product(
        TWO_BRANCHES.values(), ((F32, F32), (BF16, BF16), (F16, F16), (BF16, F32), (F32, F16))
    ):
        grad, output = values(layout, g, seed=1), values(layout, y)
        if output.numel() > 10:  # beside the minimum
            rare = torch.tensor([math.nan, -0.17, -0.2, -1e-30, 5.0, 4e4])
            output.as_strided((6,), (1,), output.storage_offset()).copy_(rare)
        codes = reference.few_bit_encode(hard((output.numel(),), 3, scale=1.0), 1, (0.0,), (1,), 0)
        yield [grad, output, codes, *two_branch[1:]]


def forward(inputs: Callable[[], list[Tensor]], names: Iterable[str], bits: int = 3) -> Iterator[Call]:
    for x, name in product(inputs(), names):
        table = LEVELS.get((name, bits), LEVELS["mish", bits])
        yield [x, ACTIVATIONS[name], *ARGUMENTS.get(name, (0.0, 0.0)), bits, *table[2:]]


def near_torchs(actual: Any, expected: Any, args: Call) -> None:
    """Asserts the reference's codes, and outputs no further from the truth than torch's (assert_near)."""
    assert torch.equal(actual[1], expected[1])
    assert_near(actual[0], args[0], [*ACTIVATIONS][args[1]], args[2], args[3])


def in_layouts(layouts: Iterable[str], dtypes: Iterable[torch.dtype]) -> list[Tensor]:
    return [values(layout, dtype) for layout, dtype in product(layouts, dtypes)]


def many_values(dtype: torch.dtype) -> list[Tensor]:
    x = torch.randn(3, 4001, generator=torch.Generator().manual_seed(0)) * torch.tensor([[0.3], [1.0], [4.0]])
    x[:, -1] = math.nan
    return [x.flatten().to(dtype)]


def around_thresholds(table: Levels) -> list[Tensor]:
    return [torch.cat([around(table), values("odd").flatten()]).to(dtype) for dtype in FLOATS]


FEW = ("odd", "channels_last", "unaligned", "0-dim")
WITHOUT_EXP = ("relu", "leaky_relu", "hardtanh", "hardshrink", "softshrink", "threshold")
for title, table in TABLES.items():
    encode(f"table of {title}", [table], around_thresholds, interpreted=True)
for layout in DENSE:
    marks = {"interpreted": True, "orders": layout == "odd", "emulated": layout in FEW}
    tables = [LEVELS[name, bits] for name in ("gelu", "tanh", "mish") for bits in (1, 2, 3, 4)]
    encode(layout, tables, lambda _, layout=layout: in_layouts([layout], FLOATS), **marks)
    add("few_bit_backward", layout, partial(backward, layout), **marks)
    add("few_bit_backward_from_output", layout, partial(from_output, layout), **marks)
    forwards = partial(forward, partial(in_layouts, [layout], FLOATS), ACTIVATIONS)
    add("few_bit_forward", layout, forwards, near=near_torchs, interpreted=True)
encode("two threads", [LEVELS["gelu", 3]], lambda _: [hard((300_001,), 1, scale=1.0)])
for dtype in FLOATS:
    forwards = partial(forward, partial(many_values, dtype), ACTIVATIONS, 2)
    add("few_bit_forward", f"many values, {name_of(dtype)}", forwards, near=near_torchs, interpreted=True)
    few = partial(forward, partial(in_layouts, FEW, [dtype]), WITHOUT_EXP)
    add("few_bit_forward", f"without an exponential, {name_of(dtype)}", few, near=near_torchs, emulated=True)
