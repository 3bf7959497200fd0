"""``state_bits=(8, 4)`` of shards: packed codes are sharded as scales are, and every rank has one process's bits."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from memkern import optim
from tests.support import sharded
from tests.support.dcp import load, state_of
from tests.support.helpers import assert_same
from tests.support.ranks import Ranks
from tests.support.sharded import Odd, alone, everything, in_shards, mesh, steps

OPTIONS: dict[str, Any] = {"min_8bit_size": 0, "weight_decay": 0.1, "state_bits": (8, 4)}
pytestmark = pytest.mark.full


class Whole(nn.Module):
    """Tensors whose shards are whole blocks on 1, 2 and 3 ranks; one of no elements on the third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.long = nn.Parameter(torch.randn(41, 301))  # a half byte at the end of each row
        self.tiny = nn.Parameter(torch.randn(2, 300))
        self.short = nn.Parameter(torch.randn(54, 41))  # 18 blocks of 3 rows: 123 elements in 62 bytes


def run(build: Any, last: int, sizes: tuple[int, ...]) -> Any:
    model = in_shards(build(), mesh=mesh(*sizes))
    optimizer = optim.AdamW(model.parameters(), **OPTIONS)
    steps(model, optimizer, 0, last)
    local = [x._local_tensor.shape for x in (optimizer.state[p]["exp_avg_sq"] for p in model.parameters())]
    return everything(model, optimizer), [tuple(shape) for shape in local]


@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2)])
def test_steps(ranks: Ranks, sizes: tuple[int, ...]) -> None:
    expected = alone(Whole, optim.AdamW, OPTIONS, 4)
    assert tuple(expected["long"]["exp_avg_sq"].shape) == (41, 151)
    results = ranks(torch.Size(sizes).numel(), run, Whole, 4, sizes)
    for state, _ in results:
        assert_same(state, expected)
    if sizes == (3,):
        assert [local for _, local in results] == [
            [(14, 151), (1, 150), (6, 62)],
            [(14, 151), (1, 150), (6, 62)],
            [(13, 151), (0, 150), (6, 62)],
        ]


def placed(sizes: tuple[int, ...], placements: Any) -> Any:
    p = nn.Parameter(distribute_tensor(sharded.gradient(torch.zeros(40, 512), 7, 0), mesh(*sizes), placements))
    holder = nn.ParameterDict({"p": p})
    optimizer = optim.AdamW(holder.parameters(), **OPTIONS)
    steps(holder, optimizer, 0, 4)
    return everything(holder, optimizer), optimizer.state[p]["exp_avg_sq"].placements


@pytest.mark.parametrize(
    ("sizes", "placements"), [((2,), [Shard(1)]), ((2,), [Replicate()]), ((2, 2), [Shard(0), Shard(1)])]
)
def test_placements(ranks: Ranks, sizes: tuple[int, ...], placements: Any) -> None:
    expected = ranks(1, placed, (1,), [Replicate()])[0][0]
    for state, at in ranks(torch.Size(sizes).numel(), placed, sizes, placements):
        assert_same(state, expected)
        assert at == tuple(placements)


def refused() -> list[str]:
    messages = []
    for shape, at in (((1001,), Shard(0)), ((37, 15), Shard(0)), ((40, 500), Shard(1))):
        p = nn.Parameter(distribute_tensor(torch.zeros(shape), mesh(), [at]))
        try:
            optim.AdamW([p], **OPTIONS)
        except ValueError as error:
            messages.append(str(error))
        optim.AdamW([p], **{**OPTIONS, "min_8bit_size": 10**6})  # 32-bit states
        optim.AdamW([p], **{**OPTIONS, "state_bits": 8})
    model = in_shards(Odd())
    optimizer = optim.AdamW(model.parameters(), **{**OPTIONS, "state_bits": 8})
    steps(model, optimizer, 0, 1)
    optimizer.param_groups[0]["state_bits"] = (8, 4)
    try:
        steps(model, optimizer, 1, 2)
    except ValueError as error:
        messages.append(str(error))
    return messages


def test_shards_that_end_inside_blocks_are_refused(ranks: Ranks) -> None:
    for messages in ranks(2, refused):
        assert len(messages) == 4
        for message in messages:
            assert message.startswith("state_bits must be 8 or 32 where shards end inside blocks, got (8, 4)")
        assert "shape (1001,) with placements (Shard(dim=0),) and block_size=128" in messages[0]


def resumed(path: str, first: int, last: int, to: str) -> Any:
    model = in_shards(Whole())
    optimizer = optim.AdamW(model.parameters(), **OPTIONS)
    if path:
        load(model, optimizer, path)
    steps(model, optimizer, first, last)
    dcp.save(state_of(model, optimizer), checkpoint_id=to)
    return everything(model, optimizer)


def test_resharding(ranks: Ranks, tmp_path: Path) -> None:
    a, b, c = (str(tmp_path / name) for name in "abc")
    ranks(2, resumed, "", 0, 2, a)
    ranks(3, resumed, a, 2, 4, b)
    (found,) = ranks(1, resumed, b, 4, 6, c)
    assert_same(found, alone(Whole, optim.AdamW, OPTIONS, 6))


def load_plain(state: Any) -> Any:
    model = in_shards(Whole())
    optimizer = optim.AdamW(model.parameters(), **OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the state was converted
        optimizer.load_state_dict(state)
    first = everything(model, optimizer)
    optimizer.param_groups[0]["state_bits"] = 32
    optimizer.state_dict()  # converts
    return first, everything(model, optimizer), dist.get_rank()


@pytest.mark.parametrize("bits", [8, (8, 4)], ids=str)
def test_a_state_dict_of_one_process(ranks: Ranks, bits: Any) -> None:
    model = Whole()
    optimizer = optim.AdamW(model.parameters(), **{**OPTIONS, "state_bits": bits})
    steps(model, optimizer, 0, 2)
    state, model = optimizer.state_dict(), Whole()
    optimizer = optim.AdamW(model.parameters(), **OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.load_state_dict(state)
    first = everything(model, optimizer)
    optimizer.param_groups[0]["state_bits"] = 32
    optimizer.state_dict()
    for found, floats, _ in ranks(2, load_plain, state):
        assert_same(found, first)
        assert_same(floats, everything(model, optimizer))
