"""Muon's Triton kernels in the interpreter, which tests/gpu/test_triton.py runs this file in: the reference's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memkern.quant.codec import WEIGHTS
from tests.support.helpers import assert_same
from tests.support.interpreted import interpreted
from tests.support.muon_helpers import compare_muon, copied, step_args

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
ops = torch.ops.memkern_triton


@interpreted()
@pytest.mark.parametrize(
    ("codec", "param", "grad", "weights", "block_size", "options"),
    [
        ("power", F32, F32, "nearest", 128, {}),
        ("power", BF16, BF16, "bf16+8", 64, {"nesterov": 0.0}),
        ("dynamic", BF16, F32, "bf16+16", 24, {"maximize": 1.0, "momentum": 0.3}),
        ("power", F16, F16, "nearest", 128, {"grad_norm": torch.tensor(3.0, dtype=torch.float64)}),
        (None, BF16, BF16, "bf16+16", 128, {"grad_scale": torch.tensor(8.0), "momentum": 0.0}),
        (None, BF16, F32, "stochastic", 128, {}),
    ],
    ids=str,
)
def test_steps(codec: Any, param: Any, grad: Any, weights: str, block_size: int, options: Any) -> None:
    compare_muon(ops, step_args(codec, param, grad, WEIGHTS[weights], block_size, **options))


@interpreted()
def test_a_step_is_skipped_whole() -> None:
    args = step_args("power", F32, F32)._replace(found_inf=torch.ones(1))
    before = copied(args)
    updates = [torch.zeros_like(p, dtype=BF16) for p in args.params]
    sums = [torch.full(u.shape[:-2], torch.nan, dtype=torch.float64) for u in updates]
    ops.muon_momentum_(updates, sums, *args)
    ops.muon_apply_(updates, [1.0] * len(updates), *args)
    assert not any(total.any() for total in sums)
    assert_same([*args], [*before])


@interpreted()
def test_bad_input_changes_nothing() -> None:
    args = step_args("power", F32, F32)
    before = copied(args)
    updates = [torch.zeros_like(p, dtype=BF16) for p in args.params]
    with pytest.raises(ValueError, match="updates must have"):
        ops.muon_momentum_(updates[1:], [], *args)
    with pytest.raises(ValueError, match="ratios must have"):
        ops.muon_apply_(updates, [1.0], *args)
    with pytest.raises(ValueError, match="the scale of momentum_buffer"):
        ops.muon_apply_(updates, [1.0] * len(updates), *args._replace(scales=[]))
    assert_same([*args], [*before])
