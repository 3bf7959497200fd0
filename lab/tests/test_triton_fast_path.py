"""Quotients and roots of memkern.triton.fast_path are correctly rounded, and usual tiles of a step take that path.

The kernels run as Triton compiles them, in the PTX emulator, whose estimates are off by up to a unit in the last place.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lab.emulators import triton_ptx
from memkern import reference
from tests.support.helpers import assert_same
from tests.support.kernels.arguments import cloned, step_args

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.full,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, which runs the kernels itself"),
    pytest.mark.skipif(triton_ptx.missing() is not None, reason=str(triton_ptx.missing())),
]
SIZE = 2**14  # elements


def near_midpoints(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Significands whose quotient is as close to the middle of two fp32 numbers as one can be: 1 / (2 b) of a unit.

    With m = +-1 / b modulo 2^25, odd, b m = 2^25 a +- 1; so 2^24 a / b = m / 2 -+ 1 / (2 b).
    """
    random = np.random.default_rng(seed)
    b = random.integers(2**23, 2**24, 8 * count, dtype=np.int64) | 1
    inverse = b.copy()
    for _ in range(5):
        inverse = inverse * (2 - b * inverse) % 2**25
    m = np.where(random.integers(0, 2, b.size) == 1, inverse, 2**25 - inverse)
    a = (b * m + 2**24) // 2**25
    usable = (m > 2**24) & (a >= 2**23) & (np.abs(b * m - 2**25 * a) == 1)
    return a[usable][:count].astype(np.float32), b[usable][:count].astype(np.float32)


def test_quotients_and_roots_are_correctly_rounded() -> None:
    import triton
    import triton.language as tl

    from memkern.triton.codec import code_root
    from memkern.triton.fast_path import fast_divide

    @triton.jit
    def kernel(a, b, quotients, roots, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x, y = tl.load(a + i), tl.load(b + i)
        tl.store(quotients + i, fast_divide(x, y))
        tl.store(roots + i, code_root(y))

    a, b = near_midpoints(SIZE, 0)
    assert len(a) == SIZE
    random = np.random.default_rng(1)
    # Exponents over the whole range of fast_path.py, numerators of both signs; roots are of the denominators.
    a *= np.exp2(random.integers(-64 - 23, 60 - 24, SIZE)).astype(np.float32) * random.choice([-1, 1], SIZE)
    b *= np.exp2(random.integers(-51 - 23, 21 - 24, SIZE)).astype(np.float32)
    a[::64], b[1::64] = 0.0, np.float32(2.0**20)
    a[2::64] = -0.0
    x, y = torch.from_numpy(a), torch.from_numpy(b)
    quotients, roots = torch.empty(SIZE), torch.empty(SIZE)
    with triton_ptx.emulated() as launched:
        kernel[(SIZE // 1024,)](x, y, quotients, roots, BLOCK=1024, num_warps=4, enable_fp_fusion=False)
    assert launched
    assert_same(quotients, x / y)
    assert_same(roots, y.double().sqrt().float())


SLOW = ("sqrt.rn.f32", "div.rn.f32")  # instructions of the other path


@pytest.mark.parametrize(("dtype", "layout"), [(torch.bfloat16, (9, 1600)), (torch.float32, (6, 1024))])
@pytest.mark.parametrize("name", ["adam_step_", "lamb_step_"])
def test_usual_tiles_take_the_fast_path(name: str, dtype: torch.dtype, layout: tuple[int, int]) -> None:
    """So do tiles whose rows end inside a block of 128, but not a last tile that is partly outside of the tensor."""
    import memkern.triton

    args = step_args(name, (layout,), [dtype], [dtype])
    generator = torch.Generator().manual_seed(0)
    args = args._replace(grads=[torch.randn(layout, generator=generator).to(dtype) / 100])
    expected = cloned(args)
    with triton_ptx.emulated() as launched:
        getattr(memkern.triton, name)(args)
    getattr(reference, name)(expected)
    assert_same([*args], [*expected])
    tiles = [k for m in launched for k in m.kernels.values() if k.name.endswith("_tiles")]
    assert tiles
    for kernel in tiles:
        assert [op for op in kernel.executed if op.startswith("rsqrt.approx")]
        assert not [op for op in SLOW if kernel.executed[op]], kernel.name


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e25, torch.nan, torch.inf])
def test_one_rare_element_sends_its_tile_the_slow_way(value: float) -> None:
    import memkern.triton

    args = step_args("adam_step_", ((8, 128), (8, 128)), codec=(0, 0))
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(8, 128, generator=generator) / 100 for _ in range(2)]
    grads[0][3, 77] = value
    args = args._replace(grads=grads)
    expected = cloned(args)
    with triton_ptx.emulated() as launched:
        memkern.triton.adam_step_(args)
    reference.adam_step_(expected)
    assert_same([*args], [*expected])
    (kernel,) = {id(k): k for m in launched for k in m.kernels.values() if k.name == "adam_tiles"}.values()
    assert kernel.executed["sqrt.rn.f32"] == 1024
