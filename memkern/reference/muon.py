"""Muon. Sources: Jordan et al., kellerjordan.github.io/posts/muon; Liu et al., arXiv 2502.16982; torch.optim.Muon.

A step is two element-wise ops with Newton-Schulz iterations between them, which are matrix products by torch:
:func:`muon_momentum_`, :func:`orthogonalize`, :func:`muon_apply_`. The element-wise ops fuse a multiplication and an
addition where torch's do, so a step on float32 momentum has torch.optim.Muon's bits on a CPU with AVX2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..quant.layout import same_layout
from ..schemas import MUON_STEP, StepArgs
from .blockwise import from_blocks, number, to_blocks
from .state import (
    check_step,
    gradient,
    gradient_factor,
    load_moment,
    next_step,
    skipped,
    store_moment,
    tensors_of,
)

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ADJUST_LR_FNS = (None, "original", "match_rms_adamw")


def fma(x: Tensor, y: float, z: Tensor) -> Tensor:
    """x * y + z with one rounding for fp32 x and z and a y that fp32 holds; fp64 is rounded twice."""
    if x.dtype == torch.float64:
        return x * y + z
    product, z = x.double() * y, z.double()  # the product is exact
    total = product + z
    part = total - product
    error = (product - (total - part)) + (z - part)  # what rounding took from the sum (Knuth's two-sum)
    # Rounded to odd in fp64, the sum rounds to fp32 as the exact one does.
    inexact = (error != 0) & (total.view(torch.int64) & 1 == 0)
    direction = torch.where(error > 0, math.inf, -math.inf).to(total)
    return torch.where(inexact & total.isfinite(), torch.nextafter(total, direction), total).float()


def lerp(start: Tensor, end: Tensor, weight: float) -> Tensor:
    """torch.lerp: start + weight * (end - start), from the nearer end."""
    w = number(weight, start)
    if abs(w) < 0.5:
        return fma(end - start, w, start)
    return fma(end - start, number(w - 1, start), end)


def lr_ratio(adjust_lr_fn: str | None, shape: Sequence[int]) -> float:
    """The factor by which a matrix's shape (..., A, B) changes its learning rate, as in torch.optim.Muon.

    "original" (and None): sqrt(max(1, A / B)). "match_rms_adamw": 0.2 * sqrt(max(A, B)).
    """
    if adjust_lr_fn not in ADJUST_LR_FNS:
        raise ValueError(f"adjust_lr_fn must be one of {ADJUST_LR_FNS}, got {adjust_lr_fn!r}")
    rows, columns = shape[-2:]
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns)) if columns else 1.0


def check_muon(args: StepArgs, updates: Sequence[Tensor]) -> None:
    """Raises before anything is changed unless all arguments fit together."""
    check_step(MUON_STEP, args)
    if len(updates) != len(args.params):
        raise ValueError(f"updates must have {len(args.params)} entries, one per parameter, got {len(updates)}")
    for i, (p, u) in enumerate(zip(args.params, updates, strict=True)):
        if p.ndim < 2:
            raise ValueError(
                f"params[{i}] must have two dimensions, or more where it is a batch of matrices, "
                f"got shape {tuple(p.shape)}"
            )
        if u.dtype != torch.bfloat16 or not same_layout(u, p):
            raise ValueError(
                f"updates[{i}] must be bfloat16 with the shape and strides of params[{i}], {tuple(p.shape)} and "
                f"{p.stride()}, got {u.dtype}, {tuple(u.shape)} and {u.stride()}"
            )


def muon_momentum_(args: StepArgs, updates: Sequence[Tensor]) -> list[Tensor]:
    """buf = lerp(buf, g, 1 - momentum), stored with the step's dither; writes u = lerp(g, buf, momentum) or u = buf.

    ``updates``: bfloat16, of the parameters' shapes and strides. u comes from the momentum before it is quantized.

    Returns:
        The sum of squares of each matrix of ``updates`` as stored, float64 of shape ``p.shape[:-2]``. Sums of a
        matrix's shards add up to the matrix's.
    """
    check_muon(args, updates)
    factor = gradient_factor(args.grad_scale, args.grad_norm, args.max_grad_norm)
    if skipped(args.found_inf):
        return [torch.zeros(u.shape[:-2], dtype=torch.float64, device=u.device) for u in updates]
    for t, u in zip(tensors_of(MUON_STEP, args), updates, strict=True):
        h, (momentum_buffer,), (scale,) = t.h, t.moments, t.scales
        step = next_step(t)
        g = gradient(t.grad, t.layout, h.maximize, factor)
        m = lerp(load_moment(momentum_buffer, scale, t.layout, t.codec), g, 1 - h.momentum)
        from_blocks(lerp(g, m, h.momentum) if h.nesterov else m, t.layout, u)
        store_moment(m, momentum_buffer, scale, t.layout, t.codec, step)
    return [u.double().square().sum((-2, -1)) for u in updates]


def check_newton_schulz(ns_coefficients: Sequence[float], ns_steps: int, eps: float) -> None:
    """Raises ValueError unless Newton-Schulz iterations can have these options."""
    if len(ns_coefficients) != 3 or not all(math.isfinite(x) for x in ns_coefficients):
        raise ValueError(f"ns_coefficients must be three finite numbers, got {ns_coefficients!r}")
    if not isinstance(ns_steps, int) or not 1 <= ns_steps < 100:
        raise ValueError(f"ns_steps must be a whole number from 1 to 99, got {ns_steps!r}")
    if not 0 < eps < math.inf:
        raise ValueError(f"eps must be a finite number above 0, got {eps!r}")


def orthogonalize(
    u: Tensor,
    squares: Tensor,
    ns_coefficients: Sequence[float] = NS_COEFFICIENTS,
    ns_steps: int = 5,
    eps: float = 1e-7,
) -> Tensor:
    """Newton-Schulz: x = u / max(|u|, eps), then ns_steps times x = a x + (b A + c A^2) x, where A = x x^T.

    ``u``: bfloat16 of shape (..., A, B); ``squares``: its sums of squares, of shape (...). A matrix with more rows than
    columns is transposed for the products. Zeros give zeros; a NaN reaches its whole matrix and no other.

    Whole matrices only: what a shard gives by itself is not a shard of the result. The products are torch's, in
    bfloat16; their bits differ between devices, and between one matrix and a batch.
    """
    check_newton_schulz(ns_coefficients, ns_steps, eps)
    if u.ndim < 2 or u.dtype != torch.bfloat16 or squares.shape != u.shape[:-2]:
        raise ValueError(
            "u must be bfloat16 matrices of shape (..., A, B) and squares of shape (...), "
            f"got {u.dtype} {tuple(u.shape)} and {tuple(squares.shape)}"
        )
    if not u.numel():
        return torch.empty_like(u)
    a, b, c = ns_coefficients
    tall = u.shape[-2] > u.shape[-1]
    x = u.mT if tall else u
    x = x / squares.sqrt().float().bfloat16().clamp(min=eps)[..., None, None]
    shape = x.shape
    if x.ndim > 3:
        x = x.flatten(0, -3)
    add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(ns_steps):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.reshape(shape)
    return x.mT if tall else x


def muon_apply_(args: StepArgs, updates: Sequence[Tensor], ratios: Sequence[float]) -> None:
    """p = p * (1 - lr * weight_decay) - lr * ratio * o, for the orthogonalized ``updates`` o.

    Follows :func:`muon_momentum_` with the same ``args``. Parameters are stored as in every other step.
    """
    check_muon(args, updates)
    if len(ratios) != len(args.params):
        raise ValueError(f"ratios must have {len(args.params)} entries, one per parameter, got {len(ratios)}")
    if skipped(args.found_inf):
        return
    for t, o, ratio in zip(tensors_of(MUON_STEP, args), updates, ratios, strict=True):
        x = t.load_param()
        decayed = x * number(1 - t.lr * t.h.weight_decay, x)
        o = to_blocks(o, t.layout).to(x)
        t.store_param(fma(o, number(-(t.lr * ratio), x), decayed), int(t.step))
