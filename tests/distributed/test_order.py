"""A step raises where one rank has unnamed parameters in another order and their shapes differ.

Named parameters may be in any order (programs.py).
"""

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
from tests.support.sharded import full_tensor

# name: class, options
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Muon": (optim.Muon8bit, {}),
    "LAMB": (optim.LAMB, {}),
    "blocks on several ranks": (optim.AdamW8bit, {}),
    "HostOffload": (LateHostOffload, {"optimizer_class": optim.Muon8bit}),
}


def step_error(case: str, reverse: bool) -> str:
    """The error of a step, "" for none; ``reverse``: the last rank has the parameters in the other order."""
    build, options = CASES[case]
    mesh, generator = init_device_mesh("cpu", (dist.get_world_size(),)), torch.Generator().manual_seed(0)

    def placed(shape: tuple[int, ...]) -> Tensor:
        return distribute_tensor(torch.randn(shape, generator=generator), mesh, [Shard(0)], src_data_rank=None)

    # Rows of 40 elements: 3 to a block and 8 on a rank, so that shards end inside blocks.
    params = [Parameter(placed(shape)) for shape in ((16, 40), (40, 16))]
    order = params[::-1] if reverse and dist.get_rank() == dist.get_world_size() - 1 else params
    with patch.object(host_weights, "BUCKET_ELEMENTS", 1):
        optimizer = build(params=order, lr=0.02, min_8bit_size=0, **options)
    for p in params:
        p.grad = placed(p.shape)
    before = [full_tensor(p.detach()).clone() for p in params]
    try:
        optimizer.step()
    except RuntimeError as error:
        assert_same([full_tensor(p.detach()) for p in params], before)
        return str(error)
    return ""


@pytest.mark.parametrize("case", CASES)
def test_another_order_of_shapes_raises_on_every_rank(ranks: Ranks, case: str) -> None:
    for message in ranks(2, step_error, case, True):
        assert "params must be the same in the same order on every rank" in message
        assert "(16, 40)" in message
        assert "named_parameters()" in message
    assert ranks(2, step_error, case, False) == [""] * 2
