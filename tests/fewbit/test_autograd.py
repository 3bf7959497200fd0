"""Few-bit activations save as many bits as they say; they work with autograd, autocast, checkpoints, torch.compile;
their modules are torch's modules with few bits.
"""

import copy
import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from memkern import functional, nn
from memkern.fewbit.tables import LEVELS
from memkern.memory import saved_bytes
from tests.support.activation_helpers import ACTIVATIONS, gradients, over_activations, values
from tests.support.helpers import assert_same, first_quick, needs_cpp, on

# ---- saved bytes


@over_activations
def test_an_activation_saves_as_many_bits_as_it_says(name: str) -> None:
    activation = ACTIVATIONS[name]
    for bits, dtype in itertools.product((1, 2, 3, 4), (torch.float32, torch.bfloat16)):
        x = torch.randn(1000, 77, dtype=dtype, requires_grad=True)
        code_bytes = (bits if activation.has_bits else 1) * x.numel() / 8
        padding = saved_bytes(lambda x=x, bits=bits: activation(x, bits)) - code_bytes
        assert 0 <= padding <= 64, f"{bits} bits, {dtype}"


@needs_cpp
@pytest.mark.parametrize("keep", ["codes", "output"])
def test_each_pass_goes_through_the_dispatcher_once(keep: str) -> None:
    """The profiler sees every operation, also one that is called inside of another."""

    def memkern_ops(profile: torch.autograd.profiler.profile) -> list[str]:
        return [event.name for event in profile.function_events if event.name.startswith("memkern")]

    x = torch.randn(100, 7, requires_grad=True)
    with on("cpu"):
        with torch.autograd.profiler.profile() as forward:
            y = functional.gelu(x, keep=keep)
        with torch.autograd.profiler.profile() as backward:
            y.backward(torch.ones_like(y))
    assert memkern_ops(forward) == ["memkern::few_bit_encode"]
    assert sum(event.name == "aten::gelu" for event in forward.function_events) == 1
    expected = "memkern::few_bit_backward" if keep == "codes" else "memkern::few_bit_backward_from_output"
    assert memkern_ops(backward) == [expected]


def test_keep_output_saves_the_output_and_one_bit_per_element() -> None:
    x = torch.randn(1000, 77, requires_grad=True)
    assert 0 <= saved_bytes(lambda: functional.gelu(x, keep="output")) - x.nbytes - x.numel() / 8 <= 64


@over_activations
def test_nothing_is_saved_without_a_gradient(name: str) -> None:
    activation = ACTIVATIONS[name]
    x = torch.randn(100, requires_grad=True)

    def outputs() -> list[Tensor]:
        with torch.no_grad():
            first = activation(x)
        with torch.inference_mode():
            second = activation(x)
        return [first, second, activation(x.detach())]

    assert saved_bytes(outputs) == 0
    for y in outputs():
        assert not y.requires_grad
        assert torch.equal(y, activation.torch(x))


# ---- autograd


def test_backward_runs_twice_only_with_retain_graph() -> None:
    x = torch.randn(500, requires_grad=True)
    y = functional.gelu(x)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)
    assert_same(torch.autograd.grad(y.sum(), x), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), x)


def test_a_module_used_twice_has_the_sum_of_both_gradients() -> None:
    x = torch.randn(500, requires_grad=True)
    act = nn.SiLU()
    (act(x) + act(2 * x)).sum().backward()
    table = LEVELS["silu", 3]
    torch.testing.assert_close(x.grad, table.derivative(x) + 2 * table.derivative(2 * x))


@pytest.mark.parametrize("keep", ["codes", "output"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_through_checkpoints_are_the_same(keep: str, reentrant: bool) -> None:
    layer = torch.nn.Linear(16, 16)
    x = torch.randn(8, 16, requires_grad=True)

    def block(t: Tensor) -> Tensor:
        return functional.gelu(layer(functional.gelu(layer(t), keep=keep)), keep=keep)

    (expected,) = torch.autograd.grad(block(x).sum(), x)
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert_same(x.grad, expected)


@pytest.mark.parametrize("keep", ["codes", "output"])
@pytest.mark.parametrize("dx_depends_on", ["the input", "a weight"])
def test_double_backward_raises(keep: str, dx_depends_on: str) -> None:
    x, w = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)
    y = functional.gelu(x, keep=keep) * (w if dx_depends_on == "a weight" else 1)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative.*torch\.nn\.functional"):
        dx.sum().backward()


def test_double_backward_of_another_path_works() -> None:
    # A gradient penalty on another path: the few-bit gradient itself is a constant of it.
    x, w = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)
    y = functional.gelu(x).sum() + (w**3).sum()
    _, dw = torch.autograd.grad(y, (x, w), create_graph=True)
    dw.sum().backward()
    torch.testing.assert_close(w.grad, 6 * w)


def test_saved_codes_can_be_offloaded() -> None:
    x = torch.randn(500, requires_grad=True)
    expected = gradients(functional.gelu, x, torch.ones(500))
    with torch.autograd.graph.save_on_cpu():
        assert_same(gradients(functional.gelu, x, torch.ones(500)), expected)


# ---- autocast and compile


@over_activations
def test_outputs_and_dtypes_under_autocast_are_torchs(name: str) -> None:
    activation = ACTIVATIONS[name]
    for dtype in (torch.float32, torch.bfloat16):
        x = values("odd", dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, dx = gradients(activation, x)
            expected, expected_dx = gradients(activation.torch, x)
        assert_same(y, expected)
        assert dx.dtype == expected_dx.dtype


COMPILED: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: functional.gelu(x),
    "gelu from output": lambda x: functional.gelu(x, "tanh", keep="output"),
    "softplus": lambda x: functional.softplus(x, 2.0, bits=4),
    "hardtanh": lambda x: functional.hardtanh(x, 0.0, 6.0),
    "softshrink": lambda x: functional.softshrink(x, 0.3),
    "in place": lambda x: functional.leaky_relu(x * 2, inplace=True) + 1,
    "wrapped": lambda x: functional.few_bit(x, torch.sin, LEVELS["gelu", 2]),
    "swiglu of one tensor": lambda x: functional.swiglu(x[:, 1:]),
    "module": torch.nn.Sequential(torch.nn.Linear(7, 9), nn.Mish(), torch.nn.Linear(9, 7)),
}


@pytest.mark.parametrize("case", first_quick(COMPILED, 2))
def test_compile_without_a_graph_break(case: str) -> None:
    fn = COMPILED[case]
    torch._dynamo.reset()
    dynamic = case in ("gelu", "hardtanh", "softshrink")  # the others are compiled again for the second shape
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (5, 6):
        x = torch.randn(rows, 7)
        assert_same(gradients(compiled, x), gradients(fn, x))


@pytest.mark.full
def test_inductor_gives_the_same_output_and_gradient() -> None:
    torch._dynamo.reset()
    x = torch.randn(64, 48)
    compiled = torch.compile(lambda t: functional.gelu(t) * 2, fullgraph=True)
    assert_same(gradients(compiled, x), gradients(lambda t: functional.gelu(t) * 2, x))


# ---- modules

MODULES = [nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Mish, nn.Hardswish]
MODULES += [nn.ELU, nn.CELU, nn.SELU, nn.LogSigmoid, nn.Softsign, nn.Tanhshrink]
MODULES += [nn.ReLU, nn.LeakyReLU, nn.Hardtanh, nn.Hardsigmoid, nn.Hardshrink, nn.Softshrink, nn.Threshold]


@pytest.mark.parametrize("cls", MODULES, ids=lambda c: c.__name__)
def test_modules_are_subclasses_with_torchs_arguments(cls: Any) -> None:
    torch_class = getattr(torch.nn, cls.__name__)
    assert issubclass(cls, torch_class)
    ours, theirs = (inspect.signature(c).parameters for c in (cls, torch_class))
    theirs = {name: p for name, p in theirs.items() if name not in ("args", "kwargs")}
    assert [name for name in ours if name not in ("bits", "keep", "args", "kwargs")] == [*theirs]
    assert all(ours[name].default == p.default for name, p in theirs.items())
    required = [0.0 for p in theirs.values() if p.default is p.empty]
    assert not cls(*required).state_dict()


@over_activations
def test_modules_call_their_function(name: str) -> None:
    activation, x = ACTIVATIONS[name], values("odd")
    for bits in (1, 2, 3, 4):
        module = copy.deepcopy(activation.module(**({"bits": bits} if activation.has_bits else {})))
        assert_same(gradients(module, x), gradients(functools.partial(activation, bits=bits), x))
        assert f"bits={bits}" in repr(module) or not activation.has_bits


def test_modules_in_place_return_their_input() -> None:
    x = torch.randn(9)
    classes = [nn.SiLU, nn.Mish, nn.Hardswish, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.Hardsigmoid]
    for cls in (*classes, functools.partial(nn.Threshold, 0.0, 0.0)):
        h = x.clone()
        assert cls(inplace=True)(h) is h
        assert cls is nn.Hardsigmoid or "inplace=True" in repr(cls(inplace=True))  # torch's does not show it


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.GELU(bits=7), "bits"),
        (lambda: nn.GELU(keep="input"), "torch.nn.functional"),
        (lambda: nn.SiLU(True, keep="output"), "keep"),
        (lambda: nn.Softplus(0.0), "beta"),
        (lambda: nn.CELU(0.0), "alpha"),
        (lambda: nn.Softshrink(-0.5), "lambd"),
        (lambda: nn.Tanh(bits="3"), "bits"),
    ],
)
def test_modules_check_when_they_are_made(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_a_gelu_module_may_keep_its_output() -> None:
    x = values("odd")
    module = nn.GELU("tanh", keep="output")
    assert "keep='output'" in repr(module)
    assert_same(gradients(module, x), gradients(lambda t: functional.gelu(t, "tanh", keep="output"), x))
