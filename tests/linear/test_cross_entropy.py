"""linear_cross_entropy has the loss and gradients of F.linear and F.cross_entropy, without all logits in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from memkern import memory
from memkern.functional import linear_cross_entropy
from memkern.nn import LinearCrossEntropy
from tests.support.helpers import assert_same, name_of

ROWS, FEATURES, CLASSES = 60, 24, 37
IGNORED = -100


def problem(dtype: torch.dtype = torch.float64, bias: bool = True, shape: Any = (ROWS,)) -> tuple[Any, ...]:
    """input, weight, bias (or None) as leaves, and a target with ignored rows."""
    x = torch.randn(*shape, FEATURES, dtype=torch.float64)
    weight, b = torch.randn(CLASSES, FEATURES, dtype=torch.float64), torch.randn(CLASSES, dtype=torch.float64)
    target = torch.randint(CLASSES, shape)
    target.view(-1)[::7] = IGNORED
    leaves = [t.to(dtype).requires_grad_() for t in (x, weight, b)]
    return leaves[0], leaves[1], leaves[2] if bias else None, target


def torch_loss(x: Tensor, linear_weight: Tensor, bias: Tensor | None, target: Tensor, **options: Any) -> Tensor:
    """torch's two functions, with the logits in fp32 at least."""
    logits = F.linear(x, linear_weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if options.get("weight") is not None:
        options["weight"] = options["weight"].to(logits.dtype)
    loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1), **options)
    return loss.view(target.shape) if options.get("reduction") == "none" else loss


def with_gradients(loss: Tensor, leaves: list[Tensor | None]) -> list[Tensor]:
    """The loss, and the leaves' gradients for gradients of the loss from 0.5 to 2."""
    upstream = torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)
    return [loss, *torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None], upstream)]


def by_both(*leaves_and_target: Any, chunk_size: int | None = 10, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The loss and the gradients by linear_cross_entropy, and by torch's two functions."""
    x, weight, bias, target = leaves_and_target
    ours = linear_cross_entropy(x, weight, target, linear_bias=bias, chunk_size=chunk_size, **options)
    theirs = torch_loss(x, weight, bias, target, **options)
    return with_gradients(ours, [x, weight, bias]), with_gradients(theirs, [x, weight, bias])


def assert_no_further(ours: list[Tensor], theirs: list[Tensor], truth: list[Tensor], slack: float = 0) -> None:
    """The loss and the gradients are about as near to the truth as torch's.

    In half precision each chunk's part of the input's gradient is rounded, and then the parts are added in fp32. torch
    rounds the sum alone.
    """
    for name, a, b, t in zip(("loss", "input", "weight", "bias"), ours, theirs, truth, strict=True):
        error, allowed = ((g.double() - t).norm() for g in (a, b))
        assert error <= (1.5 if name == "input" else 1.05) * allowed + slack * t.norm(), name


# ---- the loss and the gradients


@pytest.mark.pairwise
@pytest.mark.parametrize("weighted", [False, True], ids=["", "class weights"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_equals_torch_in_fp64(bias: bool, reduction: str, smoothing: float, weighted: bool) -> None:
    w = torch.rand(CLASSES, dtype=torch.float64) + 0.1 if weighted else None
    ours, theirs = by_both(*problem(bias=bias), reduction=reduction, label_smoothing=smoothing, weight=w)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("chunk_size", [1, 10, CLASSES - 1, CLASSES, 1000, None])
@pytest.mark.parametrize("shape", [(ROWS,), (4, 15), (), (2, 3, 5)], ids=str)
def test_equals_torch_for_any_shape_and_chunk(shape: tuple[int, ...], chunk_size: int | None) -> None:
    x, weight, bias, target = problem(shape=shape)
    target.view(-1)[0] = 3
    ours, theirs = by_both(x, weight, bias, target, chunk_size=chunk_size, reduction="none", label_smoothing=0.1)
    assert ours[0].shape == target.shape
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name_of)
def test_no_further_from_the_truth_than_torch(dtype: torch.dtype, smoothing: float) -> None:
    """In half precision both losses round the logits to it and then compute in fp32."""
    *leaves, target = problem(dtype)
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    truth = by_both(*doubles, target, label_smoothing=smoothing)[1]
    ours, theirs = by_both(*leaves, target, label_smoothing=smoothing)
    assert [t.dtype for t in ours] == [torch.float32, *[dtype] * 3]
    assert_no_further(ours, theirs, truth, 2e-7)  # two ulps of fp32, for where torch's result is exact by chance


@pytest.mark.pairwise
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk_size", [1, 10, CLASSES])
@pytest.mark.parametrize("offset", [0.0, 100.0, -1000.0, 1000.0])
def test_rows_that_are_nearly_solved_where_logits_are_large(offset: float, chunk_size: int, smoothing: float) -> None:
    """Without smoothing a row's loss is 4e-6, and fp32 numbers near 1000 are 6e-5 apart. The logits are exact here."""
    x, weight, _, target = problem(torch.float32, bias=False)
    x, weight = x.detach().mul(8).round() / 64, weight.detach().mul(8).round() / 64
    hot = F.one_hot(target.clamp(min=0), CLASSES) * 16.0
    x = torch.cat([x, hot], 1)
    weight = torch.cat([weight, torch.eye(CLASSES)], 1)
    leaves = [t.requires_grad_() for t in (x, weight, torch.full((CLASSES,), offset))]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    options: dict[str, Any] = {"label_smoothing": smoothing, "chunk_size": chunk_size}
    truth = by_both(*doubles, target, **options)[1]
    for ours, theirs, t in zip(*by_both(*leaves, target, **options), truth, strict=True):
        # The sum of a row's exp(logit - largest logit) is 1 + 4e-6, and its ulp 3 % of the loss. Added in another order
        # than torch's, the sum changes gradients by 2.5 % with AVX2, by less with AVX-512. Saved as one number with
        # the largest logit, it would change them by 100 % and more.
        assert (ours - t).norm() <= 2 * (theirs - t).norm() + 2e-2 * t.norm()


@pytest.mark.parametrize("needs", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)], ids=str)
def test_only_what_is_asked_for_has_a_gradient(needs: tuple[int, ...]) -> None:
    x, weight, bias, target = problem()
    leaves = [t.detach().requires_grad_(bool(n)) for t, n in zip((x, weight, bias), needs, strict=True)]
    loss = linear_cross_entropy(leaves[0], leaves[1], target, linear_bias=leaves[2], chunk_size=10)
    assert loss.requires_grad == any(needs)
    if any(needs):
        loss.backward()
    for leaf, n in zip(leaves, needs, strict=True):
        assert (leaf.grad is not None) == bool(n)


def test_a_tied_weight_has_torchs_gradient() -> None:
    """The embedding's gradient is the sum of both uses."""
    tokens, target = torch.randint(CLASSES, (20,)), torch.randint(CLASSES, (20,))
    grads = []
    for chunked in (True, False):
        torch.manual_seed(1)
        embedding = nn.Embedding(CLASSES, FEATURES, dtype=torch.float64)
        loss_fn = LinearCrossEntropy(FEATURES, CLASSES, dtype=torch.float64, chunk_size=10)
        loss_fn.linear.weight = embedding.weight
        x = torch.tanh(embedding(tokens))
        (loss_fn(x, target) if chunked else torch_loss(x, embedding.weight, None, target)).backward()
        grads.append(embedding.weight.grad)
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-13)


def test_a_loss_without_rows_that_count_is_torchs() -> None:
    x, weight, bias, target = problem()
    target.fill_(IGNORED)
    for reduction in ("mean", "sum", "none"):
        ours, theirs = by_both(x, weight, bias, target, reduction=reduction)
        # The mean of nothing is NaN, as torch's.
        torch.testing.assert_close(ours[0], theirs[0], equal_nan=True)
        assert not any(g.any() for g in ours[1:])


def test_another_ignore_index_and_no_rows_give_torchs_loss() -> None:
    ours, theirs = by_both(*problem()[:3], torch.randint(3, (ROWS,)), ignore_index=2)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    x, weight, bias, target = problem(shape=(0,))
    ours, theirs = by_both(x, weight, bias, target, reduction="sum")
    torch.testing.assert_close(ours, theirs)


def test_infinite_logits_give_torchs_loss() -> None:
    """Of a class with a bias of -inf; and of ignored rows without a finite logit."""
    x, weight, bias, target = problem()
    with torch.no_grad():
        bias[5] = -torch.inf
        target[target == 5] = 6
    ours, theirs = by_both(x, weight, bias, target)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    with torch.no_grad():
        bias.fill_(-torch.inf)
    target.fill_(IGNORED)
    assert linear_cross_entropy(x, weight, target, linear_bias=bias, reduction="sum") == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_autocast_is_no_further_from_the_truth_than_torch(dtype: torch.dtype) -> None:
    x, weight, bias, target = problem(torch.float32)
    with torch.autocast("cpu", dtype):
        ours = linear_cross_entropy(x, weight, target, linear_bias=bias, chunk_size=10)
        theirs = torch_loss(x, weight, bias, target)
    assert ours.dtype == torch.float32
    truth = with_gradients(torch_loss(*(t.double() for t in (x, weight, bias)), target), [x, weight, bias])
    a, b = (with_gradients(loss, [x, weight, bias]) for loss in (ours, theirs))
    assert all(g.dtype == torch.float32 for g in a)
    assert_no_further(a, b, truth)


def test_a_scalers_factor_reaches_the_logits_gradients() -> None:
    """Without the scale many of the logits' gradients, p / rows, are too small for fp16, as with torch's loss."""
    x, weight, _, _ = problem(torch.float16, shape=(4096,))
    target = torch.randint(CLASSES, (4096,))
    scale = 2.0**16
    grads = []
    for loss in (linear_cross_entropy(x, weight, target, chunk_size=10), torch_loss(x, weight, None, target)):
        (g,) = torch.autograd.grad(loss * scale, x)
        grads.append(g.double() / scale)
    truth = torch.autograd.grad(torch_loss(x.double(), weight.double(), None, target), x)[0].double()
    ours, theirs = ((g - truth).norm() for g in grads)
    assert ours <= 1.5 * theirs
    assert ours < 0.01 * truth.norm()


def test_the_second_derivative_raises() -> None:
    x, weight, bias, target = problem()
    loss = linear_cross_entropy(x, weight, target, linear_bias=bias)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"linear_cross_entropy .* no second derivative"):
        grad.sum().backward()


def test_backward_twice_with_a_retained_graph() -> None:
    x, weight, bias, target = problem()
    loss = linear_cross_entropy(x, weight, target, linear_bias=bias, chunk_size=10)
    first = torch.autograd.grad(loss, [x, weight, bias], retain_graph=True)
    assert_same(torch.autograd.grad(loss, [x, weight, bias]), first)


@pytest.mark.usefixtures("fresh_compiler")
def test_compile_without_a_graph_break() -> None:
    x, *_, target = problem()
    loss_fn = LinearCrossEntropy(FEATURES, CLASSES, True, dtype=torch.float64, chunk_size=10)
    compiled = torch.compile(loss_fn, fullgraph=True, backend="aot_eager")
    leaves = [x, loss_fn.linear.weight, loss_fn.linear.bias]
    assert_same(with_gradients(compiled(x, target), leaves), with_gradients(loss_fn(x, target), leaves))


# ---- memory

BIG_ROWS, BIG_CLASSES, BIG_CHUNK = 256, 8192, 512


def big(dtype: torch.dtype) -> tuple[LinearCrossEntropy, Tensor, Tensor]:
    loss_fn = LinearCrossEntropy(FEATURES, BIG_CLASSES, dtype=dtype, chunk_size=BIG_CHUNK)
    x = torch.randn(BIG_ROWS, FEATURES, dtype=dtype, requires_grad=True)
    return loss_fn, x, torch.randint(BIG_CLASSES, (BIG_ROWS,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_a_few_numbers_are_saved_for_each_row(dtype: torch.dtype) -> None:
    loss_fn, x, target = big(dtype)
    # Bytes of a row's target, factor, largest logit and logarithm of the sum; and of the sum of the rows' weights.
    assert memory.saved_bytes(lambda: loss_fn(x, target), loss_fn, x) <= BIG_ROWS * (8 + 4 + 4 + 4) + 4


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_the_peak_has_two_chunks_of_logits(dtype: torch.dtype, smoothing: float) -> None:
    loss_fn, x, target = big(dtype)
    loss_fn.label_smoothing = smoothing
    weight = loss_fn.linear.weight
    leaf_bytes = memory.tensor_bytes([weight, x])
    chunk_bytes = BIG_ROWS * BIG_CHUNK * 4
    bf16_chunk_bytes = chunk_bytes // 2 if dtype == torch.bfloat16 else 0
    row_bytes = 40 * BIG_ROWS * FEATURES  # an allowance for a few numbers per row, and the input's gradient in fp32
    peak = memory.peak_bytes(lambda: loss_fn(x, target).backward(), loss_fn, x)
    assert peak <= 2 * leaf_bytes + 2 * chunk_bytes + bf16_chunk_bytes + row_bytes  # leaves and their gradients
    run_torch = lambda: torch_loss(x, weight, None, target, label_smoothing=smoothing).backward()  # noqa: E731
    # torch has the logits and their gradient.
    assert memory.peak_bytes(run_torch, loss_fn, x) >= leaf_bytes + 2 * BIG_ROWS * BIG_CLASSES * 4


def test_no_autocast_copy_of_the_weight() -> None:
    loss_fn, x, target = big(torch.float32)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss_fn(x, target)

    leaf_bytes = memory.tensor_bytes([loss_fn.linear.weight, x])
    # As in test_the_peak_has_two_chunks_of_logits.
    chunk_bytes, row_bytes = BIG_ROWS * BIG_CHUNK * 4, 40 * BIG_ROWS * FEATURES
    assert memory.peak_bytes(run, loss_fn, x) <= leaf_bytes + 2.5 * chunk_bytes + row_bytes


def test_runs_on_fake_tensors() -> None:
    """memkern.plan counts the bytes of the loss on them."""
    with FakeTensorMode():
        loss_fn, x, target = big(torch.bfloat16)
        loss_fn(x, target).backward()
    assert x.grad.shape == x.shape


def test_nothing_is_saved_without_gradients() -> None:
    loss_fn, x, target = big(torch.float32)
    with torch.no_grad():
        assert not loss_fn(x, target).requires_grad
        assert memory.live_bytes_after(lambda: loss_fn(x, target), loss_fn, x, target) <= 8


# ---- the module and bad input


def test_the_module_has_torchs_loss_and_state_dict() -> None:
    loss_fn = LinearCrossEntropy(FEATURES, CLASSES, True, weight=torch.rand(CLASSES), label_smoothing=0.1)
    assert [*loss_fn.state_dict()] == ["weight", "linear.weight", "linear.bias"]
    x, _, _, target = problem(torch.float32)
    linear, options = loss_fn.linear, {"weight": loss_fn.weight, "label_smoothing": 0.1}
    expected = torch_loss(x, linear.weight, linear.bias, target, **options)
    torch.testing.assert_close(loss_fn(x, target), expected)
    assert "label_smoothing=0.1" in repr(loss_fn)


def test_from_linear_has_the_layers_parameters() -> None:
    linear = nn.Linear(FEATURES, CLASSES)
    loss_fn = LinearCrossEntropy.from_linear(linear, reduction="sum")
    assert loss_fn.linear is linear
    assert [*loss_fn.parameters()] == [*linear.parameters()]
    x, _, _, target = problem(torch.float32)
    expected = torch_loss(x, linear.weight, linear.bias, target, reduction="sum")
    torch.testing.assert_close(loss_fn(x, target), expected)


class Adapted(nn.Linear):
    """A linear layer that adds something, as loralib's."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + input.sum(-1, keepdim=True)


@pytest.mark.parametrize("module", [nn.Embedding(3, 3), Adapted(3, 3)], ids=["no linear layer", "more than one"])
def test_from_linear_refuses_what_is_not_weight_and_bias_alone(module: Any) -> None:
    with pytest.raises(TypeError, match=rf"linear must be a torch\.nn\.Linear, .*, got .*{type(module).__name__}"):
        LinearCrossEntropy.from_linear(module)


X, W, T = torch.zeros(4, 8), torch.zeros(5, 8), torch.zeros(4, dtype=torch.long)
# (input, weight, target), options, the error and its message
BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "reduction": ((X, W, T), {"reduction": "batchmean"}, ValueError, "reduction must be one of .*'batchmean'"),
    "smoothing": ((X, W, T), {"label_smoothing": 1.1}, ValueError, "label_smoothing must be .* 0 to 1, got 1.1"),
    "chunk": ((X, W, T), {"chunk_size": 0}, ValueError, "chunk_size must be None or .* got 0"),
    "weight's dimensions": ((X, W[0], T), {}, ValueError, r"linear_weight must be of shape \(classes, in\), got \(8,"),
    "features": ((X[:, :7], W, T), {}, ValueError, r"input must be of shape \(\.\.\., 8\) .* got \(4, 7\)"),
    "probabilities": ((X, W, T.float()), {}, TypeError, "target must be class indices.*got torch.float32"),
    "target's shape": ((X, W, T[:3]), {}, ValueError, r"target must be of shape \(4,\) .* got \(3,\)"),
    "bias": ((X, W, T), {"linear_bias": W[0]}, ValueError, r"linear_bias must be of shape \(5,\).* got \(8,\)"),
    "class weights": ((X, W, T), {"weight": W[0]}, ValueError, r"weight must be of shape \(5,\).* got \(8,\)"),
    "target too large": ((X, W, T + 5), {}, IndexError, "target must be from 0 to 4, or ignore_index, got 5"),
    "target negative": ((X, W, T - 1), {}, IndexError, "target must be from 0 to 4, or ignore_index, got -1"),
    "dtypes": ((X.half(), W, T), {}, TypeError, "must have the same dtype, got torch.float16 and torch.float32"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str) -> None:
    args, options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        linear_cross_entropy(*args, **options)


def test_a_bad_option_of_the_module() -> None:
    with pytest.raises(ValueError, match="reduction must be one of"):
        LinearCrossEntropy(3, 4, reduction="batchmean")
