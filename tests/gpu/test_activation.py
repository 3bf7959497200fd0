"""On a real GPU few-bit activations are near torch's kernels, also above 2^31 elements, and follow its autocast."""

import pytest
import torch

from memkern import _ops, functional
from memkern.fewbit.tables import LEVELS
from tests.support.activation_helpers import ACTIVATIONS, gradients
from tests.support.activation_kernels import RARE
from tests.support.helpers import assert_same, name_of, on, over_gpu

LARGE = 2_200_000_011  # more than 2**31 elements, and a short last group
ROUNDED_TWICE = ("quick_gelu", "softsign", "tanhshrink")  # by torch's two or three operations


@over_gpu
@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name not in ROUNDED_TWICE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_forward_is_near_torchs(backend: str, name: str, dtype: torch.dtype) -> None:
    """How near to the truth, also in fp32, is of tests/kernels/test_cases.py."""
    x = torch.randn(2**20, device="cuda").to(dtype).requires_grad_()
    with on(backend):
        y = ACTIVATIONS[name](x)
    actual_bits, expected_bits = (t.detach().view(torch.int16).int() for t in (y, ACTIVATIONS[name].torch(x)))
    ulps = (actual_bits - expected_bits).abs()
    if name == "gelu":  # left of -3 the sum in x (1 + erf) / 2 keeps few bits, and torch computes another erf
        ulps = ulps[x > -3]
    assert int(ulps.max()) <= 1
    assert float((ulps > 0).float().mean()) <= RARE


@over_gpu
def test_tensors_of_more_than_2_to_the_31_elements_are_coded_as_their_parts(backend: str) -> None:
    if torch.cuda.mem_get_info()[0] < 12 * LARGE:
        pytest.skip("too little free memory")
    x = torch.empty(LARGE, dtype=torch.bfloat16, device="cuda").normal_()
    table = LEVELS["gelu", 3]
    with on(backend):
        codes = _ops.few_bit_encode(x, table)
        dx = _ops.few_bit_backward(x, codes, table.levels)
        for start in (0, 2**30, 2**31 - 64, LARGE // 128 * 128 - 1024):
            part = slice(start, min(start + 1100, LARGE))
            part_codes = _ops.few_bit_encode(x[part].contiguous(), table)[:, :100]  # a plane's 100 bytes: 800 elements
            assert_same(codes[:, start // 8 : start // 8 + 100].contiguous(), part_codes.contiguous())
            expected = x[part].float() * table.derivative(x[part])
            assert torch.equal(dx[part], expected.bfloat16())


@over_gpu
def test_autocast_gives_torchs_dtypes(backend: str) -> None:
    x = torch.randn(1000, device="cuda", dtype=torch.bfloat16)
    with on(backend), torch.autocast("cuda", dtype=torch.bfloat16):
        for name in ("softplus", "gelu"):
            y, dx = gradients(getattr(functional, name), x)
            expected, expected_dx = gradients(getattr(torch.nn.functional, name), x)
            assert (y.dtype, dx.dtype) == (expected.dtype, expected_dx.dtype)
