"""Parameters in another order on one rank: by name each meets its own, and without names what can be seen raises."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parameter import Parameter

from memkern import optim
from memkern.optim.offload import host_weights
from tests.support.helpers import assert_same
from tests.support.late_transfers import LateHostOffload
from tests.support.ranks import Ranks
from tests.support.sharded import whole

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Muon": (optim.Muon8bit, {}),
    "LAMB": (optim.LAMB, {}),
    "LARS": (optim.LARS8bit, {}),
    "blocks on several ranks": (optim.AdamW8bit, {}),
    "clipped": (optim.AdamW, {"max_grad_norm": 0.1}),
    "HostOffload": (LateHostOffload, {"optimizer_class": optim.Muon8bit}),
}
EQUAL = ((16, 40), (16, 40), (16, 40))  # 3 rows to a block, and 8 on a rank
OTHERS = ((16, 40), (40, 16))


def run(case: str, shapes: Any, named: bool, reverse: bool, converts: bool = False) -> Any:
    """Two steps; the last rank has the parameters in the other order. Between, codes may be made anew."""
    build, options = CASES[case]
    mesh, generator = init_device_mesh("cpu", (dist.get_world_size(),)), torch.Generator().manual_seed(0)
    place = [Shard(0)]

    def placed(x: Tensor) -> Tensor:
        return distribute_tensor(x, mesh, place, src_data_rank=None)

    params = [Parameter(placed(torch.randn(shape, generator=generator))) for shape in shapes]
    given: list[Any] = [*zip("abc", params, strict=True)] if named else [*params]
    if reverse and dist.get_rank() == dist.get_world_size() - 1:
        given.reverse()
    with patch.object(host_weights, "BUCKET_ELEMENTS", 1):
        optimizer = build(params=given, lr=0.02, min_8bit_size=0, **options)
    for _ in range(2):
        for i, p in enumerate(params):
            p.grad = placed(torch.randn(p.shape, generator=generator) * 10.0**i)
        before = [whole(p.detach()).clone() for p in params]
        try:
            optimizer.step()
        except RuntimeError as error:
            assert_same([whole(p.detach()) for p in params], before)
            return str(error)
        for group in optimizer.param_groups if converts else ():
            group["codec"] = "dynamic"
    return [whole(p.detach()) for p in params]


@pytest.mark.parametrize("case", CASES)
def test_named_parameters_are_exchanged_by_name(ranks: Ranks, case: str) -> None:
    converts = case == "blocks on several ranks"
    expected = ranks(2, run, case, EQUAL, True, False, converts)
    assert_same(expected[0], expected[1])
    for rank in ranks(2, run, case, EQUAL, True, True, converts):
        assert_same(rank, expected[0])


@pytest.mark.parametrize("case", ["Muon", "LAMB", "blocks on several ranks", "HostOffload"])
def test_another_order_of_shapes_raises_on_every_rank(ranks: Ranks, case: str) -> None:
    for message in ranks(2, run, case, OTHERS, False, True):
        assert "params must be the same in the same order on every rank" in message
        assert "(16, 40)" in message
        assert "named_parameters()" in message
    for result in ranks(2, run, case, OTHERS, False, False):
        assert not isinstance(result, str)


def run_once() -> list[int]:
    """Collectives of each step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = [Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])) for _ in range(2)]
    optimizer, counts, reduce = optim.LAMB(params), [], dist.all_reduce

    def counted(*args: Any, **options: Any) -> Any:
        counts[-1] += 1
        return reduce(*args, **options)

    dist.all_reduce = counted
    try:
        for _ in range(3):
            counts.append(0)
            for p in params:
                p.grad = p.detach().clone()
            optimizer.step()
    finally:
        dist.all_reduce = reduce
    return counts


def test_the_order_is_checked_once(ranks: Ranks) -> None:
    assert ranks(2, run_once) == [[2, 1, 1]] * 2
