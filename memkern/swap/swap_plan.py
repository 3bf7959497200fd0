"""Carries out ``memkern.compress``: chooses modules, swaps them, and notes what each saves before and after."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..memory import saved_bytes
from ..nn.embedding import MARK, state_bits_of
from ..quant.layout import FLOATS
from . import match
from .class_swap import attributes_of, become, is_already, original_class, revert
from .report import Left, Swap

Predicate = Callable[[str, nn.Module], bool]

MARKED = "_memkern_marked"  # the attribute of an embedding that compress has marked for 32-bit states
DEFAULT_BITS = 3  # per element
OUTPUT = "output"  # in place of bits: GELU and SiLU save their output
_PROBE = 1 << 14  # elements of a test input: so many that the few bytes which a call saves beside codes round away


# ---- bytes of one module


def _saved_per_element(cls: type[nn.Module], module: nn.Module, dtype: torch.dtype) -> float:
    """Bytes that an activation saves per element, its input or output included; measured, rounded to an eighth."""
    x = torch.zeros(_PROBE, dtype=dtype, device="cpu", requires_grad=True)
    with torch.enable_grad():
        saved = saved_bytes(lambda: cls.forward(module, x * 1))  # times 1: an in-place one may change it
    return round(8 * saved / _PROBE) / 8


def _features(module: nn.Module) -> int | None:
    """Outputs of a linear layer."""
    features = getattr(module, "out_features", getattr(module, "nf", None))
    return features if isinstance(features, int) else None


def _width(modules: dict[str, nn.Module], name: str) -> tuple[int, str] | None:
    """An activation's elements per token and the linear layer that determines them, if the structure shows it.

    In a Sequential the last linear layer before it, else the widest one beside it.
    """
    parent, _, child = name.rpartition(".")
    if not name or parent not in modules:
        return None
    widths: list[tuple[int, str]] = []
    for sibling, module in modules[parent].named_children():
        if sibling == child and isinstance(modules[parent], nn.Sequential):
            return widths[-1] if widths else None
        features = _features(module)
        if features:
            widths.append((features, sibling))
    return max(widths, default=None)


# ---- a model


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """The names of the modules that have each parameter, by the parameter's id."""
    owners: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)].append(name)
    return owners


class Compression:
    """One call of compress: the model's modules and names, and what was done so far."""

    def __init__(self, model: nn.Module, predicate: Predicate | None) -> None:
        self.predicate = predicate
        self.names: dict[nn.Module, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self.names.setdefault(module, []).append(name)
        self.by_name = {name: module for module, names in self.names.items() for name in names}
        self.owners = _owners(model)
        floats = [p.dtype for p in model.parameters() if p.dtype.is_floating_point]
        # The first dtype that has codes: a few float64 or float8 parameters do not decide the model's dtype.
        fallback = torch.float64 if torch.float64 in floats else torch.get_default_dtype()
        self.dtype = next((d for d in floats if d in FLOATS), fallback)
        self.called = match.CalledNames(self.by_name.values())
        self.swapped: list[Swap] = []
        self.left: list[Left] = []
        self.marked: list[str] = []

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Each module once, with its first name."""
        return ((names[0], module) for module, names in self.names.items())

    def _may_be_called(self, name: str) -> bool:
        """Whether a method of the model may call the module of that name."""
        parent, _, child = name.rpartition(".")
        return not name or self.called.may_call(self.by_name[parent], child)

    def _leave(self, module: nn.Module, reason: str) -> None:
        self.left.append(Left(tuple(self.names[module]), original_class(module).__name__, reason))

    def _wanted(self, name: str, module: nn.Module, reason: str | None) -> bool:
        """Whether to swap: the predicate decides; without one, ``reason`` is the reason not to, None to swap."""
        if "forward" in vars(module):
            self._leave(module, "its forward is set on the instance")
        elif self.predicate is not None:
            return bool(self.predicate(name, module))
        elif reason is not None:
            self._leave(module, reason)
        else:
            return True
        return False

    def activations(self, mode: int | str) -> None:
        """Swaps activations. mode: bits, or OUTPUT."""
        for name, module in self.modules():
            self._swap_activation(name, module, mode)

    def _swap_activation(self, name: str, module: nn.Module, mode: int | str) -> None:
        bits, keep = (DEFAULT_BITS, OUTPUT) if isinstance(mode, str) else (mode, "codes")
        cls = original_class(module)
        counterpart = match.activation(cls, module, bits, keep)
        if counterpart is None:
            if function := match.called_in_forward(module):
                self._leave(module, f"calls {function} itself; memkern.functional has one that saves less")
            elif issubclass(cls, match.NO_COUNTERPART):
                self._leave(module, "there is none that saves less; checkpoints and memkern.compile cover it")
            return
        if isinstance(counterpart, str):
            self._leave(module, counterpart)
            return
        reason = None
        if cls in match.SAVE_THEIR_OUTPUT:
            reason = "torch saves its output, which the next layer usually saves too"
        elif not any(self._may_be_called(each) for each in self.names[module]):
            reason = "no method of the model names it, so that nothing calls it"
        if self._wanted(name, module, reason):
            self._swap(name, module, counterpart, _saved_per_element(cls, module, self.dtype))

    def _swap(self, name: str, module: nn.Module, counterpart: nn.Module, before: float) -> None:
        if is_already(module, type(counterpart), attributes_of(counterpart)):
            return
        was = original_class(module).__name__
        revert(module)
        become(module, type(counterpart), attributes_of(counterpart))
        after = _saved_per_element(type(module), module, self.dtype)
        width = _width(self.by_name, name)
        self.swapped.append(Swap(tuple(self.names[module]), was, repr(module), before, after, width))

    def linears(self, options: dict[str, Any]) -> None:
        """Swaps linear layers. options: of RandomizedLinear."""
        module: Any
        for name, module in self.modules():
            cls = original_class(module)
            counterpart = match.linear(cls, module, options)
            if counterpart is None:
                continue
            if isinstance(counterpart, str):
                self._leave(module, counterpart)
                continue
            weight, names = module.weight, self.names[module]
            others = [owner for owner in self.owners[id(weight)] if owner not in names]
            reason = f"it shares its weight with {', '.join(others)}" if others else None
            target = type(counterpart), attributes_of(counterpart)
            if self._wanted(name, module, reason) and not is_already(module, *target):
                revert(module)
                become(module, *target)
                before = float(weight.itemsize) if weight.requires_grad else 0.0
                width = weight.shape[1 if cls is nn.Linear else 0], name
                after = before * module.share
                note = f"; inputs of fewer than {module.min_tokens} tokens are saved whole"
                now = repr(module) + (note if module.min_tokens > 1 else "")
                self.swapped.append(Swap(tuple(names), cls.__name__, now, before, after, width))

    def embeddings(self) -> None:
        """Marks embeddings for 32-bit optimizer states."""
        for name, module in self.modules():
            if not isinstance(module, nn.Embedding) or state_bits_of(module) is not None:
                continue
            if self.predicate is None or self.predicate(name, module):
                vars(module).update({MARK: 32, MARKED: True})
                self.marked.append(name)
