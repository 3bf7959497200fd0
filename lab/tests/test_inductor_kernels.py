"""Inductor fuses 8-bit codes into its Triton kernels, whose PTX computes the bits of memkern's op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lab import inductor_kernels
from lab.emulators import triton_ptx
from memkern import reference
from memkern.compiled import fused
from memkern.planner import fake_cuda
from memkern.quant.codec import CODECS
from tests.support.helpers import FLOATS
from tests.support.values import hard_to_quantize

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        fake_cuda.why_not() is not None, reason="fake CUDA is for a torch built without GPUs, with a C++ compiler"
    ),
    pytest.mark.skipif(triton_ptx.missing() is not None, reason=str(triton_ptx.missing())),
]
BLOCK = 128
SHAPE = (24, 512)
POWER = CODECS["power"]


def _signed(x: Tensor) -> tuple[Tensor, ...]:
    return fused.encode(x, True, BLOCK)


def _unsigned(x: Tensor) -> tuple[Tensor, ...]:
    return fused.encode(x, False, BLOCK)


def _decoded(codes: Tensor, unit: Tensor, y: Tensor) -> Tensor:
    """Decodes and adds y: product and sum must not become a fused multiply-add."""
    return fused.decode(codes, unit, BLOCK, y.dtype) + y


def _activation(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = x * y + x
    return F.gelu(z), *fused.encode(z, True, BLOCK)


def _transposed(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return fused.encode((x + y).transpose(0, 1), True, BLOCK)


def _derivative(codes: Tensor, unit: Tensor, y: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(y, fused.decode(codes, unit, BLOCK, y.dtype))


def _encoded(dtype: torch.dtype, signed: bool) -> str:
    return f"{'signed' if signed else 'unsigned'}, {dtype}"


_UNITS = ((SHAPE[0] * SHAPE[1] // BLOCK,), torch.float32)
_PAIR = [(SHAPE, torch.float32)] * 2
PROGRAMS: dict[str, tuple[Callable[..., Any], list[Any]]] = {  # function, its inputs' shapes and dtypes
    **{_encoded(dtype, True): (_signed, [(SHAPE, dtype)]) for dtype in FLOATS},
    **{_encoded(dtype, False): (_unsigned, [(SHAPE, dtype)]) for dtype in FLOATS},
    "decoded": (_decoded, [(SHAPE, torch.int8), _UNITS, (SHAPE, torch.float32)]),
    "decoded, unsigned": (_decoded, [(SHAPE, torch.uint8), _UNITS, (SHAPE, torch.float32)]),
    "activation": (_activation, _PAIR),
    "transposed": (_transposed, _PAIR),
    "derivative": (_derivative, [(SHAPE, torch.int8), _UNITS, (SHAPE, torch.float32)]),
}


@pytest.fixture(scope="module")
def programs() -> dict[str, str]:
    sources: dict[str, str] = fake_cuda.call(inductor_kernels.sources, functions=PROGRAMS)
    return sources


@pytest.mark.parametrize("name", ["activation", "transposed"])
def test_values_are_encoded_by_the_kernel_that_computes_them(programs: dict[str, str], name: str) -> None:
    """The program is one kernel, which reads its operands once and none of its results."""
    [kernel] = inductor_kernels.kernels(programs[name])
    assert kernel.loads == ["in_ptr0", "in_ptr1"]
    assert len(kernel.stores) == (3 if name == "activation" else 2)


def test_codes_are_decoded_by_the_kernel_that_uses_the_values(programs: dict[str, str]) -> None:
    [kernel] = inductor_kernels.kernels(programs["derivative"])
    assert sorted(kernel.loads) == ["in_ptr0", "in_ptr1", "in_ptr2"]
    assert len(kernel.stores) == 1


def _same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Whether NaNs are at the same places and all other bits are equal."""
    nan = expected.isnan()
    word = {4: torch.int32, 2: torch.int16}[expected.element_size()]
    return torch.equal(actual.isnan(), nan) and torch.equal(actual[~nan].view(word), expected[~nan].view(word))


@pytest.mark.pairwise
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
def test_bits_are_those_of_the_op(
    programs: dict[str, str], dtype: torch.dtype, signed: bool, architecture: int
) -> None:
    x, y = hard_to_quantize(SHAPE, dtype), torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    codes, scale = reference.quantize_blockwise(x, POWER, signed, BLOCK, None, True)
    expected = reference.dequantize_blockwise(codes, scale, POWER, BLOCK, torch.float32)
    with mock.patch.object(triton_ptx, "ARCHITECTURE", architecture), triton_ptx.emulated():
        actual_codes, unit = inductor_kernels.run(programs[_encoded(dtype, signed)], x)
        decode = programs["decoded" if signed else "decoded, unsigned"]
        [total] = inductor_kernels.run(decode, actual_codes, unit, y)
        [decoded] = inductor_kernels.run(decode, actual_codes, unit, torch.full_like(y, -0.0))
    assert torch.equal(actual_codes, codes)
    assert _same_bits(decoded, expected)
    assert _same_bits(total, expected + y)
