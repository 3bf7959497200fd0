"""fma, lerp and Newton-Schulz of memkern.reference.muon agree with torch and with fp64.

test_muon.py has tests of whole steps.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from memkern.reference import muon
from tests.support.helpers import needs_fma

SHAPES = [(48, 48), (96, 40), (40, 96), (1, 130)]


def normal(shape: Any, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_fma_rounds_once() -> None:
    x, z = torch.tensor([1 + 2.0**-12, 3.0, torch.inf, 1e30]), torch.tensor([-1.0, 2.0**-40, 1.0, torch.nan])
    y = 1 + 2.0**-12
    expected = torch.tensor([2.0**-11 + 2.0**-24, 3 * y, torch.inf, torch.nan])
    assert torch.equal(muon.fma(x, y, z).nan_to_num(nan=7), expected.nan_to_num(nan=7))


def test_fma_of_a_sum_that_fp64_rounds_to_the_middle_of_two_fp32_numbers() -> None:
    x, y, z = torch.tensor([2.0**-24 * (1 + 2.0**-23)]), 1 - 2.0**-23, torch.tensor([1 + 2.0**-23])
    assert (x.double() * y + z.double()).float().item() == 1 + 2.0**-22  # rounded twice
    assert muon.fma(x, y, z).item() == 1 + 2.0**-23  # the exact sum is 2^-70 below the middle


@needs_fma
@pytest.mark.parametrize("weight", [0.0, 0.05, 0.5, 0.95, 1 - 0.95, 1.0])
def test_lerp_is_torchs(weight: float) -> None:
    a, b = normal(10007, 0), normal(10007, 1)
    assert torch.equal(muon.lerp(a, b, weight), torch.lerp(a, b, weight))


def test_newton_schulz_is_no_further_from_fp64_than_torchs() -> None:
    from torch.optim._muon import _zeropower_via_newtonschulz as torch_newton_schulz

    for seed, shape in enumerate(SHAPES):
        u = normal(shape, seed).bfloat16()
        squares = u.double().square().sum()
        x = u.double().mT if shape[0] > shape[1] else u.double()
        x = x / squares.sqrt()
        a, b, c = muon.NS_COEFFICIENTS
        for _ in range(5):
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        truth = x.mT if shape[0] > shape[1] else x
        ours = muon.orthogonalize(u, squares)
        theirs = torch_newton_schulz(u, muon.NS_COEFFICIENTS, 5, 1e-7)
        assert (ours - truth).norm() <= (theirs - truth).norm()
        # Each of the five iterations rounds three matrices to bf16, by at most 2^-9 of a value. (1 x n comes closest.)
        assert (ours - truth).norm() <= 5 * 3 * 2.0**-9 * truth.norm()


def test_zeros_give_zeros_and_nan_stays_in_its_matrix() -> None:
    u = torch.stack([torch.zeros(8, 16), normal((8, 16), 0), normal((8, 16), 1)]).bfloat16()
    u[2, 3, 4] = torch.nan
    result = muon.orthogonalize(u, u.double().square().sum((-2, -1)))
    assert not result[0].any()
    assert result[1].isfinite().all()
    assert result[2].isnan().all()
