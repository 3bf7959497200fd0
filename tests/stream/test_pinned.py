"""Weights on the host lie in slabs of pinned memory whose sizes are powers of two, with little that is not used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from memkern.optim.offload import pinned
from memkern.optim.offload.pinned import Slabs
from memkern.stream import streaming
from memkern.techniques.options import Techniques
from tests.stream.runs import assert_equal, model_for, optimizer_for, train, weights


def weight_shapes(hidden: int, inner: int, key_values: int, layers: int, vocabulary: int) -> list[tuple[int, int]]:
    layer = [*[(hidden, hidden)] * 2, *[(key_values, hidden)] * 2, *[(inner, hidden)] * 3, (1, hidden), (1, hidden)]
    return [(vocabulary, hidden), *layer * layers, (vocabulary, hidden)]


SHAPES = {
    "8B": weight_shapes(4096, 14336, 1024, 32, 128256),
    "14B": weight_shapes(5120, 17408, 1024, 40, 151936),
}


@pytest.mark.parametrize("name", SHAPES)
def test_little_is_allocated_beside_the_weights(name: str) -> None:
    """Less than 2 %; torch, which rounds each tensor up to a power of two, would add 46 % to 14B."""
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in SHAPES[name]]
    total = sum(x.nbytes for x in tensors)
    slabs = Slabs([x.nbytes for x in tensors], lambda size: torch.empty(size, dtype=torch.uint8, device="meta"))
    for x in tensors:
        assert slabs.copy_of(x).shape == x.shape
    assert total <= sum(slabs.slabs) < 1.02 * total


def test_slabs_are_powers_of_two_and_tensors_do_not_overlap() -> None:
    sizes: list[int] = []

    def allocate(size: int) -> Tensor:
        sizes.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    generator = torch.Generator().manual_seed(0)
    shapes = [tuple(torch.randint(0, 40, (2,), generator=generator).tolist()) for _ in range(60)]
    tensors = [torch.full(shape, float(i)) for i, shape in enumerate(shapes)]
    slabs = Slabs([x.nbytes for x in tensors], allocate)
    copies = [slabs.copy_of(x) for x in tensors]
    assert sorted(sizes) == sorted(slabs.slabs)
    assert all(size & (size - 1) == 0 for size in sizes)
    assert all(map(torch.equal, tensors, copies))


def test_a_model_in_slabs_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned memory is a GPU's: here the slabs are plain memory, and all else is as there."""
    techniques = Techniques(precision="bf16", state_bits=8, master_weights="bf16+8", step_in_backward=True)
    plain = model_for(techniques)
    losses = train(plain, optimizer_for(plain, techniques), techniques, range(3))
    made_slabs: list[Slabs] = []

    def slabs(sizes: list[int]) -> Slabs:
        made_slabs.append(Slabs(sizes, lambda size: torch.empty(size, dtype=torch.uint8)))
        return made_slabs[0]

    monkeypatch.setattr(pinned, "Slabs", slabs)
    monkeypatch.setattr(streaming, "pins", lambda device, pin_memory: True)
    monkeypatch.setattr(streaming, "_empty_host_cache", lambda: None)
    policy = streaming.CPUOffloadPolicy
    monkeypatch.setattr(streaming, "CPUOffloadPolicy", lambda pin_memory: policy(pin_memory=False))
    streamed = techniques.replace(weights_on_host="layers")
    model: Any = model_for(streamed)
    (model_slabs,) = made_slabs
    places = {x.untyped_storage().data_ptr() for x in model_slabs._allocated.values()}
    states = [m._get_fsdp_state() for m in model.modules() if hasattr(m, "_get_fsdp_state")]
    groups = [g for s in states for g in getattr(s, "_fsdp_param_groups", None) or [s._fsdp_param_group]]  # torch 2.11
    shards = [p for group in groups for p in group.fsdp_params]
    assert len(shards) == len([*model.parameters()])
    for held in ([p._local_tensor for p in model.parameters()], [p._sharded_param_data for p in shards]):
        assert all(x.untyped_storage().data_ptr() in places for x in held)  # nothing else keeps fully_shard's own
    assert train(model, optimizer_for(model, streamed), streamed, range(3)) == losses
    assert_equal(weights(model), weights(plain))
