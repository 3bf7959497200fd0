"""max_grad_norm clips gradients by their common norm inside the step; the op grad_norm_ computes the norm."""

from typing import Any

import pytest
import torch

from memkern import _ops, optim
from memkern.quant.codec import to_fp32
from tests.support.helpers import (
    assert_same,
    at,
    give_gradients,
    hard,
    make_params,
    needs_cpp,
    on,
    over_all,
    over_cpu,
    over_dtypes,
    over_kinds,
    slow_fp64,
    snapshot,
    tensor,
)
from tests.support.interpreted import interpreted


def norm_on(backend: str, grads: list[torch.Tensor], scale: float | None = None) -> float:
    """The norm of the gradients divided by the scale, by the op on a backend."""
    grads = [at(g, backend) for g in grads]
    device = grads[0].device
    norm = torch.full((), -1.0, dtype=torch.float64, device=device)
    with on(backend):
        _ops.grad_norm_(norm, grads, None if scale is None else torch.tensor(scale, device=device))
    return float(norm)


@interpreted()
@over_all
@over_dtypes
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_the_norm_of_gradients_is_that_in_fp64(backend: str, dtype: torch.dtype, scale: float | None) -> None:
    layouts = ["0-dim", "empty", "odd", "channels_last", "unaligned", "long rows", "short rows"]
    grads = [tensor(layout, dtype, seed=i, scale=0.1) for i, layout in enumerate(layouts)]
    grads.append(hard((40_000,), 7).to(dtype))  # more than one chunk
    truth = float(torch.cat([g.double().flatten() for g in grads]).norm()) / (scale or 1.0)
    rtol = 1e-7 if slow_fp64(backend) else 1e-12
    assert norm_on(backend, grads, scale) == pytest.approx(truth, rel=rtol)


@needs_cpp
def test_norm_has_the_same_bits_whatever_the_threads() -> None:
    grads = [hard((300_001,), 1), hard((77, 1001), 2)]
    norms = set()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        norms.add(norm_on("cpu", grads))
    assert len(norms) == 1


def train_clipped(build: type, backend: str, max_norm: float | None, factor: float = 1.0, **scaler: Any) -> Any:
    """A snapshot after two steps, which must not write gradients. scaler: attributes that a GradScaler would set."""
    params = make_params()
    optimizer = build(params, lr=1e-2, weight_decay=0.1, max_grad_norm=max_norm)
    for name, value in scaler.items():
        setattr(optimizer, name, value)
    for step in range(2):
        give_gradients(params, step)
        for p in params:
            p.grad *= factor
        grads = [p.grad.clone() for p in params]
        with on(backend):
            optimizer.step()
        assert_same([p.grad for p in params], grads)
    return snapshot(optimizer)


def factors(max_norm: float) -> list[float]:
    """max_norm / (norm + 1e-6) in each of the two steps. A step clips where this factor is below 1."""
    params = make_params()
    results = []
    for step in range(2):
        give_gradients(params, step)
        results.append(max_norm / (norm_on("reference", [p.grad for p in params]) + 1e-6))
    return results


@over_cpu
@over_kinds
def test_a_clipped_step_is_one_on_smaller_gradients(backend: str, build: type) -> None:
    assert max(factors(1e-3)) < 1
    params = make_params()
    optimizer = build(params, lr=1e-2, weight_decay=0.1)
    for step, factor in enumerate(factors(1e-3)):
        give_gradients(params, step)
        for p in params:
            p.grad *= to_fp32(factor)
        with on(backend):
            optimizer.step()
    assert_same(train_clipped(build, backend, 1e-3), snapshot(optimizer))
    scaler = {"grad_scale": torch.tensor(4096.0), "found_inf": torch.tensor(0.0)}  # divides before the step clips
    assert_same(train_clipped(build, backend, 1e-3, factor=4096.0, **scaler), snapshot(optimizer))
    assert min(factors(1e9)) > 1  # the norm is below max_norm: nothing is clipped
    assert_same(train_clipped(build, backend, 1e9), train_clipped(build, backend, None))


@over_cpu
@over_kinds
def test_a_norm_that_is_nan_reaches_every_parameter(backend: str, build: type) -> None:
    # As torch.nn.utils.clip_grad_norm_ with error_if_nonfinite=False.
    params = make_params()
    optimizer = build(params, max_grad_norm=1.0)
    give_gradients(params, 0)
    params[0].grad[0, 0] = torch.nan
    with on(backend):
        optimizer.step()
    assert all(p.isnan().all() for p in params)


def test_a_checkpoint_does_not_set_max_grad_norm() -> None:
    optimizer = optim.AdamW8bit(make_params(), max_grad_norm=1.0)
    state = optimizer.state_dict()
    state["param_groups"][0]["max_grad_norm"] = 3.0
    optimizer.load_state_dict(state)
    assert optimizer.defaults["max_grad_norm"] == optimizer.param_groups[0]["max_grad_norm"] == 1.0


@pytest.mark.parametrize("hosted", [False, True])
def test_a_group_that_is_added_has_the_norm_that_was_set_in_all(hosted: bool) -> None:
    p, q = (torch.nn.Parameter(torch.ones(8)) for _ in range(2))
    optimizer: Any = optim.HostOffload(optim.AdamW, [p]) if hosted else optim.AdamW([p])
    optimizer.param_groups[0]["max_grad_norm"] = 1.0  # set after construction, and no step since
    with pytest.raises(ValueError, match=r"max_grad_norm belongs to the whole optimizer, which has 1\.0"):
        optimizer.add_param_group({"params": [q], "max_grad_norm": 2.0})
    optimizer.add_param_group({"params": [q]})
    assert [group["max_grad_norm"] for group in optimizer.param_groups] == [1.0, 1.0]
    for x in (p, q):
        x.grad = torch.ones(8)
    optimizer.step()


@pytest.mark.parametrize("refused", ["weight_decay", "max_grad_norm", "params"])
def test_a_refused_group_leaves_the_norm_as_it_was(refused: str) -> None:
    p, q = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    optimizer = optim.SGD([p], lr=1.0)
    group = {"params": [p]} if refused == "params" else {"params": [q], refused: -1.0}
    optimizer.param_groups[0]["max_grad_norm"] = 1.0
    with pytest.raises(ValueError, match=r"weight_decay|max_grad_norm|more than one parameter group"):
        optimizer.add_param_group(group)
    optimizer.param_groups[0]["max_grad_norm"] = None  # as at the construction: the step must not clip
    p.grad = torch.full((4,), 10.0)
    optimizer.step()
    assert torch.equal(p.detach(), -p.grad)
