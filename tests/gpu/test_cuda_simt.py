"""The CUDA kernels and their host side, compiled by g++ and run on the CPU (tests/support/simt): the reference's bits.

What this proves is the arithmetic, the indexing, the tables and the launches; not the timing, and not what the GPU's
memory does with two threads at once. Threads run in three orders, so that a result that depends on it shows.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from ctypes import CDLL
from pathlib import Path

import pytest
import torch
from torch import Tensor

from memkern import reference
from memkern.fewbit.tables import LEVELS
from memkern.quant.codec import CODECS, ODD, POWER_LEVELS_UNSIGNED, WEIGHTS
from memkern.quant.layout import layer_count, layout_of
from memkern.reference.blockwise import dither
from memkern.schemas import STEP_OPS, StepArgs
from tests.support import cache
from tests.support.activation_helpers import LAYOUTS as ACTIVATION_LAYOUTS
from tests.support.activation_kernels import compare_activations, compare_bf16_table, compare_forward, compare_gelus
from tests.support.bad_steps import BAD_CASES, BAD_STEPS
from tests.support.helpers import (
    FLOATS,
    LAYOUTS,
    assert_same,
    hard,
    like,
    name_of,
    over_dtypes,
    over_layouts,
    tensor,
)
from tests.support.hostile_weights import hostile
from tests.support.op_helpers import step_args as op_args
from tests.support.simt import build, drive
from tests.support.simt.drive import cloned, compare_codecs, compare_steps, scaler, step_args

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(build.missing() is not None, reason=str(build.missing())),
]

ORDERS = ("fwd", "rev", "rand")
over_orders = pytest.mark.parametrize("order", ORDERS)
over_steps = pytest.mark.parametrize("name", STEP_OPS)
MOST_LAUNCHES = {name: 7 if op.has_trust_ratios else 4 for name, op in STEP_OPS.items()}


@pytest.fixture(scope="module")
def library(simt_library: tuple[CDLL, Path]) -> CDLL:
    return simt_library[0]


@pytest.fixture
def graph(library: CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[CDLL]:
    """Launches are recorded while SIMT_CAPTURE is set."""
    library.memkern_simt_forget()
    yield library
    library.memkern_simt_forget()


@pytest.fixture(autouse=True)
def _loaded(library: CDLL) -> None:
    pass


# ---- the kernels


@over_layouts
@over_dtypes
def test_codecs(layout: str, dtype: torch.dtype) -> None:
    compare_codecs(layout, dtype, (8, 128, 256, 1024))


@pytest.mark.parametrize("layout", ACTIVATION_LAYOUTS)
@over_dtypes
def test_activations(layout: str, dtype: torch.dtype) -> None:
    for bits in (1, 2, 3, 4):
        compare_activations(torch.ops.memkern_simt, layout, dtype, bits)


@over_dtypes
def test_forward_of_many_values(dtype: torch.dtype) -> None:
    compare_forward(torch.ops.memkern_simt, dtype)


@over_dtypes
def test_forward_of_gelu(dtype: torch.dtype) -> None:
    odd = [key for key, table in LEVELS.items() if table.symmetry == ODD]
    assert {("gelu", bits) for bits in (1, 2, 3, 4)} <= {*odd}
    compare_gelus(torch.ops.memkern_simt, dtype, odd)


def test_forward_of_every_bf16() -> None:
    compare_bf16_table(torch.ops.memkern_simt)


@over_dtypes
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("blocks", [1, 5, 261])  # less than a warp, a half more, more than all threads at once
def test_saved_tensors(blocks: int, signed: bool, dtype: torch.dtype) -> None:
    """Whole blocks rounded to the nearest, which have a kernel of their own."""
    x = hard((blocks, 128), blocks, signed=signed).to(dtype)
    x.view(-1)[5::1009] = torch.nan
    x.view(-1)[70::1013] = torch.inf
    expected = reference.quantize_blockwise(x, CODECS["power"], signed, 128)
    assert_same([*torch.ops.memkern_simt.quantize_blockwise(x, CODECS["power"], signed, 128, None)], [*expected])


@over_orders
def test_codecs_in_any_order(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMT_ORDER", order)
    for layout in ("odd", "short rows", "one long row"):
        compare_codecs(layout, torch.float32, (24, 264, 4096))


@over_steps
@over_dtypes
@pytest.mark.parametrize("grad", FLOATS, ids=name_of)
def test_steps(name: str, dtype: torch.dtype, grad: torch.dtype) -> None:
    compare_steps(name, step_args(name, dtype, grad), scaler())


@over_steps
@pytest.mark.parametrize("block_size", [8, 24, 256, 264, 4096])
def test_block_sizes(name: str, block_size: int) -> None:
    layouts = ("odd", "long rows", "one long row", "short rows", "unaligned", "channels_last")
    compare_steps(name, step_args(name, block_size=block_size, layouts=layouts), {})


@over_steps
@pytest.mark.parametrize("weights", [(1, 2), (2, 3), (3, 0)])
@pytest.mark.parametrize("block_size", [128, 24, 1000])
def test_weights(name: str, weights: tuple[int, int], block_size: int) -> None:
    grad = FLOATS[weights[0] % 3] if block_size == 24 else torch.bfloat16
    args = step_args(name, torch.bfloat16, grad, weights=weights, block_size=block_size)
    compare_steps(name, args, scaler())


@over_steps
@pytest.mark.parametrize("kept", ["bf16+8", "bf16+16"])
@pytest.mark.parametrize("block_size", [128, 256])
def test_every_weight_beside_hostile_states(name: str, kept: str, block_size: int) -> None:
    p, state = hostile(kept)
    weights = (WEIGHTS[kept], WEIGHTS[kept])
    args = step_args(name, torch.bfloat16, torch.bfloat16, codec=(0, 0), block_size=block_size, layouts=(p.shape,))
    args = args._replace(params=[p], weight_storage=[*weights], weight_states=[state])
    compare_steps(name, args, {}, steps=1)


@over_steps
@over_orders
def test_steps_in_any_order(name: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMT_ORDER", order)
    layouts = ("odd", "short rows", "unaligned", "one long row", "empty", "0-dim")
    compare_steps(name, step_args(name, torch.bfloat16, codec=(0, 0), layouts=layouts), {})
    compare_steps(name, step_args(name, block_size=264, layouts=layouts), scaler())


@over_steps
def test_many_tiles_of_one_tensor(name: str) -> None:
    args = step_args(name, layouts=("odd",) * 3)  # one in power codes, one in dynamic ones, one in fp32
    params = [hard((40, 1000), i, scale=0.1) for i in range(3)]
    moments = [torch.zeros(40, 1000, dtype=x.dtype) for x in args.moments]
    scales = [torch.zeros(layout_of(params[0], 128).scale_shape) for _ in args.scales]
    args = args._replace(params=params, grads=[p.clone() for p in params], moments=moments, scales=scales)
    compare_steps(name, args, {}, steps=1)


@pytest.mark.parametrize("name", ["lamb_step_", "lars_step_"])
@pytest.mark.parametrize("layers", [3, 0], ids=["three", "rows"])
@over_orders
def test_layers_of_a_tensor(name: str, layers: int, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMT_ORDER", order)
    args = step_args(name, layouts=("long rows", "one long row", "whole blocks", "1-D"), layers=[layers, 1])
    ratios = [torch.ones(layer_count(args.params[0], 128, layers))] + [torch.ones(1)] * 3
    if layers == 0:
        ratios[2] = torch.ones(6)
    group = [0, 1, 0 if layers == 0 else 1, 1]  # one long row has no three layers
    compare_steps(name, args._replace(trust_ratios=ratios, group=group), scaler())
    assert [len(x) for x in ratios] == [3, 1, 6 if layers == 0 else 1, 1]


@pytest.mark.parametrize("scale", [1e-36, 1e-30, 1e-24, 1e-18, 1e-15, 1e-12, 1e12, 1e18, 1e36])
def test_sizes_that_are_not_usual(scale: float) -> None:
    """Roots and divisions near the ends of the range of fp32 are left to the compiler's."""
    layouts = ("whole blocks", "one long row")
    args = step_args("adam_step_", codec=(0, 0), layouts=layouts, eps=[0.0, 1e-30])  # nothing hides what the root is
    for step in range(2):
        grads = [torch.randn(p.shape, generator=torch.Generator().manual_seed(step)) for p in args.params]
        grads = [g * scale * (1 + 99 * (g > 1)) for g in grads]
        compare_steps("adam_step_", args._replace(grads=grads), {}, steps=1)


@pytest.mark.parametrize("scale", [1e-30, 1e-36, 1e-38])
def test_small_moments_over_large_ones(scale: float) -> None:
    """A first moment near the end of the range, a second one that is not, and a parameter where the quotient shows."""
    args = step_args("adam_step_", codec=(0, 0), layouts=("whole blocks", "one long row"))
    for first in (True, False):
        for p in args.params:
            p.zero_()
        grads = [like(p, 7) * (1e-6 if first else scale) for p in args.params]
        for g in grads:
            g.view(-1)[::100] = 1.0 if first else scale
        compare_steps("adam_step_", args._replace(grads=grads), {}, steps=1)


@pytest.mark.parametrize("lr", [0.0, 1e-14, 1e-3, 1.0])
def test_bf16_parameters_rounded_from_approximations(lr: float) -> None:
    """Changes as large as the parameters, so that some of them are near the middle between two bf16 numbers."""
    args = step_args("adam_step_", torch.bfloat16, torch.bfloat16, codec=(0, 0), layouts=((64, 1024),))
    (p,) = args.params
    p.copy_(hard(p.shape, 3, scale=lr or 1.0))
    p.view(-1)[::5] = 0.0
    args = args._replace(grads=[like(p, 1)], lr=[torch.tensor(lr, dtype=torch.float64)] * 2)
    compare_steps("adam_step_", args, {})


@pytest.mark.parametrize(
    ("dtype", "weights"), [(torch.float32, (0, 0)), *((torch.bfloat16, kept) for kept in ((0, 0), (1, 2), (3, 0)))]
)
def test_whole_blocks(dtype: torch.dtype, weights: tuple[int, int]) -> None:
    """Several tiles of them, with gradients that are not finite, in one launch with tensors of other blocks."""
    layouts = ((40, 1024), (33, 640), "empty", "odd", "whole blocks", "one long row", "unaligned")
    args = step_args("adam_step_", dtype, dtype, codec=(0, 0), layouts=layouts, weights=weights)
    assert sum(not g.isfinite().all() for g in args.grads) >= 2
    compare_steps("adam_step_", args, scaler() if weights == (1, 2) else {}, steps=3)


@over_steps
@pytest.mark.parametrize("columns", [1024, 1600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batches_of_scales(name: str, dtype: torch.dtype, columns: int) -> None:
    """Tiles of 19 turns, or 30 with one moment: batches of 8, 8 and 3, or of 16 and 14."""
    args = step_args(name, dtype, dtype, codec=(0, 0), layouts=((300_000 // columns, columns),))
    compare_steps(name, args, {}, steps=2)


# Rows that are no multiple of 128 but of 8: 1,600 is GPT-2-XL's width. Blocks of 96 are shorter than a group of lanes.
RAGGED = ((7, 1600), (3, 200), (40, 96), (2, 1000), (1600,), (40, 1024), (13, 136), (50, 8))


def shifted(x: Tensor, by: int) -> Tensor:
    """A copy that begins so many elements into its memory, as a view of a DDP bucket does."""
    memory = torch.zeros(x.numel() + by, dtype=x.dtype)
    return memory[by:].view(x.shape).copy_(x)


@over_steps
@pytest.mark.parametrize(
    ("dtype", "grad", "weights"),
    [
        *((dtype, dtype, (0, 0)) for dtype in (torch.float32, torch.bfloat16)),
        (torch.float32, torch.float16, (0, 0)),
        (torch.bfloat16, torch.bfloat16, (2, 3)),
    ],
)
@pytest.mark.parametrize("by", [0, 1, 2, 3])
def test_rows_of_a_multiple_of_8(
    name: str, dtype: torch.dtype, grad: torch.dtype, weights: tuple[int, int], by: int
) -> None:
    """The main path's last vectors in a row, and gradients off 16 bytes."""
    for codec in [(0, 0), (0, 1)]:
        args = step_args(name, dtype, grad, codec=codec, layouts=RAGGED, weights=weights)
        grads = [shifted(g, by) for g in args.grads]
        assert all(g.data_ptr() % 16 == 0 for g in grads) == (by == 0)
        compare_steps(name, args._replace(grads=grads), scaler() if by == 2 else {}, steps=1)


def test_general_kernels_in_place_of_fast_paths(simt_library: tuple[CDLL, Path]) -> None:
    """MEMKERN_CUDA_FAST=0, which is read once: in a process of its own, with the reference's bits there too."""
    code = (
        "import sys; from pathlib import Path; from tests.support.simt import build, drive; "
        "build.load(Path(sys.argv[1])); "
        "[drive.compare_steps(n, drive.step_args(n, codec=(0, 0), layouts=((7, 1600), (9, 640))), {}, 1)"
        " for n in ('adam_step_', 'lamb_step_', 'lion_step_')]; "
        "drive.compare_codecs('whole blocks', drive.FLOATS[1], (128,))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(simt_library[1])],
        env={**os.environ, "MEMKERN_CUDA_FAST": "0"},
        cwd=build.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_codes_in_doubt(dtype: torch.dtype) -> None:
    """Second moments whose root plus dither is so near an integer that an approximate root may give another code."""
    levels = POWER_LEVELS_UNSIGNED
    # A seed with which the approximate root gets codes wrong in every case.
    generator = torch.Generator().manual_seed(1)
    shape = (2**20 // (levels + 1), 128)
    g = torch.rand(shape, generator=generator).to(dtype)
    codes = torch.randint(levels + 1, shape, generator=generator, dtype=torch.uint8)
    scale = torch.rand(shape[0], 1, generator=generator)
    g[:, 0], codes[:, 0] = 1.0, levels  # the largest
    v = (scale * (codes.double() / levels) ** 2) ** 2 + g.double() ** 2
    c = (levels * (v / v[:, :1]) ** 0.25).clamp(min=1) + dither(128, 1, g.device)
    rows = ((c - c.round()).abs() < 2 * (levels + 1) * 2**-25).any(1)
    g, codes, scale = g[rows], codes[rows], scale[rows]
    assert len(g) >= 8
    args = step_args("adam_step_", dtype, dtype, codec=(0, 0), layouts=(g.shape,), beta2=[0.5, 0.5])
    args.moment(1)[0].copy_(codes)
    args.scales_of(1, 2)[0].copy_(scale)
    compare_steps("adam_step_", args._replace(grads=[g]), {}, steps=1)


@pytest.mark.parametrize("eps", [1e-8, 1e-30, 0.0])
@pytest.mark.parametrize("g", [0.0, -0.0, 1e-3])
def test_zeros(g: float, eps: float) -> None:
    """Of either sign, in every place: first moments of -0 too, which codes below zero and a scale of 0 stand for."""
    for codes, scale in ((0, 0.0), (-1, 0.0), (0, 1.0), (-3, 1e-3)):
        args = step_args("adam_step_", codec=(0, 0), layouts=("whole blocks", "one long row"), eps=[eps, eps])
        for p, m, v in zip(args.params, args.moment(0), args.moment(1), strict=True):
            p.view(-1)[::3] = -0.0
            m.fill_(codes)
            v.view(-1)[::2] = 77
        for m_scale, v_scale in zip(args.scales_of(0, 2), args.scales_of(1, 2), strict=True):
            m_scale.fill_(scale)
            v_scale.fill_(1e-2)
        args = args._replace(grads=[torch.full_like(p, g) for p in args.params])
        compare_steps("adam_step_", args, {}, steps=1)


def test_long_run() -> None:
    """What the approximate roots of the encoder are not sure of is encoded by the formula."""
    compare_steps("adam_step_", step_args("adam_step_", codec=(0, 0), layouts=("odd", "whole blocks")), {}, 30)


@pytest.mark.parametrize("scale", [None, 1024.0])
@over_orders
def test_norm(scale: float | None, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grads = [tensor(layout, FLOATS[i % 3], seed=i, scale=0.1) for i, layout in enumerate(LAYOUTS)]
    grads.append(hard((40_000,), 7))  # several tiles
    grad_scale = None if scale is None else torch.tensor(scale)
    norms = [torch.full((), -1.0, dtype=torch.float64) for _ in range(3)]
    torch.ops.memkern_simt.grad_norm_(norms[0], grads, grad_scale)
    monkeypatch.setenv("SIMT_ORDER", order)
    torch.ops.memkern_simt.grad_norm_(norms[1], grads, grad_scale)
    assert_same(norms[1], norms[0], "the same bits in any order")
    reference.grad_norm_(norms[2], grads, grad_scale)
    assert float(norms[0]) == pytest.approx(float(norms[2]), rel=1e-12)


def rounded_alike(direction: int) -> Tensor:
    """Numbers whose squares all lose a third of an ulp or more in fp32, of about one size."""
    x = torch.linspace(1, 1.0625, 2**20)
    error = (x * x).double() - x.double().square()
    return x[error * direction > 2.0**-25]


RANGES = {
    "normal": hard((5003,), 0),
    "equal": torch.full((5003,), 1.0003),
    "all rounded up": rounded_alike(1),
    "all rounded down": rounded_alike(-1),
    "squares underflow": 1e-30 * torch.randn(5003),
    "subnormal": 1e-42 * torch.randn(5003),
    "squares overflow": 1e30 * torch.randn(5003),
    "from 1e-30 to 1e30": torch.logspace(-30, 30, 5003),
    "small ones beside 1": torch.cat([torch.ones(1), torch.full((4999,), 2.0**-64)]),
    "few are not zero": torch.zeros(5003).index_fill(0, torch.arange(0, 5003, 500), 3e-30),
}


@pytest.mark.parametrize("case", RANGES)
def test_norm_where_fp64_is_slow(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1e-7, as csrc/cuda/squares.cuh rounds three times on the way to a sum: 3 * 2^-24 of a square, half of that
    of a norm."""
    monkeypatch.setenv("SIMT_SLOW_FP64", "1")
    x = RANGES[case]
    norm = torch.zeros((), dtype=torch.float64)
    torch.ops.memkern_simt.grad_norm_(norm, [x], None)
    error = float(norm / x.double().norm()) - 1
    assert abs(error) < 1e-7
    if "rounded" in case:  # so it was the sum in fp32
        assert abs(error) > 1e-8


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_no_norm_where_fp64_is_slow(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMT_SLOW_FP64", "1")
    norm = torch.zeros((), dtype=torch.float64)
    torch.ops.memkern_simt.grad_norm_(norm, [torch.ones(100).index_fill(0, torch.tensor(50), value)], None)
    torch.testing.assert_close(norm, torch.tensor(value).double(), equal_nan=True)


@pytest.mark.parametrize("scale", [1.0, 1e-29, 1e29])
@pytest.mark.parametrize("name", ["lamb_step_", "lars_step_"])
def test_squares_where_fp64_is_slow(name: str, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMT_SLOW_FP64", "1")
    args = step_args(name, grad=torch.float32, always_adapt=[1, 1], eps=[1e-8, 1e-6])
    params = [p * scale for p in args.params]
    grads = [like(p, i, scale=scale) for i, p in enumerate(params)]
    squares, truth = torch.zeros(2, len(params), 2, dtype=torch.float64)
    args = args._replace(params=params, grads=grads, squares=squares, squares_only=True)
    getattr(torch.ops.memkern_simt, name)(*args)
    getattr(reference, name)(args._replace(squares=truth))
    torch.testing.assert_close(squares, truth, rtol=2e-7, atol=0)  # twice the norms' 1e-7
    assert not torch.equal(squares, truth)


# ---- the table


@over_steps
def test_numbers_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """lr and a GradScaler's tensors may be on the CPU: their values are then part of the table."""
    monkeypatch.setenv("SIMT_HOST_SCALARS", "1")
    layouts = ("odd", "one element", "whole blocks")
    args = step_args(name, layouts=layouts)._replace(**scaler())
    expected = cloned(args)
    for step in range(3):
        args.lr[0].mul_(0.5)
        getattr(torch.ops.memkern_simt, name)(*args)
        expected.lr[0].copy_(args.lr[0])
        getattr(reference, name)(expected)
        assert_same([*args], [*expected], f"step {step}")


@over_steps
def test_a_step_is_skipped_whole(name: str) -> None:
    args = step_args(name)._replace(**scaler(found_inf=torch.tensor(1.0)))
    before = cloned(args)
    getattr(torch.ops.memkern_simt, name)(*args)
    assert_same([*args], [*before])


@over_steps
def test_optimizers_take_turns(name: str) -> None:
    """Two with the same first parameter and as many tensors share a place in memory, and neither sees the other's."""
    one, other = step_args(name), step_args(name, codec=(1, 0))
    other = other._replace(params=[one.params[0], *other.params[1:]])
    expected = [cloned(one), cloned(other)]
    expected[1] = expected[1]._replace(params=[expected[0].params[0], *expected[1].params[1:]])
    for _ in range(2):
        for args, same in zip((one, other), expected, strict=True):
            getattr(torch.ops.memkern_simt, name)(*args)
            getattr(reference, name)(same)
    assert_same([[*one], [*other]], [[*args] for args in expected])


def many(n: int) -> StepArgs:
    """A Lion step of n small tensors."""
    params = [hard((40,), i) for i in range(n)]
    return StepArgs(
        params,
        grads=[like(p, 1) for p in params],
        moments=[torch.zeros(40) for _ in params],
        steps=[torch.zeros(()) for _ in params],
        group=[0] * n,
        lr=[torch.tensor(1e-2)],
        hyperparameters=[0.9, 0.99, 0.1, 0],
        codec=[0],
        block_size=[128],
    )


@pytest.mark.parametrize("n", [1, 148, 1000])
def test_launches_are_few_whatever_the_number_of_tensors(n: int, graph: CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    args = many(n)
    expected = cloned(args)
    torch.ops.memkern_simt.lion_step_(*args)  # the table is new: as many launches as it has chunks
    # zero_grad(set_to_none=True): new gradients at every step.
    args = args._replace(grads=[g.clone() for g in args.grads])
    monkeypatch.setenv("SIMT_CAPTURE", "1")
    torch.ops.memkern_simt.lion_step_(*args)
    monkeypatch.delenv("SIMT_CAPTURE")
    chunks = -(-n * 120 // 31744) - 1  # a graph holds the whole table
    assert graph.memkern_simt_launches() <= MOST_LAUNCHES["lion_step_"] + chunks
    graph.memkern_simt_replay()
    for _ in range(2):
        reference.lion_step_(expected)
    assert_same([*args], [*expected])


@over_steps
def test_a_graph_replays_while_lr_changes(name: str, graph: CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    args = step_args(name)._replace(**scaler())
    step_, reference_step = getattr(torch.ops.memkern_simt, name), getattr(reference, name)
    expected = cloned(args)._replace(lr=args.lr, found_inf=args.found_inf)

    def compare(what: str, grads: list[Tensor]) -> None:
        now = expected._replace(grads=grads)
        reference_step(now)
        assert_same([*args._replace(grads=grads)], [*now], what)

    step_(*args)  # the table is known when the graph is captured
    compare("before", args.grads)
    monkeypatch.setenv("SIMT_CAPTURE", "1")
    step_(*args)
    monkeypatch.delenv("SIMT_CAPTURE")
    assert_same([*args], [*expected], "nothing runs while a graph is captured")
    assert graph.memkern_simt_launches() <= MOST_LAUNCHES[name]
    for step in range(3):
        for rate in args.lr:
            rate.mul_(0.7)
        args.found_inf.fill_(step == 1)
        new = drive.gradients(args.params, step + 5, torch.float32)
        for g, fresh in zip(args.grads, new, strict=True):
            g.copy_(fresh)
        graph.memkern_simt_replay()
        compare(f"replay {step}", args.grads)
        other = drive.gradients(args.params, step + 50, torch.float32)  # other tensors: another table
        step_(*args._replace(grads=other))
        compare(f"eager step {step}", other)


# ---- errors


@pytest.mark.parametrize(("name", "case"), BAD_CASES)
def test_bad_steps_raise_before_anything_changes(name: str, case: str) -> None:
    override = BAD_STEPS[case]
    args = op_args(name, ["codes", "codes"], **override)
    before = cloned([a for a in args if isinstance(a, list)])
    with pytest.raises(RuntimeError):
        getattr(torch.ops.memkern_simt, name)(*args)
    assert_same([a for a in args if isinstance(a, list)], before)


@pytest.mark.long
@pytest.mark.parametrize("threads", [64, 256])
def test_other_sizes_give_the_same_bits(threads: int) -> None:
    """What `make gpu PART=tune` varies: nothing else knows how many threads a thread block has."""
    flags = (f"-DMEMKERN_THREADS={threads}", "-DMEMKERN_TILE_ELEMENTS=4096", "-DMEMKERN_TABLE_THREADS=512")
    folder = cache.built(f"simt-{threads}", lambda folder: build.compile_library(folder, *flags), flags)
    command = [sys.executable, "-m", drive.__name__, str(folder / build.LIBRARY)]
    run = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(build.ROOT)}, capture_output=True, text=True)
    assert run.returncode == 0, (run.stdout + run.stderr)[-6000:]
    assert run.stdout.strip() == "nothing found"


# ---- memory


@pytest.mark.long
def test_sanitizers_find_nothing() -> None:
    def path(name: str) -> str:
        return subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()

    runtime = [path(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    if not all(os.path.isabs(name) for name in runtime):
        pytest.skip("g++ has no libasan or libubsan beside it")
    flags = ("-Og", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-sanitize=alignment")
    folder = cache.built("simt-sanitized", lambda folder: build.compile_library(folder, *flags), flags)
    environment = {
        **os.environ,
        "PYTHONPATH": str(build.ROOT),
        "LD_PRELOAD": " ".join(runtime),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "SIMT_ORDER": "rand",
    }
    command = [sys.executable, "-m", drive.__name__, str(folder / build.LIBRARY)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, (run.stdout + run.stderr)[-6000:]
    assert run.stdout.strip() == "nothing found"
