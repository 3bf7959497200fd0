"""memkern.reference.muon against torch and fp64. Its steps: test_muon.py, bit for bit torch.optim.Muon's."""

from typing import Any

import pytest
import torch
from torch import Tensor

from memkern.quant.codec import CODECS, WEIGHTS
from memkern.quant.layout import layout_of
from memkern.reference import muon
from memkern.reference.blockwise import to_blocks
from memkern.reference.state import tensors_of
from memkern.schemas import MUON_STEP, StepArgs
from tests.support.helpers import hard

SHAPES = [(48, 48), (96, 40), (40, 96), (1, 130)]
# torch's lerp and add are fused with a multiplication only where its vector instructions are.
needs_fma = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="torch's CPU kernels without AVX2 are not fused",
)


def normal(shape: Any, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def new_args(params: list[Tensor], bits: int = 32, **options: Any) -> StepArgs:
    states = {
        "moments": [torch.zeros_like(p, dtype=torch.int8 if bits == 8 else torch.float32) for p in params],
        "scales": [torch.zeros(layout_of(p, 128).scale_shape) for p in params] if bits == 8 else [],
        "steps": [torch.zeros(()) for _ in params],
        "group": [0] * len(params),
        "lr": [torch.tensor(0.02, dtype=torch.float64)],
        "hyperparameters": [0.95, 1.0, 0.1, 0.0],  # momentum, nesterov, weight_decay, maximize
        "codec": [CODECS["power"]],
        "block_size": [128],
    }
    return StepArgs(params, [torch.zeros_like(p) for p in params], **(states | options))


def step(args: StepArgs) -> None:
    updates = [torch.empty_like(p, dtype=torch.bfloat16) for p in args.params]
    squares = muon.muon_momentum_(args, updates)
    found = [muon.orthogonalize(u, s) for u, s in zip(updates, squares, strict=True)]
    for u, o in zip(updates, found, strict=True):
        u.copy_(o)
    muon.muon_apply_(args, updates, [muon.adjusted(None, p.shape) for p in args.params])


# ---- parts


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
    from torch.optim._muon import _zeropower_via_newtonschulz as torchs

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
        theirs = torchs(u, muon.NS_COEFFICIENTS, 5, 1e-7)
        assert (ours - truth).norm() <= (theirs - truth).norm()
        # Each of the five iterations rounds three matrices to bf16, by at most 2^-9 of a value. (1 x n comes closest.)
        assert (ours - truth).norm() <= 5 * 3 * 2.0**-9 * truth.norm()


def test_zeros_give_zeros_and_nan_stays_in_its_matrix() -> None:
    u = torch.stack([torch.zeros(8, 16), normal((8, 16), 0), normal((8, 16), 1)]).bfloat16()
    u[2, 3, 4] = torch.nan
    found = muon.orthogonalize(u, u.double().square().sum((-2, -1)))
    assert not found[0].any()
    assert found[1].isfinite().all()
    assert found[2].isnan().all()


# ---- steps


def test_a_whole_of_rows_has_the_bits_of_its_shards() -> None:
    whole, g = normal((64, 256), 0), hard((64, 256), 1)
    halves = [*whole.clone().chunk(2)]
    one, two = new_args([whole], bits=8), new_args(halves, bits=8)
    one.grads[0].copy_(g)
    for to, part in zip(two.grads, g.chunk(2), strict=True):
        to.copy_(part)
    u, v = [torch.empty(64, 256).bfloat16()], [torch.empty(32, 256).bfloat16() for _ in halves]
    squares, sums = muon.muon_momentum_(one, u), muon.muon_momentum_(two, v)
    assert torch.equal(u[0], torch.cat(v))
    assert torch.equal(one.moments[0], torch.cat([*two.moments]))
    torch.testing.assert_close(squares[0], sum(sums), rtol=1e-14, atol=0)  # fp64 sums in another order


def test_bf16_weights_with_kept_errors_are_the_fp32_ones() -> None:
    p = normal((32, 64), 0).bfloat16()
    full = p.float()
    error = torch.zeros_like(p, dtype=torch.int16)
    kept = new_args([p], weight_states=[error], weight_storage=[WEIGHTS["bf16+16"]])
    args = new_args([full])
    for k in range(3):
        kept.grads[0].copy_(normal(p.shape, k))
        args.grads[0].copy_(kept.grads[0])
        step(kept)
        step(args)
    (t,) = tensors_of(MUON_STEP, kept)
    assert torch.equal(t.load_param(), to_blocks(full, t.layout))


# ---- refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ns_steps": 0}, "ns_steps must be a whole number from 1 to 99, got 0"),
        ({"ns_steps": 100}, "ns_steps must be a whole number from 1 to 99, got 100"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients must be three finite numbers"),
        ({"eps": 0.0}, "eps must be a finite number above 0"),
    ],
    ids=str,
)
def test_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        muon.orthogonalize(torch.ones(2, 2).bfloat16(), torch.ones(()), **options)
    with pytest.raises(ValueError, match="adjust_lr_fn must be one of"):
        muon.adjusted("rms", (2, 2))
