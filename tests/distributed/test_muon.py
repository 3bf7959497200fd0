"""Muon on sharded matrices: each is gathered and orthogonalized on one rank, with the bits of one process."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from memkern.optim import muon_step
from memkern.optim.dtensor import muon as dtensor_muon
from tests.support.helpers import assert_same
from tests.support.ranks import Ranks
from tests.support.sharded import Odd, alone, everything, gpt, in_shards, mesh, new_muon, steps


def run(sizes: tuple[int, ...], build: Any, options: dict[str, Any], last: int, bucket: int) -> Any:
    model = in_shards(build(), mesh=mesh(*sizes))
    optimizer = new_muon(model.parameters(), **options)
    with patch.object(muon_step, "BUCKET_BYTES", bucket):
        steps(model, optimizer, 0, last)
    return everything(model, optimizer)


@pytest.mark.feature("torch", "Muon8bit with `fully_shard` on 2 processes: bits of one process")
@pytest.mark.parametrize("bucket", [2**26, 0])  # bytes: all matrices in one bucket, or each in its own
def test_bits_of_one_process(ranks: Ranks, bucket: int) -> None:
    options = {"min_8bit_size": 0}
    expected = alone(Odd, new_muon, options, 4)
    for rank in ranks(2, run, (2,), Odd, options, 4, bucket):
        assert_same(rank, expected)


SHARDED = [(2,), (3,), (2, 2)]


@pytest.mark.parametrize("state_bits", [8, pytest.param(32, marks=pytest.mark.long)])
@pytest.mark.parametrize("sizes", [*SHARDED, *(pytest.param(sizes, marks=pytest.mark.long) for sizes in [(1,), (4,)])])
@pytest.mark.parametrize(("build", "last"), [(gpt, 10), (Odd, 100)])
@pytest.mark.full
def test_100_steps(ranks: Ranks, build: Any, last: int, sizes: Any, state_bits: int) -> None:
    """With three ranks the third has no elements of a matrix. ``sizes``: ranks, or HSDP's replicas and shards."""
    options = {"min_8bit_size": 0, "state_bits": state_bits}
    expected = alone(build, new_muon, options, last)
    for rank in ranks(torch.Size(sizes).numel(), run, sizes, build, options, last, 2**14):
        assert_same(rank, expected)


def count_exchanges() -> Any:
    """The exchanges of a step, and the shapes of the matrices that this rank orthogonalizes in each call."""
    model = in_shards(gpt())
    optimizer = new_muon(model.parameters(), min_8bit_size=0)
    exchanges, shapes, all_to_all, orthogonalize_ = 0, [], dist.all_to_all_single, dtensor_muon.orthogonalize_

    def count(*args: Any, **options: Any) -> Any:
        nonlocal exchanges
        exchanges += 1
        return all_to_all(*args, **options)

    def record(updates: Any, *args: Any) -> None:
        shapes.append([tuple(u.shape) for u in updates])
        orthogonalize_(updates, *args)

    with patch.object(dist, "all_to_all_single", count), patch.object(dtensor_muon, "orthogonalize_", record):
        steps(model, optimizer, 0, 1)
    return exchanges, shapes


def test_each_matrix_has_one_owner(ranks: Ranks) -> None:
    def cost(shape: tuple[int, int]) -> int:
        return min(shape) ** 2 * (2 * max(shape) + min(shape))  # multiplications in an iteration of Newton-Schulz

    results = ranks(2, count_exchanges)
    assert [exchanges for exchanges, _ in results] == [2, 2]  # there and back
    owned = [shapes for _, (shapes,) in results]  # by rank, which orthogonalizes all of its matrices in one call
    shapes = sorted(owned[0] + owned[1])
    assert shapes == sorted(tuple(p.shape) for p in gpt().parameters() if p.dim() >= 2)
    assert abs(sum(map(cost, owned[0])) - sum(map(cost, owned[1]))) <= max(map(cost, shapes))
