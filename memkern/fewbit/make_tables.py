"""``python -m memkern.fewbit.make_tables`` fits every table and writes ``tables.py``; a test compares the two."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..quant.codec import EVEN, MAX_BITS, ODD, PLAIN
from .fit import Derivative, Fit, fit_levels, mean_squared_error
from .levels import ELU_ALPHA, TwoBranch, below


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)


def _gelu_tanh(x: Tensor) -> Tensor:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return 0.5 * (1 + torch.tanh(inner)) + 0.5 * x * (1 - torch.tanh(inner) ** 2) * slope


def _silu(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * (1 + x * torch.sigmoid(-x))


def _mish(x: Tensor) -> Tensor:
    t = torch.tanh(torch.nn.functional.softplus(x))
    return t + x * (1 - t**2) * torch.sigmoid(x)


def _hardswish(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 3, x / 3 + 0.5, (x > 0).to(x.dtype))


DERIVATIVES: dict[str, Derivative] = {
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
    "tanh": lambda x: 1 - torch.tanh(x) ** 2,
    "sigmoid": lambda x: torch.sigmoid(x) * torch.sigmoid(-x),
    "softplus": torch.sigmoid,
    "mish": _mish,
    "hardswish": _hardswish,
    "quick_gelu": lambda x: _silu(1.702 * x),
    "elu": lambda x: torch.where(x > 0, 1.0, ELU_ALPHA * torch.exp(x)),
    "softsign": lambda x: 1 / (1 + x.abs()) ** 2,
}
"""The derivatives that have tables, as functions of a fp64 tensor."""

# Levels 0 and 1 are the limits of GELU's derivative: with them exact, and levels of one decimal, its 3-bit table has a
# little more error near 0 and less in the tails. Its mean squared error is at least 1.5 times below that of fewbit's
# table at every sigma of the mixture; the table of least mean error would be 1.23 times below at sigma 3.
OPTIONS: dict[tuple[str, int], dict[str, Any]] = {
    (name, bits): {"exact": (1.0,), "decimals": 1 if bits == 3 else None}
    for name in ("gelu", "gelu_tanh")
    for bits in (3, 4)
}
OPTIONS |= {("elu", bits): {"exact": (1.0,)} for bits in range(1, MAX_BITS + 1)}  # the derivative for x > 0


KINKS = {"hardswish": (3.0,)}
"""Jumps of a derivative that has its limit at the jump itself, as torch's has; bf16 and fp16 meet them."""


def fit_table(name: str, bits: int) -> Fit:
    """The fit whose levels are ``LEVELS[name, bits]`` of tables.py, rounded to six decimals."""
    table = fit_levels(DERIVATIVES[name], bits, **OPTIONS.get((name, bits), {})).levels
    rounded = [round(t, 6) for t in table.thresholds]
    table = table._replace(
        levels=tuple(round(v, 6) + 0.0 for v in table.levels),
        thresholds=tuple(below(t) if t in KINKS.get(name, ()) else t for t in rounded),
    )
    return Fit(table, mean_squared_error(table, DERIVATIVES[name]))


# f(x), and the x left and right of 0 beyond which its derivative is its limit.
TWO_BRANCH_FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "gelu": (lambda x: 0.5 * x * torch.erfc(-x * math.sqrt(0.5)), -9.0, 4.0),
    "gelu_tanh": (lambda x: x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)), -9.0, 4.0),
    "silu": (lambda x: x * torch.sigmoid(x), -40.0, 9.0),
}
DEGREE = 10  # of the polynomials
MAX_LINE = 110  # characters in tables.py
NODES = 400  # Chebyshev nodes on each side of the minimum


def _bisect(condition: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """The x between low, where ``condition`` is false, and high, where it is true, at which it changes; elementwise."""
    for _ in range(100):
        middle = (low + high) / 2
        met = condition(middle)
        low, high = torch.where(met, low, middle), torch.where(met, middle, high)
    return high


def fit_two_branch(name: str) -> TwoBranch:
    """The polynomials of a function's derivative by its output: least squares on Chebyshev nodes, eight decimals."""
    f, left, right = TWO_BRANCH_FUNCTIONS[name]
    d = DERIVATIVES[name]
    number = lambda x: torch.tensor([x], dtype=torch.float64)  # noqa: E731
    x_min = _bisect(lambda x: d(x) > 0, number(-2.0), number(-0.3))
    minimum = f(x_min)
    nodes = torch.cos(math.pi * (torch.arange(NODES, dtype=torch.float64) + 0.5) / NODES)
    coefficients, reaches = [], []
    for end in (left, right):
        reach = (f(number(end)) - minimum).sqrt() if end > 0 else (-minimum).sqrt()
        y = minimum + ((nodes + 1) / 2 * reach) ** 2
        beyond = (lambda x, y=y: f(x) > y) if end > 0 else (lambda x, y=y: f(x) < y)
        low, high = (x_min, number(end)) if end > 0 else (number(end), x_min)
        x = _bisect(beyond, low.expand(NODES), high.expand(NODES))
        powers = torch.stack([nodes**k for k in range(DEGREE, -1, -1)], 1)
        fitted = torch.linalg.lstsq(powers, d(x)[:, None]).solution[:, 0]
        coefficients.append(tuple(round(c, 8) for c in fitted.tolist()))
        reaches.append(round(float(reach), 8))
    falling, rising = coefficients
    return TwoBranch(round(float(x_min), 8), round(float(minimum), 8), falling, rising, *reaches)


def _main() -> None:
    lines = [
        '"""The tables of all activations. Written by ``python -m memkern.fewbit.make_tables``: change that file."""',
        "",
        "from ..quant.codec import EVEN, ODD, PLAIN",
        "from .levels import Levels, TwoBranch, from_steps",
        "",
        "# fmt: off",
        "LEVELS: dict[tuple[str, int], Levels] = {",
    ]
    symmetries = {PLAIN: "PLAIN", EVEN: "EVEN", ODD: "ODD"}
    for name in DERIVATIVES:
        for bits in range(1, MAX_BITS + 1):
            fit = fit_table(name, bits)
            errors = ", ".join(f"s={s:g}: {1e3 * error:.3f}" for s, error in fit.errors.items())
            table, symmetry = fit.levels, symmetries[fit.levels.symmetry]
            steps = tuple(table.levels[code] for code in itertools.accumulate(table.flips, operator.xor, initial=0))
            begin = f'    ("{name}", {bits}): from_steps({bits}, {symmetry},'
            one_line = f"{begin} {steps}, {table.thresholds}),"
            wrapped = [begin, *_wrapped(steps), *_wrapped(table.thresholds), "    ),"]
            lines.append(f"    # error times 1e-3, x ~ N(0, s^2): {errors}")
            lines += [one_line] if len(one_line) <= MAX_LINE else wrapped
    lines += ["}", "TWO_BRANCHES: dict[str, TwoBranch] = {"]
    for name in TWO_BRANCH_FUNCTIONS:
        two_branch = fit_two_branch(name)
        rows = [row for value in two_branch for row in _wrapped(value)]
        lines += [f'    "{name}": TwoBranch(', *rows, "    ),"]
    Path(__file__).with_name("tables.py").write_text("\n".join([*lines, "}", ""]))


def _wrapped(numbers: Sequence[float] | float) -> list[str]:
    """The source lines of an argument: eight numbers a line."""
    if isinstance(numbers, float):
        return [f"        {numbers},"]
    rows = [", ".join(map(repr, numbers[i : i + 8])) for i in range(0, len(numbers), 8)]
    if len(rows) < 2:
        return [f"        ({rows[0]},)," if rows else "        (),"]
    return ["        (", *(f"            {row}," for row in rows), "        ),"]


if __name__ == "__main__":
    _main()
