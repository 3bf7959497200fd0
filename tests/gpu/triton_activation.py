"""Triton's activations in the interpreter: test_triton.py runs this file with TRITON_INTERPRET=1."""

import pytest
import torch

import memkern.triton
from memkern import reference
from memkern.fewbit.levels import Levels
from memkern.quant.codec import ACTIVATIONS
from tests.support.activation_helpers import TABLES, around, over_layouts, values
from tests.support.activation_kernels import compare_activations, compare_bf16_gelu, compare_forward
from tests.support.helpers import FLOATS, assert_same, name_of
from tests.support.interpreted import interpreted

pytestmark = interpreted()


@over_layouts
def test_activations(layout: str) -> None:
    for dtype, bits in zip((*FLOATS, FLOATS[0]), (1, 2, 3, 4), strict=True):
        compare_activations(memkern.triton, layout, dtype, bits)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_forward_of_many_values(dtype: torch.dtype) -> None:
    compare_forward(memkern.triton, dtype, values=4_000)


def test_gelu_of_every_bf16() -> None:
    assert compare_bf16_gelu(memkern.triton) == 11  # the interpreter's erf is exact


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_codes_of_every_table(table: Levels) -> None:
    x = torch.cat([around(table), values("odd").flatten()])
    args = x, table.bits, table.thresholds, table.flips, table.symmetry
    codes = memkern.triton.few_bit_encode(*args)
    assert_same(codes, reference.few_bit_encode(*args))
    assert_same(
        memkern.triton.few_bit_backward(x, codes, table.levels),
        reference.few_bit_backward(x, codes, table.levels),
    )


def test_bad_arguments_raise() -> None:
    x, codes = torch.ones(4, 256), torch.zeros(3, 128, dtype=torch.uint8)
    for call in (
        lambda: memkern.triton.few_bit_encode(x, 5, [], [], 0),
        lambda: memkern.triton.few_bit_encode(x.double(), 3, [], [], 0),
        lambda: memkern.triton.few_bit_forward(x, len(ACTIVATIONS), 0.0, 0.0, 3, [], [], 0),
        lambda: memkern.triton.few_bit_backward(x, codes[:2], [0.0] * 8),
        lambda: memkern.triton.few_bit_backward_from_output(x, x, codes, 0.0, [1.0], [1.0], 1.0, 1.0),
    ):
        with pytest.raises((ValueError, TypeError)):
            call()
