"""The optimizers under a GradScaler; without one, an infinite or NaN gradient changes its own element alone."""

import pytest
import torch
from torch.amp import GradScaler

from tests.support.helpers import (
    FLOATS,
    assert_same,
    hard,
    like,
    make_params,
    name_of,
    on,
    over_cpu,
    over_kinds,
    over_optimizers,
    set_grad,
    snapshot,
)

SCALE = 2.0**12


def model_and_data(dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8)).to(dtype)
    return model, torch.randn(32, 64, dtype=dtype), torch.randn(32, 8, dtype=dtype)


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(x), y)


@over_cpu
@over_kinds
@pytest.mark.parametrize("unscaled", [False, True])
def test_a_scale_that_is_a_power_of_two_changes_no_bit(backend: str, build: type, unscaled: bool) -> None:
    runs = []
    for scaled in (False, True):
        model, x, y = model_and_data()
        optimizer = build(model.parameters(), lr=1e-2)
        scaler = GradScaler("cpu", init_scale=SCALE, growth_interval=2, enabled=scaled)
        with on(backend):
            for _ in range(4):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, x, y)).backward()
                if unscaled:  # as a loop does that clips gradients
                    scaler.unscale_(optimizer)
                gradient = next(model.parameters()).grad.clone()
                scaler.step(optimizer)
                scaler.update()
                assert torch.equal(next(model.parameters()).grad, gradient)  # the step does not write it
        runs.append(snapshot(optimizer))
        assert scaler.get_scale() == (SCALE * 4 if scaled else 1.0)  # growth_interval=2: doubled twice in four steps
    assert_same(*runs)


@over_cpu
@over_kinds
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_step_is_skipped_whole(backend: str, build: type, bad: float) -> None:
    model, x, y = model_and_data()
    optimizer = build(model.parameters(), lr=1e-2, weight_decay=0.1)
    scaler = GradScaler("cpu", init_scale=SCALE)
    with on(backend):
        for spoil in (False, True, False):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, x, y)).backward()
            before, scale = snapshot(optimizer), scaler.get_scale()
            if spoil:
                [*model.parameters()][-1].grad[3] = bad  # one element of one tensor
            scaler.step(optimizer)
            scaler.update()
            if spoil:
                assert_same(snapshot(optimizer), before)
                assert scaler.get_scale() == scale / 2
            else:
                assert not torch.equal(snapshot(optimizer)["params"][0], before["params"][0])
    steps = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
    assert steps == [2.0] * len(steps)


@over_kinds
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_any_scale_unscales_by_its_fp32_reciprocal(build: type, dtype: torch.dtype) -> None:
    # 1 / 3 is rounded, then the product: as GradScaler.unscale_ does with fp32 gradients.
    runs = []
    for scale in (None, torch.tensor(3.0)):
        params = [torch.nn.Parameter(p.detach().to(dtype)) for p in make_params()]
        optimizer = build(params)
        if scale is not None:
            optimizer.grad_scale, optimizer.found_inf = scale, torch.tensor(0.0)
        for step in range(2):
            for i, p in enumerate(params):
                g = like(p, 10 * step + i)
                set_grad(p, g if scale is not None else g.float() * torch.tensor(1 / 3))
            optimizer.step()
        runs.append(snapshot(optimizer))
    assert_same(runs[1], runs[0])


# ---- without a scaler


@pytest.mark.pairwise
@over_optimizers
@pytest.mark.parametrize("codec", ["power", "dynamic"])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_bad_gradient_reaches_its_element_only(build: type, codec: str, bad: float) -> None:
    place, runs = (2, 200), []
    for spoils in (False, True):
        p = torch.nn.Parameter(hard((4, 300), 0))
        # Without decay there is no trust ratio, which would change the whole layer (test_layerwise.py).
        optimizer = build([p], codec=codec, min_8bit_size=0, weight_decay=0.0)
        for step in range(4):
            p.grad = hard((4, 300), 10 + step)
            p.grad[place] = bad if spoils and step == 1 else 0.0
            optimizer.step()
        runs.append(snapshot(optimizer))
    clean, spoilt = runs
    if "Lion" in build.__name__ and bad is not torch.nan:
        assert spoilt["params"][0][place].isfinite()  # Lion takes a gradient's sign
    elif "LARS" in build.__name__ or "SGD" in build.__name__:
        assert not spoilt["params"][0][place].isfinite()  # the update is infinite or NaN
    else:
        assert spoilt["params"][0][place].isnan()
    for state in (clean["states"][0], spoilt["states"][0]):
        for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            if key in state:
                state[key][place] = 0
    for run in runs:
        run["params"][0][place] = 0
    assert_same(spoilt, clean)
