"""muon_momentum_ and muon_apply_ as ops: the reference's bits on every backend, and its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memkern import _ops, reference
from memkern.quant.codec import WEIGHTS
from memkern.schemas import StepArgs
from tests.support.helpers import FLOATS, assert_same, name_of, on, over_cpu
from tests.support.muon_helpers import copied, ran, step_args


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
                name: [x.flatten() for x in getattr(args, name)]
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
