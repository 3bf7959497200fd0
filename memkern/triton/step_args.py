"""The arguments of a step: their words in the step's table, and what is compared with the step before."""

from __future__ import annotations

import struct
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..reference import state
from ..schemas import StepArgs, StepOp
from . import step_table as st
from .launch import address_of


def bits(x: float) -> int:
    """The bits of an fp64 number."""
    return struct.unpack("q", struct.pack("d", x))[0]


def scalar_words(x: Tensor | None, name: str, device: torch.device) -> list[int]:
    """The two words of a scalar argument. On the device it is read by the kernels; on the CPU it is read here."""
    if x is None:
        return [0, st.ABSENT.value]
    if x.numel() != 1 or x.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{name} must be a float32 or float64 tensor of one element, got {x.dtype} of shape {tuple(x.shape)}"
        )
    if x.device == device:
        return [x.data_ptr(), (st.AT_FP32 if x.dtype == torch.float32 else st.AT_FP64).value]
    if x.device.type != "cpu":
        raise ValueError(f"{name} must be on {device} or on the CPU, got {x.device}")
    return [bits(float(x)), st.VALUE.value]


def header_and_group_words(args: StepArgs, device: torch.device) -> list[int]:
    """The table's first words: its header and its groups."""
    words = scalar_words(args.grad_scale, "grad_scale", device)
    words += scalar_words(args.found_inf, "found_inf", device)
    words += scalar_words(args.grad_norm, "grad_norm", device)
    words += [bits(args.max_grad_norm), 0]
    width = len(args.hyperparameters) // max(1, len(args.lr))
    padding = [0] * (st.GROUP_WORDS.value - st.LR_WORDS.value - width)
    for i, lr in enumerate(args.lr):
        words += scalar_words(lr, "lr", device)
        words += map(bits, args.hyperparameters[i * width : (i + 1) * width])
        words += padding
    return words


def signature_of(args: StepArgs) -> tuple[Any, ...]:
    """What a plan depends on beside addresses. Few objects: 1,000 shapes a step would start the garbage collector."""
    params_and_grads = args.params, args.grads
    contiguous = [[*map(Tensor.is_contiguous, tensors)] for tensors in params_and_grads]
    return (
        # States' dtypes are not needed: a state that becomes fp32 has no scale, so that the list of addresses differs.
        [[x.dtype for x in tensors] for tensors in params_and_grads],
        # Shapes, too: a new model's tensors may lie where those of a freed one did, at each of its addresses.
        [*map(hash, map(Tensor.size, args.params))],
        [*map(Tensor.numel, args.grads)],
        contiguous,
        [
            (x.shape, x.stride())
            for tensors, dense in zip(params_and_grads, contiguous, strict=True)
            if not all(dense)
            for x in tensors
        ],
        len(args.hyperparameters),
        list(args.group),
        list(args.codec),
        list(args.block_size),
        list(args.weight_storage),
        # The addresses of a plan's other tensors are compared, and an address belongs to one device.
        {*map(Tensor.get_device, args.grads)},
    )


KEPT = ("params", "moments", "scales", "steps", "trust_ratios", "weight_states")
"""The fields whose tensors' addresses a plan keeps; it gets the gradients' at each step."""


def addresses_of(args: StepArgs, *names: str) -> list[int]:
    """The addresses of the tensors in the fields ``names``."""
    addresses = [*map(Tensor.data_ptr, chain.from_iterable(getattr(args, name) for name in names))]
    if 0 in addresses:  # of a tensor without elements, or without memory: address_of raises for the latter
        for name in names:
            for i, x in enumerate(getattr(args, name)):
                address_of(x, f"{name}[{i}]")
    return addresses


def check_step(op: StepOp, args: StepArgs, device: torch.device) -> None:
    state.check_step(op, args)
    for name in ("params", "grads", "moments", "scales", "steps", "trust_ratios", "weight_states"):
        for i, x in enumerate(getattr(args, name)):
            if x.device != device:
                raise ValueError(f"{name}[{i}] must be on {device} like the first parameter, got {x.device}")
    if args.squares is not None and args.squares.device != device:
        raise ValueError(f"squares must be on {device} like the first parameter, got {args.squares.device}")
