"""What the optimizer steps share: checks, gradients, corrections, and the moments' way in and out of their storage."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..quant.codec import to_fp32
from ..quant.layout import FLOATS, BlockLayout, check_block_size, layout_of, same_layout
from .blockwise import POWER, check_codec, code_blocks, decode, dither, encode, from_blocks, sqrt, to_blocks


def check_tensors(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    steps: Sequence[Tensor] | None,
    group: Sequence[int],
    lr: Sequence[Tensor],
    hyperparameters: Sequence[Sequence[float]],
    moments: Sequence[tuple[str, Sequence[Tensor], torch.dtype, Sequence[Tensor]]],
    codec: Sequence[int],
    block_size: Sequence[int],
) -> None:
    """Raises before anything is changed unless all arguments fit together.

    ``moments``: name, tensors, dtype of its codes, scales (one for each tensor that holds codes, in order).
    """
    groups = len(lr)
    for values in (*hyperparameters, codec, block_size):
        if len(values) != groups:
            raise ValueError(
                f"every hyperparameter must have one entry per group, {groups}, got {len(values)}"
            )
    for t in lr:
        if t.numel() != 1 or t.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"lr must hold float32 or float64 tensors of one element, got {t.dtype} {tuple(t.shape)}"
            )
    if steps is not None:
        if len(steps) != len(params):
            raise ValueError(f"steps must have {len(params)} entries, one per parameter, got {len(steps)}")
        for t in steps:
            if t.numel() != 1 or t.dtype != torch.float32:
                raise ValueError(
                    f"steps must hold float32 tensors of one element, got {t.dtype} {tuple(t.shape)}"
                )
    for name, tensors in [("grads", grads), ("group", group), *((m[0], m[1]) for m in moments)]:
        if len(tensors) != len(params):
            raise ValueError(f"{name} must have {len(params)} entries, one per parameter, got {len(tensors)}")
    for c, b in zip(codec, block_size, strict=True):
        check_codec(c)
        check_block_size(b)
    used = [0] * len(moments)
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        if not 0 <= group[i] < groups:
            raise ValueError(f"group[{i}] must be from 0 to {groups - 1}, got {group[i]}")
        for name, x in (("params", p), ("grads", g)):
            if x.dtype not in FLOATS:
                raise TypeError(f"{name}[{i}] must be float32, bfloat16 or float16, got {x.dtype}")
        layout = layout_of(p, block_size[group[i]])
        for name, x in [("grads", g), *((m[0], m[1][i]) for m in moments)]:
            if not same_layout(x, p):
                raise ValueError(
                    f"{name}[{i}] must have its parameter's shape and strides, {tuple(p.shape)} and {p.stride()}, "
                    f"got {tuple(x.shape)} and {x.stride()}"
                )
        kinds = {m[1][i].dtype == torch.float32 for m in moments}
        for k, (name, tensors, code_dtype, scales) in enumerate(moments):
            if tensors[i].dtype not in (torch.float32, code_dtype) or len(kinds) != 1:
                raise TypeError(
                    f"{name}[{i}] must be {code_dtype} codes or float32, like the parameter's other states, "
                    f"got {tensors[i].dtype}"
                )
            if tensors[i].dtype == code_dtype:
                scale = scales[used[k]] if used[k] < len(scales) else None
                used[k] += 1
                if scale is None or scale.dtype != torch.float32 or tuple(scale.shape) != layout.scale_shape:
                    got = "none" if scale is None else f"{scale.dtype} of shape {tuple(scale.shape)}"
                    raise ValueError(
                        f"the scale of {name}[{i}] must be float32 of shape {layout.scale_shape}, got {got}"
                    )
    for k, (name, _, _, scales) in enumerate(moments):
        if used[k] != len(scales):
            raise ValueError(f"{name} has {used[k]} tensors of codes, but {len(scales)} scales were given")


def power_of(beta: float, step: int) -> float:
    """beta^step in fp64 by binary exponentiation: multiplications only, so the same bits on every backend."""
    result, square = 1.0, beta
    while step:
        if step & 1:
            result *= square
        square *= square
        step >>= 1
    return result


def skipped(found_inf: Tensor | None) -> bool:
    """Whether a GradScaler found a non-finite gradient: the step is then skipped whole."""
    return found_inf is not None and bool(found_inf != 0)


def gradient_factor(
    grad_scale: Tensor | None, grad_norm: Tensor | None = None, max_grad_norm: float = 0.0
) -> float:
    """What gradients are multiplied by: unscaled, and clipped to a global norm where one is given.

    The clip is torch.nn.utils.clip_grad_norm_'s; a norm that is NaN gives NaN.
    """
    for name, t in (("grad_scale", grad_scale), ("grad_norm", grad_norm)):
        if t is not None and t.numel() != 1:
            raise ValueError(f"{name} must be a tensor of one element, got {tuple(t.shape)}")
    factor = 1.0 if grad_scale is None else 1.0 / float(grad_scale)
    if grad_norm is None:
        return factor
    clip = max_grad_norm / (float(grad_norm) + 1e-6)
    return factor if clip >= 1.0 else factor * clip


def gradient(grad: Tensor, layout: BlockLayout, maximize: int, factor: float) -> Tensor:
    """The gradient in fp32 blocks, times ``factor``, which is rounded to fp32; negated to maximize."""
    return to_blocks(grad, layout) * to_fp32(-factor if maximize else factor)


class Scales:
    """Hands out the scales of the tensors that hold codes, in order."""

    def __init__(self, *scales: Sequence[Tensor]) -> None:
        self.iterators = [iter(s) for s in scales]

    def next_for(self, *moments: Tensor) -> list[Tensor | None]:
        return [
            next(it) if m.dtype != torch.float32 else None
            for it, m in zip(self.iterators, moments, strict=True)
        ]


def load_moment(
    state: Tensor, scale: Tensor | None, layout: BlockLayout, codec: int, decay: float = 1.0
) -> Tensor:
    """A moment in fp32 blocks, times ``decay``, which goes into the scale.

    Unsigned power codes hold w = sqrt(v), so decay * v = (sqrt(decay) * w)^2.
    """
    if scale is None:
        return to_fp32(decay) * to_blocks(state, layout)
    codes = code_blocks(state, layout)
    if codec == POWER and state.dtype == torch.uint8:
        w = decode(codes, scale.reshape(-1), codec, math.sqrt(decay))
        return w * w
    return decode(codes, scale.reshape(-1), codec, decay)


def store_moment(
    x: Tensor, state: Tensor, scale: Tensor | None, layout: BlockLayout, codec: int, step: int = 0
) -> None:
    """Stores a moment in place; the inverse of :func:`load_moment`. v is rounded with the dither of ``step``."""
    if scale is None:
        from_blocks(x, layout, state)
        return
    signed = state.dtype == torch.int8
    if codec == POWER and not signed:
        q, s = encode(sqrt(x), codec, signed, dither(layout.block, step, x.device))
    else:
        q, s = encode(x, codec, signed)
    from_blocks(q, layout, state)
    scale.copy_(s.reshape(scale.shape))
