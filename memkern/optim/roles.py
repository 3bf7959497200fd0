"""Decides which parameters of a model Muon steps and which AdamW, and why: by shapes, modules and names."""

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
    """The algorithm for a parameter, and why. sure: a known module or name says so, and not a rule for unknown ones."""

    algorithm: str
    reason: str
    sure: bool = True


class _Site(NamedTuple):
    """One use of a parameter: the module that it belongs to, the module's place, and the parameter's name there."""

    place: Place
    module: nn.Module
    own_name: str
    parameter: Tensor
    behind: str  # the classes of unknown parametrizations between parameter and module; empty if there are none


WITHOUT_DECAY = ("a vector", "a bias", "a norm", "a norm, by its class's name")
"""Reasons whose parameters get no weight decay."""

# ---- modules

_WRAPPED = (  # names under which wrappers have the module that they wrap
    *("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"),
    *("base_layer", "original_module"),  # PEFT
)
_BY_ADAPTER = ("modules_to_save", "lora_A", "lora_B")  # PEFT's dicts, with one module for each adapter
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_MATMUL_MODULES = (nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
_MATMUL_CLASS_NAMES = ("Conv1D", "RandomizedConv1D")  # of transformers and memkern.nn: y = x @ weight
_LOSSES = (nn.AdaptiveLogSoftmaxWithLoss, LinearCrossEntropy)  # losses whose linear layers are output heads
_SCALED = (parametrizations._WeightNorm, parametrizations._SpectralNorm)  # known parametrizations, which scale a weight

# ---- names

_HEADS = (
    *("lm_head", "lm_heads", "embed_out", "head", "heads", "classifier", "score", "qa_outputs"),
    *("text_projection", "visual_projection", "seq_relationship", "output_projection", "last_layer"),
)
# Names of heads, but for modules in a list of layers:
_HEADS_OUTSIDE_LISTS = ("output", "fc", "proj_out", "out", "output_layer", "logits")
_HEAD_SUFFIXES = ("_head", "_classifier", "_logits", "_predictor")
_EMBEDDING_NAMES = ("embed", "pos", "token")  # in the names of parameters that are embeddings outside of nn.Embedding
_NORM_CLASS_NAME = re.compile(r"norm(\d+d?)?$")  # in lower case
_WEIGHT_NAME = re.compile(r"(^|_)(weight|kernel|proj|projection|w\d*|lora_[ab]|experts?)s?$", re.IGNORECASE)


def roles(model: nn.Module) -> dict[Tensor, Role]:
    """The role of each parameter. One with several uses goes to AdamW where one of them is surely AdamW's."""
    modules = dict(model.named_modules(remove_duplicate=False))
    sites = [*_sites(modules)]
    heads = _heads(modules, sites)
    candidates: dict[Tensor, list[Role]] = {}
    for site in sites:
        candidates.setdefault(site.parameter, []).append(_role(site, heads))
    return {p: min(uses, key=lambda role: (not role.sure, role.algorithm)) for p, uses in candidates.items()}


def _role(site: _Site, heads: set[Place]) -> Role:
    """The role by the first rule that applies, of those for shapes, kinds of modules, output heads and names."""
    p, name, module = site.parameter, site.own_name, site.module
    class_names = [cls.__name__.lower() for cls in type(module).__mro__]
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
    if any(map(_NORM_CLASS_NAME.search, class_names)):
        return Role("adamw", "a norm, by its class's name")
    if any("embed" in class_name for class_name in class_names):
        return Role("adamw", "an embedding, by its class's name")
    if p.dim() > 2 and p.shape[0] == 1:
        return Role("adamw", "one matrix of three dimensions")
    if any("expert" in x for x in (name, *class_names)) and p.dim() > 2:
        return Role("muon", "experts")
    if name == "weight" and any("router" in class_name for class_name in class_names):
        return Role("muon", "a router of experts, by its class's name")
    if _WEIGHT_NAME.search(name):
        return Role("muon", "a weight, by its name", sure=False)
    return Role("adamw", "of a module that is not known", sure=False)


def _multiplies(module: nn.Module, name: str) -> bool:
    """Whether a module is known to multiply by its parameter of that name."""
    named = any(cls.__name__ in _MATMUL_CLASS_NAMES for cls in type(module).__mro__)
    return (named or isinstance(module, _MATMUL_MODULES)) and ("weight" in name or name.startswith("lora_"))


# ---- where parameters are


def _sites(modules: dict[str, nn.Module]) -> Iterator[_Site]:
    """Each use of each parameter, in order."""
    for name, module in modules.items():
        for own_name, p in module.named_parameters(recurse=False):
            owner, name_there, behind = _owner(modules, name, own_name)
            yield _Site(_place(modules, owner), _adapted(modules[owner], name_there), name_there, p, behind)


def _owner(modules: dict[str, nn.Module], name: str, own_name: str) -> tuple[str, str, str]:
    """The name of the module that a parameter belongs to, its name there, and unknown parametrizations between them."""
    module, (parent, _, last) = modules[name], name.rpartition(".")
    if isinstance(module, ParametrizationList):
        unknown = [type(parametrization).__name__ for parametrization in module if type(parametrization) not in _SCALED]
        return parent.rpartition(".")[0], last, ", ".join(unknown)
    if isinstance(module, (nn.ParameterList, nn.ParameterDict)) and name:
        return parent, last if isinstance(module, nn.ParameterList) else f"{last}_{own_name}", ""
    for suffix in ("_g", "_v", "_orig"):  # of what weight_norm, spectral_norm and prune compute the tensor from
        if own_name.endswith(suffix) and own_name.removesuffix(suffix) in vars(module):
            return name, own_name.removesuffix(suffix), ""
    return name, own_name, ""


def _adapted(module: nn.Module, own_name: str) -> nn.Module:
    """The layer that a parameter of PEFT's LoRA adapts; for other parameters the module itself."""
    while own_name.startswith("lora_") and "base_layer" in module._modules:
        module = module.get_submodule("base_layer")
    return module


def _place(modules: dict[str, nn.Module], name: str) -> Place:
    """A module's name without the parts that wrappers add."""
    kept, path, previous = [], "", ""
    for part in name.split(".") if name else ():
        parent = modules[path]
        path = f"{path}.{part}" if path else part
        is_adapter = previous in _BY_ADAPTER and isinstance(parent, nn.ModuleDict)
        is_wrapped = part == "module" and len(parent._modules) == 1  # by DistributedDataParallel, AveragedModel
        if not (is_adapter or is_wrapped or part in (*_WRAPPED, *_BY_ADAPTER)):
            kept.append(part)
        previous = part
    return tuple(kept)


# ---- outputs


def _is_head(place: Place) -> bool:
    """Whether the name of a module or a parameter is that of an output head."""
    if not place:
        return False
    last, in_list = place[-1], any(part.isdigit() for part in place[:-1])
    return last in _HEADS or (not in_list and (last in _HEADS_OUTSIDE_LISTS or last.endswith(_HEAD_SUFFIXES)))


def _heads(modules: dict[str, nn.Module], sites: list[_Site]) -> set[Place]:
    """The places of output heads: by get_output_embeddings(), class or name, else the last layer of the model itself.

    Of a head of several layers, such as a Sequential, the last is the output.
    """
    models: list[Any] = [*modules.values()]
    declared = [m.get_output_embeddings() for m in models if hasattr(m, "get_output_embeddings")]
    matrices = dict.fromkeys(site.place for site in sites if site.parameter.dim() > 1)  # places of modules, in order
    heads: set[Place] = set()
    for name, module in modules.items():
        place = _place(modules, name)
        if isinstance(module, _LOSSES):
            heads.update(x for x in matrices if x[: len(place)] == place)
        if not (_is_head(place) or any(module is head for head in declared)):
            continue
        is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        for head in [(*place, key) for key in module._modules] if is_list else [place]:
            inside = [x for x in matrices if x[: len(head)] == head]
            if head in matrices or (inside and place[-1] not in _HEADS_OUTSIDE_LISTS):
                heads.add(head if head in matrices else inside[-1])
    return heads or _last_layer(modules)


def _last_layer(modules: dict[str, nn.Module]) -> set[Place]:
    """The place of the Linear that the model's own modules, or its last Sequential, end in; empty if they do not."""
    name, module, at_model = "", modules[""], True  # at_model: only wrappers of the model have been entered
    while not isinstance(module, nn.Linear):
        children = [key for key, m in module._modules.items() if m is not None and any(True for _ in m.parameters())]
        wraps = isinstance(module, _CONTAINERS) or any(key in (*_WRAPPED, *_BY_ADAPTER) for key in children)
        if not children or not (wraps or at_model):
            return set()
        at_model = at_model and len(children) == 1  # a module with one child counts as a wrapper
        name = f"{name}.{children[-1]}" if name else children[-1]
        module = modules[name]
    return {_place(modules, name)} - {()}
