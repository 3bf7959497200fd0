"""The arguments of a step: their words in the step's table, and what tells that nothing moved since the last step."""

from __future__ import annotations

import struct
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..reference import state
from ..schemas import StepArgs, StepOp
from . import multi_tensor as mt


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
    width = len(args.hyperparameters) // max(1, len(args.lr))
    padding = [0] * (mt.GROUP_WORDS.value - mt.LR_WORDS.value - width)
    for i, lr in enumerate(args.lr):
        front += number(lr, "lr", device)
        front += map(bits, args.hyperparameters[i * width : (i + 1) * width])
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
        len(args.hyperparameters),
        list(args.group),
        list(args.codec),
        list(args.block_size),
    )


def addresses_of(args: StepArgs) -> list[int]:
    lists = args.params, args.moments, args.scales, args.steps, args.trust_ratios
    return [*map(Tensor.data_ptr, chain.from_iterable(lists))]


def check_step(op: StepOp, args: StepArgs, device: torch.device) -> None:
    state.check_step(op, args)
    for name in ("params", "grads", "moments", "scales", "steps", "trust_ratios"):
        for i, x in enumerate(getattr(args, name)):
            if x.device != device:
                raise ValueError(f"{name}[{i}] must be on {device} like the first parameter, got {x.device}")
