"""What the optimizers' steps share: checks, gradients, bias corrections, and moments read from and written to codes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from ..quant.codec import WEIGHTS
from ..quant.layout import FLOATS, BlockLayout, arithmetic, check_block_size, layout_of, same_layout
from ..schemas import WEIGHT_STATES, StepArgs, StepOp
from .blockwise import (
    DYNAMIC,
    check_codec,
    code_blocks,
    decode,
    dither,
    encode,
    from_blocks,
    number,
    sqrt,
    to_blocks,
)
from .shard import ShardArgs, ShardLayout
from .weights import load_weight, store_weight


class StepTensor(NamedTuple):
    """One tensor of a step, with what its group says."""

    param: Tensor
    grad: Tensor
    moments: list[Tensor]
    scales: list[Tensor | None]  # None where the moments are float32
    step: Tensor
    trust_ratios: Tensor | None
    weight_state: Tensor | None  # memkern.schemas.WEIGHT_STATES
    weight_storage: int
    layout: BlockLayout
    codec: int
    lr: float
    h: SimpleNamespace  # hyperparameters by name
    squares: Tensor | None  # (layers, 2): StepArgs.squares of this tensor
    squares_only: bool

    def load_param(self) -> Tensor:
        """The parameter in blocks, in the dtype of the arithmetic."""
        return load_weight(self.param, self.weight_state, self.weight_storage, self.layout)

    def store_param(self, x: Tensor, step: int) -> None:
        """Stores the parameter after a step."""
        store_weight(x, self.param, self.weight_state, self.weight_storage, self.layout, step)


def tensors_of(op: StepOp, args: StepArgs) -> Iterator[StepTensor]:
    """The tensors of a step, one after the other."""
    groups, rates = op.group_hyperparameters(args), [float(t) for t in args.lr]
    moment_numbers = range(len(op.moments))
    scales = [iter(args.scales_of(k, len(op.moments))) for k in moment_numbers]
    weight_states = iter(args.weight_states)
    layers = 0  # of the tensors so far
    for i, (p, g, group) in enumerate(zip(args.params, args.grads, args.group, strict=True)):
        moments = [args.moment(k)[i] for k in moment_numbers]
        first_layer, layers = layers, layers + (len(args.trust_ratios[i]) if op.has_trust_ratios else 0)
        yield StepTensor(
            param=p,
            grad=g.double() if p.dtype == torch.float64 else g,
            moments=moments,
            scales=[None if m.is_floating_point() else next(s) for m, s in zip(moments, scales, strict=True)],
            step=args.steps[i],
            trust_ratios=args.trust_ratios[i] if op.has_trust_ratios else None,
            weight_state=next(weight_states) if args.storage_of(group) in WEIGHT_STATES else None,
            weight_storage=args.storage_of(group),
            layout=_layout(args, i),
            codec=args.codec[group],
            lr=rates[group],
            h=groups[group],
            squares=None if args.squares is None else args.squares[first_layer:layers],
            squares_only=args.squares_only,
        )


def _layout(args: StepArgs, i: int) -> BlockLayout:
    if isinstance(args, ShardArgs):
        return args.layouts[i]
    return layout_of(args.params[i], args.block_size[args.group[i]])


def check_step(op: StepOp, args: StepArgs) -> None:
    """Raises before anything is changed unless all arguments fit together."""
    _check_groups(op, args)
    _check_lists(op, args)
    coded = 0  # tensors so far whose moments are codes
    for i, (p, g) in enumerate(zip(args.params, args.grads, strict=True)):
        if not 0 <= args.group[i] < len(args.lr):
            raise ValueError(f"group[{i}] must be from 0 to {len(args.lr) - 1}, got {args.group[i]}")
        for name, x in (("params", p), ("grads", g)):
            if x.dtype not in FLOATS and not x.dtype == p.dtype == torch.float64:
                raise TypeError(f"{name}[{i}] must be float32, bfloat16 or float16, got {x.dtype}")
        coded += _check_states(op, args, i, coded)
    if len(args.scales) != coded * len(op.moments):
        raise ValueError(
            f"scales must have {coded * len(op.moments)} entries, one per moment of codes, got {len(args.scales)}"
        )
    _check_weights(args)


def _check_groups(op: StepOp, args: StepArgs) -> None:
    groups = len(args.lr)
    for name, values, per_group in (
        ("hyperparameters", args.hyperparameters, len(op.hyperparameters)),
        ("codec", args.codec, 1),
        ("block_size", args.block_size, 1),
    ):
        if len(values) != groups * per_group:
            raise ValueError(f"{name} must have {groups * per_group} entries, {per_group} per group, got {len(values)}")
    if args.weight_storage and len(args.weight_storage) != groups:
        raise ValueError(f"weight_storage must have {groups} entries or none, got {len(args.weight_storage)}")
    for storage in args.weight_storage:
        if storage not in WEIGHTS.values():
            raise ValueError(f"weight_storage must be one of {WEIGHTS}, got {storage}")
    for codec, block_size in zip(args.codec, args.block_size, strict=True):
        check_codec(codec)
        check_block_size(block_size)
    for t in args.lr:
        if t.numel() != 1 or t.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"lr must hold float32 or float64 tensors of one element, got {t.dtype} {tuple(t.shape)}")
    for i, t in enumerate(args.steps):
        if t.numel() != 1 or t.dtype != torch.float32:
            raise ValueError(
                f"steps[{i}] must be a float32 tensor of one element, got {t.dtype} of shape {tuple(t.shape)}"
            )
        # On a GPU the question would wait for it, and no CUDA graph could be captured.
        if t.is_cpu and not 0 <= float(t) < math.inf:
            raise ValueError(f"steps[{i}] must be a finite number, 0 or more, got {float(t)}")


def _check_weights(args: StepArgs) -> None:
    """Checks the weight states, and that only bf16 parameters are stored in another way than to the nearest."""
    states = iter(args.weight_states)
    expected = 0
    for i, (p, group) in enumerate(zip(args.params, args.group, strict=True)):
        storage = args.storage_of(group)
        if storage and p.dtype != torch.bfloat16:
            raise TypeError(f"params[{i}] must be bfloat16 for weight_storage {storage}, got {p.dtype}")
        if storage not in WEIGHT_STATES:
            continue
        expected += 1
        x, dtype = next(states, None), getattr(torch, WEIGHT_STATES[storage])
        if x is not None and (x.dtype != dtype or not same_layout(x, p)):
            raise ValueError(
                f"weight_states[{expected - 1}] must be {dtype} with the shape and strides of params[{i}], "
                f"{tuple(p.shape)} and {p.stride()}, got {x.dtype}, {tuple(x.shape)} and {x.stride()}"
            )
    if len(args.weight_states) != expected:
        raise ValueError(
            f"weight_states must have {expected} entries, one per parameter whose group stores one, "
            f"got {len(args.weight_states)}"
        )


def _check_lists(op: StepOp, args: StepArgs) -> None:
    n = len(args.params)
    for name, values, per_param in (
        ("grads", args.grads, 1),
        ("group", args.group, 1),
        ("moments", args.moments, len(op.moments)),
        ("steps", args.steps, 1),
        ("trust_ratios", args.trust_ratios, int(op.has_trust_ratios)),
    ):
        if len(values) != n * per_param:
            raise ValueError(f"{name} must have {n * per_param} entries, {per_param} per parameter, got {len(values)}")
    if (args.squares is not None or args.squares_only) and not op.has_trust_ratios:
        raise ValueError(f"squares and squares_only are of steps with trust ratios, which {op.name} has not")


def _check_states(op: StepOp, args: StepArgs, i: int, coded_before: int) -> bool:
    """Checks tensor i's gradient, moments and scales; returns whether the moments are codes.

    ``coded_before``: how many tensors before it have moments in codes.
    """
    p, moments = args.params[i], [args.moment(k)[i] for k in range(len(op.moments))]
    layout = _layout(args, i)
    floats = arithmetic(p.dtype)
    has_codes = moments[0].dtype != floats
    if has_codes and p.dtype == torch.float64:
        raise TypeError(f"params[{i}] is float64 and must have float64 states, got {moments[0].dtype}")
    for name, x in [("grads", args.grads[i]), *zip(op.moments, moments, strict=True)]:
        if not same_layout(x, p):
            raise ValueError(
                f"{name}[{i}] must have its parameter's shape and strides, {tuple(p.shape)} and {p.stride()}, "
                f"got {tuple(x.shape)} and {x.stride()}"
            )
    for k, (name, signed) in enumerate(op.moments.items()):
        codes = torch.int8 if signed else torch.uint8
        if moments[k].dtype != (codes if has_codes else floats):
            raise TypeError(
                f"{name}[{i}] must be {codes} codes or {floats}, like the parameter's other states, "
                f"got {moments[k].dtype}"
            )
        if has_codes:
            scales = args.scales_of(k, len(op.moments))
            scale = scales[coded_before] if coded_before < len(scales) else None
            if scale is None or scale.dtype != torch.float32 or tuple(scale.shape) != layout.scale_shape:
                got = "none" if scale is None else f"{scale.dtype} of shape {tuple(scale.shape)}"
                raise ValueError(f"the scale of {name}[{i}] must be float32 of shape {layout.scale_shape}, got {got}")
    return has_codes


def power_of(beta: float, step: int) -> float:
    """beta^step in fp64 by binary exponentiation: multiplications only, so the same bits on every backend."""
    result, square = 1.0, beta
    while step:
        if step & 1:
            result *= square
        square *= square
        step >>= 1
    return result


def next_step(t: StepTensor) -> int:
    """The number of the step that begins; stores it unless only squares are computed."""
    if t.squares_only:
        return int(t.step) + 1
    t.step.add_(1)
    return int(t.step)


def skipped(found_inf: Tensor | None) -> bool:
    """Whether a GradScaler found a non-finite gradient: the step is then skipped whole."""
    return found_inf is not None and bool(found_inf != 0)


def gradient_factor(grad_scale: Tensor | None, grad_norm: Tensor | None = None, max_grad_norm: float = 0.0) -> float:
    """The factor of all gradients: divides by ``grad_scale``, and clips to a global norm where one is given.

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
    """The gradient in blocks, times ``factor`` (rounded to fp32 unless the blocks are fp64); negated to maximize."""
    g = to_blocks(grad, layout)
    return g * number(-factor if maximize else factor, g)


def load_moment(state: Tensor, scale: Tensor | None, layout: BlockLayout, codec: int, decay: float = 1.0) -> Tensor:
    """A moment in fp32 blocks, times ``decay``, which goes into the scale.

    Unsigned power codes hold w = sqrt(v), so decay * v = (sqrt(decay) * w)^2.
    """
    if scale is None:
        x = to_blocks(state, layout)
        return number(decay, x) * x
    signed, scale = state.dtype == torch.int8, scale.reshape(-1)
    codes = code_blocks(state, layout)
    if isinstance(layout, ShardLayout) and layout.cut:
        scale = scale[layout.numbers]
    if codec != DYNAMIC and not signed:
        w = decode(codes, scale, codec, math.sqrt(decay))
        return w * w
    return decode(codes, scale, codec, decay)


def store_moment(x: Tensor, state: Tensor, scale: Tensor | None, layout: BlockLayout, codec: int, step: int) -> None:
    """Stores a moment in place; the inverse of :func:`load_moment`. Power codes take the dither of ``step``."""
    if scale is None:
        from_blocks(x, layout, state)
        return
    signed = state.dtype == torch.int8
    q, s = encode_moment(sqrt(x) if codec != DYNAMIC and not signed else x, layout, codec, signed, step)
    from_blocks(q, layout, state)
    scale.copy_(s.reshape(scale.shape))


def encode_moment(x: Tensor, layout: BlockLayout, codec: int, signed: bool, step: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of blocks as a step stores them; for a shard with cut blocks, the whole tensor's scales."""
    u = None if codec == DYNAMIC else dither(layout.block, step, x.device)
    q, s = encode(x, codec, signed, u, keep_positive=True)
    if isinstance(layout, ShardLayout) and layout.cut:
        s = layout.magnitudes.reduced_or_own(s.new_zeros(layout.total).index_copy_(0, layout.numbers, s))
        # encode() takes the largest value of a row as its scale: a further column makes that the whole block's.
        x = torch.cat([x, s[layout.numbers][:, None]], 1)
        u = None if u is None else torch.nn.functional.pad(u, (0, 1))
        q = encode(x, codec, signed, u, keep_positive=True)[0][:, :-1]
    return q, s
