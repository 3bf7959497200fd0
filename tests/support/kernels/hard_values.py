"""Arguments at which a kernel is most likely to differ from the reference: values beside the boundaries of codes,
states and gradients that are not finite, tensors that begin anywhere in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, product
from typing import Any

import torch
from torch import Tensor

from memkern.quant import codec as C
from memkern.reference.blockwise import dither
from memkern.schemas import StepArgs
from tests.support.helpers import FLOATS, hard, like, tensor
from tests.support.hostile_weights import hostile
from tests.support.kernels.arguments import F32, Gradient, with_nonfinite
from tests.support.trained import with_random_nonfinite

Edit = Callable[[StepArgs], StepArgs]

# ---- gradients


def of_size(scale: float) -> Gradient:
    return lambda p, seed, dtype: like(p, seed, dtype, scale=scale)


def zero_after_the_first(p: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    return like(p, seed, dtype) * (seed < 200)


def often_not_finite(p: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    return with_random_nonfinite(like(p, seed, dtype), seed)


def of_two_sizes(scale: float) -> Gradient:
    def gradient(p: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
        g = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
        return g * scale * (1 + 99 * (g > 1))

    return gradient


# ---- changes of a step's arguments


def replaced(field: str, change: Callable[[StepArgs], Any]) -> Edit:
    return lambda args: args._replace(**{field: change(args)})


def shifted(x: Tensor, by: int) -> Tensor:
    """A copy that begins so many elements into its memory, as a view of a DDP bucket does."""
    return torch.empty(x.numel() + by, dtype=x.dtype)[by:].as_strided(x.shape, x.stride()).copy_(x)


def off(field: str, by: int = 1) -> Edit:
    return replaced(field, lambda args: [shifted(x, by) for x in getattr(args, field)])


def other_strides(args: StepArgs) -> StepArgs:
    """Gradients that are transposed, with gaps, expanded, and contiguous of a channels_last parameter."""
    a, b, c, d = args.grads
    gaps = torch.stack([b, b], -1)[..., 0]
    return args._replace(grads=[a.t().contiguous().t(), gaps, c[:1].expand_as(c), d.contiguous()])


def beside_hostile_states(storage: str) -> Edit:
    def edit(args: StepArgs) -> StepArgs:
        p, state = hostile(storage)
        return args._replace(params=[p], weight_states=[state])

    return edit


def large_changes(lr: float) -> Edit:
    """Parameters as large as their changes, so that some sums are near the middle between two bf16 numbers."""

    def edit(args: StepArgs) -> StepArgs:
        p = hard((64, 1024), 3, scale=lr or 1.0).bfloat16()
        p.view(-1)[::5] = 0.0
        return args._replace(params=[p], lr=[torch.tensor(lr, dtype=torch.float64)] * 2)

    return edit


def small_moments(scale: float) -> Edit:
    """First moments near the end of fp32's range, usual second ones, and parameters of 0, so that all bits stay."""

    def edit(args: StepArgs) -> StepArgs:
        scales = [torch.full_like(x, s) for k, s in enumerate((scale, 1.0)) for x in args.scales_of(k, 2)]
        params = [torch.zeros_like(p) for p in args.params]
        return args._replace(params=params, scales=scales, grads=[like(p, 7, scale=scale) for p in params])

    return edit


def codes_in_doubt(args: StepArgs) -> StepArgs:
    """Second moments whose root plus dither is so near an integer that an approximate root may give another code."""
    levels, dtype = C.POWER_LEVELS_UNSIGNED, args.params[0].dtype
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
    p, m = hard(g.shape, 0, scale=0.1).to(dtype), torch.zeros(g.shape, dtype=torch.int8)
    return args._replace(params=[p], grads=[g], moments=[m, codes], scales=[torch.zeros_like(scale), scale])


def zeros(g: float, code: int, scale: float) -> Edit:
    """Zeros of either sign among parameters, gradients and moments; a code below zero with a scale of 0 is -0."""

    def edit(args: StepArgs) -> StepArgs:
        for p, v in zip(args.params, args.moment(1), strict=True):
            p.view(-1)[::3] = -0.0
            v.fill_(0).view(-1)[::2] = 77
        m = [torch.full_like(x, code) for x in args.moment(0)]
        scales = [torch.full_like(x, s) for k, s in enumerate((scale, 1e-2)) for x in args.scales_of(k, 2)]
        grads = [torch.full_like(p, g) for p in args.params]
        return args._replace(grads=grads, moments=[*m, *args.moment(1)], scales=scales)

    return edit


# ---- what is quantized

FLT_MAX = torch.finfo(F32).max
# Scales below which the factor that a block is multiplied by overflows, and the block is stored as zeros.
LEAST_POWER, LEAST_DYNAMIC = 255**2 / FLT_MAX * 1.001, 1 / FLT_MAX * 1.001
SCALES = (1.0, 3e-3, 0.7e-20, 1e30, LEAST_POWER, 2.0**-113, 2.0**-112, 2.0**-126, LEAST_DYNAMIC, FLT_MAX)
BLOCKS = (
    *([0.0, -0.0, 0.0], [1e-40, 0.0, -1e-41], [1e-36, 0.0, -1e-37], [2e-34, -2e-34, 1e-34]),
    *([FLT_MAX, -FLT_MAX, FLT_MAX / 5, 1.0], [math.nan, 1.0, -0.25, 0.0], [math.inf, 1.0, -math.inf, 0.25]),
    *([math.nan, math.nan], [math.inf, -math.inf], [math.nan, math.inf], [1e30, 1e-30, 2.0**-149], [-2.0, -0.5]),
)


def nonfinite_tensors(layouts: Iterable[str], *dtypes: torch.dtype) -> list[Tensor]:
    """A tensor of each layout with some NaN and infinities, with ``dtypes`` in turn."""
    return [with_nonfinite(tensor(layout, dtype)) for layout, dtype in zip(layouts, cycle(dtypes), strict=False)]


def extreme_blocks() -> list[Tensor]:
    return [torch.tensor([x + [0.0] * 30]).to(dtype) for x, dtype in product(BLOCKS, FLOATS)]


def whole_blocks(dtype: torch.dtype, signed: bool, *counts: int) -> Iterator[Tensor]:
    for n in counts:
        x = hard((n, 128), n, signed=signed).to(dtype)
        x.view(-1)[5::1009], x.view(-1)[70::1013] = math.nan, math.inf
        yield x


def neighbours(x: Tensor, ulps: int = 3) -> Tensor:
    """x and the fp32 numbers next to it, up to ``ulps`` away on each side."""
    return (x.view(torch.int32)[..., None] + torch.arange(-ulps, ulps + 1, dtype=torch.int32)).view(F32)


def power_boundaries(scale: float, signed: bool, step: int | None) -> list[Tensor]:
    """Blocks whose first value is the scale, and whose others are beside the end of a code, where an estimated root may
    give another one."""
    levels, u = (127 if signed else 255), torch.full((127,), 0.5, dtype=torch.float64)
    if step is not None:
        u = dither(128, step, torch.device("cpu"))[1:].double()
    q = torch.arange(levels + 1, dtype=torch.float64)[:, None]
    ends = (q[1:] - u).clamp_min(0).square()
    if signed and step is not None:
        bound = 1 - u.clamp(C.DITHER_CLAMP, 1 - C.DITHER_CLAMP)
        ends = torch.cat([q * q + bound * (2 * q + 1), (q * q).expand(-1, len(u))])  # every square, too
    x = neighbours((ends / levels**2 * scale).float()).movedim(-1, 0).flatten(0, 1).clamp(0, scale)
    x = torch.nn.functional.pad(x, (1, 0), value=scale)
    if signed:
        x[:, 2::2] *= -1
    return [x]


def dynamic_boundaries(scale: float, signed: bool) -> list[Tensor]:
    edges = torch.tensor([0.0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0])
    x = neighbours(torch.cat([torch.tensor(C.dynamic_midpoints(signed)), edges, -edges if signed else edges]))
    x = x.clamp(-1, 1).reshape(-1) * scale
    x = torch.nn.functional.pad(x, (0, -len(x) % 7)).view(-1, 7)
    return [torch.cat([x, torch.full((len(x), 1), scale)], 1)]


def squares_at_the_dithers_ends(count: int) -> Iterator[list[Any]]:
    """Calls for the first ``count`` steps at which a block of 4096 has a dither within 2^-18 of 0 or 1; all have one
    within 2^-12. With one step a fifth of the values."""
    x = neighbours((torch.arange(1, 128).float() / 127).square(), 8).clamp(max=1.0).reshape(-1, 1)
    x = x[:: 5 if count == 1 else 1].expand(-1, 4096).clone()
    x[:, ::9] = 1.0
    for step in range(1, 3000):
        u = dither(4096, step, torch.device("cpu"))
        if u.min() < 2**-18 or u.max() > 1 - 2**-18:
            yield [x, 0, True, 4096, step, False]
            count -= 1
            if count == 0:
                return
