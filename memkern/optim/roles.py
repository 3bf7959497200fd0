"""Which parameters of a model Muon steps and which AdamW, and why: by shapes, modules and names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import ParametrizationList

from ..nn.loss import LinearCrossEntropy

Place = tuple[str, ...]
"""The names on the way to a module, without those of wrappers."""


class Role(NamedTuple):
    """The algorithm for a parameter, and why. sure: a known module or name says so, no rule for the unknown."""

    algorithm: str
    reason: str
    sure: bool = True


class _Site(NamedTuple):
    """One use of a parameter: the module it belongs to, where that is, and the parameter's name there."""

    place: Place
    module: nn.Module
    own_name: str
    parameter: Tensor
    behind: str  # the class of a parametrization that it goes through, where that is not known


WITHOUT_DECAY = ("a vector", "a bias", "a norm", "a norm, by its class's name")
"""The reasons of parameters that are not to decay."""

# ---- modules

_WRAPPED = (
    *("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"),
    *("base_layer", "original_module"),  # PEFT
)
_BY_ADAPTER = ("modules_to_save", "lora_A", "lora_B")  # PEFT's: one module for each adapter
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_MATMUL_MODULES = (nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
_MATMUL_CLASS_NAMES = ("Conv1D", "RandomizedConv1D")  # of transformers and memkern.nn: y = x @ weight
_LOSSES = (nn.AdaptiveLogSoftmaxWithLoss, LinearCrossEntropy)  # their layers are outputs
_SCALED = (parametrizations._WeightNorm, parametrizations._SpectralNorm)  # known: the weight is scaled

# ---- names

_HEADS = (
    *("lm_head", "lm_heads", "embed_out", "head", "heads", "classifier", "score", "qa_outputs"),
    *("text_projection", "visual_projection", "seq_relationship", "output_projection", "last_layer"),
)
# Heads where they are not in a list of layers:
_HEADS_OUTSIDE_LISTS = ("output", "fc", "proj_out", "out", "output_layer", "logits")
_HEAD_SUFFIXES = ("_head", "_classifier", "_logits", "_predictor")
_EMBEDDING_NAMES = ("embed", "pos", "token")  # in the name of a parameter that no module of torch's looks up
_NORM_CLASS_NAME = re.compile(r"norm(\d+d?)?$")  # in lower case
_WEIGHT_NAME = re.compile(r"(^|_)(weight|kernel|proj|projection|w\d*|lora_[ab]|experts?)s?$", re.IGNORECASE)


def roles(model: nn.Module) -> dict[Tensor, Role]:
    """The role of each parameter. One with several uses is AdamW's where one of them is surely AdamW's."""
    modules = dict(model.named_modules(remove_duplicate=False))
    sites = [*_sites(modules)]
    heads = _heads(modules, sites)
    found: dict[Tensor, list[Role]] = {}
    for site in sites:
        found.setdefault(site.parameter, []).append(_role(site, heads))
    return {p: min(each, key=lambda role: (not role.sure, role.algorithm)) for p, each in found.items()}


def _role(site: _Site, heads: set[Place]) -> Role:
    """The first that applies: shape, kind of module, output, name."""
    p, name, module = site.parameter, site.own_name, site.module
    kinds = [kind.__name__.lower() for kind in type(module).__mro__]
    if sum(size != 1 for size in p.shape) < 2:
        return Role("adamw", "a vector")
    if isinstance(module, _EMBEDDINGS):
        return Role("adamw", "an embedding")
    if isinstance(module, nn.modules.conv._ConvNd):
        return Role("adamw", "a convolution")
    if isinstance(module, _NORMS):
        return Role("adamw", "a norm")
    if site.place in heads or _is_head((*site.place, name)):
        return Role("adamw", "an output head")
    if site.behind:
        return Role("adamw", f"behind {site.behind}, a parametrization that is not known", sure=False)
    if _multiplies(module, name):
        return Role("muon", "a matrix" if p.dim() == 2 else "a batch of matrices")
    if name.endswith("bias"):
        return Role("adamw", "a bias")
    if name != "weight" and any(part in name for part in _EMBEDDING_NAMES):
        return Role("adamw", "an embedding, by its name")
    if any(map(_NORM_CLASS_NAME.search, kinds)):
        return Role("adamw", "a norm, by its class's name")
    if any("embed" in kind for kind in kinds):
        return Role("adamw", "an embedding, by its class's name")
    if p.dim() > 2 and p.shape[0] == 1:
        return Role("adamw", "one matrix of three dimensions")
    if any("expert" in kind for kind in (name, *kinds)) and p.dim() > 2:
        return Role("muon", "experts")
    if name == "weight" and any("router" in kind for kind in kinds):
        return Role("muon", "a router of experts, by its class's name")
    if _WEIGHT_NAME.search(name):
        return Role("muon", "a weight, by its name", sure=False)
    return Role("adamw", "of a module that is not known", sure=False)


def _multiplies(module: nn.Module, name: str) -> bool:
    """Whether a module is known to multiply by its parameter of that name."""
    known = isinstance(module, _MATMUL_MODULES) or any(k.__name__ in _MATMUL_CLASS_NAMES for k in type(module).__mro__)
    return known and ("weight" in name or name.startswith("lora_"))


# ---- where parameters are


def _sites(modules: dict[str, nn.Module]) -> Iterator[_Site]:
    """Each use of each parameter, in order."""
    for name, module in modules.items():
        for own_name, p in module.named_parameters(recurse=False):
            owner, own, behind = _owner(modules, name, own_name)
            yield _Site(_place(modules, owner), _adapted(modules[owner], own), own, p, behind)


def _owner(modules: dict[str, nn.Module], name: str, own_name: str) -> tuple[str, str, str]:
    """The name of the module that a parameter belongs to, its name there, and an unknown parametrization before it."""
    module, (parent, _, last) = modules[name], name.rpartition(".")
    if isinstance(module, ParametrizationList):
        unknown = [type(each).__name__ for each in module if type(each) not in _SCALED]
        return parent.rpartition(".")[0], last, ", ".join(unknown)
    if isinstance(module, (nn.ParameterList, nn.ParameterDict)) and name:
        return parent, last if isinstance(module, nn.ParameterList) else f"{last}_{own_name}", ""
    for end in ("_g", "_v", "_orig"):  # of the older weight_norm, spectral_norm and prune, which make the tensor of it
        if own_name.endswith(end) and own_name.removesuffix(end) in vars(module):
            return name, own_name.removesuffix(end), ""
    return name, own_name, ""


def _adapted(module: nn.Module, own_name: str) -> nn.Module:
    """The layer that a parameter of PEFT's LoRA is for."""
    while own_name.startswith("lora_") and "base_layer" in module._modules:
        module = module.get_submodule("base_layer")
    return module


def _place(modules: dict[str, nn.Module], name: str) -> Place:
    """A module's name without the parts that wrappers add."""
    kept, path, before = [], "", ""
    for part in name.split(".") if name else ():
        parent = modules[path]
        path = f"{path}.{part}" if path else part
        adapter = before in _BY_ADAPTER and isinstance(parent, nn.ModuleDict)
        alone = part == "module" and len(parent._modules) == 1  # DistributedDataParallel, AveragedModel
        if not (adapter or alone or part in (*_WRAPPED, *_BY_ADAPTER)):
            kept.append(part)
        before = part
    return tuple(kept)


# ---- outputs


def _is_head(place: Place) -> bool:
    """Whether the name of a module or a parameter is an output's."""
    if not place:
        return False
    last, in_list = place[-1], any(part.isdigit() for part in place[:-1])
    return last in _HEADS or (not in_list and (last in _HEADS_OUTSIDE_LISTS or last.endswith(_HEAD_SUFFIXES)))


def _heads(modules: dict[str, nn.Module], sites: list[_Site]) -> set[Place]:
    """The places of output heads: by get_output_embeddings(), class or name, else the last layer of the model itself.

    Of a head of several layers, such as a Sequential, the last is the output.
    """
    models: list[Any] = [*modules.values()]
    given = [m.get_output_embeddings() for m in models if hasattr(m, "get_output_embeddings")]
    weights = dict.fromkeys(site.place for site in sites if site.parameter.dim() > 1)
    found: set[Place] = set()
    for name, module in modules.items():
        place = _place(modules, name)
        if isinstance(module, _LOSSES):
            found.update(at for at in weights if at[: len(place)] == place)
        if not (_is_head(place) or any(module is head for head in given)):
            continue
        several = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        for each in [(*place, key) for key in module._modules] if several else [place]:
            inner = [at for at in weights if at[: len(each)] == each]
            if each in weights or (inner and place[-1] not in _HEADS_OUTSIDE_LISTS):
                found.add(each if each in weights else inner[-1])
    return found or _last_layer(modules)


def _last_layer(modules: dict[str, nn.Module]) -> set[Place]:
    """The place of the linear layer that a model's own modules end in, if they do."""
    name, module, at_model = "", modules[""], True
    while not isinstance(module, nn.Linear):
        children = [key for key, m in module._modules.items() if m is not None and any(True for _ in m.parameters())]
        wraps = isinstance(module, _CONTAINERS) or any(key in (*_WRAPPED, *_BY_ADAPTER) for key in children)
        if not children or not (wraps or at_model):
            return set()
        at_model = at_model and len(children) == 1  # a wrapper of the model, as far as can be seen
        name = f"{name}.{children[-1]}" if name else children[-1]
        module = modules[name]
    return {_place(modules, name)} - {()}
