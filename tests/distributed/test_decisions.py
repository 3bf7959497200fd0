"""Ranks that share parameters skip a step alike, clip by one norm, and raise where their parameters differ in order."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parameter import Parameter

from memkern import optim
from memkern.optim import muon_step
from memkern.optim.offload import host_weights
from tests.support.helpers import assert_same
from tests.support.late_transfers import LateHostOffload
from tests.support.ranks import Ranks
from tests.support.sharded import full_tensor


def _shard(mesh: DeviceMesh, *placements: Any) -> Callable[[Tensor], DTensor]:
    return lambda x: distribute_tensor(x, mesh, [*placements] or [Shard(0)], src_data_rank=None)


# ---- layouts: each returns a function per parameter, which places its whole tensor on the mesh


def beside_plain() -> list[Any]:
    """A parameter that is the same plain tensor on every rank, between two that are sharded."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return [_shard(mesh), lambda x: x.clone(), _shard(mesh)]


def replicas_of_shards() -> list[Any]:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return [_shard(mesh, Replicate(), Shard(0)), _shard(mesh, Replicate(), Shard(0))]


def replicated() -> list[Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return [_shard(mesh), _shard(mesh, Replicate())]


def part_of_a_mesh() -> list[Any]:
    """As with experts: the second parameter is on the ranks of one column of the mesh, the third on those of a row."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))
    return [_shard(mesh, Shard(0), Shard(1)), _shard(mesh["a"]), _shard(mesh["b"])]


def two_dimensions() -> list[Any]:
    """Each parameter is on a mesh of some ranks; none is on all."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))
    return [_shard(mesh["a"]), _shard(mesh["b"])]


def chain() -> list[Any]:
    """Meshes of neighbours: the first rank has no part of the last parameter, and the last rank none of the first."""
    world = dist.get_world_size()
    # Unique names, since DTensor caches equal meshes, and another test has one of ranks 0 and 1.
    meshes = [DeviceMesh("cpu", [i, i + 1], mesh_dim_names=(f"pair{i}",)) for i in range(world - 1)]
    return [_shard(mesh) for mesh in meshes]


LAYOUTS = {f.__name__: f for f in (beside_plain, replicas_of_shards, replicated, part_of_a_mesh, two_dimensions, chain)}
# name: class, options; "scaled": its step is GradScaler's
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Muon8bit": (optim.Muon8bit, {}),
    "Muon, clipped": (optim.Muon, {"max_grad_norm": 1.0}),
    "AdamW8bit, clipped": (optim.AdamW8bit, {"max_grad_norm": 1.0}),
    "LAMB8bit, clipped": (optim.LAMB8bit, {"max_grad_norm": 1.0}),
    "AdamW8bit, scaled": (optim.AdamW8bit, {}),
}


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def make_optimizer(layout: str, name: str) -> tuple[list[Any], list[Parameter], Any]:
    """The functions that place tensors, the parameters and their optimizer."""
    generator = torch.Generator().manual_seed(0)
    places = LAYOUTS[layout]()
    params = [Parameter(place(torch.randn(64, 64, generator=generator))) for place in places]
    build, options = OPTIMIZERS[name]
    return places, params, build(params, lr=0.02, min_8bit_size=0, weight_decay=0.0, **options)


def give_gradients(places: list[Any], params: list[Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    for place, p in zip(places, params, strict=True):
        p.grad = place(torch.randn(64, 64, generator=generator))


def run_with_fault(layout: str, name: str, number: int, value: float) -> Any:
    """Three steps; in the second the last rank's gradient of parameter ``number`` has ``value`` in one element.

    Returns for each step the largest update of each parameter, and the states' step counts.
    """
    places, params, optimizer = make_optimizer(layout, name)
    scaler = GradScaler("cpu", init_scale=1.0) if "scaled" in name else None
    result: list[Any] = []
    for step in range(3):
        give_gradients(places, params, step)
        grads = [local(p.grad) for p in params]
        if step == 1 and dist.get_rank() == dist.get_world_size() - 1 and grads[number].numel():
            grads[number][0, 0] = value
        before = [local(p).clone() for p in params]
        if scaler is None:
            optimizer.step()
        else:
            scaler.scale(torch.ones(()))  # makes the scale
            scaler.step(optimizer)
            scaler.update()
        moved = [(local(p) - old).abs().max().item() for p, old in zip(params, before, strict=True) if old.numel()]
        result.append((moved, [state["step"].item() for state in optimizer.state.values()]))
    return result


@pytest.mark.pairwise
@pytest.mark.parametrize("value", [torch.nan, pytest.param(torch.inf, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("layout", "world", "number"),  # number: of the parameter with the fault
    [
        ("beside_plain", 2, 1),
        ("beside_plain", 2, 2),
        pytest.param("beside_plain", 3, 1, marks=pytest.mark.full),
        pytest.param("replicated", 2, 1, marks=pytest.mark.full),
        pytest.param("replicas_of_shards", 4, 1, marks=pytest.mark.full),
        pytest.param("part_of_a_mesh", 4, 0, marks=pytest.mark.full),
        pytest.param("part_of_a_mesh", 4, 1, marks=pytest.mark.full),
        pytest.param("part_of_a_mesh", 4, 2, marks=pytest.mark.full),
        pytest.param("two_dimensions", 4, 0, marks=pytest.mark.full),
        pytest.param("two_dimensions", 4, 1, marks=pytest.mark.full),
        pytest.param("chain", 4, 2, marks=pytest.mark.full),
    ],
)
def test_a_value_that_is_not_finite_on_one_rank_reaches_all(
    ranks: Ranks, layout: str, world: int, number: int, name: str, value: float
) -> None:
    """All ranks skip the step, or none; a norm that is not finite on one rank clips on all."""
    if "scaled" in name and layout == "beside_plain":
        layout, number = "replicated", 1  # GradScaler refuses plain tensors beside DTensors
    results = ranks(world, run_with_fault, layout, name, number, value)
    skips = "Muon" in name or "scaled" in name
    for rank in results:
        finite_steps = rank[:1] + rank[2:] if skips else rank[:1]
        for moved, steps in finite_steps:
            assert all(0 < x < 1 for x in moved), (moved, steps)
    for moved, steps in (rank[1] for rank in results):
        if skips:
            assert moved == [0.0] * len(moved)
            assert set(steps) == {1.0}
        elif value == torch.inf:  # as in one process: the norm is infinite, all other gradients are clipped to 0
            assert sum(map(math.isnan, moved)) <= 1
        else:  # the norm is NaN, and so is every update
            assert all(map(math.isnan, moved))
    assert skips or any(math.isnan(x) for rank in results for x in rank[1][0])


def run_with_other_gradient(name: str, factor: float | None, bucket: int) -> Any:
    """The sharded parameters after a step where rank 1's gradient of the plain one is ``factor`` as large, or none."""
    places, params, optimizer = make_optimizer("beside_plain", name)
    with patch.object(muon_step, "BUCKET_BYTES", bucket):
        give_gradients(places, params, 0)
        if dist.get_rank() == 1:
            params[1].grad = None if factor is None else params[1].grad * factor
        optimizer.step()
    return [p.detach().full_tensor() for p in (params[0], params[2])]


ONE_BUCKET, BUCKET_EACH = 2**26, 3 * 64 * 64  # bytes: of all matrices, or of one (bf16)


@pytest.mark.parametrize(
    ("name", "factor", "bucket"),
    [
        *((name, 10.0, ONE_BUCKET) for name in ("Muon, clipped", "AdamW8bit, clipped", "LAMB8bit, clipped")),
        *(("Muon8bit", None, bucket) for bucket in (ONE_BUCKET, BUCKET_EACH)),
    ],
)
def test_a_plain_gradient_of_one_rank_is_in_the_norm_of_all_and_in_no_exchange(
    ranks: Ranks, name: str, factor: float | None, bucket: int
) -> None:
    """All ranks clip by the largest norm of any rank, so that a tensor's shards are clipped alike."""
    build, options = OPTIMIZERS[name]
    generator = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(64, 64, generator=generator)) for _ in range(3)]
    optimizer = build(params, lr=0.02, min_8bit_size=0, weight_decay=0.0, **options)
    give_gradients([lambda x: x.clone()] * 3, params, 0)
    params[1].grad *= factor or 1.0  # type: ignore[operator]
    optimizer.step()
    for rank in ranks(2, run_with_other_gradient, name, factor, bucket):
        for x, p in zip(rank, (params[0], params[2]), strict=True):
            torch.testing.assert_close(x, p.detach(), rtol=0, atol=0 if factor is None else 1e-6)


def steps_on_some_ranks(name: str, offloads: bool) -> list[Tensor]:
    """A matrix of the first two ranks, and one of all, which has no gradient in the second of three steps; after these.

    So the third rank has no gradient at all then. In one process both are whole.
    """
    places: list[Any] = [torch.clone, torch.clone]
    if dist.is_initialized():
        everyone = init_device_mesh("cpu", (dist.get_world_size(),))
        places = [_shard(DeviceMesh("cpu", [0, 1], mesh_dim_names=("first two",))), _shard(everyone)]
    a, b = params = [Parameter(place(torch.full((64, 64), 0.1))) for place in places]
    groups: list[Any] = [{"params": [a]}, {"params": [b]}]
    if name == "Muon":
        groups[1] |= {"algorithm": "adamw", "lr": 1e-2}
    build, options = getattr(optim, name.partition(",")[0]), {"max_grad_norm": 1.0} if "clipped" in name else {}
    new = functools.partial(LateHostOffload, build) if offloads else build
    with patch.object(host_weights, "BUCKET_ELEMENTS", 1):  # each has a bucket of its own
        optimizer = new(groups, lr=1e-2, weight_decay=0.0, **options)
    for step in range(3):
        give_gradients(places, params, step)
        if _is_third():  # which has no part of it
            a.grad = None
        if step == 1:
            b.grad = None
        if "scaled" in name:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(0.0)
        optimizer.step()
    return [
        p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for p in params if p is b or not _is_third()
    ]


def _is_third() -> bool:
    return dist.is_initialized() and dist.get_rank() == 2


@pytest.mark.parametrize("offloads", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["Muon", "AdamW, clipped", "AdamW, scaled", "LAMB"])
def test_a_rank_without_gradients_takes_part_in_decisions(ranks: Ranks, name: str, offloads: bool) -> None:
    """A rank that did not would leave the others waiting."""
    expected = steps_on_some_ranks(name, False)
    for rank in ranks(3, steps_on_some_ranks, name, offloads):
        for x, y in zip(rank, expected[-len(rank) :], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def steps_in_backward_on_some_ranks() -> list[Tensor]:
    """The first two ranks' matrix and all ranks' after three steps in the backward pass; of the third rank the last."""
    everyone = init_device_mesh("cpu", (3,))
    places = [_shard(DeviceMesh("cpu", [0, 1], mesh_dim_names=("first two",))), _shard(everyone)]
    params = [Parameter(place(torch.full((64, 64), 0.1))) for place in places]
    a, b = params
    groups = [{"params": [a]}, {"params": [b], "algorithm": "adamw", "lr": 1e-2}]
    optimizer = optim.StepInBackward(optim.Muon, groups, lr=1e-2, weight_decay=0.0)
    own = params[1:] if _is_third() else params
    for _ in range(3):
        for p in own:
            p.to_local().sum().backward()  # type: ignore[attr-defined]
        optimizer.step()
    return [p.detach().full_tensor() for p in own]  # type: ignore[attr-defined]


def test_a_step_in_backward_is_decided_by_the_ranks_of_the_parameter(ranks: Ranks) -> None:
    results = ranks(3, steps_in_backward_on_some_ranks)
    assert_same(results[0], results[1])
    assert_same(results[0][1:], results[2])
    assert all((x != 0.1).all() for x in results[0])


# ---- the order of parameters: named ones may be in any (programs.py), of others the shapes must be in the same order

# name: class, options
ORDERED: dict[str, tuple[Any, dict[str, Any]]] = {
    "Muon": (optim.Muon8bit, {}),
    "LAMB": (optim.LAMB, {}),
    "blocks on several ranks": (optim.AdamW8bit, {}),
    "HostOffload": (LateHostOffload, {"optimizer_class": optim.Muon8bit}),
}


def step_error(case: str, reverse: bool) -> str:
    """The error of a step, "" for none; ``reverse``: the last rank has the parameters in the other order."""
    build, options = ORDERED[case]
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


@pytest.mark.parametrize("case", ORDERED)
def test_another_order_of_shapes_raises_on_every_rank(ranks: Ranks, case: str) -> None:
    for message in ranks(2, step_error, case, True):
        assert "params must be the same in the same order on every rank" in message
        assert "(16, 40)" in message
        assert "named_parameters()" in message
    assert ranks(2, step_error, case, False) == [""] * 2
