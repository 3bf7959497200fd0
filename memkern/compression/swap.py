"""``memkern.compress`` swaps a model's modules in place for those that save less, ``memkern.restore`` undoes it.

A module changes its class and gains a few attributes; it stays the same object with the same parameters, so hooks,
state_dict keys, optimizers, other modules' references to it and its training flag stay as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..fewbit.levels import check_bits
from ..memory import saved_bytes
from ..nn.embedding import MARK, state_bits_of
from . import match
from .report import Left, Report, Swap

Predicate = Callable[[str, nn.Module], bool]

ORIGINAL = "_memkern_original"  # (class, attributes that were overwritten, names of all that were set)
MARKED = "_memkern_marked"
DEFAULT_BITS = 3
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PROBE = 1 << 14  # elements; the few bytes that a call saves beside its codes round away


# ---- one module


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class before a swap."""
    return vars(module).get(ORIGINAL, (type(module),))[0]


def _attributes(new: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(new).items() if name not in _OF_EVERY_MODULE}


def _become(module: nn.Module, new: nn.Module) -> None:
    own, attributes = vars(module), _attributes(new)
    overwritten = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    own[ORIGINAL] = (type(module), overwritten, tuple(attributes))
    module.__class__ = type(new)


def _revert(module: nn.Module) -> bool:
    own = vars(module)
    if ORIGINAL not in own:
        return False
    module.__class__, overwritten, names = own.pop(ORIGINAL)
    for name in names:
        own.pop(name, None)
    own.update(overwritten)
    return True


def _is_already(module: nn.Module, new: nn.Module) -> bool:
    attributes = _attributes(new)
    return type(module) is type(new) and all(vars(module).get(k, k) == v for k, v in attributes.items())


# ---- what it saves


def _saved_per_element(cls: type[nn.Module], module: nn.Module, dtype: torch.dtype) -> float:
    """Bytes that an activation saves per element, its input or output included; measured, to an eighth."""
    x = torch.zeros(_PROBE, dtype=dtype, device="cpu", requires_grad=True)
    with torch.enable_grad():
        saved = saved_bytes(lambda: cls.forward(module, x * 1))  # times 1: an in-place one may change it
    return round(8 * saved / _PROBE) / 8


def _features(module: nn.Module) -> int | None:
    """Outputs of a linear layer."""
    features = getattr(module, "out_features", getattr(module, "nf", None))
    return features if isinstance(features, int) else None


def _width(modules: dict[str, nn.Module], name: str) -> tuple[int, str] | None:
    """An activation's elements per token and the linear layer that says so, as far as the structure tells.

    In a Sequential the last linear layer before it, else the widest one beside it.
    """
    parent, _, own = name.rpartition(".")
    if not name or parent not in modules:
        return None
    widths: list[tuple[int, str]] = []
    for sibling, module in modules[parent].named_children():
        if sibling == own and isinstance(modules[parent], nn.Sequential):
            return widths[-1] if widths else None
        features = _features(module)
        if features:
            widths.append((features, sibling))
    return max(widths, default=None)


# ---- a model


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """Who has each parameter, by the parameter's id."""
    owners: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)].append(name)
    return owners


class _Compression:
    """One call of compress."""

    def __init__(self, model: nn.Module, predicate: Predicate | None) -> None:
        self.predicate = predicate
        self.names: dict[nn.Module, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self.names.setdefault(module, []).append(name)
        self.by_name = {name: module for module, names in self.names.items() for name in names}
        self.owners = _owners(model)
        floats = (p.dtype for p in model.parameters() if p.dtype.is_floating_point)
        self.dtype = next(floats, torch.get_default_dtype())
        self.swapped: list[Swap] = []
        self.left: list[Left] = []
        self.marked: list[str] = []

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        return ((names[0], module) for module, names in self.names.items())

    def _leave(self, module: nn.Module, reason: str) -> None:
        self.left.append(Left(tuple(self.names[module]), original_class(module).__name__, reason))

    def _wanted(self, name: str, module: nn.Module, default: str | None) -> bool:
        """The predicate decides; without one, ``default`` is a reason against."""
        if "forward" in vars(module):
            self._leave(module, "its forward is set on the instance")
        elif self.predicate is not None:
            return bool(self.predicate(name, module))
        elif default is not None:
            self._leave(module, default)
        else:
            return True
        return False

    def activations(self, mode: int | str) -> None:
        bits, keep = (DEFAULT_BITS, "output") if isinstance(mode, str) else (mode, "codes")
        for name, module in self.modules():
            cls = original_class(module)
            new = match.activation(cls, module, bits, keep)
            if new is None:
                if function := match.called_in_forward(module):
                    self._leave(
                        module, f"calls {function} itself; memkern.functional has one that saves less"
                    )
                continue
            if isinstance(new, str):
                self._leave(module, new)
                continue
            reason = "torch saves its output, which the next layer usually saves too"
            if not self._wanted(name, module, reason if cls in match.SAVE_THEIR_OUTPUT else None):
                continue
            if not _is_already(module, new):
                before = _saved_per_element(cls, module, self.dtype)
                _revert(module)
                _become(module, new)
                after = _saved_per_element(type(module), module, self.dtype)
                width = _width(self.by_name, name)
                self.swapped.append(
                    Swap(tuple(self.names[module]), cls.__name__, repr(module), before, after, width)
                )

    def linears(self, options: dict[str, Any]) -> None:
        module: Any
        for name, module in self.modules():
            cls = original_class(module)
            new = match.linear(cls, module, options)
            if new is None:
                continue
            if isinstance(new, str):
                self._leave(module, new)
                continue
            weight, names = module.weight, self.names[module]
            others = [owner for owner in self.owners[id(weight)] if owner not in names]
            reason = f"it shares its weight with {', '.join(others)}" if others else None
            if self._wanted(name, module, reason) and not _is_already(module, new):
                _revert(module)
                _become(module, new)
                before = float(weight.itemsize) if weight.requires_grad else 0.0
                width = weight.shape[1 if cls is nn.Linear else 0], name
                after = before * module.keep
                self.swapped.append(Swap(tuple(names), cls.__name__, repr(module), before, after, width))

    def embeddings(self) -> None:
        for name, module in self.modules():
            if not isinstance(module, nn.Embedding) or state_bits_of(module) is not None:
                continue
            if self.predicate is None or self.predicate(name, module):
                vars(module).update({MARK: 32, MARKED: True})
                self.marked.append(name)


def _check_removed(arguments: Mapping[str, Any]) -> None:
    for name in arguments:
        if name == "keep":
            raise TypeError(
                "compress() has no argument keep: write activations='output' for keep='output' (keep is the share of "
                "tokens of randomized linear layers, linear={'keep': 0.2})"
            )
        raise TypeError(f"compress() got an unexpected keyword argument {name!r}")


def compress(
    model: nn.Module,
    activations: int | str | None = DEFAULT_BITS,
    linear: float | Mapping[str, Any] | None = None,
    embeddings: bool = False,
    predicate: Predicate | None = None,
    **removed: Any,
) -> Report:
    """Makes a model save less for its backward pass, in place; returns what was done and how much less that is.

    Args:
        model: any module. Parameters, buffers, state_dict keys, hooks and flags stay as they are.
        activations: 1 to 4 bits per element for the activations, or ``"output"``: GELU and SiLU save their output and
            one bit, see :func:`memkern.functional.gelu`; None leaves them alone. Default 3. Swapped are
            torch.nn's GELU, SiLU, Mish, Hardswish, Softplus, LeakyReLU, Hardtanh and ReLU6, and by name, if they
            compute what the name says, transformers' (gelu_new and the other composites, GELUActivation,
            QuickGELUActivation, SiLUActivation, MishActivation, BloomGelu), minGPT's NewGELU and CLIP's QuickGELU.
            A composite's forward changes in the last bits: it becomes torch's fused one.
        linear: share of the tokens that linear layers save (see :class:`memkern.nn.RandomizedLinear`), or a dict of
            its options; None leaves them alone. Default None. Swapped are torch.nn.Linear and GPT-2's Conv1D.
        embeddings: marks embeddings for 32-bit optimizer states, see :func:`memkern.optim.param_groups`; nothing else
            about them changes. Default False.
        predicate: ``predicate(name, module)`` chooses among those; by default all but ReLU, Tanh and Sigmoid (torch
            saves their output, which the next layer usually saves too) and linear layers that share their weight with
            another module, such as a head tied to the embedding.

    A module that occurs under several names is swapped once. Left alone and reported: subclasses, modules whose forward
    is set on the instance, and, as far as their code shows it, modules that call such a function themselves
    (``F.gelu(self.up(x))``). A second call changes what its arguments change; the same call again changes nothing.
    Compress before wrapping a model for sharding.

    Raises:
        TypeError: model is no module, or an argument that there is none of.
        ValueError: an option out of range; before anything is changed.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    _check_removed(removed)
    if isinstance(activations, str) and activations != "output":
        raise ValueError(f"activations must be 1 to 4 bits, 'output' or None, got {activations!r}")
    if activations is not None and not isinstance(activations, str):
        check_bits(activations)
    options = None
    if linear is not None:
        options = dict(linear) if isinstance(linear, Mapping) else {"keep": linear}
        match.RandomizedLinear(1, 1, device="meta", **options)  # checks them
    compression = _Compression(model, predicate)
    if activations is not None:
        compression.activations(activations)
    if options is not None:
        compression.linears(options)
    if embeddings:
        compression.embeddings()
    return Report(tuple(compression.swapped), tuple(compression.left), tuple(compression.marked))


def swapped_state(model: nn.Module) -> list[tuple[nn.Module, type[nn.Module], dict[str, Any]]]:
    """The swapped and marked modules with their classes and attributes: what brings them back after a restore."""
    touched = [m for m in model.modules() if ORIGINAL in vars(m) or MARKED in vars(m)]
    return [(m, type(m), dict(vars(m))) for m in touched]


def restore(model: nn.Module) -> int:
    """Undoes every :func:`compress` of a model, in place; returns how many modules changed."""
    count = 0
    for module in model.modules():
        count += _revert(module)
        if vars(module).pop(MARKED, False):
            del vars(module)[MARK]
            count += 1
    return count
