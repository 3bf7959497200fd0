"""muon_groups gives Muon the matrices of hidden layers and AdamW all other parameters.

Also through wrappers, and where only a parameter's name tells what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

from memkern.optim import Muon, muon_groups


class UnknownModule(nn.Module):
    """A module of a class that muon_groups does not know, with one parameter."""

    def __init__(self, name: str, *shape: int) -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.ones(shape)))


class RMSNorm2d(UnknownModule):
    pass


class Experts(UnknownModule):
    pass


class ModulesToSave(nn.Module):
    """A stand-in for PEFT's ModulesToSaveWrapper."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.original_module = module.requires_grad_(False)
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(8, 9)})


class Lora(nn.Module):
    """A stand-in for PEFT's LoRA layers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, 9, bias=False)})
        self.lora_embedding_A = nn.ParameterDict({"default": nn.Parameter(torch.ones(4, 9))})


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def parametrize_by_half(module: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(module, "weight", Halved())


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "none": lambda module: module,
    "torch.compile": compiled,
    "checkpoint": checkpoint_wrapper,
    "module": lambda module: nn.ModuleDict({"module": module}),
    "weight_norm": parametrizations.weight_norm,
    "older weight_norm": weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "older spectral_norm": spectral_norm,
    "compiled weight_norm": lambda module: compiled(parametrizations.weight_norm(module)),
}


def algorithms(model: nn.Module) -> dict[str, set[str]]:
    """The algorithms of matrices, by the first part of their names; all other parameters must have AdamW."""
    by_part: dict[str, set[str]] = {}
    for name, (algorithm, _) in muon_groups(model).reasons.items():
        if sum(size > 1 for size in model.get_parameter(name).shape) > 1:
            by_part.setdefault(name.split(".")[0], set()).add(algorithm)
        else:
            assert algorithm == "adamw", name
    return by_part


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_do_not_change_a_modules_algorithm(wrapper: str) -> None:
    wrap = WRAPPERS[wrapper]
    kinds = {
        "body": nn.Linear(8, 8),
        "table": nn.Embedding(9, 8),
        "conv": nn.Conv1d(8, 8, 3),
        "qa_outputs": nn.Linear(8, 9),
    }
    model = nn.ModuleDict({name: wrap(module) for name, module in kinds.items()})
    assert algorithms(model) == {
        "body": {"muon"},
        "table": {"adamw"},
        "conv": {"adamw"},
        "qa_outputs": {"adamw"},
    }


def test_adapters_have_the_algorithm_of_their_layer() -> None:
    model = nn.ModuleDict({"lm_head": ModulesToSave(nn.Linear(8, 9)), "score": Lora(nn.Linear(8, 9))})
    model["table"], model["q"] = Lora(nn.Embedding(9, 8)), Lora(nn.Linear(8, 9))
    reasons = muon_groups(model).reasons
    assert reasons["lm_head.modules_to_save.default.weight"] == ("adamw", "an output head")
    assert reasons["score.lora_A.default.weight"][0] == reasons["score.lora_B.default.weight"][0] == "adamw"
    assert reasons["table.lora_embedding_A.default"] == ("adamw", "an embedding")
    assert reasons["q.lora_A.default.weight"] == reasons["q.lora_B.default.weight"] == ("muon", "a matrix")


def test_modules_of_each_kind() -> None:
    model = nn.ModuleDict(
        {
            "norm": nn.LayerNorm([4, 8]),
            "rms": nn.RMSNorm([4, 8]),
            "own_norm": RMSNorm2d("weight", 4, 8),
            "attention": nn.MultiheadAttention(8, 2, kdim=4),
            "lstm": nn.LSTM(8, 8, proj_size=4),
            "bilinear": nn.Bilinear(4, 5, 6),
            "experts": Experts("down", 2, 8, 8),
            "expert_bias": Experts("gate_up_proj_bias", 2, 8),
            "column": nn.Linear(1, 8),
            "classifier": nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 9)),
            "lm_heads": nn.ModuleList([nn.Linear(8, 9), nn.Linear(8, 9)]),
            "own": UnknownModule("text_projection", 8, 8),
        }
    )
    groups = muon_groups(model)
    assert {name for name, (algorithm, _) in groups.reasons.items() if algorithm == "muon"} == {
        *(f"attention.{x}_proj_weight" for x in "qkv"),
        "attention.out_proj.weight",
        *(f"lstm.weight_{x}_l0" for x in ("ih", "hh", "hr")),
        "bilinear.weight",
        "experts.down",
        "classifier.0.weight",
    }
    assert groups.doubts == []
    undecayed = {p for g in groups if not g["weight_decay"] for p in g["params"]}
    assert {model.get_parameter(f"{name}.weight") for name in ("norm", "rms", "own_norm", "column")} < undecayed
    assert model.get_parameter("classifier.2.weight") not in undecayed


@pytest.mark.parametrize(
    ("model", "expected"),  # expected: names of output heads; None: all parameters of the last module
    [
        (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 9), nn.Softmax(-1)), {"2.weight"}),
        (nn.ModuleDict({"module": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 9))}), {"module.1.weight"}),
        (nn.ModuleDict({"a": nn.Linear(8, 8), "b": compiled(nn.Linear(8, 9))}), {"b._orig_mod.weight"}),
        (nn.ModuleDict({"score": nn.Linear(8, 9), "b": nn.Linear(8, 8)}), {"score.weight"}),
        (nn.Linear(8, 9), set()),
        (nn.Transformer(8, 2, 1, 1, 8), set()),
        (nn.Sequential(nn.Linear(8, 8), nn.AdaptiveLogSoftmaxWithLoss(8, 90, [30])), None),
    ],
    ids=["Sequential", "wrapped", "last", "named", "a layer", "layers", "AdaptiveLogSoftmaxWithLoss"],
)
def test_the_last_layer_is_the_output_where_no_other_is_known(model: nn.Module, expected: set[str] | None) -> None:
    heads = {name for name, (_, reason) in muon_groups(model).reasons.items() if reason == "an output head"}
    if expected is None:
        expected = {name for name, p in model.named_parameters() if name.startswith("1.")}
    assert heads == expected


def test_doubts_are_decided_by_name_and_strict_raises() -> None:
    modules = {
        "mixer": UnknownModule("A_log", 8, 4),
        "mine": UnknownModule("weight", 8, 8),
        "code": UnknownModule("codebook", 9, 8),
    }
    known = {"body": nn.Linear(8, 8), "head": nn.Linear(8, 9)}
    model = nn.ModuleDict({**modules, "behind": parametrize_by_half(nn.Linear(8, 8)), **known})
    groups = muon_groups(model)
    behind = "behind.parametrizations.weight.original"
    assert groups.doubts == ["mixer.A_log", "mine.weight", "code.codebook", behind]
    assert [groups.reasons[name][0] for name in groups.doubts] == ["adamw", "muon", "adamw", "adamw"]
    assert "Halved" in groups.reasons[behind][1]
    with pytest.raises(ValueError, match=r"mixer\.A_log \(adamw: .*mine\.weight \(muon: .*name them with adamw="):
        muon_groups(model, strict=True)
    by_hand: dict[str, Any] = {
        "adamw": lambda name, p: name in groups.doubts[:3],
        "muon": lambda name, p: name == behind,
    }
    strict = muon_groups(model, strict=True, **by_hand)
    assert [strict.reasons[name] for name in groups.doubts] == [("adamw", "asked for")] * 3 + [("muon", "asked for")]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_names_in_lists_and_dicts_and_of_older_norms() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([weight_norm(UnknownModule("up_proj", 8, 8), "up_proj"), nn.Module()])
    model.blocks[1].weights = nn.ParameterList([torch.ones(8, 8)])
    model.blocks[1].own = nn.ParameterDict({"w1": torch.ones(8, 8), "b_bias": torch.ones(8, 8)})
    assert {name: algorithm for name, (algorithm, _) in muon_groups(model).reasons.items()} == {
        "blocks.0.up_proj_g": "adamw",
        "blocks.0.up_proj_v": "muon",
        "blocks.1.weights.0": "muon",
        "blocks.1.own.w1": "muon",
        "blocks.1.own.b_bias": "adamw",
    }


def test_a_matrix_that_is_an_embedding_too_is_adamws() -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 9, bias=False), "table": nn.Embedding(9, 8), "head": nn.Linear(8, 8)})
    model["a"].weight = model["table"].weight
    assert muon_groups(model).reasons["a.weight"] == ("adamw", "an embedding")


def test_flat_shards_are_refused() -> None:
    model: Any = nn.Linear(8, 8)
    model.weight = nn.Parameter(torch.ones(64))
    model.weight._fsdp_flattened = True
    with pytest.raises(ValueError, match=r"weight is a flat shard of FullyShardedDataParallel .*fully_shard"):
        muon_groups(model)
    with pytest.raises(ValueError, match=r"'muon' is a flat shard of FullyShardedDataParallel .*fully_shard"):
        Muon([model.weight])
