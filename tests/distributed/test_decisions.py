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
    """A plain tensor, the same on every rank, between two that are sharded. In one process all three are plain."""
    if not dist.is_initialized():
        return [torch.clone] * 3
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
    """Takes three steps; in the second, the last rank's gradient of parameter ``number`` has ``value`` in one element.

    Returns for each step the largest update of each parameter that has elements here, and the states' step counts.
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
            scaler.scale(torch.ones(()))  # the first call makes the scale, without which step() raises
            scaler.step(optimizer)
            scaler.update()
        moved = [(local(p) - old).abs().max().item() for p, old in zip(params, before, strict=True) if old.numel()]
        result.append((moved, [state["step"].item() for state in optimizer.state.values()]))
    return result


@pytest.mark.pairwise
@pytest.mark.parametrize("value", [torch.nan, pytest.param(torch.inf, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("layout", "world", "number"),  # number: the index of the parameter whose gradient has the value
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
    """Muon and GradScaler skip the step on all ranks. The other optimizers clip, on all ranks by the same norm."""
    if "scaled" in name and layout == "beside_plain":
        layout, number = "replicated", 1  # GradScaler refuses plain tensors beside DTensors
    results = ranks(world, run_with_fault, layout, name, number, value)
    skips = "Muon" in name or "scaled" in name
    for first, _, third in results:
        # Where the second step is not skipped, it leaves NaN behind, and the third step is not looked at.
        for moved, counts in [first, third] if skips else [first]:
            assert all(0 < x < 1 for x in moved), (moved, counts)
    second_steps = [second for _, second, _ in results]
    for moved, counts in second_steps:
        if skips:
            assert moved == [0.0] * len(moved)
            assert set(counts) == {1.0}
        elif value == torch.inf:
            # As in one process: clipping by an infinite norm makes the infinity NaN, and all other elements 0.
            assert sum(map(math.isnan, moved)) <= 1
        else:  # the norm is NaN, and so is every update
            assert all(map(math.isnan, moved))
    if not skips:
        assert any(math.isnan(x) for moved, _ in second_steps for x in moved)


def step_beside_plain(name: str, factor: float | None, bucket_bytes: int) -> list[Tensor]:
    """The first and the third of three matrices after a step, as whole tensors. On two ranks both are sharded.

    The second matrix is a plain tensor, whose gradient is multiplied by ``factor`` (None: taken away) on rank 1 alone;
    in one process too.
    """
    is_rank_1 = not dist.is_initialized() or dist.get_rank() == 1
    places, params, optimizer = make_optimizer("beside_plain", name)
    with patch.object(muon_step, "BUCKET_BYTES", bucket_bytes):
        give_gradients(places, params, 0)
        if is_rank_1:
            params[1].grad = None if factor is None else params[1].grad * factor  # type: ignore[operator]
        optimizer.step()
    return [full_tensor(p.detach()) for p in (params[0], params[2])]


@pytest.mark.parametrize("name", ["Muon, clipped", "AdamW8bit, clipped", "LAMB8bit, clipped"])
def test_all_ranks_clip_by_the_largest_norm_of_any_rank(ranks: Ranks, name: str) -> None:
    """So a tensor's shards are clipped alike, though the plain tensor has another gradient on each rank."""
    expected = step_beside_plain(name, 10.0, 2**26)
    for result in ranks(2, step_beside_plain, name, 10.0, 2**26):
        for x, y in zip(result, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bucket_bytes", [2**26, 3 * 64 * 64])
def test_a_plain_matrix_is_in_no_bucket_that_ranks_exchange(ranks: Ranks, bucket_bytes: int) -> None:
    """Rank 1 lacks the gradient of the plain matrix. Both ranks still exchange the same buckets of sharded matrices.

    A rank's bf16 updates take 2 * 64 * 32 bytes for each sharded matrix and 2 * 64 * 64 for the plain one. If buckets
    of 3 * 64 * 64 bytes held both kinds, rank 0 would have two buckets and rank 1 one.
    """
    expected = step_beside_plain("Muon8bit", None, bucket_bytes)
    for result in ranks(2, step_beside_plain, "Muon8bit", None, bucket_bytes):
        assert_same(result, expected)


def steps_on_some_ranks(name: str, offloads: bool) -> list[Tensor]:
    """Three steps of two matrices: ``a`` is on ranks 0 and 1, ``b`` on all three. The second step lacks b's gradient.

    So rank 2 has no gradient at all in the second step. In one process both matrices are whole tensors.
    Returns the matrices of which this rank has a part, as whole tensors: both, on rank 2 only b.
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
    with patch.object(host_weights, "BUCKET_ELEMENTS", 1):  # each matrix has a bucket of its own
        optimizer = new(groups, lr=1e-2, weight_decay=0.0, **options)
    for step in range(3):
        give_gradients(places, params, step)
        if _is_rank_2():  # which has no part of a
            a.grad = None
        if step == 1:
            b.grad = None
        if "scaled" in name:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(0.0)
        optimizer.step()
    return [full_tensor(p.detach()) for p in ([b] if _is_rank_2() else [a, b])]


def _is_rank_2() -> bool:
    return dist.is_initialized() and dist.get_rank() == 2


@pytest.mark.parametrize("offloads", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["Muon", "AdamW, clipped", "AdamW, scaled", "LAMB"])
def test_a_rank_without_gradients_takes_part_in_decisions(ranks: Ranks, name: str, offloads: bool) -> None:
    """If the rank called no collectives, the other ranks would wait for it."""
    a, b = steps_on_some_ranks(name, False)
    results = ranks(3, steps_on_some_ranks, name, offloads)
    for result, expected in zip(results, ([a, b], [a, b], [b]), strict=True):
        for x, y in zip(result, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def steps_in_backward_on_some_ranks() -> list[Tensor]:
    """As steps_on_some_ranks, but in the backward pass, and with gradients of both matrices in each step."""
    everyone = init_device_mesh("cpu", (3,))
    places = [_shard(DeviceMesh("cpu", [0, 1], mesh_dim_names=("first two",))), _shard(everyone)]
    a, b = params = [Parameter(place(torch.full((64, 64), 0.1))) for place in places]
    groups = [{"params": [a]}, {"params": [b], "algorithm": "adamw", "lr": 1e-2}]
    optimizer = optim.StepInBackward(optim.Muon, groups, lr=1e-2, weight_decay=0.0)
    own = [b] if _is_rank_2() else params
    for _ in range(3):
        for p in own:
            p.to_local().sum().backward()  # type: ignore[attr-defined]
        optimizer.step()
    return [p.detach().full_tensor() for p in own]  # type: ignore[attr-defined]


def test_a_step_in_backward_is_decided_by_the_ranks_of_the_parameter(ranks: Ranks) -> None:
    (a, b), of_rank_1, of_rank_2 = ranks(3, steps_in_backward_on_some_ranks)
    assert_same(of_rank_1, [a, b])
    assert_same(of_rank_2, [b])
    assert all((x != 0.1).all() for x in (a, b))


# ---- the order of parameters: ranks may have named parameters in different orders (programs.py). The shapes of other
# parameters must be in the same order on each rank.

# name: class, options
ORDERED: dict[str, tuple[Any, dict[str, Any]]] = {
    "Muon": (optim.Muon8bit, {}),
    "LAMB": (optim.LAMB, {}),
    "blocks on several ranks": (optim.AdamW8bit, {}),
    "HostOffload": (LateHostOffload, {"optimizer_class": optim.Muon8bit}),
}


def step_error(case: str, reverse: bool) -> str:
    """A step's error message, or "". reverse: whether the last rank has the parameters in reverse order."""
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
