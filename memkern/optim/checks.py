"""Checks options, parameters and gradients of optimizers; errors say what was given and what is allowed."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..quant.blockwise import check_codec
from ..quant.layout import FLOATS, check_block_size, overlaps
from ..schemas import StepOp
from . import weights
from .dtensor.shards import check_placements
from .format import Format, check_state_bits

UNSUPPORTED = {"differentiable": False, "grad_averaging": True, "caution": False, "corrected_weight_decay": False}
"""Options of torch.optim's and timm's optimizers, with the only value that memkern's have."""


def own_options(arguments: dict[str, Any], others: Iterable[str]) -> dict[str, Any]:
    """The options among the ``locals()`` of a class's ``__init__``, without those that are ignored, and without others.

    Raises ValueError for options that are set but not supported.
    """
    for name, only in UNSUPPORTED.items():
        if bool(value := arguments.get(name, only)) != only:
            optimizer = type(arguments["self"]).__name__
            raise ValueError(f"memkern.optim.{optimizer} does not support {name}={value!r}; leave it {only}")
    left_out = {"self", "__class__", "params", "options", "foreach", "fused", *UNSUPPORTED, *others}
    return {name: value for name, value in arguments.items() if name not in left_out}


READ_AT_EACH_STEP = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "trust_coeff")
"""Options that may be tensors: users may change their values in place between two steps."""


def make_plain(group: dict[str, Any], options: Iterable[str]) -> None:
    """Makes Python numbers of a group's NumPy numbers, and of its one-element tensors but READ_AT_EACH_STEP's."""
    for key in {*options, "betas"} & group.keys():
        group[key] = plain(group[key], tensors=key not in READ_AT_EACH_STEP)


def plain(x: Any, tensors: bool = True) -> Any:
    """A NumPy number (with ``tensors`` a one-element tensor, too), alone or in a sequence, as a Python number.

    Sequences of other kinds (OmegaConf's lists, NumPy's arrays) become tuples.
    """
    if isinstance(x, Tensor):
        return x.item() if tensors and x.numel() == 1 else x
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(x, (numpy.generic, numpy.ndarray)):
        return x.item() if x.ndim == 0 else tuple(x.tolist())
    if isinstance(x, Sequence) and not isinstance(x, (str, bytes)):
        return (list if isinstance(x, list) else tuple)(plain(y, tensors) for y in x)
    return x


def number(name: str, x: Any) -> float:
    """An option's value, a number or a one-element tensor, as a float. Anything else is NaN, which no range has.

    YAML, for one, reads ``1e-3`` as a string.
    """
    if isinstance(x, Tensor) and (x.numel() != 1 or x.is_complex() or x.device.type != "cpu"):
        raise ValueError(
            f"{name} must be a number, or a tensor of one element on the CPU (a step that read it elsewhere would wait "
            f"for the device), got {x.dtype} of shape {tuple(x.shape)} on {x.device}"
        )
    return float(x) if isinstance(x, (Real, Tensor)) else math.nan


def check_number(name: str, value: Any) -> None:
    """Raises ValueError unless ``value`` is a finite number, 0 or more."""
    if not 0 <= number(name, value) < math.inf:
        raise ValueError(f"{name} must be 0 or more and finite, got {value!r}")


def check_lr(lr: Any) -> None:
    if isinstance(lr, Tensor):
        if lr.numel() != 1 or lr.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"lr must be a float or a 0-dim tensor of float32 or float64, got {lr.dtype} of shape {tuple(lr.shape)}"
            )
    else:
        check_number("lr", lr)


def check_betas(betas: Any) -> None:
    """Raises ValueError unless both are numbers or one-element tensors: OneCycleLR makes the first one a number."""
    is_pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    if not is_pair or not all(0 <= number("each of betas", b) < 1 for b in betas):
        raise ValueError(f"betas must be two floats from 0 to below 1, got {betas!r}")


def check_momentum(group: dict[str, Any]) -> None:
    """Checks the momentum options of SGD and LARS, and Muon's, which has no dampening."""
    momentum, dampening = group["momentum"], group.get("dampening", 0.0)
    if not 0 <= number("momentum", momentum) < 1:
        raise ValueError(f"momentum must be from 0 to below 1, got {momentum!r}")
    if not 0 <= number("dampening", dampening) <= 1:
        raise ValueError(f"dampening must be from 0 to 1, got {dampening!r}")
    if "dampening" in group and group["nesterov"] and (momentum == 0 or dampening):
        raise ValueError(
            f"nesterov needs a momentum above 0 and no dampening, got momentum {momentum}, dampening {dampening}"
        )


def check_group(group: dict[str, Any], op: StepOp) -> None:
    """Checks the options that every optimizer has."""
    check_lr(group["lr"])
    if "betas" in group:
        check_betas(group["betas"])
    if "eps" in group:
        check_number("eps", group["eps"])
    check_number("weight_decay", group["weight_decay"])
    weights.check_options(group)
    check_block_size(group["block_size"])
    check_codec(group["codec"])
    check_state_bits(group)
    norm = group["max_grad_norm"]
    if norm is not None and not (isinstance(norm, Real) and float(norm) > 0):
        raise ValueError(f"max_grad_norm must be None or more than 0, got {norm!r}")
    if not isinstance(group["min_8bit_size"], int) or group["min_8bit_size"] < 0:
        raise ValueError(f"min_8bit_size must be a whole number, 0 or more, got {group['min_8bit_size']!r}")


def check_norm_of_group(group: dict[str, Any], norm: float | None) -> None:
    """Raises ValueError for a new group whose max_grad_norm is not the optimizer's."""
    if group.get("max_grad_norm", norm) != norm:
        raise ValueError(
            f"max_grad_norm belongs to the whole optimizer, which has {norm}; a group cannot have "
            f"{group['max_grad_norm']}"
        )


def check_param(p: Tensor, group: dict[str, Any]) -> None:
    if p.is_complex():
        raise TypeError(
            f"params must be float32, bfloat16, float16 or float64, got {p.dtype} of shape {tuple(p.shape)}: a block's "
            "scale and a trust ratio have no meaning for complex numbers; pass torch.view_as_real(p)"
        )
    if p.dtype not in (*FLOATS, torch.float64):
        raise TypeError(
            f"params must be float32, bfloat16, float16 or float64, got {p.dtype} of shape {tuple(p.shape)}"
        )
    if p.dtype == torch.float64 and Format.of(group).has_codes:
        raise ValueError(
            "state_bits must be 32 for float64 parameters, whose moments are float64, got "
            f"{group['state_bits']} for shape {tuple(p.shape)}"
        )
    weights.check_param(p, group)
    if p.layout != torch.strided:
        raise ValueError(f"params must be dense tensors, got {p.layout} of shape {tuple(p.shape)}")
    check_placements(p)
    if overlaps(p.shape, p.stride()):
        raise ValueError(
            f"params must have each element at a place of its own in memory, got shape {tuple(p.shape)} with strides "
            f"{p.stride()}; use tensor.contiguous() or clone()"
        )


def check_gradient(p: Tensor, g: Tensor) -> None:
    if g.layout != torch.strided:
        raise RuntimeError(f"memkern's optimizers take dense gradients, got {g.layout}; see torch.optim.SparseAdam")
    if g.dtype not in FLOATS and not g.dtype == p.dtype == torch.float64:
        raise TypeError(f"gradients must be float32, bfloat16 or float16, got {g.dtype} for a {p.dtype} parameter")
    if g.shape != p.shape or g.device != p.device:
        raise RuntimeError(
            f"a gradient must have its parameter's shape and device, {tuple(p.shape)} on {p.device}, "
            f"got {tuple(g.shape)} on {g.device}"
        )


def place_lr(group: dict[str, Any]) -> None:
    """capturable: lr becomes a tensor on the parameters' device, which schedulers fill in place."""
    # The first trained parameter: frozen ones may be on another device.
    first = next((p for p in group["params"] if p.requires_grad), next(iter(group["params"]), None))
    if group["capturable"] and first is not None and not first.is_meta:
        device, lr = first.device, group["lr"]
        dtype = lr.dtype if isinstance(lr, Tensor) else torch.float64
        group["lr"] = torch.as_tensor(lr, dtype=dtype, device=device)
