"""memkern.quant.codec has bitsandbytes' dynamic map, an even dither, and C++ headers with the same numbers."""

import runpy
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from memkern.quant import codec
from tests.support.helpers import over_signs

GENERATE = runpy.run_path(str(Path(codec.__file__).parents[2] / "csrc/generate.py"))  # its functions by name


def bitsandbytes_map(signed: bool) -> torch.Tensor:
    """create_dynamic_map of bitsandbytes 0.50 (functional.py) for its defaults, 7 exponent bits of 8."""
    data = []
    for i in range(7):
        items = 2**i + 1 if signed else 2 ** (i + 1) + 1
        boundaries = torch.linspace(0.1, 1, items, dtype=torch.float32)
        means = (boundaries[:-1] + boundaries[1:]) / 2.0
        data += ((10 ** (-6 + i)) * means).tolist()
        if signed:
            data += (-(10 ** (-6 + i)) * means).tolist()
    data += [0, 1.0]
    return torch.tensor(sorted(data), dtype=torch.float32)


@over_signs
def test_dynamic_map_is_that_of_bitsandbytes(signed: bool) -> None:
    ours = torch.tensor(codec.dynamic_map(signed), dtype=torch.float64)
    assert torch.equal(ours, bitsandbytes_map(signed).double())  # fp32 numbers, to the last bit


@over_signs
def test_dynamic_map_is_ascending_and_holds_zero_and_one(signed: bool) -> None:
    values = codec.dynamic_map(signed)
    assert len({*values}) == 256
    assert [*values] == sorted(values)
    assert values[codec.dynamic_zero(signed)] == 0
    assert values[-1] == 1
    assert values[0] == (-float(np.float32(0.99296875)) if signed else 0)


def around(x: float, ulps: int) -> list[float]:
    """The fp32 numbers up to `ulps` steps from x."""
    numbers = [np.float32(x)]
    for _ in range(ulps):
        numbers = [
            np.nextafter(numbers[0], np.float32(-np.inf)),
            *numbers,
            np.nextafter(numbers[-1], np.float32(np.inf)),
        ]
    return [float(n) for n in numbers]


@over_signs
def test_midpoints_decide_the_nearest_entry_exactly(signed: bool) -> None:
    values, midpoints = codec.dynamic_map(signed), codec.dynamic_midpoints(signed)
    assert len(midpoints) == 255
    assert all(float(np.float32(m)) == m for m in midpoints)
    exact = [Fraction(v) for v in values]
    for i, midpoint in enumerate(midpoints):
        for t in around(midpoint, 2):
            chosen = sum(m < t for m in midpoints)
            # A tie takes the lower entry.
            nearest = min(range(max(0, i - 2), min(256, i + 4)), key=lambda k: (abs(exact[k] - Fraction(t)), k))
            assert chosen == nearest, f"{t!r} beside the boundary {i}"


def test_headers_in_the_tree_are_current(tmp_path: Path) -> None:
    GENERATE["write_headers"](tmp_path)
    headers = {name: GENERATE["CSRC"] / name for name in GENERATE["HEADERS"]}
    if not any(header.exists() for header in headers.values()):
        pytest.skip("they are written by a build in the tree, and there was none")
    for name, header in headers.items():
        assert header.read_text() == (tmp_path / name).read_text(), f"{header} is old: python csrc/generate.py"


@pytest.mark.parametrize("x", [0.1, 1 / 3, 1e-45, 1e-40, 3.4e38, -0.7, 0.0, 1.0])
def test_to_fp32_rounds_once(x: float) -> None:
    assert codec.to_fp32(x) == float(np.float32(x))


def test_dither_is_even_along_a_block_and_over_steps() -> None:
    from memkern.reference.blockwise import dither

    cpu = torch.device("cpu")
    for step in (1, 2, 1000, 2**24 - 1):
        u = dither(128, step, cpu)
        assert u.dtype == torch.float32
        assert 0 <= u.min() <= u.max() < 1
        # 2^32 over the golden ratio: the gaps of 128 points take two or three lengths, none above 2.2 / 128.
        gaps = u.sort().values.diff()
        assert gaps.max() < 2.2 / 128
        assert gaps.min() > 0.3 / 128
    at_one_place = torch.stack([dither(8, step, cpu)[3] for step in range(1, 1001)])
    assert abs(at_one_place.mean() - 0.5) < 0.005
    assert torch.histc(at_one_place, 10, 0, 1).min() > 90
    # Written out by hand for j = 3, step = 5.
    assert dither(8, 5, cpu)[3] == ((3 * 2654435769 + 5 * 1640531527) % 2**32 >> 8) / 2**24


def test_dither_stays_below_1_at_the_largest_step() -> None:
    from memkern.reference.blockwise import dither

    # step is an fp32 counter: 2^24 is as far as it counts.
    u = dither(4096, 2**24, torch.device("cpu"))
    assert 0 <= u.min() <= u.max() < 1
