"""The fused MLP: torch's gradients where it is exact, and no more bytes than its mode needs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from memkern import functional, nn
from memkern.memory import saved_bytes
from tests.support.helpers import assert_same, on, over_cpu

KEEPS = ("codes", "output", "input")
over_keeps = pytest.mark.parametrize("keep", KEEPS)
over_approximate = pytest.mark.parametrize("approximate", ["none", "tanh"])


def arguments(bias: bool = True, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (3, 5, 16)) -> list:
    generator = torch.Generator().manual_seed(0)
    shapes = [shape, (40, 16), (40,), (12, 40), (12,)]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    tensors = [t * s for t, s in zip(tensors, (1.0, 0.3, 0.1, 0.3, 0.1), strict=True)]
    return [t.requires_grad_() if bias or i not in (2, 4) else None for i, t in enumerate(tensors)]


def plain(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, approximate: str) -> Tensor:
    return F.linear(F.gelu(F.linear(x, w1, b1), approximate=approximate), w2, b2)


def with_gradients(fn: Any, args: list, *options: Any, **more: Any) -> list[Tensor]:
    y = fn(*args, *options, **more)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [a for a in args if a is not None and a.requires_grad], grad)]


@over_approximate
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 16), (7, 16), (16,), (0, 16)])
def test_keep_input_is_torchs(approximate: str, bias: bool, shape: tuple[int, ...]) -> None:
    args = arguments(bias, shape=shape)
    expected = with_gradients(plain, args, approximate)
    actual = with_gradients(functional.mlp, args, approximate, keep="input")
    for a, b in zip(actual, expected, strict=True):
        # Of weights, the products' sums are in another order than autograd's: some ulp of their largest terms.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert_same(actual[0], expected[0])


@over_approximate
def test_gradcheck(approximate: str) -> None:
    args = arguments(dtype=torch.float64, shape=(2, 16))
    assert torch.autograd.gradcheck(lambda *a: functional.mlp(*a, approximate, keep="input"), args)


@over_cpu
@over_approximate
@pytest.mark.parametrize("bits", [1, 3, 4])
def test_keep_codes_is_the_layers_one_by_one(backend: str, approximate: str, bits: int) -> None:
    args = arguments()
    with on(backend):
        actual = with_gradients(functional.mlp, args, approximate, bits=bits)
        expected = with_gradients(
            lambda x, w1, b1, w2, b2: F.linear(functional.gelu(F.linear(x, w1, b1), approximate, bits=bits), w2, b2),
            args,
        )
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # sums in another order, as above


@over_cpu
@over_approximate
def test_keep_output_is_close_to_torchs(backend: str, approximate: str) -> None:
    args = arguments()
    with on(backend):
        actual = with_gradients(functional.mlp, args, approximate, keep="output")
    for a, b in zip(actual, with_gradients(plain, args, approximate), strict=True):
        assert (a - b).norm() <= 3e-4 * b.norm()  # of the polynomials: docs/activations.md


@over_keeps
def test_what_is_kept(keep: str) -> None:
    x, w1, b1, w2, b2 = arguments(shape=(64, 16))
    numel, parameters = 64 * 40, w1.nbytes + w2.nbytes
    expected = {"codes": 4 * numel + 3 * numel / 8, "output": 4 * numel + numel / 8, "input": 4 * numel}[keep]
    kept = saved_bytes(lambda: functional.mlp(x, w1, b1, w2, b2, keep=keep)) - x.nbytes - parameters
    assert 0 <= kept - expected <= 64
    assert kept < saved_bytes(lambda: plain(x, w1, b1, w2, b2, "none")) - x.nbytes - parameters


@over_keeps
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (4,), (1, 2), (3, 4)])
def test_only_what_is_wanted_is_kept(keep: str, wanted: tuple[int, ...]) -> None:
    args = [a.detach() for a in arguments(shape=(64, 16))]
    for i in wanted:
        args[i].requires_grad_()
    every = with_gradients(functional.mlp, arguments(shape=(64, 16)), keep=keep)
    actual = with_gradients(functional.mlp, args, keep=keep)
    for i, dx in zip(wanted, actual[1:], strict=True):
        torch.testing.assert_close(dx, every[1 + i])
    kept = saved_bytes(lambda: functional.mlp(*args, keep=keep))
    hidden, weights = 64 * 40 * 4, 40 * 16 * 4 + 12 * 40 * 4
    if wanted == (4,):
        assert kept == 0
    elif wanted in ((3,), (3, 4)):
        assert kept == hidden
    elif keep != "output":
        assert kept <= (hidden if keep == "input" else hidden * 3 / 32 + 64) + args[0].nbytes + weights


@over_keeps
def test_meta_tensors_have_no_autocast(keep: str) -> None:
    args = [a.to("meta").detach().requires_grad_() for a in arguments()]
    y = functional.mlp(*args, keep=keep)
    y.sum().backward()
    assert y.is_meta
    assert args[0].grad.shape == args[0].shape


def test_nothing_is_kept_without_gradients() -> None:
    args = arguments()
    with torch.no_grad():
        assert saved_bytes(lambda: functional.mlp(*args)) == 0
        assert_same(functional.mlp(*args, keep="input"), plain(*args, "none"))


@over_keeps
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_and_a_second_walk(keep: str, reentrant: bool) -> None:
    module = nn.MLP(16, 40, 12, keep=keep)
    x = torch.randn(5, 16, requires_grad=True)
    y = module(x)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert_same(torch.autograd.grad(y.sum(), x), first)
    checkpoint(module, x, use_reentrant=reentrant).sum().backward()
    assert_same(x.grad, first[0])


@over_keeps
def test_double_backward_raises(keep: str) -> None:
    args = arguments()
    (dx,) = torch.autograd.grad(functional.mlp(*args, keep=keep).sum(), args[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dx.sum().backward()


@over_keeps
def test_compile_without_a_graph_break(keep: str) -> None:
    torch._dynamo.reset()
    module = nn.MLP(16, 40, 12, approximate="tanh", keep=keep)
    args = [torch.randn(5, 16, requires_grad=True)]
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for a, b in zip(with_gradients(compiled, args), with_gradients(module, args), strict=True):
        torch.testing.assert_close(a, b)


@over_keeps
def test_autocast_as_torchs(keep: str) -> None:
    args = arguments()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = with_gradients(functional.mlp, args, keep=keep, bits=4)
        expected = with_gradients(plain, args, "none")
    assert_same(actual[0], expected[0])
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).float().norm() <= 0.05 * b.float().norm()


def test_module() -> None:
    module = nn.MLP(16, 40, bias=False, approximate="tanh", bits=2, keep="output", dtype=torch.bfloat16)
    assert [*module.state_dict()] == ["fc1.weight", "fc2.weight"]
    assert module.fc2.weight.shape == (16, 40)
    assert module.fc1.weight.dtype == torch.bfloat16
    assert "bits=2, keep='output'" in repr(module)
    x = torch.randn(5, 16, dtype=torch.bfloat16)
    assert_same(module(x), plain(x, module.fc1.weight, None, module.fc2.weight, None, "tanh"))
