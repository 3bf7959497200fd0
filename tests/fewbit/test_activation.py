"""Few-bit activations give the codes and gradients of their tables and torch's outputs, also in place."""

import functools
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memkern import functional
from memkern.fewbit.tables import LEVELS, TWO_BRANCHES
from memkern.reference.activation import decode, few_bit_encode, plane_bytes
from tests.support.activation_helpers import (
    ACTIVATIONS,
    LAYOUTS,
    STRIDED,
    TABLES,
    around,
    gradients,
    over_activations,
    over_bits,
    over_layouts,
    values,
)
from tests.support.helpers import FLOATS, assert_same, device_of, fast_here, hard, on, over_all, over_cpu
from tests.support.interpreted import interpreted

# Without a threshold, with many, plain, even, odd, with several planes flipped at once.
SOME_TABLES = ("nothing", "relu", "tanh 2", "gelu 3", "mish 4", "sign and threshold in one plane", "many")


# ---- codes


@pytest.mark.parametrize("name", SOME_TABLES)
def test_codes_are_what_the_table_says(name: str) -> None:
    table = TABLES[name]
    x = torch.cat([around(table), values("odd").flatten()])
    codes = few_bit_encode(x, table.bits, *table[2:])
    inputs = x if table.symmetry == 0 else x.abs()  # 0: PLAIN, 2: ODD
    for value, compared, code in zip(x.tolist(), inputs.tolist(), decode(codes, x.numel()).tolist(), strict=True):
        expected = 0
        for threshold, flip in zip(table.thresholds, table.flips, strict=True):
            expected ^= flip if compared > torch.tensor(threshold).item() else 0
        if table.symmetry == 2 and value < 0:
            expected ^= 1 << (table.bits - 1)
        assert code == expected, value


@over_layouts
@over_bits
def test_codes_are_bit_planes_in_memory_order(layout: str, bits: int) -> None:
    x = values(layout)
    codes = few_bit_encode(x, bits, *LEVELS["gelu", bits][2:])
    assert codes.shape == (bits, plane_bytes(x.numel()))
    assert 8 * codes.numel() < bits * x.numel() + 8 * 64  # the padding of all planes is less than 64 bytes
    unpacked = (codes[:, :, None] >> torch.arange(8) & 1).view(bits, -1)
    assert not unpacked[:, x.numel() :].any(), "padding must be zeros"
    # Plane p, byte i, bit j: bit p of the code of element 8 i + j, in memory order.
    expected = LEVELS["gelu", bits].codes(torch.as_strided(x, (x.numel(),), (1,)))
    for p in range(bits):
        assert torch.equal(unpacked[p, : x.numel()], expected >> p & 1)


# ---- the functions


@over_activations
def test_forward_is_torchs(name: str) -> None:
    activation = ACTIVATIONS[name]
    # Large enough for huge pages, and a part of a tensor for which torch's vectors begin elsewhere.
    inputs = {"large": (torch.randn(2**19 + 77) * 3)[3:]}
    inputs |= {f"{layout}, {dtype}": values(layout, dtype) for layout, dtype in product((*LAYOUTS, *STRIDED), FLOATS)}
    for what, x in inputs.items():
        expected = activation.torch(x)
        for backend in ("reference", *fast_here()[-1:]):
            with on(backend):
                assert_same(activation(x), expected, f"{what}, {backend}")
                assert_same(activation(x.requires_grad_()), expected, f"{what}, {backend}, with a gradient")


@interpreted(layout=("odd", "channels_last", "a slice", "a transposed slice"))
@over_all
@pytest.mark.parametrize("layout", ["odd", "channels_last", "empty", *STRIDED])
def test_gradient_is_the_level_of_each_element(backend: str, layout: str) -> None:
    x = values(layout)
    grad = hard(x.shape, 7, scale=1.0)
    for name, activation in ACTIVATIONS.items():
        for bits in (1, 2, 3, 4) if layout in ("odd", "a slice") else (3,):
            fn = functools.partial(activation, bits=bits)
            with on(backend):
                _, dx = gradients(fn, on_device_of(x, backend), on_device_of(grad, backend))
            assert torch.equal(dx.cpu(), grad * activation.table(bits).derivative(x)), f"{name}, {bits} bits"


def on_device_of(x: Tensor, backend: str) -> Tensor:
    """x on the device of a backend, with the strides that Tensor.to() keeps: of dense tensors alone on a GPU."""
    return x.to(device_of(backend))


@pytest.mark.parametrize("kind", ["expanded", "transposed", "slices", "channels_last"])
def test_the_outputs_gradient_may_have_any_strides(kind: str) -> None:
    x = values("permuted")
    grad = {
        "expanded": torch.ones(()).expand(x.shape),
        "transposed": hard(x.shape[::-1], 1).permute(2, 1, 0),
        "slices": hard((*x.shape[:-1], 2 * x.shape[-1]), 2)[..., ::2],
        "channels_last": hard(x.shape, 3).contiguous(),
    }[kind]
    for backend in ("reference", *fast_here()):
        with on(backend):
            _, dx = gradients(lambda t: ACTIVATIONS["gelu"](t), x, grad)
        assert torch.equal(dx, grad * LEVELS["gelu", 3].derivative(x)), backend


@over_activations
def test_nan_stays_nan_in_the_output_and_has_a_finite_gradient(name: str) -> None:
    for dtype, backend in product(FLOATS, ("reference", *fast_here()[-1:])):
        x = torch.tensor([1.0, torch.nan, -1.0, torch.nan], dtype=dtype)
        with on(backend):
            y, dx = gradients(lambda t: ACTIVATIONS[name](t), x, torch.ones(4, dtype=dtype))
        assert torch.equal(y.isnan(), x.isnan()), f"{dtype}, {backend}"
        assert dx.isfinite().all(), f"{dtype}, {backend}"


@over_cpu
def test_the_reference_alone_takes_fp64(backend: str) -> None:
    x = torch.tensor([-7.3, -1.2, -0.4, 0.3, 0.9, 2.0, 6.5], dtype=torch.float64, requires_grad=True)
    with on(backend):
        if backend == "reference":
            assert torch.autograd.gradcheck(functional.leaky_relu, (x,))  # a rounded derivative could not pass
        else:
            with pytest.raises(TypeError, match="x must be float32, bfloat16 or float16 where it needs a gradient"):
                functional.leaky_relu(x)


# ---- in place


@pytest.mark.parametrize("name", [name for name, a in ACTIVATIONS.items() if a.inplace])
def test_in_place_has_the_same_output_and_gradient(name: str) -> None:
    activation = ACTIVATIONS[name]
    layouts = ("odd", "channels_last", "every second", "empty", "0-dim")
    for layout, backend in product(layouts, ("reference", *fast_here()[-1:])):
        leaf = values(layout).requires_grad_()
        with on(backend):
            x = leaf.clone()
            y = activation(x, inplace=True)
            assert y is x
            assert_same(y, activation.torch(leaf.clone(), inplace=True), layout)
            grad = hard(y.shape, 1)
            (dx,) = torch.autograd.grad(y, leaf, grad)
            assert torch.equal(dx, grad * activation.table(3).derivative(leaf)), layout
            with torch.no_grad():
                z = leaf.detach().clone()
                assert activation(z, inplace=True) is z
                assert_same(z, y, layout)


def test_in_place_on_a_leaf_raises_before_anything_changes() -> None:
    x = torch.randn(8, requires_grad=True)
    before = x.detach().clone()
    with pytest.raises(RuntimeError, match="inplace"):
        ACTIVATIONS["silu"](x, inplace=True)
    assert_same(x, before)


def test_in_place_on_a_view_has_the_gradient_of_its_base() -> None:
    x = torch.randn(8, 6, requires_grad=True)
    base = x * 1
    ACTIVATIONS["relu"](base[2:5], inplace=True)
    base.sum().backward()
    expected = torch.ones(8, 6)
    expected[2:5] = (x[2:5] > 0).float()
    assert torch.equal(x.grad, expected)


def test_in_place_is_seen_by_autograds_checks() -> None:
    x = torch.randn(8, requires_grad=True)
    h = x * 1
    y = h * h  # saves h for its backward pass
    ACTIVATIONS["relu"](h, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- from the output: keep="output"


@pytest.mark.parametrize("name", TWO_BRANCHES)
def test_the_derivative_from_the_output_is_near_the_true_one(name: str) -> None:
    activation = ACTIVATIONS[name.replace("_", " ")]
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    rms_errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        y, dx = gradients(lambda t: activation.ours(t, keep="output"), x.to(dtype), torch.ones(200_000, dtype=dtype))
        assert_same(y, activation.torch(x.to(dtype)))
        truth = gradients(activation.torch, x.to(dtype).double(), torch.ones(200_000).double())[1]
        rms_errors[dtype] = float((dx.double() - truth).pow(2).mean().sqrt())
        assert float((dx.double() - truth).abs().max()) < (0.03 if dtype == torch.bfloat16 else 1e-3)
    # docs/numerics.md states both.
    assert rms_errors[torch.float32] < 8e-5
    assert rms_errors[torch.bfloat16] < 2.3e-3


@pytest.mark.parametrize("layout", ["odd", "channels_last", "every second", "expanded", "empty", "0-dim"])
def test_from_the_output_in_any_layout(layout: str) -> None:
    x = values(layout)
    ones = torch.ones_like(x)
    y, dx = gradients(lambda t: ACTIVATIONS["gelu"].ours(t, keep="output"), x, ones)
    assert_same(y, F.gelu(x))
    truth = gradients(F.gelu, x, ones)[1]
    finite = truth.isfinite()
    assert torch.allclose(dx[finite], truth[finite], atol=1e-3, rtol=0)


def test_an_output_that_was_changed_raises_in_the_backward_pass() -> None:
    x = torch.randn(100, requires_grad=True)
    y = ACTIVATIONS["gelu"].ours(x, keep="output")
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_slope_of_minus_zero_is_not_that_of_zero() -> None:
    """Activations are made once for each set of parameters, and -0.0 == 0.0."""
    x = torch.tensor([-2.0, 3.0], requires_grad=True)
    for slope in (0.0, -0.0):
        y = ACTIVATIONS["leaky_relu"].ours(x, slope)
        assert torch.equal(y.signbit(), F.leaky_relu(x, slope).signbit())


# ---- bad arguments

GELU, SILU = ACTIVATIONS["gelu"].ours, ACTIVATIONS["silu"].ours
X = torch.ones(4, requires_grad=True)
BAD: dict[str, tuple[Any, str]] = {  # a call, and the message of its ValueError
    "bits 0": (lambda: GELU(X, bits=0), "bits must be an integer from 1 to 4, got 0"),
    "bits 5": (lambda: GELU(X, bits=5), "bits must be .* got 5"),
    "bits 2.0": (lambda: GELU(X, bits=2.0), "bits must be .* got 2.0"),
    "approximate": (lambda: GELU(X, "erf"), "approximate must be 'none' or 'tanh', got 'erf'"),
    "keep": (lambda: GELU(X, keep="all"), "keep must be 'codes' or 'output', got 'all'"),
    "keep input": (lambda: GELU(X, keep="input"), "use torch.nn.functional"),
    "keep output in place": (lambda: SILU(X, True, keep="output"), "keep must be 'codes' where inplace"),
    "beta": (lambda: ACTIVATIONS["softplus"].ours(X, -1.0), "beta must be positive, got -1.0"),
    "alpha": (lambda: ACTIVATIONS["celu"].ours(X, 0.0), "alpha must be positive, got 0.0"),
    "lambd": (lambda: ACTIVATIONS["softshrink"].ours(X, -0.5), "lambd must be 0 or more, got -0.5"),
    "bounds": (lambda: ACTIVATIONS["hardtanh"].ours(X, 1.0, 1.0), "max_val must be larger than min_val"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_name_themselves(case: str) -> None:
    call, message = BAD[case]
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=message):
            call()
