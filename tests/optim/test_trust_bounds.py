"""trust_bounds: phi(|p|) = min(max(|p|, low), high) in the trust ratios of LAMB and LARS."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkern import optim
from tests.support.helpers import assert_same, make_params, on, over_cpu, train

FORMS = {
    "LAMB": (optim.LAMB, {}),
    "LAMB decoupled": (optim.LAMB, {"decoupled_decay": True}),
    "LARS": (optim.LARS, {}),
    "classic LARS": (optim.LARS, {"trust_coeff": 1e-2}),
}
over_forms = pytest.mark.parametrize(("build", "options"), FORMS.values(), ids=FORMS)
SHAPES = [(40, 30), (64, 128), (7,), (3, 5, 11)]
LOW, HIGH = 30.0, 80.0
SCALES = (0.01, 1.0, 100.0)  # of weights: norms below, between and above the bounds, for the second shape


def params(scale: float = 1.0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter((scale * p.detach()).to(dtype)) for p in make_params(SHAPES)]


def expected_ratio(p: Tensor, g: Tensor, optimizer: Any) -> float:
    """The first step's, in fp64."""
    group, p, g = optimizer.param_groups[0], p.double(), g.double()
    decay, lr = group["weight_decay"], group["lr"]
    if group.get("decoupled_decay"):
        p, decay = p * (1 - lr * decay), 0.0
    phi = min(max(float(p.norm()), group["trust_bounds"][0]), group["trust_bounds"][1])
    if isinstance(optimizer, optim.LAMB):
        return phi / float((g / (g.abs() + group["eps"]) + decay * p).norm())
    if group["trust_coeff"] is None:
        return phi / float(((1 - group["momentum"]) * (g + decay * p)).norm())
    return group["trust_coeff"] * phi / (float(g.norm()) + decay * phi + group["eps"])


@over_cpu
@over_forms
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("bits", [8, 32])
def test_the_ratio_is_of_the_bounded_norm(
    backend: str, build: type, options: dict[str, Any], scale: float, bits: int
) -> None:
    own = params(scale)
    optimizer = build(
        own, lr=1e-2, weight_decay=0.1, state_bits=bits, min_8bit_size=0, trust_bounds=(LOW, HIGH), **options
    )
    before = [p.detach().clone() for p in own]
    with on(backend):
        train(optimizer, 1)
    ratios = [float(r) for r in optimizer.trust_ratios().values()]
    wanted = [expected_ratio(x, p.grad, optimizer) for x, p in zip(before, own, strict=True)]
    assert ratios == pytest.approx(wanted, rel=1e-5)


@over_cpu
@over_forms
def test_wide_bounds_change_no_bit(backend: str, build: type, options: dict[str, Any]) -> None:
    runs = []
    for bounds in (None, (0.0, math.inf), (0, 1e300)):
        optimizer = build(params(), lr=1e-2, weight_decay=0.1, min_8bit_size=0, trust_bounds=bounds, **options)
        with on(backend):
            runs.append(train(optimizer, 3))
    assert_same(runs[1], runs[0])
    assert_same(runs[2], runs[0])


@over_forms
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backends_give_the_same_bits(build: type, options: dict[str, Any], bits: int, dtype: torch.dtype) -> None:
    runs = []
    for backend in ("reference", "cpu"):
        with on(backend):
            optimizer = build(
                [{"params": params(dtype=dtype)}, {"params": params(3.0, dtype), "trust_bounds": None}],
                lr=1e-2, weight_decay=0.1, state_bits=bits, min_8bit_size=0, max_grad_norm=1.0,
                trust_bounds=(LOW, HIGH), **options,
            )  # fmt: skip
            runs.append(train(optimizer, 3))
    assert_same(runs[1], runs[0])


def test_groups_have_bounds_of_their_own() -> None:
    """A layer steps as it would in an optimizer of its own, whatever the order of groups is."""
    bounds = [(LOW, HIGH), None, (0.0, 1.0), (500.0, math.inf)]
    together = optim.LAMB8bit(
        [{"params": [p], "trust_bounds": b} for p, b in zip(params(), bounds, strict=True)], weight_decay=0.1
    )
    alone = [optim.LAMB8bit([p], weight_decay=0.1, trust_bounds=b) for p, b in zip(params(), bounds, strict=True)]
    for step in range(3):
        grads = [torch.randn(s, generator=torch.Generator().manual_seed(step)) for s in SHAPES]
        for i, g in enumerate(grads):
            together.param_groups[i]["params"][0].grad = g.clone()
            alone[i].param_groups[0]["params"][0].grad = g.clone()
            alone[i].step()
        together.step()
    for i, other in enumerate(alone):
        assert torch.equal(together.param_groups[i]["params"][0], other.param_groups[0]["params"][0])


@over_cpu
def test_zeros_start_with_a_lower_bound(backend: str) -> None:
    p = nn.Parameter(torch.zeros(8, 64))
    optimizer = optim.LAMB([p], lr=1.0, weight_decay=0.1, eps=0.0, trust_bounds=(2.0, 10.0))
    p.grad = torch.ones_like(p)
    with on(backend):
        optimizer.step()
    assert p.detach().norm().item() == pytest.approx(2.0, rel=1e-6), "lr * low"


@over_cpu
def test_gaps_float64_and_rows(backend: str) -> None:
    """What takes other ways through a step: strides with gaps, float64, a ratio per row."""
    wide = torch.randn(16, 256, generator=torch.Generator().manual_seed(1))
    for p, more in (
        (nn.Parameter(wide[:, ::2]), {}),
        (nn.Parameter(wide[:, :128].double()), {}),
        (nn.Parameter(wide[:, :128].clone()), {"layers": "rows"}),
    ):
        optimizer = optim.LAMB([p], lr=1e-2, weight_decay=0.1, eps=1e-6, trust_bounds=(0.0, 0.5), **more)
        p.grad = torch.ones_like(p)
        before = p.detach().clone()
        with on(backend):
            optimizer.step()
        update = 1 + 0.1 * before.double()
        norm = update.norm(dim=1) if more else update.norm().reshape(1)
        (ratio,) = optimizer.trust_ratios().values()
        assert torch.allclose(ratio.double(), 0.5 / norm, rtol=1e-5)


@over_forms
@pytest.mark.parametrize(
    "bad",
    [
        1.0,
        (1.0,),
        (2.0, 1.0),
        (1.0, 1.0),
        (-1.0, 1.0),
        (math.nan, 1.0),
        (0.0, math.nan),
        ("0", "1"),
        (0, 1, 2),
    ],
)
def test_bounds_that_are_none(build: type, options: dict[str, Any], bad: Any) -> None:
    with pytest.raises(ValueError, match=r"trust_bounds must be None or \(low, high\).* got "):
        build(params(), trust_bounds=bad, **options)
    optimizer = build(params(), **options)
    optimizer.param_groups[0]["trust_bounds"] = bad
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    with pytest.raises(ValueError, match="trust_bounds must be None"):
        train(optimizer, 1)
    assert_same([p.detach() for p in optimizer.param_groups[0]["params"]], before)
