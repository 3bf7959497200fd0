"""torch's generic tests of optimizers (tests/support/generic_tests.py) and some of memkern's own, on every class."""

import copy
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests.support.generic_optimizers import CASES, clones, closure_of, linear
from tests.support.generic_tests import *  # noqa: F403
from tests.support.helpers import assert_same, over_kinds, snapshot
from tests.support.optimizers import Options, spec_of


def test_gradients_are_only_read(plain: Any) -> None:
    params = [Parameter(torch.randn(10, 5)), Parameter(torch.randn(5, 2, 3)[..., 0])]
    optimizer = plain(params)
    for p in params:
        p.grad = torch.randn_like(p)
    before = [(p.grad, p.grad.clone(), p.grad._version) for p in params]
    for _ in range(2):
        optimizer.step()
    for p, (grad, values, version) in zip(params, before, strict=True):
        assert p.grad is grad
        assert grad._version == version
        assert torch.equal(grad, values)


@over_kinds
def test_default_dtype_does_not_matter(build: type) -> None:
    expected = None
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(1)
        weight, bias, x = linear()
        torch.set_default_dtype(dtype)
        try:
            optimizer = build([weight, bias], min_8bit_size=0, max_grad_norm=1.0)
            for _ in range(3):
                optimizer.step(closure_of(optimizer, weight, bias, x))
        finally:
            torch.set_default_dtype(torch.float32)
        expected = expected or snapshot(optimizer)
        assert_same(snapshot(optimizer), expected)


# ---- equality with a loop over parameters in fp64


# dtype: absolute, relative
TOLERANCES = {torch.float64: (1e-13, 1e-11), torch.float32: (1e-6, 1e-5)}


@pytest.mark.parametrize(
    ("dtype", "strided"),
    [
        pytest.param(torch.float64, False, id="fp64"),
        pytest.param(torch.float32, False, id="fp32"),
        pytest.param(torch.float32, True, id="fp32, strided", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize(
    ("build", "options"),
    [
        pytest.param(build, options, id=f"{build.__name__}-{name}")
        for build, name, options in CASES
        if not build.__name__.endswith("8bit")
    ],
)
def test_equals_a_loop_over_the_parameters(build: type, options: Options, dtype: torch.dtype, strided: bool) -> None:
    """Seven steps agree with the formulas in fp64, as torch tests its foreach and fused implementations."""
    options = copy.deepcopy({**options, "state_bits": 32})
    weight, bias, _ = linear(dtype, strided)
    optimizer = build([weight, bias], **options)
    group = optimizer.param_groups[0]
    expected, states = [p.detach().double().clone() for p in (weight, bias)], [{}, {}]
    for _ in range(7):
        for p in (weight, bias):
            p.grad = torch.randn_like(p)
        grads = [p.grad.double() for p in (weight, bias)]
        if limit := group["max_grad_norm"]:
            factor = min(1.0, limit / (float(torch.stack([g.norm() for g in grads]).norm()) + 1e-6))
            grads = [g * factor for g in grads]
        optimizer.step()
        expected = [spec_of(build).step(*values, group) for values in zip(expected, grads, states, strict=True)]
    atol, rtol = TOLERANCES[dtype]
    for p, x in zip((weight, bias), expected, strict=True):
        assert p.dtype == dtype
        torch.testing.assert_close(p.detach().double(), x, atol=atol, rtol=rtol)


def test_parameters_on_two_devices_step_by_two_op_calls(new: Any) -> None:
    """The meta device stands for a second one; the parameter on the first steps as without the other."""
    on_cpu, on_meta = Parameter(torch.randn(10, 5)), Parameter(torch.empty(6, 4, device="meta"))
    (expected,) = clones(on_cpu)
    optimizer, cpu_optimizer = new([on_cpu, on_meta], max_grad_norm=None), new([expected], max_grad_norm=None)
    for _ in range(3):
        on_cpu.grad, on_meta.grad = torch.randn_like(on_cpu), torch.empty_like(on_meta)
        expected.grad = on_cpu.grad.clone()
        optimizer.step()
        cpu_optimizer.step()
    assert_same(on_cpu, expected)
    for key, value in optimizer.state[on_meta].items():
        assert value.device.type == "meta", key


# ---- errors that torch.optim.Optimizer raises

a, b = (Parameter(torch.randn(1, 1)) for _ in range(2))
# name: params, options, the error and its message
ERRORS: dict[str, tuple[Any, Options, type[Exception], str]] = {
    "one tensor": (a, {}, TypeError, "should be an iterable of Tensors or dicts"),
    "none": ([], {}, ValueError, "empty parameter list"),
    "in two groups": ([{"params": a}, {"params": a}], {}, ValueError, "more than one parameter group"),
    "no tensor": ([1], {}, TypeError, "optimizer can only optimize Tensors"),
    "no leaf": ([a * 2], {}, ValueError, "can't optimize a non-leaf Tensor"),
    "a name missing": ([("weight", a), b], {}, ValueError, "Some param names are missing"),
    "a group's names missing": (
        [{"params": [a]}, {"params": [("weight", b)]}], {}, ValueError, "with/without names"
    ),
}  # fmt: skip


@over_kinds
@pytest.mark.parametrize("name", ERRORS)
def test_bad_params_raise_as_in_torch(build: type, name: str) -> None:
    params, options, error, message = ERRORS[name]
    with pytest.raises(error, match=f"(?i){message}"):
        build(params, **options)


@over_kinds
def test_a_parameter_twice_in_a_group_warns(build: type) -> None:
    with pytest.warns(UserWarning, match="a parameter group with duplicate parameters"):
        build([a, a])
