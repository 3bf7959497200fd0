"""Finds accesses out of bounds by optimizer steps of tensors of every size, offset and stride pattern.

tests/support/sanitized.py runs them under AddressSanitizer, which guards both ends of an allocation. Each tensor has an
allocation of its own; what is no element in it, before an offset or in gaps, holds a guard value that must stay.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from memkern.quant.layout import is_dense, layout_of
from memkern.schemas import STEP_OPS, WEIGHT_STATES
from tests.support.kernels.arguments import HYPERPARAMETERS, MOMENTS, pack

GUARD = 77  # the value of what is no element
BF16 = torch.bfloat16


def strided(shape: tuple[int, ...], strides: tuple[int, ...], offset: int, dtype: torch.dtype) -> Tensor:
    """A tensor behind ``offset`` guard values, which ends where its allocation does."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    allocation = torch.full((offset + (reach if 0 not in shape else 0),), GUARD, dtype=dtype)
    return allocation.as_strided(shape, strides, offset)


def guards(x: Tensor) -> Tensor:
    """The values of a tensor's allocation that are not its elements."""
    allocation = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    is_guard = torch.ones_like(allocation, dtype=torch.bool)
    is_guard.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(False)
    return allocation[is_guard]


def dense_strides(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense tensor whose dimensions lie in memory in this order, the innermost last."""
    strides, inside = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = inside
        inside *= shape[d]
    return tuple(strides)


def patterns(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Strides: dense in every order, with gaps, expanded, and with elements in each other's place."""
    dense = [dense_strides(shape, order) for order in itertools.permutations(range(len(shape)))]
    plain = dense[0]
    gaps = [
        tuple(2 * s for s in plain),
        *(tuple(s + (k == d) for k, s in enumerate(plain)) for d in range(len(shape))),
    ]
    expanded = [tuple(0 if k == d else s for k, s in enumerate(plain)) for d in range(len(shape))]
    return [*dense, *gaps, *expanded, (1,) * len(shape), (0,) * len(shape)]


def call_step(name: str, tensors: list[dict[str, Any]], codec: int, block_size: int, storage: int) -> None:
    """One call of an op. Each tensor: p, g and its moments by name, and a weight state."""
    lists: dict[str, Any] = {
        **{key: values[:1] for key, values in HYPERPARAMETERS[name].items()},
        "layers": [1],
        "params": [t["p"] for t in tensors],
        "grads": [t["g"] for t in tensors],
        "steps": [torch.zeros(()) for _ in tensors],
        "trust_ratios": [torch.ones(1) for _ in tensors],
        "group": [0] * len(tensors),
        "lr": [torch.tensor(1e-3, dtype=torch.float64)],
        "codec": [codec],
        "block_size": [block_size],
        "weight_storage": [storage],
        "weight_states": [t["state"] for t in tensors if t["state"] is not None],
    }
    for moment in MOMENTS[: len(STEP_OPS[name].moments)]:
        lists[f"{moment}s"] = [t[moment] for t in tensors]
        lists[f"{moment}_scales"] = [t[f"{moment}_scale"] for t in tensors if t[f"{moment}_scale"] is not None]
    getattr(torch.ops.memkern, name)(*pack(name, lists))


def tensors_of(
    name: str, new: Callable[[torch.dtype], Tensor], like: Callable[[], Tensor], coded: bool, block_size: int,
    storage: int,
) -> dict[str, Any]:  # fmt: skip
    """A parameter, its gradient and its states, each made by ``new``. like: makes a tensor with the same blocks."""
    p, g = (new(BF16 if storage else torch.float32).fill_(x) for x in (0.5, -0.25))
    tensors: dict[str, Any] = {"p": p, "g": g, "state": None}
    if storage in WEIGHT_STATES:
        tensors["state"] = new(getattr(torch, WEIGHT_STATES[storage])).zero_()
    for moment, signed in zip(MOMENTS, STEP_OPS[name].moments.values(), strict=False):
        code = torch.int8 if signed else torch.uint8
        tensors[moment] = new(code if coded else torch.float32).zero_()
        tensors[f"{moment}_scale"] = torch.zeros(layout_of(like(), block_size).scale_shape) if coded else None
    return tensors


def step_every_size(name: str, storage: int, max_size: int) -> None:
    """Steps of 1-D tensors of 1 to ``max_size`` elements at offsets of 0 to 15, in codes and in fp32."""
    for first in range(1, max_size + 1, 64):
        batch = []
        for n in range(first, first + 64):
            offset = random.Random(n).randrange(16)
            coded = n % 5 != 0
            new = lambda dtype, n=n, at=offset: strided((n,), (1,), at, dtype)  # noqa: E731
            batch.append(tensors_of(name, new, lambda n=n: torch.empty(n, device="meta"), coded, 128, storage))
        call_step(name, batch, codec=0, block_size=128, storage=storage)
        for tensors in batch:
            for x in tensors.values():
                if x is not None and x.dim() == 1 and x.numel() > 1:
                    assert (guards(x) == GUARD).all(), "what lies before an offset was written"


def accepts_a_pattern(name: str, storage: int, draw: random.Random) -> bool:
    """Whether the op accepts a step whose parameter, gradient and states have strides that are drawn at random."""
    shape = draw.choice([(5, 7, 3), (4, 128), (1, 300), (6, 1, 33), (2, 3, 4, 40), (0, 4), (130,)])
    block_size, alike = draw.choice([8, 24, 128]), draw.random() < 0.3
    strides = draw.choice(patterns(shape))
    plain = strides if is_dense(shape, strides) else dense_strides(shape, tuple(range(len(shape))))

    def new(dtype: torch.dtype) -> Tensor:
        return strided(shape, strides if alike else draw.choice(patterns(shape)), draw.randrange(9), dtype)

    like = functools.partial(torch.empty_strided, shape, plain, device="meta")
    tensors = tensors_of(name, new, like, draw.random() < 0.7, block_size, storage)
    tensors["p"] = strided(shape, strides, draw.randrange(9), tensors["p"].dtype).fill_(0.5)
    accepted = True
    try:
        call_step(name, [tensors], draw.randrange(2), block_size, storage)
    except RuntimeError:
        accepted = False
        assert (tensors["p"] == 0.5).all(), "a step that raised has changed a parameter"
    for x in tensors.values():
        if x is not None and x.numel() > 0 and x.shape == shape:
            assert (guards(x) == GUARD).all(), "what is no element was written"
    return accepted


def check(names: Iterable[str], max_size: int, draws: int) -> None:
    """Checks all sizes up to ``max_size`` and ``draws`` stride patterns, with each way to store weights."""
    for name in names:
        for storage in (0, *WEIGHT_STATES):
            step_every_size(name, storage, max_size)
            draw = random.Random(storage)
            accepted = sum(accepts_a_pattern(name, storage, draw) for _ in range(draws))
            assert 0 < accepted < draws, accepted
