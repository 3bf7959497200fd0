"""muon_momentum_ and muon_apply_ as ops: the reference's bits on every backend, and its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memkern import _ops, reference
from memkern.quant.codec import CODECS, WEIGHTS
from memkern.quant.layout import layout_of
from memkern.schemas import StepArgs
from tests.support.helpers import FLOATS, assert_same, hard, name_of, on, over_cpu

SHAPES = ((37, 53), (3, 1000), (130, 8), (1, 130), (4, 24, 40), (2, 3, 16, 24), (5, 0), (0, 5, 3))
STATES = {
    WEIGHTS["bf16+8"]: torch.int8,
    WEIGHTS["bf16+16"]: torch.int16,
    WEIGHTS["fp32"]: torch.float32,
}


def params(dtype: torch.dtype) -> list[Tensor]:
    """Of all shapes, and two that are not contiguous."""
    found = [hard(shape, i).to(dtype) for i, shape in enumerate(SHAPES)]
    transposed = hard((40, 24), 20).to(dtype).t()
    batch_last = hard((24, 40, 3), 21).to(dtype).permute(2, 0, 1)
    return [*found, transposed, batch_last]


def step_args(
    codec: str | None, dtype: torch.dtype, grad_dtype: torch.dtype, storage: int = 0, **h: Any
) -> StepArgs:
    own = params(dtype)
    coded = torch.int8 if codec else torch.float32
    kept = STATES.get(storage)
    return StepArgs(
        params=own,
        grads=[torch.empty_like(p, dtype=grad_dtype).copy_(hard(p.shape, 50 + i)) for i, p in enumerate(own)],
        moments=[torch.zeros_like(p, dtype=coded) for p in own],
        scales=[torch.zeros(layout_of(p, 64).scale_shape) for p in own] if codec else [],
        steps=[torch.zeros(()) for _ in own],
        weight_states=[torch.zeros_like(p, dtype=kept) for p in own] if kept is not None else [],
        group=[i % 2 for i in range(len(own))],
        lr=[torch.tensor(0.02, dtype=torch.float64), torch.tensor(0.3)],
        hyperparameters=[h.get("momentum", 0.95), h.get("nesterov", 1.0), 0.1, h.get("maximize", 0.0)] * 2,
        codec=[CODECS[codec or "power"]] * 2,
        block_size=[64, 64],
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


def same_as_the_reference(backend: str, args: StepArgs) -> None:
    expected = ran(copied(args), reference.muon_momentum_, reference.muon_apply_)
    with on(backend):
        assert_same(ran(args, _ops.muon_momentum_, _ops.muon_apply_), expected)


@over_cpu
@pytest.mark.parametrize("codec", [None, "power", "dynamic"])
@pytest.mark.parametrize("grad_dtype", FLOATS, ids=name_of)
def test_moments_and_gradients(backend: str, codec: str | None, grad_dtype: torch.dtype) -> None:
    same_as_the_reference(backend, step_args(codec, torch.float32, grad_dtype))


@over_cpu
@pytest.mark.parametrize("storage", WEIGHTS.values(), ids=[*WEIGHTS])
def test_weights(backend: str, storage: int) -> None:
    same_as_the_reference(backend, step_args("power", torch.bfloat16, torch.bfloat16, storage))


@over_cpu
@pytest.mark.parametrize(
    "options",
    [
        {"nesterov": 0.0},
        {"maximize": 1.0, "momentum": 0.3},
        {"grad_norm": torch.tensor(3.0, dtype=torch.float64)},
        {"grad_scale": torch.tensor(8.0), "momentum": 0.0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options(backend: str, options: dict[str, Any]) -> None:
    same_as_the_reference(backend, step_args("power", torch.float16, torch.float32, **options))


@over_cpu
def test_sums_of_squares_are_of_each_matrix(backend: str) -> None:
    args = step_args(None, torch.float32, torch.float32)
    updates = [torch.empty_like(p, dtype=torch.bfloat16) for p in args.params]
    with on(backend):
        sums = _ops.muon_momentum_(args, updates)
    for u, total in zip(updates, sums, strict=True):
        assert total.shape == u.shape[:-2]
        # In another order than torch's, in fp64.
        torch.testing.assert_close(total, u.double().square().sum((-2, -1)), rtol=1e-13, atol=0)


@over_cpu
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_whole(backend: str) -> None:
    args = step_args("power", torch.float32, torch.float32)._replace(found_inf=torch.ones(1))
    before = copied(args)
    updates = [torch.zeros_like(p, dtype=torch.bfloat16) for p in args.params]
    with on(backend):
        sums = _ops.muon_momentum_(args, updates)
        _ops.muon_apply_(args, updates, [1.0] * len(updates))
    assert not any(total.any() for total in sums)
    assert_same([*args], [*before])


@over_cpu
def test_gradients_of_other_strides(backend: str) -> None:
    args, other = (step_args("power", torch.float32, torch.float32) for _ in range(2))
    for i, g in enumerate(other.grads):
        other.grads[i] = g.mT.contiguous().mT  # type: ignore[index]
    with on(backend):
        expected = ran(args, _ops.muon_momentum_, _ops.muon_apply_, steps=1)
        assert_same(ran(other, _ops.muon_momentum_, _ops.muon_apply_, steps=1), expected)


BAD: dict[str, Any] = {
    "one update less": (lambda args, u: (args, u[1:]), "updates must have"),
    "fp32 updates": (lambda args, u: (args, [x.float() for x in u]), r"updates\[0\] must be bfloat16"),
    "other strides": (lambda args, u: (args, [x.mT for x in u]), r"updates\[0\] must be bfloat16"),
    "a vector": (
        lambda args, u: (
            args._replace(**{
                name: [x.flatten() if name != "steps" else x for x in getattr(args, name)]
                for name in ("params", "grads", "moments")
            }),
            [x.flatten() for x in u],
        ),
        r"params\[0\] must have two dimensions",
    ),
    "hyperparameters": (lambda args, u: (args._replace(hyperparameters=[0.9]), u), "hyperparameters must have"),
}  # fmt: skip


@over_cpu
@pytest.mark.parametrize("name", BAD)
def test_bad_input_changes_nothing(backend: str, name: str) -> None:
    change, message = BAD[name]
    args = step_args(None, torch.float32, torch.float32)
    before = copied(args)
    updates = [torch.zeros_like(p, dtype=torch.bfloat16) for p in args.params]
    bad, bad_updates = change(args, updates)
    for call in (
        lambda: _ops.muon_momentum_(bad, bad_updates),
        lambda: _ops.muon_apply_(bad, bad_updates, [1.0] * len(bad.params)),
    ):
        with on(backend), pytest.raises((RuntimeError, ValueError), match=message):
            call()
    with on(backend), pytest.raises((RuntimeError, ValueError), match="ratios must have"):
        _ops.muon_apply_(args, updates, [1.0])
    assert_same([*args], [*before])
