"""Steps on any numbers and shapes (hypothesis) have the reference's bits on every instruction set."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from memkern import optim
from tests.support.helpers import FLOATS, assert_same, fast_here, on, set_grad, snapshot
from tests.support.property_tests import given, settings, st


def any_values(shape: tuple[int, ...], seed: int, exponents: tuple[int, int]) -> Tensor:
    """fp32 values of random bits, whose 8 exponent bits are in a range (255: infinity or NaN); one in eight is 0."""
    rng = np.random.default_rng(seed)
    exponent = rng.integers(exponents[0], exponents[1] + 1, shape, dtype=np.uint32)
    bits = exponent << 23 | rng.integers(0, 2**23, shape, dtype=np.uint32)
    bits |= rng.integers(0, 2, shape, dtype=np.uint32) << 31
    bits *= rng.integers(0, 8, shape, dtype=np.uint32) > 0
    return torch.from_numpy(np.asarray(bits).view(np.float32))


exponent_ranges = st.tuples(st.integers(0, 255), st.integers(0, 255)).map(lambda pair: (min(pair), max(pair)))
shapes = st.one_of(
    st.tuples(st.integers(1, 700)),
    st.tuples(st.integers(1, 40), st.integers(1, 300)),
    st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 40)),
)
options = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([1e-3, 0.0, 1e-30, 1e5]),
        "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.0), (0.99, 0.5), (0.5, 0.999999)]),
        "weight_decay": st.sampled_from([0.0, 0.1, 1e-30, 10.0]),
        "maximize": st.booleans(),
        "state_bits": st.sampled_from([8, 8, 8, 32]),
        "codec": st.sampled_from(["power", "dynamic"]),
        "block_size": st.sampled_from([8, 16, 128, 4096]),
    }
)


@settings(max_examples=250)
@given(
    build=st.sampled_from([optim.AdamW, optim.Adam, optim.Lion, optim.LAMB, optim.LARS]),
    options=options,
    eps=st.sampled_from([1e-8, 0.0, 1.0]),
    flags=st.tuples(*[st.booleans()] * 4),
    shape=shapes,
    p_dtype=st.sampled_from(FLOATS),
    g_dtype=st.sampled_from(FLOATS),
    p_range=exponent_ranges,
    g_range=exponent_ranges,
    seed=st.integers(0, 2**16),
    grad_scale=st.sampled_from([None, 1.0, 65536.0, 3.0]),
)
def test_any_step_has_the_references_bits(
    build: type,
    options: dict[str, Any],
    eps: float,
    flags: tuple[bool, ...],
    shape: tuple[int, ...],
    p_dtype: torch.dtype,
    g_dtype: torch.dtype,
    p_range: tuple[int, int],
    g_range: tuple[int, int],
    seed: int,
    grad_scale: float | None,
) -> None:
    if build is not optim.Lion:
        options = options | {"eps": eps}
    adapt, clip, third, fourth = flags  # the last two: other options for LAMB than for LARS
    if build in (optim.LAMB, optim.LARS):
        options = options | {"always_adapt": adapt, "trust_clip": clip}
    if build is optim.LAMB:
        options = options | {"decoupled_decay": third, "bias_correction": fourth}
    if build is optim.LARS:
        options = options | {"momentum": options["betas"][0], "trust_coeff": 1e-3 if third else None}
        options |= {"nesterov": True} if third and fourth and options["momentum"] else {}
        del options["betas"]
    start = any_values(shape, seed, p_range).to(p_dtype)
    runs = {}
    for backend in ("reference", *fast_here()):
        p = torch.nn.Parameter(start.clone())
        optimizer = build([p], min_8bit_size=0, **options)
        if grad_scale is not None:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(grad_scale), torch.tensor(0.0)
        with on(backend):
            for step in range(3):
                set_grad(p, any_values(shape, seed + 1 + step, g_range).to(g_dtype))
                optimizer.step()
        runs[backend] = snapshot(optimizer)
        for key, value in optimizer.state[p].items():
            assert not key.endswith("scale") or value.isfinite().all()
    for backend in fast_here():
        assert_same(runs[backend], runs["reference"], backend)
