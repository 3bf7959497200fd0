"""Activations written in several operations save their input alone and are run again for the backward pass."""

from __future__ import annotations

import functools
import math
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ..functions.derivative import OPERATIONS, Chain, Step
from ..functions.saves_input import Recompute
from . import proof
from .class_swap import original_class


class _Known(NamedTuple):
    """The operations of a class's forward, and its function and the attributes that it read when they were recorded."""

    forward: Callable[..., Tensor]
    attributes: dict[str, Any]
    chain: Chain | None

    def holds(self, cls: type[nn.Module], module: nn.Module) -> bool:
        own = vars(module)
        same = all(_unbound(own.get(name), module) == value for name, value in self.attributes.items())
        return same and cls.forward is self.forward


_known: weakref.WeakKeyDictionary[type[nn.Module], _Known] = weakref.WeakKeyDictionary()


def _is_plain(function: Any) -> bool:
    """Whether all that a function names is in modules, such as torch and math, or its own."""
    if not isinstance(function, types.FunctionType) or function.__code__.co_freevars:
        return False
    names = {name for name in function.__code__.co_names if name in function.__globals__}
    return all(isinstance(function.__globals__[name], types.ModuleType) for name in names)


def _unbound(value: Any, module: nn.Module) -> Any:
    """The function of a method of the module's own, any other value as it is."""
    return value.__func__ if isinstance(value, types.MethodType) and value.__self__ is module else value


def _step(node: fx.Node, numbers: dict[fx.Node, int]) -> Step | None:
    name = proof.plain_operation(node)
    if node.kwargs or name is None or not 1 <= len(node.args) <= 2:
        return None
    first, *others = node.args
    if name in ("mul", "add") and others and not isinstance(first, fx.Node):
        first, others = others[0], [first]
    if not isinstance(first, fx.Node):
        return None
    values = [first, *(other for other in others if isinstance(other, fx.Node))]
    number: Any = next((other for other in others if type(other) in (int, float)), None)
    if len(values) + (number is not None) != 1 + len(others):
        return None
    if number is not None and not (math.isfinite(number) and (name != "pow" or number)):
        return None
    step = Step(name if number is None else f"{name} number", tuple(numbers[value] for value in values), number)
    return step if step.operation in OPERATIONS else None


def _chain(graph: fx.Graph) -> Chain | None:
    """The operations of a recorded forward; None where one is not known."""
    numbers: dict[fx.Node, int] = {}
    steps: list[Step] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            numbers[node] = 0
            continue
        step = _step(node, numbers)
        if step is None:
            return None
        steps.append(step)
        numbers[node] = len(steps)
    return Chain(steps) if steps else None


def _known_of(cls: type[nn.Module], module: nn.Module) -> _Known:
    recorded = proof.recorded_forward(cls, module) if _is_plain(cls.forward) else None
    if recorded is None:
        return _Known(cls.forward, {}, None)
    graph, read = recorded
    attributes = {name: _unbound(value, module) for name, value in read.items()}
    is_known = all(type(value) in (int, float, bool) or _is_plain(value) for value in attributes.values())
    return _Known(cls.forward, attributes, _chain(graph) if is_known else None)


def chain_of(module: nn.Module) -> Chain | None:
    """The operations of the forward of a module's original class, if they are known and are what they were."""
    cls = original_class(module)
    known = _known.get(cls)
    if known is None:
        _known[cls] = known = _known_of(cls, module)
    return known.chain if known.holds(cls, module) else None


class Recomputed(nn.Module):
    """Replaces a composite activation: the forward pass and every bit of the gradient stay."""

    def forward(self, x: Tensor) -> Tensor:
        function = functools.partial(original_class(self).forward, self)
        traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        changes_its_input = getattr(self, "inplace", False)  # set since: a second run would change it again
        if traced or changes_its_input or not (torch.is_grad_enabled() and x.requires_grad):
            return function(x)
        return Recompute.apply(x, function, chain_of(self))
