"""fit_levels finds the tables of memkern.fewbit.tables, whose errors are the least."""

import math
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from memkern import nn
from memkern.fewbit.activations import activation_of
from memkern.fewbit.fit import SIGMAS, Derivative, fit_levels, mean_squared_error
from memkern.fewbit.levels import ELU_ALPHA, Levels
from memkern.fewbit.make_tables import DERIVATIVES, TWO_BRANCH_FUNCTIONS, fit_table, fit_two_branch
from memkern.fewbit.tables import LEVELS, TWO_BRANCHES
from memkern.quant.codec import EVEN, ODD, PLAIN
from tests.support.activation_helpers import gradients
from tests.support.helpers import assert_same, first_quick, hard

ROOT = Path(__file__).parents[2]
over_names = pytest.mark.parametrize("name", DERIVATIVES)

# The mean squared error of the derivative of the library fewbit's 3-bit GELU (2023) for x ~ N(0, sigma^2), by sigma.
FEWBIT_ERRORS = {0.25: 5.24e-3, 0.5: 4.68e-3, 1.0: 3.38e-3, 2.0: 2.10e-3, 3.0: 1.50e-3}


def sampled_error(table: Levels, name: str, sigma: float) -> float:
    """The mean squared error over a million evenly spread quantiles of N(0, sigma^2), without the fit's own grid."""
    u = (torch.arange(1_000_000, dtype=torch.float64) + 0.5) / 1_000_000
    x = sigma * math.sqrt(2) * torch.erfinv(2 * u - 1)
    return float((DERIVATIVES[name](x) - table.derivative(x).double()).pow(2).mean())


def derivative_of(fn: Callable[[Tensor], Tensor]) -> Derivative:
    return lambda x: gradients(fn, x, torch.ones_like(x))[1]


@over_names
@pytest.mark.parametrize("bits", first_quick([3, 1, 4]))
def test_shipped_tables_are_fitted_ones(name: str, bits: int) -> None:
    fitted, shipped = fit_table(name, bits).levels, LEVELS[name, bits]
    assert (fitted.bits, fitted.flips, fitted.symmetry) == (shipped.bits, shipped.flips, shipped.symmetry)
    assert fitted.levels == pytest.approx(shipped.levels, abs=2e-6)  # tables have six digits
    assert fitted.thresholds == pytest.approx(shipped.thresholds, abs=2e-5)  # flat derivatives move them more


@pytest.mark.parametrize("name", TWO_BRANCH_FUNCTIONS)
def test_shipped_branches_are_fitted_ones(name: str) -> None:
    for fitted, shipped in zip(fit_two_branch(name), TWO_BRANCHES[name], strict=True):
        assert fitted == pytest.approx(shipped, abs=1e-6)


@over_names
def test_derivatives_are_those_of_the_functions(name: str) -> None:
    fn = {
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "elu": lambda x: torch.nn.functional.elu(x, ELU_ALPHA),
    }.get(name) or getattr(torch.nn.functional, name)
    x = torch.linspace(-8, 8, 1001, dtype=torch.float64) + 1e-3
    torch.testing.assert_close(DERIVATIVES[name](x), gradients(fn, x, torch.ones_like(x))[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sigma", SIGMAS)
def test_3_bit_gelu_errs_less_than_fewbits(sigma: float) -> None:
    error = sampled_error(LEVELS["gelu", 3], "gelu", sigma)
    assert FEWBIT_ERRORS[sigma] / error >= 1.5
    assert error == pytest.approx(fit_table("gelu", 3).errors[sigma], rel=1e-3)


def test_3_bit_gelu_has_round_levels_and_known_thresholds() -> None:
    table = LEVELS["gelu", 3]
    assert sorted(table.levels) == [-0.1, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.1]
    assert table.thresholds == (0.256185, 0.554376, 0.883233, 2.348606)
    assert LEVELS["gelu_tanh", 3].thresholds == (0.256213, 0.554652, 0.884284, 2.355164)


@pytest.mark.parametrize(
    ("name", "bits", "levels", "error"),  # the least mean squared error, and its levels where they are compared
    [
        ("gelu", 1, [0.0908, 0.9092], 3.84e-2),
        ("gelu", 2, [-0.0464, 0.3127, 0.6873, 1.0464], 8.00e-3),
        ("gelu", 4, None, 4.7e-4),
        ("silu", 3, None, 1.99e-3),
    ],
)
def test_levels_for_n_0_1_have_the_least_error(name: str, bits: int, levels: list[float] | None, error: float) -> None:
    fit = fit_levels(DERIVATIVES[name], bits, sigmas=(1.0,))
    assert fit.errors[1.0] <= error * 1.003  # the errors above are rounded
    if levels:
        assert sorted(fit.levels.levels) == pytest.approx(levels, abs=2e-4)


def test_tables_have_the_symmetry_of_the_derivative() -> None:
    others = {"tanh": EVEN, "sigmoid": EVEN, "softsign": EVEN, "mish": PLAIN, "elu": PLAIN}
    for (name, bits), table in LEVELS.items():
        assert table.symmetry == others.get(name, ODD), (name, bits)
        if table.symmetry == ODD:
            half = 2 ** (bits - 1)
            sums = [a + b for a, b in zip(table.levels[:half], table.levels[half:], strict=True)]
            assert sums == pytest.approx([1.0] * half, abs=2e-6), (name, bits)  # levels are written with six digits
            assert len(table.thresholds) < 2**bits


# Activations whose tables are another's, scaled: their parameters, and how many times the mean error of a table that
# is fitted to them their error may be.
MADE_OF_OTHERS = {
    "elu": ((1.0, 0.0), 1.2),
    "elu 0.3": ((0.3, 0.0), 1.01),
    "celu 2": ((2.0, 0.0), 1.5),  # of the best table for x / 2, which is spread otherwise
    "selu": (None, 1.4),
    "logsigmoid": (None, 1.01),
    "tanhshrink": (None, 1.01),
}


@pytest.mark.parametrize(("name", "bits"), zip(MADE_OF_OTHERS, (3, 4) * 3, strict=True))
def test_tables_made_of_others_are_near_the_best(name: str, bits: int) -> None:
    parameters, factor = MADE_OF_OTHERS[name]
    activation = activation_of(name.split()[0], bits, "codes", parameters)
    derivative = derivative_of(activation.forward)
    errors = mean_squared_error(activation.levels, derivative)
    assert sum(errors.values()) <= factor * sum(fit_levels(derivative, bits).errors.values())


def test_errors_in_the_docs_are_those_of_the_tables() -> None:
    rows = re.findall(r"^\| (\w+), (\d) bits? \|(.*)\|$", (ROOT / "docs/numerics.md").read_text(), re.MULTILINE)
    assert len(rows) >= 10
    for name, bits, numbers in rows:
        parameters = {"elu": (1.0, 0.0)}.get(name.lower())
        activation = activation_of(name.lower(), int(bits), "codes", parameters)
        errors = mean_squared_error(activation.levels, derivative_of(activation.forward))
        assert [f"{1e3 * error:.3f}" for error in errors.values()] == numbers.replace(" ", "").split("|")


@pytest.mark.parametrize("name", ["gelu", "mish", "tanh"])
def test_moving_any_level_makes_the_error_larger(name: str) -> None:
    fit = fit_levels(DERIVATIVES[name], 3)
    best = sum(fit.errors.values())
    for i, step in product(range(8), (-3e-3, 3e-3)):
        levels = list(fit.levels.levels)
        levels[i] += step
        moved = sum(mean_squared_error(fit.levels._replace(levels=tuple(levels)), DERIVATIVES[name]).values())
        assert moved > best


def test_exact_levels_are_among_the_fitted_ones() -> None:
    fit = fit_levels(DERIVATIVES["silu"], 3, exact=(1.0,))
    assert {0.0, 1.0} <= {*fit.levels.levels}
    fit = fit_levels(DERIVATIVES["mish"], 3, exact=(0.0, 0.5, 1.0))
    assert {0.0, 0.5, 1.0} <= {*fit.levels.levels}


def test_a_derivative_with_jumps_is_exact() -> None:
    fit = fit_levels(lambda x: torch.where(x > 1, 3.0, torch.where(x < -2, -1.0, 0.5)), 2)
    x = torch.tensor([-5.0, -2.001, -1.999, 0.0, 0.999, 1.001, 9.0])
    assert fit.levels.derivative(x).tolist() == pytest.approx([-1, -1, 0.5, 0.5, 0.5, 3, 3], abs=1e-6)
    assert max(fit.errors.values()) < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 0}, "bits"),
        ({"bits": 3, "sigmas": ()}, "sigmas"),
        ({"bits": 3, "sigmas": (1.0, -1.0)}, "sigmas"),
        ({"bits": 1, "exact": (0.0, 0.5, 1.0)}, "exact"),
        ({"bits": 3, "exact": (1.0, 0.0)}, "exact"),
        ({"bits": 3, "derivative": lambda x: x / x * torch.nan}, "finite"),
        ({"bits": 3, "derivative": lambda x: x.sum()}, "derivative"),
        ({"bits": 4, "derivative": lambda x: torch.sin(20 * x)}, "thresholds"),
    ],
)
def test_bad_arguments_name_themselves(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_levels(**({"derivative": DERIVATIVES["mish"]} | options))


# ---- a user's own activation


def squared_relu(x: Tensor) -> Tensor:
    return torch.relu(x).square()


def test_few_bit_wraps_any_function() -> None:
    module = nn.few_bit(squared_relu, lambda x: 2 * x.clamp(min=0), 4, sigmas=(1.0,))
    assert "squared_relu" in repr(module)
    x, grad = hard((37, 53), 0, scale=1.0), hard((37, 53), 1)
    for view in (x, x.t(), x[:, ::3], x.bfloat16()):
        g = (grad[:, : view.shape[1]] if len(view) == len(x) else grad.t()).to(view.dtype)
        y, dx = gradients(module, view, g)
        assert_same(y, squared_relu(view))
        assert torch.equal(dx, (g.float() * module.levels.derivative(view)).to(view.dtype))
    with torch.no_grad():
        assert_same(module(x), squared_relu(x))


def test_few_bit_refuses_a_function_in_place() -> None:
    module = nn.few_bit(torch.sin_, torch.cos)
    x = torch.randn(8, requires_grad=True)
    with pytest.raises(ValueError, match="fn must not change its argument in place"):
        module(x * 1)
    assert torch.equal(module(x.detach().clone()), x.sin())


def test_few_bit_takes_inference_tensors() -> None:
    """They have no version counter, and may require gradients."""
    module = nn.few_bit(torch.sin, torch.cos)
    with torch.inference_mode():
        x = torch.ones(4, requires_grad=True)
    assert_same(module(x), torch.sin(x))


def test_few_bit_refuses_what_is_not_elementwise() -> None:
    module = nn.FewBit(lambda x: x.sum(0), LEVELS["gelu", 3])
    with pytest.raises(ValueError, match="fn must work elementwise"):
        module(torch.randn(3, 4, requires_grad=True))
