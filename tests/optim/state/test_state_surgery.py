"""Users cut rows out of a parameter and its state or append some, as 3D Gaussian splatting does.

8-bit codes refuse it with an error that says how to do it in 32 bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memkern import optim
from tests.support.helpers import assert_same, name_of, over_kinds, snapshot

ROWS, WIDTH = 300, 48  # rows are shorter than a block


def parameter(width: int = WIDTH) -> nn.Parameter:
    return nn.Parameter(torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0)))


def step(optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    optimizer.step()


def pruned(x: Tensor) -> Tensor:
    return x[torch.arange(len(x)) % 3 > 0]


def cloned(x: Tensor) -> Tensor:
    return torch.cat([x, torch.zeros(50, *x.shape[1:])])  # floats, as the published code has them


def replace_parameter(optimizer: Any, change: Callable[[Tensor], Tensor], keys: Any = None) -> nn.Parameter:
    """Changes the first group's parameter and its state, or these entries of it, as the published code does."""
    group = optimizer.param_groups[0]
    p = group["params"][0]
    state = optimizer.state.pop(p)
    for key in keys or [key for key, x in state.items() if x.shape == p.shape]:
        state[key] = change(state[key])
    group["params"][0] = new = nn.Parameter(change(p.detach()))
    optimizer.state[new] = state
    return new


def make_two_groups(build: Any, width: int = WIDTH, **options: Any) -> Any:
    groups = [{"params": [("sh", parameter(width))]}, {"params": [("xyz", parameter(width))]}]
    return build(groups, lr=1e-2, **{"min_8bit_size": 0, **options})


@pytest.mark.parametrize("change", [pruned, cloned], ids=name_of)
@over_kinds
def test_codes_cannot_be_cut_or_joined(build: Any, change: Callable[[Tensor], Tensor]) -> None:
    optimizer = make_two_groups(build)
    step(optimizer, 0)
    p = replace_parameter(optimizer, change)
    if optimizer.param_groups[0]["state_bits"] == 32:
        step(optimizer, 1)
        assert all(x.shape == p.shape for key, x in optimizer.state[p].items() if key.startswith("exp_avg"))
        return
    before = snapshot(optimizer)
    name = next(iter(build.op.moments))
    entry = name if change is cloned else f"{name}_scale"
    with pytest.raises(
        ValueError, match=rf"^{entry} of parameter 0 \('sh', .* must be torch\..*set state_bits=32 of the group"
    ):
        step(optimizer, 1)
    assert_same(snapshot(optimizer), before)


@pytest.mark.parametrize("change", [pruned, cloned], ids=name_of)
@pytest.mark.parametrize("build", [optim.AdamW8bit, optim.SGD8bit, optim.HostOffload], ids=name_of)
def test_rows_are_edited_in_32_bits_as_the_error_says(build: Any, change: Callable[[Tensor], Tensor]) -> None:
    make = build if build is not optim.HostOffload else lambda *a, **o: optim.HostOffload(optim.AdamW8bit, *a, **o)
    optimizer = make_two_groups(make)
    step(optimizer, 0)
    optimizer.param_groups[0]["state_bits"] = 32
    optimizer.state_dict()
    p = replace_parameter(optimizer, change)
    floats = {key: x.clone() for key, x in optimizer.state[p].items() if x.shape == p.shape}
    optimizer.param_groups[0]["state_bits"] = 8
    optimizer.state_dict()
    assert any(key.endswith("_scale") for key in optimizer.state[p])
    optimizer.param_groups[0]["state_bits"] = 32
    optimizer.state_dict()
    for key, x in floats.items():
        # Rounded to codes of blocks that hold other rows than before.
        assert float((optimizer.state[p][key] - x).abs().max()) <= 0.2 * float(x.abs().max())
    step(optimizer, 1)


def test_rows_of_whole_blocks_may_be_cut_with_their_scales() -> None:
    cut, uncut = (make_two_groups(optim.AdamW8bit, width=256) for _ in range(2))
    for optimizer in (cut, uncut):
        step(optimizer, 0)
    replace_parameter(cut, pruned, ["exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"])
    for optimizer in (cut, uncut):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        optimizer.step()
    p, q = (optimizer.param_groups[0]["params"][0].detach() for optimizer in (cut, uncut))
    assert_same(p, pruned(q))


@pytest.mark.parametrize("zero", [0, np.float64(0.0), torch.zeros(1)], ids=repr)
@pytest.mark.parametrize("build", [optim.AdamW8bit, optim.SGD, optim.Muon8bit], ids=name_of)
def test_a_step_counter_may_be_set_to_a_number(build: Any, zero: Any) -> None:
    """Loops that begin a schedule anew set the counter to 0."""
    optimizers = [build([parameter(), parameter()], lr=1e-2) for _ in range(2)]
    for optimizer, value in zip(optimizers, (zero, torch.zeros(())), strict=True):
        step(optimizer, 0)
        for state in optimizer.state.values():
            state["step"] = value.clone() if isinstance(value, Tensor) else value
        step(optimizer, 1)
        assert [float(state["step"]) for state in optimizer.state.values()] == [1, 1]
    assert_same(*(snapshot(optimizer)["params"] for optimizer in optimizers))


def test_a_step_counter_comes_to_its_parameters_device() -> None:
    """torch.optim keeps step counters on the CPU, so that loops make new counters on the CPU."""
    p = nn.Parameter(torch.empty(8, 16, device="meta"))
    optimizer = optim.AdamW8bit([p])
    for _ in range(2):
        p.grad = torch.empty_like(p)
        optimizer.step()
        optimizer.state[p]["step"] = torch.tensor(0.0, device="cpu")
    p.grad = torch.empty_like(p)
    optimizer.step()
    assert optimizer.state[p]["step"].is_meta


# name: options, an edit of the state's entries, the entry and the error that names it
WRONG: dict[str, tuple[dict[str, Any], Callable[[Any], Any], str, str]] = {
    "scale": ({}, lambda s: {"exp_avg_scale": s["exp_avg_scale"][1:]}, "exp_avg_scale", "must be torch.float32"),
    "dtype": ({}, lambda s: {"exp_avg_sq": s["exp_avg_sq"].char()}, "exp_avg_sq", "must be torch.uint8"),
    "floats": ({"state_bits": 32}, lambda s: {"exp_avg": s["exp_avg"][1:]}, "exp_avg", "must be of shape"),
    "error": (
        {"master_weights": "bf16+8"},
        lambda s: {"weight_error": s["weight_error"][1:]},
        "weight_error",
        "must be of shape",
    ),
}


@pytest.mark.parametrize("next_call", ["step", "other bits", "state_dict"])
@pytest.mark.parametrize("wrong", WRONG)
def test_every_entry_is_checked_before_anything_is_changed(wrong: str, next_call: str) -> None:
    options, edit, key, message = WRONG[wrong]
    params = [parameter().bfloat16() if "master_weights" in options else parameter() for _ in range(2)]
    optimizer = optim.AdamW8bit([nn.Parameter(p.detach()) for p in params], lr=1e-2, min_8bit_size=0, **options)
    step(optimizer, 0)
    p = optimizer.param_groups[0]["params"][1]
    optimizer.state[p].update(edit(optimizer.state[p]))
    if next_call != "step":
        bits = 8 if options.get("state_bits") == 32 else 32
        optimizer.param_groups[0]["state_bits"] = bits
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=rf"^{key} of parameter 1 \(shape .* {re.escape(message)}"):
        optimizer.state_dict() if next_call == "state_dict" else step(optimizer, 1)
    assert_same(snapshot(optimizer), before)
