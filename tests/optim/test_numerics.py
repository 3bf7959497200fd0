"""Results do not depend on the number of threads; 32-bit states are as near to fp64 as torch.optim's, and 8-bit states
move parameters within the codes' error.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from memkern import optim
from tests.support.helpers import FLOATS, assert_same, hard, like, name_of, needs_cpp, on, over_cpu
from tests.support.optimizers import LAYERWISE, cases
from tests.support.trained import trained


@needs_cpp
@pytest.mark.parametrize("build", [optim.AdamW8bit, *LAYERWISE], ids=name_of)
def test_results_depend_neither_on_the_run_nor_on_the_number_of_threads(build: type) -> None:
    # Layers that threads share, layers of one thread, and batches of layers; in C++ for any processor ("generic").
    shapes = [(300, 700), (40, 7), (200, 513), *[(33, 300)] * 20, (5,)]
    params = [hard(shape, i) for i, shape in enumerate(shapes)]
    before, runs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 3):
            torch.set_num_threads(threads)
            runs.append(trained("generic", build, {"weight_decay": 0.1}, params, lambda p, seed: like(p, seed), 2))
    finally:
        torch.set_num_threads(before)
    for result in runs[1:]:
        assert_same(result, runs[0])


# ---- parity with torch.optim

PARITY = cases("parity")


def run(build: Callable[..., Any], dtype: torch.dtype, options: dict[str, Any], steps: int = 20) -> tuple[Any, Tensor]:
    """An optimizer and its parameter after some steps, whose gradients are the same numbers in every dtype."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    p = torch.nn.Parameter(x.to(dtype))
    optimizer = build([p], **options)
    for step in range(steps):
        g = torch.randn(64, 128, generator=torch.Generator().manual_seed(1 + step)).bfloat16().to(torch.float16)
        p.grad = g.to(dtype)
        optimizer.step()
    return optimizer, p.detach().double()


@pytest.mark.pairwise
@over_cpu
@pytest.mark.parametrize("name", PARITY)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("loop", ["foreach", "fused"])
def test_32_bit_is_no_further_from_the_truth_than_torch(backend: str, name: str, dtype: torch.dtype, loop: str) -> None:
    spec, options = PARITY[name]
    truth = run(spec.peer_of, torch.float64, options)[1]
    with on(backend):
        optimizer, p = run(spec.cls, dtype, options)
    theirs, q = run(spec.peer_of, dtype, options | {loop: True})
    error = (p - truth).abs()
    torchs_error = (q - truth).abs().nan_to_num(torch.inf)  # torch.optim's v in fp16 is 0
    # The largest of 8,192 errors is random within one rounding of the largest parameters (from 2 to 4, SGD's 4.9).
    rounding = torch.finfo(dtype).eps * 2 ** math.floor(math.log2(truth.abs().max()))
    assert error.max() <= torchs_error.max() + rounding
    assert error.mean() <= 1.1 * torchs_error.mean()
    if dtype == torch.float32:
        assert (p - q).abs().max() <= 8 * torch.finfo(dtype).eps  # parameters are around 1
        (ours,), (torchs,) = optimizer.state.values(), theirs.state.values()
        first = next(iter(optimizer.moments))
        # Roundings of the moment's largest values: SGD's is a sum over gradients of up to 4, the others' a mean.
        atol = 1e-7 * max(1.0, float(torchs[first].abs().max()))
        torch.testing.assert_close(ours[first], torchs[first], rtol=1e-5, atol=atol)
        if "exp_avg_sq" in ours:
            torch.testing.assert_close(ours["exp_avg_sq"], torchs["exp_avg_sq"], rtol=4e-6, atol=0)
            assert ours["step"] == torchs["step"] == 20


@pytest.mark.pairwise
@over_cpu
@pytest.mark.parametrize("name", PARITY)
@pytest.mark.parametrize("codec", ["power", "dynamic"])
def test_8_bit_moves_parameters_as_torch_does_within_the_codecs_error(backend: str, name: str, codec: str) -> None:
    spec, options = PARITY[name]
    start = run(spec.peer_of, torch.float64, options, 0)[1]
    truth = run(spec.peer_of, torch.float64, options)[1]
    with on(backend):
        optimizer, p = run(spec.cls, torch.float32, options | {"state_bits": 8, "codec": codec})
    assert f"{next(iter(optimizer.moments))}_scale" in next(iter(optimizer.state.values()))  # moments are in codes
    error = (p - truth).norm() / (truth - start).norm()
    # Measured: .010 (power), .015 (dynamic). Lion moves by the sign, which the stored moment's error turns where the
    # sum is near 0: .056.
    limit = 0.08 if spec.name == "Lion" else {"power": 0.02, "dynamic": 0.03}[codec]
    assert 1e-5 < error < limit
