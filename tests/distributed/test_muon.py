"""Muon on sharded matrices: each is gathered and orthogonalized on one rank, with the bits of one process."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from memkern.optim import muon_step
from memkern.optim.dtensor import muon as dtensor_muon
from tests.support.helpers import assert_same, first_full
from tests.support.ranks import Ranks
from tests.support.sharded import Odd, full_params_and_states, gpt, in_shards, mesh, new_muon, run_in_one_process, steps


def train_sharded(sizes: tuple[int, ...], build: Any, options: dict[str, Any], count: int, bucket_bytes: int) -> Any:
    """Parameters and states of ``build()`` on a mesh of these sizes after ``count`` steps of Muon."""
    model = in_shards(build(), mesh=mesh(*sizes))
    optimizer = new_muon(model.parameters(), **options)
    with patch.object(muon_step, "BUCKET_BYTES", bucket_bytes):
        steps(model, optimizer, 0, count)
    return full_params_and_states(model, optimizer)


@pytest.mark.feature("torch", "Muon8bit with `fully_shard` on 2 processes: bits of one process")
@pytest.mark.parametrize("bucket_bytes", [2**26, 0])  # all matrices in one bucket, or each in its own
def test_bits_of_one_process(ranks: Ranks, bucket_bytes: int) -> None:
    options = {"min_8bit_size": 0}
    expected = run_in_one_process(Odd, new_muon, options, 4)
    for rank in ranks(2, train_sharded, (2,), Odd, options, 4, bucket_bytes):
        assert_same(rank, expected)


@pytest.mark.full
@pytest.mark.parametrize(
    ("build", "count", "sizes", "state_bits"),  # sizes: (ranks,), or HSDP's (replicas, shards)
    first_full(
        [
            (Odd, 40, (3,), 8),  # the third rank has no elements of a matrix
            (gpt, 4, (2, 2), 8),
            (gpt, 10, (2,), 8),
            (gpt, 10, (4,), 32),
            (Odd, 100, (2,), 32),
            (Odd, 100, (2, 2), 8),
        ],
        2,
    ),
)
def test_many_steps_have_the_bits_of_one_process(
    ranks: Ranks, build: Any, count: int, sizes: Any, state_bits: int
) -> None:
    options = {"min_8bit_size": 0, "state_bits": state_bits}
    expected = run_in_one_process(build, new_muon, options, count)
    for rank in ranks(torch.Size(sizes).numel(), train_sharded, sizes, build, options, count, 2**14):
        assert_same(rank, expected)


def count_exchanges() -> Any:
    """The number of all-to-alls in a step, and the matrices' shapes in each call by which this rank orthogonalizes."""
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
    def multiplications(shape: tuple[int, int]) -> int:
        """The number of multiplications in an iteration of Newton-Schulz."""
        return min(shape) ** 2 * (2 * max(shape) + min(shape))

    results = ranks(2, count_exchanges)
    assert [exchanges for exchanges, _ in results] == [2, 2]  # to the owner and back
    owned = [shapes for _, (shapes,) in results]  # each rank orthogonalizes all of its matrices in one call
    shapes = sorted(owned[0] + owned[1])
    assert shapes == sorted(tuple(p.shape) for p in gpt().parameters() if p.dim() >= 2)
    costs = [sum(map(multiplications, of_rank)) for of_rank in owned]
    assert abs(costs[0] - costs[1]) <= max(map(multiplications, shapes))  # no two ranks differ by more than a matrix
