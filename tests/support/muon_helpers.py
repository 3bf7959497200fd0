"""Arguments of Muon's two ops, and steps of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memkern import reference
from memkern.quant.codec import CODECS, WEIGHTS
from memkern.quant.layout import layout_of
from memkern.schemas import StepArgs
from tests.support.helpers import assert_same, hard

SHAPES = ((37, 53), (3, 1000), (130, 8), (1, 130), (4, 24, 40), (2, 3, 16, 24), (5, 0), (0, 5, 3))
STATES = {
    WEIGHTS["bf16+8"]: torch.int8,
    WEIGHTS["bf16+16"]: torch.int16,
}


def params(dtype: torch.dtype, contiguous: bool = False) -> list[Tensor]:
    """Of all shapes, and two that are not contiguous."""
    found = [hard(shape, i).to(dtype) for i, shape in enumerate(SHAPES)]
    if contiguous:
        return found
    transposed = hard((40, 24), 20).to(dtype).t()
    batch_last = hard((24, 40, 3), 21).to(dtype).permute(2, 0, 1)
    return [*found, transposed, batch_last]


def step_args(
    codec: str | None,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
    storage: int = 0,
    block_size: int = 64,
    **h: Any,
) -> StepArgs:
    own = params(dtype, h.get("contiguous", False))
    coded = torch.int8 if codec else torch.float32
    kept = STATES.get(storage)
    return StepArgs(
        params=own,
        grads=[torch.empty_like(p, dtype=grad_dtype).copy_(hard(p.shape, 50 + i)) for i, p in enumerate(own)],
        moments=[torch.zeros_like(p, dtype=coded) for p in own],
        scales=[torch.zeros(layout_of(p, block_size).scale_shape) for p in own] if codec else [],
        steps=[torch.zeros(()) for _ in own],
        weight_states=[torch.zeros_like(p, dtype=kept) for p in own] if kept is not None else [],
        group=[i % 2 for i in range(len(own))],
        lr=[torch.tensor(0.02, dtype=torch.float64), torch.tensor(0.3)],
        hyperparameters=[h.get("momentum", 0.95), h.get("nesterov", 1.0), 0.1, h.get("maximize", 0.0)] * 2,
        codec=[CODECS[codec or "power"]] * 2,
        block_size=[block_size] * 2,
        weight_storage=[storage] * 2 if storage else [],
        grad_norm=h.get("grad_norm"),
        max_grad_norm=1.0,
        grad_scale=h.get("grad_scale"),
    )


def copied(args: StepArgs) -> StepArgs:
    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.clone()
        listed = isinstance(value, list) and value and isinstance(value[0], Tensor)
        return [x.clone() for x in value] if listed else value

    return StepArgs(*map(one, args))


def ran(args: StepArgs, momentum: Any, apply: Any, steps: int = 3) -> list[Any]:
    """What two ops leave after some steps; the updates are scaled in place of being orthogonalized."""
    seen = []
    for step in range(steps):
        updates = [torch.empty_like(p, dtype=torch.bfloat16) for p in args.params]
        sums = momentum(args, updates)
        seen.append([u.clone() for u in updates])
        for i, u in enumerate(updates):
            u.mul_(0.5 + i)
        apply(args, updates, [0.2 + i for i in range(len(updates))])
        seen.append([x.clone() for x in (*args.params, *args.moments, *args.scales, *args.weight_states)])
        assert len(sums) == len(updates)
        for i, g in enumerate(args.grads):
            g.copy_(hard(g.shape, 100 * step + i))
    return seen


def compare_muon(ops: Any, args: StepArgs, steps: int = 2) -> None:
    """Steps by the ops of a namespace and by the reference, equal in every bit; sums as near as fp64 has them."""

    def momentum(args: StepArgs, updates: list[Tensor]) -> list[Tensor]:
        sums = [torch.full(u.shape[:-2], torch.nan, dtype=torch.float64) for u in updates]
        ops.muon_momentum_(updates, sums, *args)
        for u, total in zip(updates, sums, strict=True):
            torch.testing.assert_close(total, u.double().square().sum((-2, -1)), rtol=1e-12, atol=0)
        return sums

    def apply(args: StepArgs, updates: list[Tensor], ratios: list[float]) -> None:
        ops.muon_apply_(updates, ratios, *args)

    expected = ran(copied(args), reference.muon_momentum_, reference.muon_apply_, steps)
    assert_same(ran(args, momentum, apply, steps), expected)
