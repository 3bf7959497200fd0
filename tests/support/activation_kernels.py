"""Compares a backend's few-bit activations with the reference and with torch's own ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memkern import reference
from memkern.fewbit.levels import Levels
from memkern.fewbit.tables import LEVELS
from memkern.quant.codec import ACTIVATIONS, ODD, PLAIN
from memkern.reference.activation import activate
from tests.support.activation_helpers import around, values
from tests.support.helpers import assert_same

ARGUMENTS = {
    "softplus": (2.0, 4.0),
    "leaky_relu": (0.01, 0.0),
    "hardtanh": (-1.0, 0.75),
    "elu": (0.3, 0.0),
    "celu": (2.0, 0.0),
    "hardshrink": (0.5, 0.5),
    "softshrink": (0.5, 0.5),
    "threshold": (0.25, -2.0),
}
"""The activations' parameters a and b, where they have any."""
NEAR = 2.5
"""ulp that are accepted where torch is nearer, too. Of 4 million normal numbers on an H200, Triton's mish was off by up
to 2.15, torch's own by 2.52."""
RARE = 2e-4
"""The share of elements that may be rounded to 16 bits otherwise: of Triton's mish 1.5e-4 on an H200."""


def assert_near(y: Tensor, x: Tensor, name: str, a: float = 0.0, b: float = 0.0) -> None:
    """An activation computed in fp32 is no further from the truth than torch's own, or within NEAR ulp."""
    torch_y = activate(x, ACTIVATIONS[name], a, b)
    assert (y.dtype, y.shape) == (torch_y.dtype, torch_y.shape), name
    assert y.stride() == torch_y.stride() or y.numel() < 2, name
    not_inf = ~x.isinf()  # torch's CPU GELU of infinity is NaN
    assert torch.equal(y.isnan() & not_inf, torch_y.isnan() & not_inf), name
    truth = activate(x.double(), ACTIVATIONS[name], a, b)
    finite = truth.isfinite() & (truth.abs() < 6e4) & (x.abs() < 80)
    y64, torch64, truth, x64 = (t.double()[finite] for t in (y, torch_y, truth, x))
    # x (1 + erf) / 2 cancels where x is negative, and x - tanh(x) near 0, in torch's kernels too: an ulp is one of
    # x / 2 there, or of x.
    cancels = x64.abs() if name == "tanhshrink" else x64.abs() / 2
    ulp = torch.finfo(x.dtype).eps * torch.maximum(truth.abs(), cancels).clamp(min=torch.finfo(x.dtype).tiny)
    error, torch_error = ((t - truth).abs() / ulp for t in (y64, torch64))
    assert (error <= torch_error.clamp(min=NEAR)).all(), name
    if x.dtype != torch.float32:
        # Against the rounded truth: far left torch's erf on the CPU has an error of its own.
        wrong, torch_wrong = (int((t != truth.to(x.dtype).double()).sum()) for t in (y64, torch64))
        assert wrong <= 1.05 * torch_wrong + RARE * len(y64) + 3, name  # 3: of small tensors


def gelu_values(table: Levels, dtype: torch.dtype) -> Tensor:
    """Thresholds with their neighbours, numbers of any exponent, and common ones."""
    anything = torch.randint(-(2**31), 2**31 - 1, (500,)).int().view(torch.float32)
    return torch.cat([around(table), anything, values("odd").flatten()]).to(dtype)


def compare_gelus(ops: Any, dtype: torch.dtype, names: Sequence[tuple[str, int]]) -> None:
    """GELU with tables that are odd about a value has the reference's codes, and in every bit the results that it has
    with a table that only the general kernel takes."""
    for name, bits in names:
        table = LEVELS[name, bits]
        assert table.symmetry == ODD
        aligned = gelu_values(table, dtype)
        for x in (aligned, aligned[1:]):
            for fn in (ACTIVATIONS["gelu"], ACTIVATIONS["gelu_tanh"]):
                y, codes = ops.few_bit_forward(x, fn, 0.0, 0.0, bits, *table[2:])
                assert_same(codes, reference.few_bit_encode(x, bits, *table[2:]), f"{name} {bits}")
                expected, _ = ops.few_bit_forward(x, fn, 0.0, 0.0, bits, [0.0], [1], PLAIN)
                assert torch.equal(y.view(torch.uint8), expected.view(torch.uint8)), f"{name} {bits}"


def every_bf16(repeats: int = 1) -> Tensor:
    """All 65,536 bf16 values, with NaNs and infinities."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).repeat(repeats)


TABLES = (("gelu", 3), ("gelu", 1), ("gelu_tanh", 4), ("gelu_tanh", 2))


def compare_bf16_table(ops: Any, tables: Sequence[tuple[str, int]] = TABLES) -> None:
    """The forward pass of large bf16 tensors, which reads a table, has the bits of torch's own op; beyond the table it
    has the bits that the formula gives small tensors."""
    small, large = every_bf16(), torch.cat([every_bf16(8), torch.randn(13).bfloat16()])
    for name, bits in tables:
        table = LEVELS[name, bits]
        y, codes = ops.few_bit_forward(large, ACTIVATIONS[name], 0.0, 0.0, bits, *table[2:])
        assert_same(codes, reference.few_bit_encode(large, bits, *table[2:]), name)
        formula = ops.few_bit_forward(small, ACTIVATIONS[name], 0.0, 0.0, bits, *table[2:])[0]
        torch_y = activate(large, ACTIVATIONS[name], 0.0, 0.0)
        formula = torch.cat([formula.repeat(8), torch_y[-13:]])
        expected = torch.where((large.abs() >= 2**-9) & (large.abs() < 6), torch_y, formula)
        assert torch.equal(y.isnan(), expected.isnan()), name
        assert_same(y[~y.isnan()], expected[~y.isnan()], name)


def compare_bf16_gelu(ops: Any) -> int:
    """GELU and GELU_TANH of every bf16 value have the reference's codes, and the bits of the formula in fp32, which
    ``ops`` compute for fp32 tensors. Returns for how many values GELU has other bits; all of them are left of -3. They
    are 11 where the formula's erf is exact, or CUDA 12's: for them it rounds 1 + erf otherwise than with CUDA 13's.
    """
    x, differing = every_bf16(), {}
    for name in ("gelu", "gelu_tanh"):
        args = ACTIVATIONS[name], 0.0, 0.0, 3, *LEVELS[name, 3][2:]
        y, codes = ops.few_bit_forward(x, *args)
        assert_same(codes, reference.few_bit_encode(x, *args[3:]), name)
        expected = ops.few_bit_forward(x.float(), *args)[0].bfloat16()
        assert torch.equal(y.isnan(), expected.isnan()), name
        differing[name] = x[(y.view(torch.int16) != expected.view(torch.int16)) & ~y.isnan()]
    assert not len(differing["gelu_tanh"])
    assert (differing["gelu"] < -3).all()
    return len(differing["gelu"])
