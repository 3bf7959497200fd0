"""Gradients that are made of small distances from a limit: the error of codes is bounded in the derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import memkern
from memkern import memory
from memkern.saved import attention, bounded
from memkern.saved.codecs import Layout

N, W = 128, 64
MOST = 0.01
"""Of the gradient: twice what codes of values in no saturation are off by."""
MOST_OF_ATTENTION = 0.03
"""Of the gradient of queries and keys: the errors of scores go through an exponential."""
LIMITS = (0.0, 0.9, 0.99, 0.999, 1 - 1e-6)
X = torch.randn(N, W, generator=torch.Generator().manual_seed(1))
Function = Callable[[Tensor, Tensor], Tensor]


def weights(count: int = 2, width: int = W) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(width, width, generator=generator) / width**0.5).requires_grad_() for _ in range(count)]


def off(forward: Callable[[], Tensor], leaves: list[Tensor]) -> list[float]:
    """Of each leaf, the relative error of its gradient."""
    expected = torch.autograd.grad(forward(), leaves)
    with memkern.quantize_saved(8):
        loss = forward()
    actual = torch.autograd.grad(loss, leaves)
    return [float((a - b).norm() / b.norm()) for a, b in zip(actual, expected, strict=True)]


# ---- gates


GATES: dict[str, Function] = {
    "sigmoid, y * v": lambda z, v: torch.sigmoid(z) * v,
    "sigmoid, y * v + (1 - y) * x": lambda z, v: torch.sigmoid(z) * v + (1 - torch.sigmoid(z)) * X,
    "sigmoid, y * (1 - y)": lambda z, v: (y := torch.sigmoid(z)) * (1 - y),
    "tanh": lambda z, v: torch.tanh(z / 2),
    "tanh, y * v": lambda z, v: torch.tanh(z / 2) * v,
    "tanh, 1 - y * y": lambda z, v: 1 - torch.tanh(z / 2) ** 2,
    "two classes": lambda z, v: torch.stack((z, torch.zeros_like(z)), -1).softmax(-1)[..., 0] * v,
    "swish by hand": lambda z, v: z * torch.sigmoid(z),
}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("side", [1, -1])
def test_saturated_gates(name: str, limit: float, side: int) -> None:
    first, second = weights()
    bias = side * float(torch.tensor(limit).double().clamp_min(0.5).logit())

    def forward() -> Tensor:
        return ((GATES[name](X @ first + bias, X @ second) @ second) * X).square().mean()

    assert off(forward, [first])[0] < (MOST if limit < 0.999 else 0.03)  # in fp32 1 - 1e-6 is right to 3 %


TAILS: dict[str, Function] = {
    "silu": lambda z, v: F.silu(z),
    "gelu": lambda z, v: F.gelu(z),
    "softplus": lambda z, v: F.softplus(z),
    "elu": lambda z, v: F.elu(z),
    "mish": lambda z, v: F.mish(z),
    "glu": lambda z, v: F.glu(torch.cat((v, z), -1), -1),
    "swiglu": lambda z, v: memkern.functional.swiglu(torch.cat((z, v), -1)),
    "geglu": lambda z, v: memkern.functional.geglu(z, v),
    "hardswish": lambda z, v: F.hardswish(z + 6),  # around its limits, where its derivative jumps
    "power": lambda z, v: (z / 8) ** 12,
}


@pytest.mark.parametrize("bias", [-9.0, -6.0, -3.0, 0.0, 3.0, 9.0])
@pytest.mark.parametrize("name", TAILS)
def test_functions_that_are_nearly_constant(name: str, bias: float) -> None:
    first, second = weights()

    def forward() -> Tensor:
        return ((TAILS[name](X @ first + bias, X @ second) @ second) * X).square().mean()

    assert off(forward, [first])[0] < 0.03


def test_gates_of_all_kinds_in_one_block() -> None:
    """Each unit's gradient: units of one layer share blocks of codes."""
    first, second = weights()
    bias = torch.linspace(0, 9, W)  # up to 1 - 1e-4

    def forward() -> Tensor:
        return ((torch.sigmoid(X @ first + bias) * (X @ second)) @ second).square().mean()

    expected = torch.autograd.grad(forward(), first)[0]
    with memkern.quantize_saved(8):
        loss = forward()
    actual = torch.autograd.grad(loss, first)[0]
    assert ((actual - expected).norm(dim=0) / expected.norm(dim=0)).max() < 0.03


@pytest.mark.parametrize("bias", [3.0, 6.0])
def test_a_recurrence_with_a_long_memory(bias: float) -> None:
    gate, value = (
        (torch.randn(16, 64, generator=torch.Generator().manual_seed(i)) / 9).requires_grad_() for i in (3, 4)
    )
    x = torch.randn(16, 100, 16, generator=torch.Generator().manual_seed(5))

    def forward() -> Tensor:
        a, u, h = torch.sigmoid(x @ gate + bias), x @ value, torch.zeros(16, 64)
        for t in range(100):
            h = a[:, t] * h + (1 - a[:, t]) * u[:, t]
        return h.square().mean()

    assert max(off(forward, [gate, value])) < MOST


# ---- cross entropy


@pytest.mark.parametrize("classes", [10, 300])
@pytest.mark.parametrize("loss", [1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
def test_cross_entropy_of_a_model_that_is_right(loss: float, classes: int) -> None:
    generator = torch.Generator().manual_seed(6)
    w = (torch.randn(W, classes, generator=generator) / 8).requires_grad_()
    target = torch.randint(classes, (N,), generator=generator)
    base = torch.randn(N, classes, generator=generator)
    margin = torch.tensor(classes / loss).log()

    def forward() -> Tensor:
        logits = 0.1 * (X @ w) + base.scatter(1, target[:, None], float(margin))
        return F.cross_entropy(logits, target)

    assert 0.1 * loss < forward().item() < 10 * loss
    assert off(forward, [w])[0] < MOST


SOFT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "label_smoothing": lambda z, q: F.cross_entropy(z, q.argmax(-1), label_smoothing=0.1),
    "soft targets": lambda z, q: F.cross_entropy(z, q),
    "kl_div": lambda z, q: F.kl_div(z.log_softmax(-1), q, reduction="batchmean"),
    "by hand": lambda z, q: -(z.log_softmax(-1) * q).sum(-1).mean(),
    "nll and the mean": lambda z, q: (
        0.9 * F.nll_loss(logp := z.log_softmax(-1), q.argmax(-1)) - 0.1 * logp.mean(-1).mean()
    ),
    "the mean and gather": lambda z, q: (
        -0.1 * (logp := z.log_softmax(-1)).mean(-1) - 0.9 * logp.gather(1, q.argmax(-1)[:, None])[:, 0]
    ).mean(),
}


@pytest.mark.parametrize("distance", [1.0, 1e-2, 1e-3])
@pytest.mark.parametrize("name", SOFT)
def test_losses_of_soft_targets_that_are_nearly_met(name: str, distance: float) -> None:
    """Their gradient is p - q, and p comes close to q."""
    weight, last = weights()
    target = torch.arange(N) % W
    q = torch.full((N, W), 0.1 / W).scatter_(1, target[:, None], 0.9 + 0.1 / W)

    def forward() -> Tensor:
        loss = SOFT[name]((X @ weight) * distance + q.log(), q)
        return loss + 1e-9 * (X @ last).square().mean() * loss  # shows the operation before it

    assert off(forward, [weight])[0] < MOST


def test_log_probabilities_of_classes_are_coded() -> None:
    (weight,) = weights(1)
    target = torch.arange(N) % W
    losses: list[Callable[[Tensor], Tensor]] = [
        lambda z: F.cross_entropy(z, target),
        lambda z: F.nll_loss(z.log_softmax(-1), target),
        lambda z: F.nll_loss(z.view(2, -1, W).log_softmax(-1).view(-1, W), target),
        lambda z: -z.log_softmax(-1).gather(1, target[:, None]).mean(),
    ]
    for loss in losses:

        def forward(loss: Callable[[Tensor], Tensor] = loss) -> Tensor:
            with memkern.quantize_saved(8):
                return loss(X @ weight).square()  # what the square saves shows the operations before it

        assert memory.saved_bytes(forward, X, weight, target) <= 1.17 * N * W + 512


@pytest.mark.parametrize("deviation", [1.0, 5.0, 15.0, 50.0])
def test_linear_cross_entropy(deviation: float) -> None:
    body, head = weights(2)

    def forward() -> Tensor:
        hidden = F.layer_norm(X @ body, (W,)) * deviation
        loss = memkern.functional.linear_cross_entropy(hidden, head, torch.arange(N) % W)
        return loss + 0.1 * loss.square()  # what the square saves shows the operation before it

    assert max(off(forward, [body, head])) < MOST


# ---- attention


def _heads(x: Tensor, width: int) -> Tensor:
    return x.view(2, W, -1, width).transpose(1, 2)


@pytest.mark.parametrize("deviation", [1.0, 5.0, 15.0, 50.0])
@pytest.mark.parametrize("kind", ["unrelated", "sure", "sure, masked"])
@pytest.mark.parametrize("width", [16, 64])
def test_attention(kind: str, deviation: float, width: int) -> None:
    """Scores of a deviation, or of one key by so much above the others."""
    query, key, value = weights(3)
    sure = kind != "unrelated"
    scale = (deviation / width**0.5) ** 0.5 if sure else deviation**0.5
    mask = torch.ones(W, W, dtype=torch.bool).tril() if kind == "sure, masked" else None
    x = X

    def forward() -> Tensor:
        q, k, v = x @ query, x @ (query if sure else key), x @ value
        q, k, v = (_heads(each, width) for each in (q * scale, k * scale, v))
        y = F.scaled_dot_product_attention(q, k, v, mask)
        return ((y.transpose(1, 2).reshape(N, W) @ value) * x).square().mean()

    with memkern.quantize_saved(8):
        loss = forward()
    ours, torchs = (torch.autograd.grad(y, [query, value]) for y in (loss, forward()))
    x, query, value = x.double(), *(w.detach().double().requires_grad_() for w in (query, value))
    key = key.detach().double()
    for actual, plain, exact in zip(ours, torchs, torch.autograd.grad(forward(), [query, value]), strict=True):
        own = float((plain - exact).norm() / exact.norm())  # rounding, where scores of 50 leave 1e-20 of it
        assert float((actual - plain).norm() / plain.norm()) < max(MOST_OF_ATTENTION, 4 * own)


class _Count(TorchDispatchMode):
    """How often attention's forward pass runs."""

    runs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs += func._schema.name.endswith("flash_attention_for_cpu")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("scale", "runs"), [(0.1, 0), (3.0, 1)])
def test_attention_runs_again_where_it_is_sure(scale: float, runs: int) -> None:
    """Here with two heads for each head of keys and values."""
    query, value = weights()

    def forward() -> Tensor:
        q, v = _heads(X @ query, 16) * scale, _heads(X @ value, 16)[:, :2]
        y = F.scaled_dot_product_attention(q, q[:, :2] * scale, v, is_causal=True, enable_gqa=True)
        return ((y.transpose(1, 2).reshape(N, W) @ value) * X).square().mean()

    assert max(off(forward, [query, value])) < MOST_OF_ATTENTION
    with memkern.quantize_saved(8):
        loss = forward()
    with _Count() as count:
        loss.backward()
    assert count.runs == runs


@pytest.mark.parametrize("deviation", [1.0, 5.0, 15.0])
def test_attention_by_hand(deviation: float) -> None:
    query, value = weights()
    scale = (deviation / 4) ** 0.5

    def forward() -> Tensor:
        q = _heads(X @ query, 16) * scale
        p = (q @ q.transpose(-1, -2) / 4).softmax(-1)
        y = (p @ _heads(X @ value, 16)).transpose(1, 2).reshape(N, W)
        return ((y @ value) * X).square().mean()

    assert max(off(forward, [query, value])) < MOST_OF_ATTENTION


def test_attention_with_large_scores_keeps_its_values_in_codes() -> None:
    query, key, value = weights(3)

    def forward() -> Tensor:
        q, k, v = (_heads(X @ w, 16) for w in (query * 4, key * 4, value))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(N, W)
        return (y @ value).sin()

    def coded() -> Tensor:
        with memkern.quantize_saved(8):
            return forward()

    # q and k, values and output in codes, the argument of sin
    assert memory.saved_bytes(coded, X, query, key, value) < (4 + 4 + 1.04 + 1.04 + 4) * N * W + 2 * 4 * 4096


def test_attention_with_dropout_is_exact() -> None:
    """Of the operations that run on a GPU: their forward pass would draw another mask."""

    class Dropping:
        _saved_dropout_p = 0.1

        def name(self) -> str:
            return "ScaledDotProductFlashAttentionBackward0"

    assert attention.is_attention(Dropping())
    assert attention.stays_exact(Dropping(), None)


# ---- the codes


@pytest.mark.parametrize("codec", [bounded.PROBABILITY, bounded.TANH])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_of_distances(codec: Any, dtype: torch.dtype) -> None:
    """The bound of bounded.py, for each value of blocks with distances of .5 to 1e-7."""
    distance = torch.logspace(-7, -0.31, 128, dtype=torch.float64)
    sides = [distance, 1 - distance] + ([-distance, distance - 1] if codec is bounded.TANH else [])
    x = torch.stack(sides).to(dtype).t().contiguous().t()  # strides that are not those of a contiguous tensor
    encoded = codec.encode(x)
    assert encoded is not None
    y = codec.decode(encoded.data, Layout(x.shape, x.stride(), x.dtype), torch.float64)
    exact, near = (torch.minimum(z.double().abs(), 1 - z.double().abs()) for z in (x, y))
    assert y.stride() == x.stride()
    assert torch.equal(y.sign(), x.sign().double())
    assert torch.equal(y.abs() > 0.5, x.double().abs() > 0.5)
    most = 2 / 255 * (0.5 / exact.clamp_min(1e-12)) ** 0.25  # half a code, of a law whose exponent is 1 / 4
    assert ((near - exact).abs() <= exact * (most + most**2) + 1e-7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities(dtype: torch.dtype) -> None:
    x = (12 * torch.randn(64, 128)).log_softmax(-1).to(dtype)
    x[0, :4] = torch.tensor([-torch.inf, -1e9, -1e-7, 0.0])
    encoded = bounded.LOGARITHM.encode(x)
    assert encoded is not None
    y = bounded.LOGARITHM.decode(encoded.data, Layout(x.shape, x.stride(), x.dtype), x.dtype)
    assert y.isfinite().all()
    p, q = x.double().exp(), y.double().exp()
    assert (p - q).norm() < 0.01 * p.norm()
    assert (x.double().expm1() - y.double().expm1())[x > -0.69].norm() < 0.01 * x.double().expm1()[x > -0.69].norm()


@pytest.mark.parametrize("codec", [bounded.PROBABILITY, bounded.TANH, bounded.LOGARITHM])
def test_nan_is_not_coded(codec: Any) -> None:
    assert codec.encode(torch.full((64, 64), -0.5).index_fill(0, torch.tensor([3]), torch.nan)) is None


BYTES: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "sigmoid": (torch.sigmoid, 1.16),
    "softmax": (lambda h: h.softmax(-1), 1.16),
    "tanh": (torch.tanh, 1.29),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes(name: str) -> None:
    function, share = BYTES[name]
    first, second = weights()

    def forward() -> Tensor:
        with memkern.quantize_saved(8):
            return (function(X @ first) @ second).sin()

    assert memory.saved_bytes(forward, X, first, second) <= (share + 4) * N * W + 256  # 4: the argument of sin
