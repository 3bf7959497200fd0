"""Elements that fall quiet beside live ones of their block: 8-bit states treat them as fp32 states do."""

import functools
from typing import Any

import pytest
import torch

from memkern import optim
from tests.support import quiet
from tests.support.helpers import on

ADAMW = functools.partial(optim.AdamW, weight_decay=0.0)
POWER = functools.partial(optim.AdamW8bit, weight_decay=0.0)
DYNAMIC = functools.partial(optim.AdamW8bit, weight_decay=0.0, codec="dynamic")
full, long = pytest.mark.full, pytest.mark.long


@functools.cache
def moved(codec: str, neighbours: float, noisy: bool, every: int | None = None) -> float:
    factory = {"fp32": ADAMW, "power": POWER, "dynamic": DYNAMIC}[codec]
    return quiet.one_gradient(factory, neighbours, noisy=noisy, every=every)


@pytest.mark.parametrize("noisy", [True, False], ids=["noisy", "constant"])
@pytest.mark.parametrize(
    "neighbours",
    [pytest.param(x, marks=full if x != 100 else ()) for x in (1, 10, 100, 1000)],
)
def test_one_gradient_and_then_zeros(neighbours: float, noisy: bool) -> None:
    fp32, power = moved("fp32", 1, True), moved("power", neighbours, noisy)
    assert fp32 == pytest.approx(0.006, rel=0.02)
    assert 0.6 * fp32 <= power <= 1.1 * fp32


@pytest.mark.parametrize("every", [pytest.param(50, marks=full), pytest.param(500, marks=full)])
@pytest.mark.parametrize("neighbours", [1, 100, 1000])
def test_a_gradient_now_and_then(neighbours: float, every: int) -> None:
    fp32, power = (moved(codec, neighbours, True, every) for codec in ("fp32", "power"))
    assert abs(power - fp32) <= 0.006


@full
@pytest.mark.parametrize("neighbours", [1, 10])
@pytest.mark.parametrize("every", [50, 500])
def test_rare_features(every: int, neighbours: float) -> None:
    fp32, power = (quiet.rare_features(factory, every, neighbours) for factory in (ADAMW, POWER))
    assert power == pytest.approx(fp32, rel=0.02)


@long
def test_a_bag_of_words_keeps_its_loss_and_its_weights() -> None:
    fp32, power = quiet.bag_of_words(ADAMW), quiet.bag_of_words(POWER)
    assert power.loss == pytest.approx(fp32.loss, rel=0.05)
    assert power.max_weight == pytest.approx(fp32.max_weight, rel=0.05)


@pytest.mark.parametrize(
    ("build", "beta"), [pytest.param(optim.Lion8bit, 0.99), pytest.param(optim.LARS8bit, 0.9, marks=full)]
)
def test_the_momentum_of_quiet_elements_is_the_true_one(build: Any, beta: float) -> None:
    assert quiet.quiet_momentum(build, beta) == pytest.approx(1.0, abs=0.05)


# ---- the dynamic map


def one_beside_a_constant(build: Any, steps: int = 30) -> float:
    """One gradient of 2e-4 beside constant ones of 1.0: how far it moves its element."""
    p = torch.nn.Parameter(torch.zeros(64, 128))
    optimizer = build([p], lr=1e-3)
    for step in range(steps):
        p.grad = torch.ones(64, 128)
        p.grad[:, 0] = 2e-4 if step == 0 else 0.0
        optimizer.step()
    return p.detach()[:, 0].abs().max().item()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_no_positive_second_moment_becomes_zero_in_the_dynamic_map(backend: str) -> None:
    with on(backend):
        assert one_beside_a_constant(DYNAMIC) < 0.01
        p = torch.nn.Parameter(torch.zeros(64, 128))
        optimizer = DYNAMIC([p], lr=1e-3)
        p.grad = torch.ones(64, 128)
        p.grad[:, ::2] = 2e-4
        p.grad[:, 1] = 0.0
        optimizer.step()
    codes = optimizer.state[p]["exp_avg_sq"]
    assert (codes[:, ::2] == 1).all()
    assert (codes[:, 1] == 0).all()


@full
@pytest.mark.parametrize("neighbours", [1, 1000])
def test_the_dynamic_map_moves_quiet_elements_little_too(neighbours: float) -> None:
    assert moved("dynamic", neighbours, True) < 0.01


# ---- one element far above its block's


@full
@pytest.mark.parametrize(
    ("options", "least", "most"),
    [({"state_bits": 32}, 1.0, 1.5), ({"state_bits": 8}, 5.0, 12.0)],
    ids=["32", "8"],
)
def test_the_largest_step_beside_an_element_of_10_000_times_the_gradient(
    options: dict[str, Any], least: float, most: float
) -> None:
    """docs/numerics.md: with the least codes of both moments a step is (255 / 127)^2 of the large element's |m| / w."""
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(32, 512))
    optimizer = optim.AdamW([p], lr=1.0, weight_decay=0.0, min_8bit_size=0, **options)
    largest = 0.0
    for _ in range(300):
        p.grad = 1e-4 * torch.randn(32, 512)
        p.grad[:, ::128] = torch.randn(32, 4).sign()
        before = p.detach().clone()
        optimizer.step()
        largest = max(largest, (p.detach() - before).abs().max().item())
    assert least < largest < most
