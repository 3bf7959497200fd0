"""Elements that fall quiet beside others of their block that do not: what stored states make of them.

A moment that is rounded to the nearest code stops decaying at a code that depends on its block's largest value. So
these streams put quiet and live elements into the same blocks: one gradient and then none, features that occur in one
step of many, words of a bag that are rare, momenta of elements that no longer have gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Factory = Callable[..., Any]  # (params, lr=) -> an optimizer

BLOCKS, BLOCK = 64, 128
QUIET = BLOCK // 2  # of each block; the others are live
LR = 1e-3


def one_gradient(
    factory: Factory, neighbours: float, *, noisy: bool, steps: int = 1700, every: int | None = None
) -> float:
    """How far elements move that get a gradient of 1 or -1 at the first step and zeros after, or one `every` so often.

    They are half of each block; the others' gradients are `neighbours` times as large, noisy or constant, in all
    steps. Returns the mean of |final value| of the quiet half.
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
    """How far elements move whose gradient is noise in one step of `every`, beside live ones `neighbours` times larger.

    Returns the root mean square of the rare half's final values. (They have no direction: it is a random walk.)
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
    loss: float  # of the last 100 steps, mean
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
    of_topic = torch.stack([frequency * (topic == k) for k in range(topics)])
    embedding = torch.nn.Parameter(0.1 * torch.randn(words, width, generator=rng))
    output = torch.nn.Parameter(0.1 * torch.randn(topics, width, generator=rng))
    optimizer = factory([embedding, output], lr=LR)
    losses = []
    for _ in range(steps):
        label = torch.randint(0, topics, (batch,), generator=rng)
        about = torch.multinomial(of_topic[label], length // 2, replacement=True, generator=rng)
        noise = torch.multinomial(frequency, batch * (length // 2), replacement=True, generator=rng)
        bag = torch.cat([about, noise.view(batch, -1)], 1)
        loss = torch.nn.functional.cross_entropy(embedding[bag].mean(1) @ output.t(), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return BagOfWords(sum(losses[-100:]) / 100, embedding.detach().abs().max().item())


def quiet_momentum(factory: Factory, beta: float, steps: int = 3000) -> float:
    """The stored first moment of elements that fell quiet, over its true value.

    All gradients are noise around 1; after a third of the steps those of half of each block fall to a hundredth.
    Returns the ratio of the mean |m| of that half to its exact value, after the last step.
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
    m = stored_m(optimizer, param)
    return (m[:, :QUIET].abs().mean() / exact[:, :QUIET].abs().mean()).item()


def stored_m(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> torch.Tensor:
    """The first moment as it is stored, in fp64."""
    import memkern

    state, group = optimizer.state[param], optimizer.param_groups[0]
    m = state["exp_avg"]
    if m.dtype is torch.int8:
        m = memkern.dequantize_blockwise(
            m, state["exp_avg_scale"], codec=group["codec"], block_size=group["block_size"]
        )
    return m.double()
