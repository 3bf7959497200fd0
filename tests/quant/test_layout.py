"""memkern.quant.layout cuts a tensor into blocks as the ops of every backend do, also where it is a shard."""

import math
from typing import Any

import pytest
import torch

import memkern
from memkern.quant.layout import block_layout, check_block_size, is_dense, memory_order
from tests.support.helpers import (
    LAYOUTS,
    assert_same,
    at,
    fast_here,
    hard,
    on,
    over_all,
    over_codecs,
    over_cpu,
    tensor,
)
from tests.support.interpreted import interpreted
from tests.support.property_tests import given, settings, st

# shape, strides, block_size -> segment, block, shape of the scales
TABLE = [
    ((), (), 128, 1, 128, (1,)),
    ((1,), (1,), 128, 1, 128, (1,)),
    ((5000,), (1,), 128, 5000, 128, (40,)),  # rows of one element: 128 of them are a block
    ((6, 128), (128, 1), 128, 128, 128, (6, 1)),
    ((6, 129), (129, 1), 128, 129, 128, (6, 2)),
    ((6, 127), (127, 1), 128, 762, 127, (6,)),
    ((150, 7), (7, 1), 128, 1050, 126, (9,)),
    ((3, 1000), (1000, 1), 128, 1000, 128, (3, 8)),
    ((3, 1000), (1000, 1), 4096, 3000, 4000, (1,)),
    ((1, 1500), (1500, 1), 128, 1500, 128, (1, 12)),
    ((1500, 1), (1, 1), 128, 1500, 128, (12,)),
    ((33, 131), (1, 33), 128, 4323, 99, (44,)),  # transposed: 131 rows of 33
    ((4, 9, 5, 3), (135, 1, 27, 9), 128, 135, 128, (4, 2)),  # channels_last
    ((7, 60, 5), (60, 1, 420), 128, 420, 128, (5, 4)),  # the outermost dimension in memory is the last
    ((2, 1, 300), (300, 77, 1), 128, 300, 128, (2, 3)),  # a dimension of size 1 lies anywhere
]


def layout_id(case: tuple) -> str:
    return f"{case[0]} {case[1]} block {case[2]}"


@pytest.mark.parametrize("case", TABLE, ids=layout_id)
def test_block_layout_is_that_of_the_table(case: tuple) -> None:
    shape, strides, block_size, segment, block, scale_shape = case
    layout = block_layout(shape, strides, block_size)
    assert layout == (math.prod(shape), segment, block, scale_shape)
    assert layout.blocks == math.prod(scale_shape)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 5)])
def test_empty_has_no_blocks(shape: tuple[int, ...]) -> None:
    layout = block_layout(shape, torch.empty(shape).stride(), 128)
    assert layout.scale_shape == (0,)
    assert layout.blocks == layout.blocks_per_segment == 0


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((4, 8), (16, 1)),
        ((4, 8), (4, 1)),
        ((4, 8), (0, 1)),
        ((4,), (2,)),
        ((2, 3), (1, 1)),
        ((2, 2, 2), (4, 2, 2)),
    ],
)
def test_gaps_and_overlaps_are_not_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    assert not is_dense(shape, strides)
    with pytest.raises(ValueError, match=r"dense.*contiguous\(\) or clone\(\)"):
        block_layout(shape, strides, 128)


@pytest.mark.parametrize("block_size", [8, 16, 24, 128, 1000, 4096])
def test_multiples_of_8_up_to_4096_are_block_sizes(block_size: int) -> None:
    check_block_size(block_size)


@pytest.mark.parametrize("block_size", [0, 4, 12, 8192, 4104, -8, 128.0, True, "128", None])
def test_other_block_sizes_are_refused(block_size: object) -> None:
    with pytest.raises(ValueError, match="multiple of 8 from 8 to 4096"):
        check_block_size(block_size)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_order_is_a_view_of_every_element_once(layout: str) -> None:
    x = tensor(layout)
    flat = memory_order(x)
    assert flat.data_ptr() == x.data_ptr()
    assert torch.equal(flat.sort().values, x.reshape(-1).sort().values)


@interpreted()
@over_all
@pytest.mark.parametrize("case", TABLE, ids=layout_id)
def test_ops_make_the_scales_of_the_layout(backend: str, case: tuple) -> None:
    shape, strides, block_size, *_, scale_shape = case
    x = at(torch.empty_strided(shape, strides).normal_(), backend)
    with on(backend):
        codes, scale = memkern.quantize_blockwise(x, block_size=block_size)
    assert tuple(scale.shape) == scale_shape
    assert codes.stride() == x.stride()
    # A block's scale is its largest magnitude, so that it tells which elements the block has.
    segment, block = block_layout(shape, strides, block_size)[1:3]
    blocks = [b for row in memory_order(x).abs().split(segment) for b in row.split(block)]
    assert torch.equal(scale.reshape(-1), torch.stack([b.max() for b in blocks]))


@st.composite
def dense_tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of up to five dimensions in any order in memory, those of size 1 with any stride."""
    shape = draw(st.lists(st.integers(1, 12), max_size=4))
    if draw(st.booleans()):
        shape.append(draw(st.integers(1, 400)))
    order = draw(st.permutations(range(len(shape))))
    strides, expected = [0] * len(shape), 1
    for d in order:
        strides[d] = expected if shape[d] > 1 else draw(st.sampled_from([0, 1, 3, 1000]))
        expected *= shape[d]
    flat = hard(expected, draw(st.integers(0, 99)))
    return flat.as_strided(shape, strides)


@settings(max_examples=150)
@given(x=dense_tensors(), block_size=st.integers(1, 64).map(lambda n: 8 * n), signed=st.booleans())
def test_backends_cut_alike(x: torch.Tensor, block_size: int, signed: bool) -> None:
    with on("reference"):
        expected = memkern.quantize_blockwise(x, block_size=block_size, signed=signed)
    for backend in fast_here():
        with on(backend):
            actual = memkern.quantize_blockwise(x, block_size=block_size, signed=signed)
        assert_same(actual, expected, backend)
    # Every element is in the block that the layout says.
    layout = block_layout(x.shape, x.stride(), block_size)
    back = memkern.dequantize_blockwise(*expected, block_size=block_size)
    assert layout.numel == back.numel()
    assert ((back - (x if signed else x.clamp_min(0))).abs() <= expected[1].max() * 2 / 127).all()


# ---- shards

SHORT, LONG, CHANNELS_LAST = (512, 7), (12, 700), (8, 40, 3, 3)
# shape, the sizes of its shards in rows: whole groups of 128 // 7 = 18 where rows are short
SHARDS = [
    (LONG, [12]),
    (LONG, [5, 7]),
    (LONG, [1, 10, 1]),
    (SHORT, [18, 36, 458]),
    (SHORT, [180, 332]),
    ((6, 128), [1, 2, 3]),
    (CHANNELS_LAST, [3, 5]),
    (CHANNELS_LAST, [1, 6, 1]),
    ((66000,), [128 * 3, 128 * 500, 1616]),
]


def sharded(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    x = hard(shape, seed)
    return x.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else x


@over_codecs
@pytest.mark.parametrize(("shape", "sizes"), SHARDS)
def test_quantized_shards_are_shards_of_the_quantized(codec: str, shape: tuple[int, ...], sizes: list[int]) -> None:
    x = sharded(shape, 0)
    options: dict[str, Any] = {"codec": codec, "signed": False, "step": 7 if codec == "power" else None}
    codes, scale = memkern.quantize_blockwise(x, **options)
    parts = [memkern.quantize_blockwise(part, **options) for part in x.split(sizes)]
    assert torch.equal(torch.cat([part[0] for part in parts]), codes)
    assert torch.equal(torch.cat([part[1] for part in parts]), scale)


@over_cpu
@pytest.mark.parametrize("name", ["gaps", "overlap", "expanded"])
def test_ops_refuse_what_is_not_dense(backend: str, name: str) -> None:
    x = {
        "gaps": torch.ones(8, 64)[:, ::2],
        "overlap": torch.ones(100).as_strided((8, 16), (4, 1)),
        "expanded": torch.ones(8, 1).expand(8, 16),
    }[name]
    with on(backend), pytest.raises(ValueError, match="dense"):
        memkern.quantize_blockwise(x)
    codes = x.to(torch.int8) if name != "gaps" else torch.ones(8, 64, dtype=torch.int8)[:, ::2]
    if not is_dense(codes.shape, codes.stride()):
        with on(backend), pytest.raises(ValueError, match="dense"):
            memkern.dequantize_blockwise(codes, torch.ones(1))
