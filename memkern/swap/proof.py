"""Proves which known function a module's forward is: its operations, as torch.fx records them, are compared one by one.

A name and some points of the function prove nothing: a clamp acts outside of the points, dropout in another mode, a
gradient of its own in the backward pass, and an attribute may be set later. Whatever is not seen to be one of the forms
below is left alone.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import GraphAppendingTracer
from torch.nn import functional as F

Form = Any
"""An operation and what it is applied to, as nested tuples; equal for products and sums in any order."""

INPUT: Form = ("input",)


class Unproved(Exception):
    """The forward pass does something that its graph does not show."""


# ---- recording


def _state() -> tuple[bool, ...]:
    autocast = (torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return torch.is_grad_enabled(), *autocast


class _Recorder(GraphAppendingTracer):
    """Refuses operations inside of no_grad, an autograd.Function (whose gradient is its own) or another autocast.

    trusted: a class of KNOWN, whose own gradient is that of the function. read: the module's attributes and methods
    that the forward pass has read.
    """

    def __init__(self, trusted: bool = False) -> None:
        super().__init__(fx.Graph())
        self.state, self.trusted = _state(), trusted
        self.read: dict[str, Any] = {}

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _state() != self.state and not self.trusted:
            raise Unproved
        return super().create_node(*args, **kwargs)


class _StandIn:
    """A module's ``self`` while its forward is recorded: children and methods, and no attribute that may change.

    Only those of a class of KNOWN are read, which are set at construction.
    """

    def __init__(self, cls: type[nn.Module], module: nn.Module, recorder: _Recorder) -> None:
        object.__setattr__(self, "_about", (cls, module, recorder))

    def __getattribute__(self, name: str) -> Any:
        cls, module, recorder = object.__getattribute__(self, "_about")
        if name in module._modules:
            return lambda x: recorder.create_proxy("call_module", name, (x,), {})
        method = inspect.getattr_static(cls, name, None)
        if inspect.isfunction(method) and name not in vars(module):
            recorder.read[name] = method
            return types.MethodType(method, self)
        if recorder.trusted or (name == "inplace" and vars(module).get(name) is False):  # the same values either way
            recorder.read[name] = getattr(module, name)
            return recorder.read[name]
        raise Unproved

    def __setattr__(self, name: str, value: Any) -> None:
        raise Unproved


def _recorded(run: Callable[[Any, fx.Proxy], Any], this: Any, recorder: _Recorder) -> Form:
    """The form of ``run(this, input)``."""
    graph = recorder.graph
    x = recorder.create_proxy("placeholder", "input", (), {})
    output = run(this, x)
    if not isinstance(output, fx.Proxy):
        raise Unproved
    form = _form(output.node)
    seen = {output.node}
    for node in reversed(graph.nodes):  # inputs come before their users
        if node not in seen:
            raise Unproved  # nothing that is returned needs it: it has an effect of its own
        seen.update(node.all_input_nodes)
    return form


# ---- forms

_NAMESPACES = (operator, torch, F, torch._C._nn, torch.special)
_ALIASES = {"multiply": "mul", "divide": "div", "truediv": "div", "true_divide": "div", "subtract": "sub"}
_DEFAULTS: set[tuple[str, Any]] = {("inplace", False), ("approximate", "none")}


def _rounded(number: float) -> float:
    """To 6 digits: the constants of different spellings, such as sqrt(2 / pi), differ in the eighth."""
    return float(f"{number:.6g}")


def _product(*parts: Form) -> Form:
    number, factors = 1.0, []
    for part in parts:
        if isinstance(part, float):
            number *= part
        elif part[0] == "*":
            number *= part[1]
            factors += part[2]
        else:
            factors.append(part)
    number = _rounded(number)
    if not factors or (number == 1 and len(factors) == 1):
        return factors[0] if factors else number
    return "*", number, tuple(sorted(factors, key=repr))


def _sum(*parts: Form) -> Form:
    number, terms = 0.0, []
    for part in parts:
        if isinstance(part, float):
            number += part
        elif part[0] == "+":
            number += part[1]
            terms += part[2]
        else:
            terms.append(part)
    return "+", _rounded(number), tuple(sorted(terms, key=repr))


def _divided(a: Form, b: Form) -> Form:
    if not isinstance(b, float) or b == 0:
        raise Unproved
    return _product(a, 1 / b)


def _power(a: Form, exponent: Form) -> Form:
    if exponent not in (2.0, 3.0):
        raise Unproved
    return _product(*[a] * int(exponent))


_ARITHMETIC: dict[str, Callable[..., Form]] = {
    "mul": _product,
    "add": _sum,
    "sub": lambda a, b: _sum(a, _product(-1.0, b)),
    "neg": lambda a: _product(-1.0, a),
    "div": _divided,
    "pow": _power,
}


def _operation(node: fx.Node) -> str:
    """The name of a node's operation; of one that works in place on a value of its own that of the plain one."""
    if node.op == "call_method":
        name = str(node.target)
        if name.endswith("_") and not name.startswith("_"):
            (source,) = node.all_input_nodes[:1]
            if source.op in ("placeholder", "call_module") or len(source.users) > 1:
                raise Unproved
            name = name[:-1]
        return name
    name = getattr(node.target, "__name__", "")
    if not any(getattr(space, name, None) is node.target for space in _NAMESPACES):
        raise Unproved
    return name


def _form(value: Any) -> Form:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        return "text", value
    if not isinstance(value, fx.Node):
        raise Unproved
    if value.op == "placeholder":
        return INPUT
    options = [value.kwargs[key] for key in sorted(value.kwargs) if (key, value.kwargs[key]) not in _DEFAULTS]
    parts = [_form(each) for each in (*value.args, *options)]
    if value.op == "call_module":
        return "child", value.target, *parts
    name = _operation(value)
    name = _ALIASES.get(name, name)
    arithmetic = _ARITHMETIC.get(name)
    return (name, *parts) if arithmetic is None else arithmetic(*parts)


# ---- what is known

KNOWN: dict[str, tuple[str, ...]] = {
    "transformers.activations": ("GELUTanh", "GELUActivation", "AccurateGELUActivation", "MishActivation"),
    # Its autograd.Function has the derivative of the tanh form.
    "transformers.models.bloom.modeling_bloom": ("BloomGelu",),
}
"""Classes whose forward reads attributes of construction, or has a gradient of its own, by the module that has them."""

_WITHOUT_EFFECT = {"__init__", "__module__", "__doc__", "__qualname__", "__annotations__", "extra_repr"}
_WITHOUT_EFFECT |= {"__firstlineno__", "__static_attributes__", "__parameters__", "__orig_bases__"}


def defining_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class whose forward ``cls`` has; ``cls`` itself where a subclass overrides more than the construction."""
    mro = cls.__mro__
    owner = next(base for base in mro if "forward" in vars(base))
    for base in mro[: mro.index(owner)]:
        if (vars(base).keys() - _WITHOUT_EFFECT) & set(dir(owner)):
            return cls
    return owner


def is_as_defined(cls: type[nn.Module]) -> bool:
    """Whether a class's forward is the one of its source: nobody has put another function in its place."""
    return getattr(cls.forward, "__module__", None) == cls.__module__


_CALLS = ("__call__", "_wrapped_call_impl", "_call_impl")


def _calls_forward(cls: type[nn.Module]) -> bool:
    return all(getattr(cls, name) is getattr(nn.Module, name) for name in _CALLS)


def _is_trusted(cls: type[nn.Module]) -> bool:
    owner = defining_class(cls)
    return owner.__name__ in KNOWN.get(owner.__module__, ()) and is_as_defined(owner)


def recorded_forward(cls: type[nn.Module], module: nn.Module) -> tuple[fx.Graph, dict[str, Any]] | None:
    """The operations of a forward of one argument, and the attributes that it reads; None where they are not seen.

    A class with a gradient of its own shows the operations inside of it, which are not those of that gradient.
    """
    with torch.enable_grad():
        recorder = _Recorder(_is_trusted(cls))
        try:
            _recorded(cls.forward, _StandIn(cls, module, recorder), recorder)
        except Exception:  # of code that was not written to be recorded
            return None
    return recorder.graph, recorder.read


def plain_operation(node: fx.Node) -> str | None:
    """The name of a recorded operation of torch that makes a new tensor; None for others."""
    if node.op not in ("call_function", "call_method") or str(node.target).endswith("_"):
        return None
    try:
        name = _operation(node)
    except Unproved:
        return None
    return _ALIASES.get(name, name)


def _of_forward(cls: type[nn.Module], module: nn.Module, method: str = "forward") -> Form | None:
    """The form of a module's forward, or another method of one argument; None where it is not seen."""
    trusted = _is_trusted(cls)
    run = inspect.getattr_static(cls, method, None)
    if not inspect.isfunction(run) or not _calls_forward(cls):
        return None
    if len(inspect.signature(run, follow_wrapped=False).parameters) != 2:
        return None
    forms = []
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            recorder = _Recorder(trusted)
            this = _StandIn(cls, module, recorder)
            try:
                forms.append(_recorded(run, this, recorder))
            except Exception:  # of code that was not written to be recorded
                return None
    return forms[0] if forms[0] == forms[1] else None


_FORMS: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "gelu": (F.gelu, lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))),
    "gelu_tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3)))),
        lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x))),
    ),
    "quick_gelu": (lambda x: x * torch.sigmoid(1.702 * x),),
    "silu": (F.silu, lambda x: x * torch.sigmoid(x)),
    "mish": (F.mish, lambda x: x * torch.tanh(F.softplus(x))),
    "hardswish": (F.hardswish, lambda x: x * F.relu6(x + 3) / 6),
}


@functools.cache
def _forms(kind: str) -> tuple[Form, ...]:
    return tuple(_recorded(lambda _, x: each(x), None, _Recorder()) for each in _FORMS[kind])  # noqa: B023


def computes(cls: type[nn.Module], module: nn.Module, kind: str) -> bool:
    """Whether a module, whose class is or was ``cls``, is the activation ``kind`` and nothing else."""
    if next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
        return False
    form = _of_forward(cls, module)
    return form is not None and form in _forms(kind)


def _gated(act: str, both: Form) -> Form:
    """act(gate) * up of gate and up in one tensor, gate first."""
    gate, up = (("getitem", ("chunk", both, 2.0, -1.0), half) for half in (0.0, 1.0))
    return _product(("child", act, gate), up)


def is_gate(cls: type[nn.Module], module: nn.Module, method: str, act: str) -> bool:
    """Whether a method is act(gate) * up of its argument's halves. act: the name of the activation's child."""
    return _of_forward(cls, module, method) == _gated(act, INPUT)


def is_gated_mlp(cls: type[nn.Module], module: nn.Module, act: str) -> bool:
    """Whether forward is down_proj(act(gate) * up), where gate and up are the halves of gate_up_proj(x)."""
    return _of_forward(cls, module) == ("child", "down_proj", _gated(act, ("child", "gate_up_proj", INPUT)))


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_called_plainly(module: nn.Module) -> bool:
    """Whether a call is the class's forward and nothing else: no hooks, and no forward of the instance."""
    return "forward" not in vars(module) and not any(vars(module).get(hooks) for hooks in _HOOKS)
