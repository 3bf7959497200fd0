"""memkern.saved.users: the operation that uses a value decides whether it may be coded."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memkern
from memkern import memory
from memkern.functions.glu import Glu
from memkern.functions.saves_input import Recompute
from memkern.saved import codecs, data_needs, users

B, T, W = 4, 32, 64
X = torch.randn(B, T, W, generator=torch.Generator().manual_seed(1))
TARGET = torch.randint(0, W, (B * T, 1), generator=torch.Generator().manual_seed(2))
MASK = (torch.rand(B * T, W, generator=torch.Generator().manual_seed(3)) < 0.5).scatter_(1, TARGET, False)
GROUPS = torch.randint(0, 4, (B, T, W), generator=torch.Generator().manual_seed(4))
MOST = {"exact": 1e-6, 8: 0.03}
Weights = list[nn.Parameter]
Function = Callable[[Tensor, Tensor], Tensor]


def _weights(count: int = 2) -> Weights:
    generator = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randn(W, W, generator=generator) / W**0.5) for _ in range(count)]


def _off(actual: Any, expected: Any) -> float:
    off = sum((a.double() - b.double()).square().sum() for a, b in zip(actual, expected, strict=True))
    return float((off / sum(b.double().square().sum() for b in expected)) ** 0.5)


def check(forward: Callable[[], Tensor], leaves: Any, bits: Any, most: float | None = None) -> None:
    expected = torch.autograd.grad(forward(), leaves)
    with memkern.quantize_saved(bits):
        loss = forward()
    actual = torch.autograd.grad(loss, leaves)
    assert all(g.isfinite().all() for g in expected)
    assert _off(actual, expected) <= (MOST[bits] if most is None else most)


# ---- what compares, divides or takes a logarithm gets what it saved


def _max_by(function: Function) -> Function:
    return lambda h, w: (function(h, w) @ w).square().mean()


COMPARED: dict[str, Function] = {
    "amax": _max_by(lambda h, w: F.gelu(h).amax(1)),
    "amin": _max_by(lambda h, w: h.amin(1)),
    "amax of the rows of a norm": _max_by(lambda h, w: F.layer_norm(h, (W,)).amax(1)),
    "norm of infinity": _max_by(lambda h, w: torch.linalg.vector_norm(h, ord=math.inf, dim=1)),
    "median": _max_by(lambda h, w: h + h.nanmedian()),
    "scatter_reduce": _max_by(lambda h, w: torch.zeros(B, 4, W).scatter_reduce(1, GROUPS, h, "amax")),
    "index_reduce": _max_by(lambda h, w: torch.full((B, 4, W), -9.0).index_reduce(1, torch.arange(T) % 4, h, "amax")),
    "segment_reduce": _max_by(lambda h, w: torch.segment_reduce(h.reshape(-1, W), "max", lengths=torch.full((B,), T))),
    "amax beside a product": lambda h, w: (h @ w).sin().mean() + (h.amax(1) @ w).square().mean(),
}
DIVIDED: dict[str, Function] = {
    "logarithm of softmax": lambda h, w: -(F.softmax(8 * (h @ w), -1) + 1e-9).log().mean(),
    "softmax, gather, logarithm": lambda h, w: -F.softmax(8 * (h @ w), -1).view(-1, W).gather(1, TARGET).log().mean(),
    "SAC": lambda h, w: (1 - torch.tanh(4 * (h @ w)) ** 2 + 1e-6).log().mean(),
    "between smallest and largest": lambda h, w: (
        (((h - (low := h.amin(-1, keepdim=True))) / (h.amax(-1, keepdim=True) - low)) @ w).square().mean()
    ),
    "grid": lambda h, w: (
        (F.grid_sample(X[:1, None, :, :T], (h @ w).tanh().view(1, B * T, T, 2), align_corners=False) * 1.0)
        .square()
        .mean()
    ),
    "product of norms": lambda h, w: (
        torch.linalg.vector_norm(h, dim=-1) * torch.linalg.vector_norm(h @ w, dim=-1)
    ).mean(),
}


@pytest.mark.parametrize("bits", ["exact", 8])
@pytest.mark.parametrize("name", [*COMPARED, *DIVIDED])
@pytest.mark.filterwarnings("ignore:index_reduce")
def test_what_compares_or_divides(name: str, bits: Any) -> None:
    first, second = _weights()
    function = (COMPARED | DIVIDED)[name]
    check(lambda: function(X @ first, second), [first, second], bits)


def test_flat_regions() -> None:
    """Where all values of a row are nearly equal, 1 / sqrt(var) is large and the differences are what counts."""
    first, second = _weights()
    flat = torch.zeros(W).index_fill_(0, torch.arange(W // 2), 5.0)

    def forward() -> Tensor:
        h = torch.where(flat > 0, 5 + 1e-4 * (X @ first), X @ first).view(B, T, 2, W // 2)
        rows = (h - h.mean(-1, keepdim=True)) * (h.var(-1, keepdim=True) + 1e-6) ** -0.5
        return (rows.view(B, T, W) @ second).square().mul(X).mean()

    # The rows are computed anew from differences whose codes share a scale with those of other regions.
    check(forward, [first, second], 8, most=0.1)


# ---- log-probabilities with masks


@pytest.mark.parametrize("value", [-1e4, -1e9, torch.finfo(torch.float32).min, -math.inf])
def test_masked_log_probabilities(value: float) -> None:
    first, second = _weights()

    def forward() -> Tensor:
        logits = (3 * (X @ first @ second)).view(-1, W).masked_fill(MASK, value)
        return F.cross_entropy(logits, TARGET[:, 0])

    check(forward, [first, second], 8, most=0.02)


def test_contrast_with_a_masked_diagonal() -> None:
    (weight,) = _weights(1)

    def forward() -> Tensor:
        h = F.normalize((X @ weight).view(-1, W), dim=-1)
        scores = (h @ h.t() / 0.1).masked_fill(torch.eye(B * T, dtype=torch.bool), -1e9)
        return F.cross_entropy(scores, (torch.arange(B * T) + 1) % (B * T))

    check(forward, [weight], 8, most=0.02)


def test_log_probabilities_take_a_byte() -> None:
    (weight,) = _weights(1)

    def forward() -> Tensor:
        with memkern.quantize_saved(8):
            return F.cross_entropy((X @ weight).view(-1, W).masked_fill(MASK, -1e9), TARGET[:, 0])

    numel = B * T * W
    assert memory.saved_bytes(forward, weight, X, MASK, TARGET) < 1.1 * numel + 1024


def test_a_sum_that_overflows_is_not_taken_for_infinity() -> None:
    x = torch.randn(64, 64).masked_fill(MASK[:64], torch.finfo(torch.float32).min)
    assert codecs.POWER.encode(x) is not None
    for value in (math.inf, -math.inf, math.nan):
        assert codecs.POWER.encode(torch.randn(64, 64).index_fill(0, torch.tensor([3]), value)) is None


# ---- norms


NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda h: F.layer_norm(h, (W,)),
    "batch_norm": lambda h: F.batch_norm(h.view(-1, W), None, None, training=True).view(B, T, W),
    "group_norm": lambda h: F.group_norm(h.transpose(1, 2), 8).transpose(1, 2),
    "rms_norm": lambda h: F.rms_norm(h, (W,)),
}


@pytest.mark.parametrize("mean", [0.0, 10.0, 100.0])
@pytest.mark.parametrize("name", NORMS)
def test_norms_whose_mean_is_large(name: str, mean: float) -> None:
    first, second = _weights()
    check(lambda: (NORMS[name](X @ first + mean) @ second).square().mul(X).mean(), [first, second], 8, 0.02)


def test_what_is_centred_takes_a_byte() -> None:
    first, second = _weights()

    def forward() -> Tensor:
        with memkern.quantize_saved(8):
            return (F.layer_norm(X @ first + 100, (W,)) @ second).sin()

    assert memory.saved_bytes(forward, first, second, X) < (1.04 + 4) * X.numel() + 4 * B * T * 3
    # 4 bytes for the argument of sin, which is exact, and the statistics.


def test_no_centre_without_need() -> None:
    x = (X + 0.1).requires_grad_()
    with memkern.quantize_saved(8):
        y = F.layer_norm(x * 1, (W,))
    assert data_needs.normalization(y.grad_fn, x.detach()) is None
    shifted = torch.cat((x[:2], x[2:] + 100))
    with memkern.quantize_saved(8):
        y = F.layer_norm(shifted, (W,))
    mean, inverse = data_needs.normalization(y.grad_fn, x.detach()) or (None, None)
    assert mean is not None
    assert inverse is not None
    rows = (shifted.detach() - mean) * inverse
    torch.testing.assert_close(rows, F.layer_norm(shifted.detach(), (W,)), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["layer_norm", "batch_norm", "group_norm"])
def test_norms_of_large_and_small_rows_in_one_block(name: str) -> None:
    """Two rows of 64, or all channels of two rows, share a block of codes: the small ones keep their digits."""
    first, _ = _weights()
    size = torch.ones(B, T, W)
    size[:, ::2] = 1e4
    size[:, :, ::4] *= 1e4
    small = (size == 1).float()

    def forward() -> Tensor:
        return (NORMS[name]((X @ first) * size) * small * X).square().mean()

    check(forward, [first], 8, 0.03)


def test_attention_with_large_scores() -> None:
    """An error of .4 % of a score of 1e4 would be e ** 40 in the probabilities."""
    first, second = _weights()
    x = X.clone()
    x[0, 3, 5] = 1e4

    def forward() -> Tensor:
        q = (x @ first).view(B, T, 4, 16).transpose(1, 2)
        k = (x @ second).view(B, T, 4, 16).transpose(1, 2)
        return (F.scaled_dot_product_attention(q, k, q).transpose(1, 2).reshape(B, T, W) @ second).square().mean()

    check(forward, [first, second], 8)


@pytest.mark.parametrize("where", ["keys", "values"])
@pytest.mark.parametrize("mean", [10.0, 100.0])
def test_attention_whose_keys_or_values_have_a_large_mean(where: str, mean: float) -> None:
    """A part that all tokens share cancels in the gradient of the scores, so that codes must be of the rest."""
    first, second = _weights()
    shared = mean * torch.sign(torch.arange(W) % 2 - 0.5)

    def heads(x: Tensor) -> Tensor:
        return x.view(B, T, 4, 16).transpose(1, 2)

    def forward() -> Tensor:
        q, k, v = 0.1 * (X @ first), X @ second, X @ first
        k, v = (0.1 * (k + shared), v) if where == "keys" else (k, v + shared)
        y = F.scaled_dot_product_attention(heads(q), heads(k), heads(v)).transpose(1, 2).reshape(B, T, W)
        return (y * X @ second).square().mean()

    check(forward, [first, second], 8, 0.02)


# ---- one large value in a block


BESIDE: dict[str, Function] = {
    "mul": lambda h, w: h * (X @ w),
    "silu": lambda h, w: F.silu(h),
    "gelu": lambda h, w: F.gelu(h),
    "relu": lambda h, w: F.relu(h),
    "leaky_relu": lambda h, w: F.leaky_relu(h),
    "hardswish": lambda h, w: F.hardswish(h),
    "softplus": lambda h, w: F.softplus(h),
    "square": lambda h, w: h**2 / 8,
}


@pytest.mark.parametrize("name", BESIDE)
def test_elementwise_functions_of_the_others_beside_a_large_value(name: str) -> None:
    """Errors of the large value are left out: they would hide the others."""
    first, second = _weights()
    large = torch.zeros(B, T, W)
    large[:, ::2, 5] = 1e6

    def forward() -> Tensor:
        y = BESIDE[name](X @ first + large, second).masked_fill(large > 0, 0.0)
        return (y @ second).square().mean()

    check(forward, [first, second], 8)


def test_small_values_are_not_lost_but_beside_a_large_one() -> None:
    for x in (torch.randn(64, 64), F.relu(torch.randn(64, 64)), torch.randn(64, 64) * torch.randn(64, 64)):
        encoded = codecs.POWER.encode(x)
        assert encoded is not None
        assert not encoded.coarse
        x[3, 5] = 1e6
        encoded = codecs.POWER.encode(x)
        assert encoded is not None
        assert encoded.coarse
    sparse = torch.zeros(64, 64)
    sparse[:, 0] = 1.0
    encoded = codecs.POWER.encode(sparse)
    assert encoded is not None
    assert not encoded.coarse


# ---- which side of a limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [F.hardtanh, F.relu6, F.hardsigmoid])
def test_limits_take_one_exact_bit(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    (weight,) = _weights(1)
    x = (4 * X @ weight.detach()).to(dtype)
    x[0, 0, :4] = torch.tensor([-3.0, -1.0, 1.0, 3.0])
    last = nn.Linear(W, W, bias=False, dtype=dtype)

    def forward(bits: Any) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        with memkern.quantize_saved(bits) if bits else contextlib.nullcontext():
            loss = last(function(leaf * 1)).sum()
        return leaf, loss

    (expected, loss), (actual, coded) = forward(None), forward(8)
    loss.backward()
    codes = X.numel() // 8 + 1.04 * X.numel()  # the second of the product's argument
    assert memory.saved_bytes(lambda: forward(8)[1], last) <= codes + 128
    coded.backward()
    assert torch.equal(actual.grad, expected.grad)  # type: ignore[arg-type]


def test_limits_without_a_value_between_them() -> None:
    assert codecs.inside(100.0, 100.1, torch.bfloat16) is None
    for low, high in ((0.0, math.inf), (-math.inf, 0.0), (-1.0, 1.0), (0.0, 6.0)):
        codec = codecs.inside(low, high, torch.bfloat16)
        assert codec is not None
        x = torch.linspace(-8, 8, 130).bfloat16()
        encoded = codec.encode(x)
        assert encoded is not None
        y = codec.decode(encoded.data, codecs.Layout(x.shape, x.stride(), x.dtype), x.dtype)
        assert torch.equal((y > low) & (y < high), (x > low) & (x < high))


# ---- the version of a leaf is that of its use


@pytest.mark.parametrize("bits", ["exact", 8])
def test_a_leaf_that_is_changed_after_its_use(bits: Any) -> None:
    (weight,) = _weights(1)
    p = nn.Parameter(torch.zeros(W))

    def forward() -> Tensor:
        h = X @ weight
        a = F.silu(h)
        y = h + p
        with torch.no_grad():
            p.add_(5.0)
        return (a.sum() + y.sin().sum()) / y.numel()

    expected = torch.autograd.grad(forward(), [weight])
    with torch.no_grad():
        p.zero_()
    with memkern.quantize_saved(bits):
        loss = forward()
    assert _off(torch.autograd.grad(loss, [weight]), expected) < MOST[bits]


@pytest.mark.parametrize("bits", ["exact", 8])
def test_a_generator_that_is_stepped_before_the_discriminator(bits: Any) -> None:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(W, W), nn.LayerNorm(W))
    discriminator = nn.Sequential(nn.Linear(W, W), nn.GELU(), nn.Linear(W, 1))
    before = {name: p.detach().clone() for name, p in generator.named_parameters()}

    def gradients(bits: Any) -> Any:
        generator.load_state_dict(before)
        with memkern.quantize_saved(bits) if bits else contextlib.nullcontext():
            fake = generator(X)
            with torch.no_grad():
                for p in generator.parameters():
                    p.add_(3.0)
            loss = discriminator(fake).square().mean()
        return torch.autograd.grad(loss, list(discriminator.parameters()))

    assert _off(gradients(bits), gradients(None)) < MOST[bits]


def test_a_cast_of_a_leaf_that_is_changed_before_the_cast_is_used() -> None:
    (weight,) = _weights(1)
    x = X.bfloat16().requires_grad_()
    with memkern.quantize_saved("exact"):
        copy = weight.bfloat16()
        with torch.no_grad():
            weight.add_(1.0)
        y = (x @ copy).sum()
    expected = copy.detach().float().sum(1).expand(B, T, W)
    assert _off(torch.autograd.grad(y, [x]), [expected]) < 0.01


# ---- casts, norms without a weight, functions of other people


@pytest.mark.parametrize("bits", ["exact", 8])
def test_casts_down_and_up_again(bits: Any) -> None:
    first, second = _weights()

    def forward() -> Tensor:
        h = X @ first
        return (h.bfloat16().float() @ second).square().mean() + (h * h.sin()).mean()

    check(forward, [first, second], bits)


@pytest.mark.parametrize("bits", ["exact", 8])
@pytest.mark.parametrize(("has_weight", "has_bias"), [(False, True), (True, False), (True, True), (False, False)])
def test_layer_norm_with_or_without_weight_and_bias(bits: Any, has_weight: bool, has_bias: bool) -> None:
    first, second = _weights()
    weight = nn.Parameter(torch.randn(W)) if has_weight else None
    bias = nn.Parameter(torch.randn(W)) if has_bias else None
    leaves = [first, second, *(p for p in (weight, bias) if p is not None)]
    check(lambda: (F.layer_norm(X @ first, (W,), weight, bias) @ second).square().mean(), leaves, bits)


class _Theirs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.activation = "silu"
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        assert ctx.saved_tensors[0].shape == grad.shape
        return grad * 2


@pytest.mark.parametrize("bits", ["exact", 8])
@pytest.mark.parametrize("name", ["Glu", "Recompute", "FewBit"])
def test_functions_are_told_by_their_class_and_not_by_its_name(name: str, bits: Any) -> None:
    first, second = _weights()
    theirs = type(name, (_Theirs,), {})

    def forward() -> Tensor:
        h = X @ first
        return (theirs.apply(h) @ second).square().mean() + h.cos().mean()

    assert users.operation(theirs.apply(X @ first).grad_fn) == ""
    check(forward, [first, second], bits)


def test_memkern_s_functions_are_known() -> None:
    x = X.clone().requires_grad_()
    assert users.operation(memkern.functional.swiglu(x).grad_fn) == "memkern.Glu"
    assert users.operation(Recompute.apply(x, torch.tanh).grad_fn) == "memkern.Recompute"
    assert issubclass(Glu.eager, Glu)
    assert users.operation(memkern.functional.gelu(x).grad_fn) == "memkern.FewBit"


# ---- what may wait


def test_what_no_operation_uses_later_is_freed() -> None:
    """A value that waits for its user is held by the graph alone."""
    first, _ = _weights()

    def forward() -> None:
        with memkern.quantize_saved(8):
            for _ in range(100):
                F.silu(X @ first)

    assert memory.saved_bytes(forward, first, X) == 0


def test_a_module_s_result_shows_the_last_user() -> None:
    """The last product of a compressed model is found from the result."""

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(_weights())

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"y": (F.gelu(x @ self.weights[0]) @ self.weights[1])[..., :1]}

    model = Products()
    memkern.compress(model, saved_bits=8)
    held = [X, *model.parameters()]
    assert memory.saved_bytes(lambda: model(X)["y"], *held) <= 1.04 * X.numel() + 4 * B * T * W + 64
