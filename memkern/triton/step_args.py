"""What the step ops take, as one value; its words in the step's table, and what tells that nothing moved."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..reference.state import check_tensors
from . import multi_tensor as mt


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


def front_words(args: StepArgs, device: torch.device) -> list[int]:
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


def signature_of(args: StepArgs) -> tuple[Any, ...]:
    """What a plan depends on, but for addresses. Few objects: 1,000 shapes a step set off the garbage collector."""
    both = args.params, args.grads
    contiguous = [[*map(Tensor.is_contiguous, tensors)] for tensors in both]
    return (
        # Not the states' dtypes: where one turns from codes to fp32, its scale goes, and so the list of addresses.
        [[x.dtype for x in tensors] for tensors in both],
        [[*map(Tensor.numel, tensors)] for tensors in both],
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


def addresses_of(args: StepArgs) -> list[int]:
    states = chain.from_iterable((m.tensors, m.scales) for m in args.moments)
    lists = args.params, *states, args.steps or (), args.trust_ratios
    return [*map(Tensor.data_ptr, chain.from_iterable(lists))]


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
