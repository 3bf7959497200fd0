"""Optimizers step shards that lie in the host's memory though their mesh is of another device.

CPUOffloadPolicy makes such shards on a GPU. The tests have a mesh of CUDA devices and no GPU, so that moving a tensor
to the mesh's device raises.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from memkern import optim
from memkern.optim.dtensor.shards import local, on_mesh
from memkern.train.distributed import full, load_full, load_full_states

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a mesh of CUDA's moves tensors where it is there")
# name: class, options
CLASSES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "AdamW": (optim.AdamW8bit, {}),
    "AdamW, max_grad_norm": (optim.AdamW8bit, {"max_grad_norm": 0.1}),
    "Lion": (optim.Lion8bit, {"lr": 1e-3}),
    "LAMB": (optim.LAMB8bit, {}),
    "LARS": (optim.LARS, {}),
    "SGD": (optim.SGD, {"momentum": 0.9, "state_bits": 8}),
    "Muon": (optim.Muon8bit, {}),
}


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield DeviceMesh("cuda", [0])
    except ZeroDivisionError:  # torch 2.10 divides by the number of devices
        pytest.skip("this torch makes no mesh of devices that are not there")
    finally:
        dist.destroy_process_group()


def tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in ((64, 256), (96, 128), (128, 100))]


@pytest.mark.parametrize("name", CLASSES)
def test_steps_and_states_stay_on_the_host(mesh: DeviceMesh, name: str) -> None:
    cls, options = CLASSES[name]
    options = {"lr": 1e-2, "master_weights": "bf16+8", "min_8bit_size": 1} | options

    def shard(x: Tensor) -> Tensor:
        return on_mesh(x, mesh, [Shard(0)], x.shape)

    def train(place: Any, steps: range, start: Any = None) -> tuple[list[Tensor], Any]:
        """Parameters and state_dict after the steps; ``start``: those to begin from."""
        params = [nn.Parameter(place(x)) for x in (tensors(0) if start is None else start[0])]
        optimizer = cls(params, **options)
        if start is not None:
            optimizer.load_state_dict(start[1])
        for step in steps:
            for p, g in zip(params, tensors(step + 1), strict=True):
                p.grad = place(g)
            optimizer.step()
        states = [x for s in optimizer.state.values() for x in s.values() if isinstance(x, Tensor)]
        assert {x.device.type for x in [*map(local, states), *map(local, params)]} == {"cpu"}
        return [local(p).detach().clone() for p in params], optimizer.state_dict()

    unsharded, sharded = train(lambda x: x, range(4)), train(shard, range(4))
    assert all(map(torch.equal, unsharded[0], sharded[0]))
    unsharded_after_two = train(lambda x: x, range(2))
    resumed = train(shard, range(2, 4), unsharded_after_two)
    assert all(map(torch.equal, unsharded[0], resumed[0]))


@pytest.mark.parametrize("name", ["torch", *(name for name in CLASSES if name != "Muon")])
def test_whole_tensors_load_into_shards(name: str, mesh: DeviceMesh) -> None:
    cls, options = CLASSES.get(name, (torch.optim.AdamW, {"fused": True}))

    def model() -> nn.Module:
        net = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128))
        for module in net:
            for key, p in [*module.named_parameters()]:
                setattr(module, key, nn.Parameter(on_mesh(p.detach(), mesh, [Shard(0)], p.shape)))
        net.register_buffer("count", torch.tensor(3.0))
        return net

    def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        for p in net.parameters():
            p.grad = on_mesh(torch.ones(p.shape), mesh, [Shard(0)], p.shape)
        optimizer.step()
        return {name: local(p).detach().clone() for name, p in net.named_parameters()}

    source, target = model(), model()
    source_optimizer, target_optimizer = (cls(m.parameters(), **{"lr": 0.1, **options}) for m in (source, target))
    step(source, source_optimizer)
    load_full(target, full(source.state_dict()))
    load_full_states(target_optimizer, copy.deepcopy(full(source_optimizer.state_dict())))  # torch would share steps
    expected, weights = step(source, source_optimizer), step(target, target_optimizer)
    assert all(torch.equal(weights[key], x) for key, x in expected.items())
