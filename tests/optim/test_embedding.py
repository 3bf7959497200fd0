"""StableEmbedding, a normalized embedding, and optim.param_groups, which gives it a group with 32-bit states."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import memkern
from memkern import optim
from memkern.nn import StableEmbedding
from tests.support.helpers import assert_same, first_moment


def language_model(tied: bool = False) -> nn.Sequential:
    """A StableEmbedding and linear layers, whose matrices are all large enough for 8-bit states."""
    model = nn.Sequential(StableEmbedding(200, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    model.append(nn.Linear(64, 200, bias=False))
    if tied:
        model[4].weight = model[0].weight
    return model


# ---- the module


def test_from_pretrained_has_the_weights_dtype() -> None:
    embedding = StableEmbedding.from_pretrained(torch.randn(5, 4, dtype=torch.float64))
    assert embedding(torch.tensor([1])).dtype == embedding.norm.weight.dtype == torch.float64


def test_output_is_the_normalized_row() -> None:
    embedding = StableEmbedding(30, 16, padding_idx=3)
    tokens = torch.tensor([[1, 3], [29, 0]])
    expected = F.layer_norm(F.embedding(tokens, embedding.weight), (16,))
    assert_same(embedding(tokens), expected)
    assert embedding(tokens)[0, 1].abs().max() == 0


def test_weights_start_xavier_uniform_with_a_zero_padding_row() -> None:
    embedding = StableEmbedding(500, 100, padding_idx=-1)
    bound = math.sqrt(6 / 600)
    weight = embedding.weight.detach()
    assert weight.abs().max() <= bound
    assert weight.std() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert weight[-1].abs().max() == 0
    assert [*embedding.state_dict()] == ["weight", "norm.weight", "norm.bias"]
    before = weight.clone()
    embedding.reset_parameters()
    assert not torch.equal(before, embedding.weight)


def test_takes_the_arguments_of_torchs_embedding() -> None:
    options = {"padding_idx": 2, "max_norm": 1.5, "scale_grad_by_freq": True, "dtype": torch.bfloat16}
    embedding = StableEmbedding(10, 8, **options)
    assert (embedding.padding_idx, embedding.max_norm, embedding.scale_grad_by_freq) == (2, 1.5, True)
    assert {p.dtype for p in embedding.parameters()} == {torch.bfloat16}
    weight = torch.randn(10, 8)
    pretrained = StableEmbedding.from_pretrained(weight, freeze=True)
    assert_same(pretrained.weight.detach(), weight)
    assert not pretrained.weight.requires_grad


# ---- param_groups: the module's mark asks for 32-bit states


def groups_by_bits(model: nn.Module, **options: Any) -> dict[int | None, set[str]]:
    """The parameters' names by the state_bits of their group, None where it has none; each is in one group."""
    names = {p: name for name, p in model.named_parameters()}
    groups = optim.param_groups(model, **options)
    assert sorted(names[p] for g in groups for p in g["params"]) == sorted(names.values())
    return {group.get("state_bits"): {names[p] for p in group["params"]} for group in groups}


def wrapped_with_other_names(model: nn.Module) -> nn.Module:
    class Wrapper(nn.Module):
        """Like FSDP's wrapper: parameters have other names, and all other attributes are the wrapped module's."""

        def __init__(self) -> None:
            super().__init__()
            self._wrapped = model

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self._wrapped, name)

    return Wrapper()


def saved_and_loaded(model: nn.Module) -> nn.Module:
    fresh = language_model()
    fresh.load_state_dict(model.state_dict())
    return fresh


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


# What a user may do to a model before optim.param_groups reads it.
TRANSFORMS = {
    "itself": lambda model: model,
    "deepcopy": copy.deepcopy,
    "state_dict": saved_and_loaded,
    "pickle": pickled,
    "compile": lambda model: torch.compile(model, backend="eager"),
    "a renaming wrapper": wrapped_with_other_names,
    "another module around it": nn.Sequential,
    "half precision": lambda model: model.half(),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_the_mark_survives_what_users_do_to_a_model(transform: str) -> None:
    model = TRANSFORMS[transform](language_model())
    marked = groups_by_bits(model)
    assert set(marked) == {None, 32}
    assert len(marked[32]) == 3
    assert all(name.endswith(("0.weight", "0.norm.weight", "0.norm.bias")) for name in marked[32])
    assert sum(p.numel() for g in optim.param_groups(model)[:1] for p in g["params"]) == 200 * 64 + 128


def sharded(model: nn.Module) -> nn.Module:
    for layer in model:
        if [*layer.parameters()]:
            fully_shard(layer)
    return fully_shard(model)


@pytest.mark.parametrize("wrap", [nn.parallel.DistributedDataParallel, sharded])
def test_the_mark_survives_data_parallel_wrappers(wrap: Any) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        marked = groups_by_bits(wrap(language_model()))
    finally:
        torch.distributed.destroy_process_group()
    names = {name.removeprefix("module.") for name in marked[32]}
    assert names == {"0.weight", "0.norm.weight", "0.norm.bias"}


def test_a_wrapper_with_the_attributes_of_a_marked_module_is_not_marked() -> None:
    model = wrapped_with_other_names(StableEmbedding(200, 64))
    model.extra = nn.Linear(64, 64)
    assert groups_by_bits(model)[None] == {"extra.weight", "extra.bias"}


def test_a_marked_module_whose_parameters_a_wrapper_took_is_refused() -> None:
    model = language_model()
    embedding = model[0]
    model.flat = nn.Parameter(torch.cat([p.detach().flatten() for p in embedding.parameters()]))
    del embedding.weight, embedding.norm.weight, embedding.norm.bias
    with pytest.raises(ValueError, match="model: 0 asks for 32-bit optimizer states and has no parameters"):
        optim.param_groups(model)


def test_shared_parameters_stay_together_and_come_once() -> None:
    assert groups_by_bits(language_model(tied=True))[32] == {"0.weight", "0.norm.weight", "0.norm.bias"}
    assert "4.weight" in groups_by_bits(language_model())[None]


def test_param_groups_decay_matrices_alone() -> None:
    model = language_model()
    groups = optim.param_groups(model, weight_decay=0.1, lr=0.5)
    group_options = [(g["weight_decay"], g.get("state_bits"), g["lr"], {p.dim() for p in g["params"]}) for g in groups]
    assert group_options == [(0.1, 32, 0.5, {2}), (0.0, 32, 0.5, {1}), (0.1, None, 0.5, {2}), (0.0, None, 0.5, {1})]
    assert all("weight_decay" not in group for group in optim.param_groups(model))
    assert len(optim.param_groups(nn.Linear(3, 3, bias=False), weight_decay=0.1)) == 1
    assert optim.param_groups(nn.GELU()) == []
    with pytest.raises(TypeError, match="params"):
        optim.param_groups(model, params=[])


def test_8_bit_optimizers_keep_32_bits_for_the_embedding() -> None:
    model = language_model()
    optimizer = optim.AdamW8bit(optim.param_groups(model, lr=1e-2))
    tokens = torch.randint(200, (4, 10))
    for _ in range(2):
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
    dtypes = {name: first_moment(optimizer, p).dtype for name, p in model.named_parameters()}
    assert dtypes["0.weight"] == torch.float32
    assert dtypes["1.weight"] == dtypes["4.weight"] == torch.int8
    resumed = optim.AdamW8bit(optim.param_groups(model, lr=1e-2))
    resumed.load_state_dict(optimizer.state_dict())
    assert first_moment(resumed, model[0].weight).dtype == torch.float32


def test_torchs_optimizers_take_the_groups() -> None:
    groups = optim.param_groups(language_model(), weight_decay=0.1, lr=0.1)
    assert torch.optim.AdamW(groups).param_groups[0]["lr"] == 0.1


def test_compress_marks_a_plain_embedding_and_restore_unmarks_it() -> None:
    model = nn.Sequential(nn.Embedding(200, 64), nn.Linear(64, 128))
    assert set(groups_by_bits(model)) == {None}
    keys = [*model.state_dict()]
    report = memkern.compress(model, activations=None, embeddings=True)
    assert type(model[0]) is nn.Embedding
    assert "0" in str(report)
    assert [*model.state_dict()] == keys
    for transform in (copy.deepcopy, pickled, nn.Sequential):
        assert set(groups_by_bits(transform(model))) == {None, 32}
    memkern.restore(model)
    assert set(groups_by_bits(model)) == {None}
