"""8-bit states treat elements whose gradients cease beside live ones of their block as fp32 states do.

A moment that is rounded to the nearest code stops decaying at a code that depends on its block's largest value. So
these streams put quiet and live elements into the same blocks: one gradient and then none, features that occur in one
step of many, words of a bag that are rare, momenta of elements that no longer have gradients.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from memkern import optim
from memkern.optim.state import load_moment
from tests.support.helpers import on

ADAMW = functools.partial(optim.AdamW, weight_decay=0.0)
POWER = functools.partial(optim.AdamW8bit, weight_decay=0.0)
DYNAMIC = functools.partial(optim.AdamW8bit, weight_decay=0.0, codec="dynamic")
full, long = pytest.mark.full, pytest.mark.long

Factory = Callable[..., Any]  # (params, lr=) -> an optimizer

BLOCKS, BLOCK = 64, 128
QUIET = BLOCK // 2  # elements of each block that fall quiet; the others have gradients in all steps ("live")
LR = 1e-3


def one_gradient(
    factory: Factory, neighbours: float, *, noisy: bool, steps: int = 1700, every: int | None = None
) -> float:
    """How far quiet elements move: the mean of their |final values|, which start at 0.

    Their gradient is 1 or -1 in the first step, and in each ``every``-th one if given, else 0. They are half of each
    block; the other half has gradients ``neighbours`` times as large, noisy or constant, in all steps.
    """
    rng = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.zeros(BLOCKS, BLOCK))
    optimizer = factory([param], lr=LR)
    for step in range(steps):
        gradient = torch.zeros(BLOCKS, BLOCK)
        live = torch.randn(BLOCKS, QUIET, generator=rng) if noisy else torch.ones(BLOCKS, QUIET)
        gradient[:, QUIET:] = neighbours * live
        if step == 0 or (every and step % every == 0):
            gradient[:, :QUIET] = torch.randint(0, 2, (BLOCKS, QUIET), generator=rng) * 2.0 - 1.0
        param.grad = gradient
        optimizer.step()
    return param.detach()[:, :QUIET].abs().mean().item()


def rare_features(factory: Factory, every: int, neighbours: float = 1.0, steps: int = 5000) -> float:
    """How far rare elements walk at random: the root mean square of their final values, which start at 0.

    Their gradient is noise in one step of ``every``. They are half of each block; the other half has noise
    ``neighbours`` times as large in all steps.
    """
    rng = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.zeros(BLOCKS, BLOCK))
    optimizer = factory([param], lr=LR)
    for _ in range(steps):
        gradient = torch.randn(BLOCKS, BLOCK, generator=rng)
        gradient[:, :QUIET] *= torch.rand(BLOCKS, QUIET, generator=rng) < 1 / every
        gradient[:, QUIET:] *= neighbours
        param.grad = gradient
        optimizer.step()
    return param.detach()[:, :QUIET].square().mean().sqrt().item()


class BagOfWords(NamedTuple):
    """What bag_of_words returns."""

    loss: float  # the mean loss of the last 100 steps
    max_weight: float  # the largest |weight| of the embedding


def bag_of_words(factory: Factory, steps: int = 2000, *, words: int = 8192, width: int = 16) -> BagOfWords:
    """Trains a classifier of bags of words: an embedding whose rows are averaged, and a linear layer.

    Words come with the frequencies of Zipf's law, so that most rows of the embedding have no gradient at most
    steps; a word belongs to one of 8 topics, and a bag's class is the topic that half of its words are drawn from.
    """
    rng = torch.Generator().manual_seed(0)
    topics, batch, length = 8, 32, 32
    frequency = 1.0 / (1 + torch.randperm(words, generator=rng)).double()  # rare words beside frequent ones
    topic = torch.randint(0, topics, (words,), generator=rng)
    of_topic = torch.stack([frequency * (topic == i) for i in range(topics)])
    embedding = torch.nn.Parameter(0.1 * torch.randn(words, width, generator=rng))
    output = torch.nn.Parameter(0.1 * torch.randn(topics, width, generator=rng))
    optimizer = factory([embedding, output], lr=LR)
    losses = []
    for _ in range(steps):
        label = torch.randint(0, topics, (batch,), generator=rng)
        topic_words = torch.multinomial(of_topic[label], length // 2, replacement=True, generator=rng)
        noise = torch.multinomial(frequency, batch * (length // 2), replacement=True, generator=rng)
        bag = torch.cat([topic_words, noise.view(batch, -1)], 1)
        loss = torch.nn.functional.cross_entropy(embedding[bag].mean(1) @ output.t(), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return BagOfWords(sum(losses[-100:]) / 100, embedding.detach().abs().max().item())


def quiet_momentum(factory: Factory, beta: float, steps: int = 3000) -> float:
    """The stored first moment of elements that fell quiet, over its true value.

    All gradients are noise around 1. After a third of the steps, the gradients of half of each block fall to a
    hundredth. Returns the ratio of that half's mean |m| to its exact value, after the last step.
    """
    rng = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.zeros(BLOCKS, BLOCK))
    optimizer = factory([param], lr=LR)
    exact = torch.zeros(BLOCKS, BLOCK, dtype=torch.float64)
    for step in range(steps):
        gradient = 1.0 + torch.randn(BLOCKS, BLOCK, generator=rng)
        if step > steps / 3:
            gradient[:, :QUIET] *= 0.01
        exact = beta * exact + (1 - beta) * gradient.double()
        param.grad = gradient
        optimizer.step()
    m = load_moment("exp_avg", optimizer.state[param]).double()
    return (m[:, :QUIET].abs().mean() / exact[:, :QUIET].abs().mean()).item()


@functools.cache
def distance(codec: str, neighbours: float, noisy: bool, every: int | None = None) -> float:
    """one_gradient's result, computed once."""
    factory = {"fp32": ADAMW, "power": POWER, "dynamic": DYNAMIC}[codec]
    return one_gradient(factory, neighbours, noisy=noisy, every=every)


@pytest.mark.parametrize(
    ("neighbours", "noisy"), [(100, True), (100, False), *(pytest.param(x, True, marks=full) for x in (1, 1000))]
)
def test_one_gradient_and_then_zeros(neighbours: float, noisy: bool) -> None:
    fp32, power = distance("fp32", 1, True), distance("power", neighbours, noisy)
    assert fp32 == pytest.approx(0.006, rel=0.02)  # 6 LR
    assert 0.6 * fp32 <= power <= 1.1 * fp32  # a moment that stopped decaying would move them in all 1,700 steps


@full
@pytest.mark.parametrize(("every", "neighbours"), [(50, 1), (50, 1000), (500, 1), (500, 1000)])
def test_a_gradient_every_so_many_steps(neighbours: float, every: int) -> None:
    fp32, power = (distance(codec, neighbours, True, every) for codec in ("fp32", "power"))
    assert abs(power - fp32) <= 0.006  # 6 LR, as of one gradient


@full
@pytest.mark.parametrize(
    ("every", "neighbours"), [(50, 1), (500, 10), *(pytest.param(*x, marks=long) for x in ((50, 10), (500, 1)))]
)
def test_rare_features_walk_as_far(every: int, neighbours: float) -> None:
    fp32, power = (rare_features(factory, every, neighbours) for factory in (ADAMW, POWER))
    assert power == pytest.approx(fp32, rel=0.02)


@long
def test_a_bag_of_words_keeps_its_loss_and_its_weights() -> None:
    fp32, power = bag_of_words(ADAMW), bag_of_words(POWER)
    assert power.loss == pytest.approx(fp32.loss, rel=0.05)
    assert power.max_weight == pytest.approx(fp32.max_weight, rel=0.05)


@pytest.mark.parametrize(
    ("build", "beta"), [pytest.param(optim.Lion8bit, 0.99), pytest.param(optim.LARS8bit, 0.9, marks=full)]
)
def test_the_momentum_of_quiet_elements_is_the_true_one(build: Any, beta: float) -> None:
    assert quiet_momentum(build, beta) == pytest.approx(1.0, abs=0.05)


# ---- the dynamic map


def distance_beside_a_constant(build: Any, steps: int = 30) -> float:
    """How far one gradient of 2e-4, and then 0, moves an element whose block has constant gradients of 1."""
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
        assert distance_beside_a_constant(DYNAMIC) < 0.01
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
    assert distance("dynamic", neighbours, True) < 0.01


# ---- one element far above its block's


@full
@pytest.mark.parametrize(
    ("options", "lower", "upper"),
    [({"state_bits": 32}, 1.0, 1.5), ({"state_bits": 8}, 5.0, 12.0)],
    ids=["32", "8"],
)
def test_the_largest_step_beside_an_element_of_10_000_times_the_gradient(
    options: dict[str, Any], lower: float, upper: float
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
    assert lower < largest < upper
