"""Inputs of checkpoints: exact, or in codes with which the forward pass goes on, too."""

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memkern
from memkern import memory
from memkern.quant.blockwise import dequantize_blockwise, quantize_blockwise

Function = Callable[[Tensor], Tensor]
# A function of a checkpoint, and what makes its input. From rounded inputs each is another function.
PROGRAMS: dict[str, tuple[Function, Function]] = {
    "log of energies": (lambda e: e.log(), lambda h: h * h),
    "normalized": (
        lambda h: h / (h - h.mean(-1, keepdim=True)).norm(dim=-1, keepdim=True),
        lambda h: h * 0.01 + 5,
    ),
    "amax": (lambda h: h.amax(-1), lambda h: h * 1.0),
    "sine": (lambda h: torch.sin(50 * h).sum(-1), lambda h: h * 1.0),
    "top-k": (lambda h: h * (h >= h.topk(4, -1).values[..., -1:]), lambda h: h * 1.0),
    "rounded": (lambda h: h * (h * 8).round(), lambda h: h * 1.0),
}


def gradient(name: str, bits: Any, reentrant: bool) -> Tensor:
    torch.manual_seed(0)
    weight, x = (torch.randn(64, 64) / 2).requires_grad_(), torch.randn(256, 64)
    inside, before = PROGRAMS[name]

    def loss() -> Tensor:
        y = checkpoint(inside, before(x @ weight), use_reentrant=reentrant)
        return (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum()

    if bits is None:
        loss().backward()
    else:
        with memkern.quantize_saved(bits):
            total = loss()
        total.backward()
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("bits", ["exact", 8])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_checkpoint_recomputes_from_the_very_input(name: str, bits: Any, reentrant: bool) -> None:
    expected = gradient(name, None, reentrant)
    error = (gradient(name, bits, reentrant) - expected).norm() / expected.norm()
    assert error < (1e-6 if bits == "exact" else 0.01)  # what is before the checkpoint has codes


# ---- checkpoint_blocks(bits=8)


class Router(nn.Module):
    """A block that chooses its experts: near ties, rounded inputs choose others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 8, bias=False)
        self.experts = nn.Parameter(torch.randn(8, width, width) / width**0.5)
        self.chosen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        best = scores.topk(2, -1)
        self.chosen.append(best.indices)
        y = torch.einsum("...w,...kwv->...kv", x, self.experts[best.indices])
        return x + (best.values.softmax(-1).unsqueeze(-1) * y).sum(-2)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Router(32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def routed(bits: int | None, how: str | None = "blocks") -> Routed:
    torch.manual_seed(0)
    model = Routed()
    if how is not None:
        memkern.checkpoint_blocks(model, how, bits=bits)
    return model


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


X = torch.randn(64, 16, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("how", ["blocks", "sqrt"])
def test_both_passes_decide_alike(how: str) -> None:
    model = routed(8, how)
    gradients(model, X)
    for block in model.blocks:
        forward, again = block.chosen
        assert torch.equal(forward, again)
    plain = routed(None, None)
    plain(X)
    # The test can fail: with exact inputs some tokens have other experts.
    assert any(
        not torch.equal(block.chosen[0], other.chosen[0])
        for block, other in zip(model.blocks, plain.blocks, strict=True)
    )


class Rounded(torch.autograd.Function):
    """What a checkpoint in 8 bits computes with, by the public functions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return dequantize_blockwise(*quantize_blockwise(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_the_gradient_is_that_of_the_model_with_rounded_inputs() -> None:
    model, twin = routed(8), routed(None, None)
    for block in twin.blocks:
        block.register_forward_pre_hook(lambda _, args: (Rounded.apply(args[0]), *args[1:]))
    assert torch.equal(model(X), twin(X))
    found, expected = gradients(model, X), gradients(twin, X)
    assert found.keys() == expected.keys()
    for name in found:
        assert torch.equal(found[name], expected[name]), name


def test_bytes_of_inputs_in_codes() -> None:
    models = [routed(bits) for bits in (None, 8)]
    exact, codes = (memory.saved_bytes(lambda model=model: model(X).sum()) for model in models)
    assert exact - codes == pytest.approx(4 * X.numel() * (4 - (1 + 4 / 128)), rel=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model, twin = routed(8).to(dtype), routed(None).to(dtype)
    x = X.to(dtype)
    assert model(x).dtype == dtype
    found, expected = gradients(model, x), gradients(twin, x)
    name = "blocks.3.experts"
    assert (found[name] - expected[name]).norm() < 0.1 * expected[name].norm()


def test_float64_is_exact() -> None:
    assert torch.equal(routed(8).double()(X.double()), routed(None, None).double()(X.double()))


def test_without_gradients_nothing_is_rounded() -> None:
    with torch.no_grad():
        assert torch.equal(routed(8)(X), routed(None, None)(X))


def test_codes_leave_the_device_with_what_is_saved() -> None:
    model, twin = routed(8), routed(8)
    memkern.compress(twin, saved_bits=8, offload=True)
    found, expected = gradients(twin, X), gradients(model, X)
    name = "blocks.3.experts"
    assert (found[name] - expected[name]).norm() < 0.02 * expected[name].norm()


def test_bits_are_none_or_8() -> None:
    with pytest.raises(memkern.OptionError, match="bits: 4 given; allowed: None, 8"):
        memkern.checkpoint_blocks(Routed(), "blocks", bits=4)
    with pytest.raises(memkern.OptionError, match="checkpoint_bits: 8 given; allowed: None without checkpointing"):
        memkern.Techniques(checkpoint_bits=8)


class Returns(nn.Module):
    """A model whose blocks return a tensor in a tuple, with something beside it."""

    def __init__(self, beside: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(ReturnsBlock(beside) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, *_ = block(x)
        return x


class ReturnsBlock(nn.Module):
    def __init__(self, beside: Any) -> None:
        super().__init__()
        self.linear, self.beside = nn.Linear(32, 32), beside

    def forward(self, x: Tensor) -> Any:
        out = self.linear(x).tanh()
        return (out, *self.beside(out))


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("beside", [lambda x: (), lambda x: (None,), lambda x: (None, None)])
def test_blocks_that_return_tuples(beside: Any, bits: Any) -> None:
    """As checkpoints around every block give, in each of two steps and after one that was interrupted."""
    expected, model = Returns(beside), Returns(beside)
    memkern.checkpoint_blocks(model, "sqrt", bits=bits)
    with pytest.raises(RuntimeError):
        model(X[..., :31])
    for _ in range(2):
        found = gradients(model, X)
        if bits is None:
            assert all(torch.equal(found[name], grad) for name, grad in gradients(expected, X).items())
        assert found.keys() == gradients(expected, X).keys()
    assert torch.equal(model(X), model(X))


def test_blocks_that_return_two_tensors_are_refused_by_groups() -> None:
    model = Returns(lambda x: (x + 1,))
    memkern.checkpoint_blocks(model, "sqrt")
    with pytest.raises(RuntimeError, match=r"return more than one tensor; checkpointing='blocks' does not mind"):
        model(X)
    other, plain = Returns(lambda x: (x + 1,)), Returns(lambda x: (x + 1,))
    memkern.checkpoint_blocks(other, "blocks")
    expected = gradients(plain, X)
    assert all(torch.equal(grad, expected[name]) for name, grad in gradients(other, X).items())


class Output(NamedTuple):
    hidden: Tensor
    attention: Any = None


class Named(ReturnsBlock):
    def forward(self, x: Tensor) -> Any:
        return Output(*super().forward(x))


def test_blocks_that_return_named_tuples() -> None:
    expected, model = Returns(lambda x: ()), Returns(lambda x: ())
    model.blocks = nn.ModuleList(Named(lambda x: ()) for _ in range(7))
    model.load_state_dict(expected.state_dict())
    memkern.checkpoint_blocks(model, "sqrt")
    for _ in range(2):
        found = gradients(model, X)
        assert all(torch.equal(found[name], grad) for name, grad in gradients(expected, X).items())


def returns_nothing_else(x: Tensor) -> tuple[()]:
    return ()


@pytest.mark.parametrize("was_called", [False, True])
@pytest.mark.parametrize("how", ["blocks", "sqrt"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch's own tree structures, when they are pickled
def test_a_copy_runs_its_own_blocks(duplicate: Callable[[nn.Module], nn.Module], how: str, was_called: bool) -> None:
    """As an average of weights does, which begins as a copy."""
    model = Returns(returns_nothing_else)
    memkern.checkpoint_blocks(model, how)
    if was_called:
        model(X)
    before, copied = model(X), duplicate(model)
    assert torch.equal(copied(X), before)
    model.blocks[0](X.clone().requires_grad_() * 1.0)  # a forward pass that ends after one block
    assert torch.equal(duplicate(model)(X), before)
    with torch.no_grad():
        for p in copied.parameters():
            p.zero_()
    grads = gradients(copied, X)
    assert torch.equal(copied(X), torch.zeros_like(before))
    assert grads
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(model(X), before)
