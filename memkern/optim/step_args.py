"""The arguments of a step's op: lists of states, learning rates, what a GradScaler set."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..schemas import StepArgs, StepOp


def state_args(states: dict[str, list[Tensor]], op: StepOp) -> dict[str, Any]:
    """The lists of states by key as the op's lists."""
    return {
        "moments": [x for name in op.moments for x in states[name]],
        "scales": [x for name in op.moments for x in states[f"{name}_scale"]],
        "steps": states["step"],
        "trust_ratios": states.get("trust_ratio", []),
    }


def place_lr(group: dict[str, Any]) -> None:
    """capturable: lr becomes a tensor on the parameters' device, which schedulers fill in place."""
    # Frozen parameters may be elsewhere.
    first = next((p for p in group["params"] if p.requires_grad), next(iter(group["params"]), None))
    if group["capturable"] and first is not None and not first.is_meta:
        device, lr = first.device, group["lr"]
        dtype = lr.dtype if isinstance(lr, Tensor) else torch.float64
        group["lr"] = torch.as_tensor(lr, dtype=dtype, device=device)


def learning_rates(groups: list[dict[str, Any]], buffers: list[Tensor]) -> list[Tensor]:
    """The groups' lr as tensors: their own, or ``buffers``, which are filled, so that a step allocates nothing."""
    if torch.compiler.is_compiling():
        # The compiler can take a changing float into a product; torch.full would recompile at each change.
        return [
            g["lr"]
            if isinstance(g["lr"], Tensor)
            else torch.ones((), dtype=torch.float64, device="cpu") * g["lr"]
            for g in groups
        ]
    if len(buffers) != len(groups):
        with torch.inference_mode(False):
            buffers[:] = [torch.zeros((), dtype=torch.float64, device="cpu") for _ in groups]
    return [
        g["lr"] if isinstance(g["lr"], Tensor) else buffer.fill_(g["lr"])
        for g, buffer in zip(groups, buffers, strict=True)
    ]


def scaler_on(args: StepArgs, device: torch.device) -> StepArgs:
    """The arguments with the GradScaler's tensors on a device."""
    scale, inf = args.grad_scale, args.found_inf
    if scale is None and inf is None:
        return args
    return args._replace(
        grad_scale=None if scale is None else scale.to(device),
        found_inf=None if inf is None else inf.to(device),
    )
