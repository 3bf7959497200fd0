"""Finds counterparts that save less for classes of torch, transformers and timm, and functions that modules call."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..library import is_own
from ..nn import activation as ours
from ..nn.linear import RandomizedConv1D, RandomizedLinear
from .class_swap import original_class

Maker = Callable[..., nn.Module]
"""Makes a counterpart of a module. Called as (module, bits, keep), the last two as of memkern.nn.GELU."""

TORCH: dict[type[nn.Module], Maker] = {
    nn.GELU: lambda m, bits, keep: ours.GELU(m.approximate, bits=bits, keep=keep),
    nn.SiLU: lambda m, bits, keep: ours.SiLU(m.inplace, bits=bits, keep="codes" if m.inplace else keep),
    nn.Mish: lambda m, bits, keep: ours.Mish(m.inplace, bits=bits),
    nn.Hardswish: lambda m, bits, keep: ours.Hardswish(m.inplace, bits=bits),
    nn.Softplus: lambda m, bits, keep: ours.Softplus(m.beta, m.threshold, bits=bits),
    nn.LeakyReLU: lambda m, bits, keep: ours.LeakyReLU(m.negative_slope, m.inplace),
    nn.Hardtanh: lambda m, bits, keep: ours.Hardtanh(m.min_val, m.max_val, m.inplace),
    nn.ReLU6: lambda m, bits, keep: ours.Hardtanh(m.min_val, m.max_val, m.inplace),
    nn.ELU: lambda m, bits, keep: ours.ELU(m.alpha, m.inplace, bits=bits),
    nn.CELU: lambda m, bits, keep: ours.CELU(m.alpha, m.inplace, bits=bits),
    nn.SELU: lambda m, bits, keep: ours.SELU(m.inplace, bits=bits),
    nn.LogSigmoid: lambda m, bits, keep: ours.LogSigmoid(bits=bits),
    nn.Softsign: lambda m, bits, keep: ours.Softsign(bits=bits),
    nn.Tanhshrink: lambda m, bits, keep: ours.Tanhshrink(bits=bits),
    nn.Hardsigmoid: lambda m, bits, keep: ours.Hardsigmoid(m.inplace),
    nn.Hardshrink: lambda m, bits, keep: ours.Hardshrink(m.lambd),
    nn.Softshrink: lambda m, bits, keep: ours.Softshrink(m.lambd),
    nn.Threshold: lambda m, bits, keep: ours.Threshold(m.threshold, m.value, m.inplace),
    nn.ReLU: lambda m, bits, keep: ours.ReLU(m.inplace),
    nn.Tanh: lambda m, bits, keep: ours.Tanh(bits=bits),
    nn.Sigmoid: lambda m, bits, keep: ours.Sigmoid(bits=bits),
}
"""The counterparts of torch.nn's activations."""

# torch saves the outputs of these, and so does the layer that usually follows: codes would be saved beside them.
SAVE_THEIR_OUTPUT = (nn.ReLU, nn.Tanh, nn.Sigmoid)


_GELU: Maker = lambda m, bits, keep: ours.GELU(bits=bits, keep=keep)  # noqa: E731
_GELU_TANH: Maker = lambda m, bits, keep: ours.GELU("tanh", bits=bits, keep=keep)  # noqa: E731
_QUICK_GELU: Maker = lambda m, bits, keep: ours.QuickGELU(bits=bits)  # noqa: E731
_SILU: Maker = lambda m, bits, keep: ours.SiLU(bits=bits, keep=keep)  # noqa: E731
_MISH: Maker = lambda m, bits, keep: ours.Mish(bits=bits)  # noqa: E731

LIBRARY_CLASSES: dict[tuple[str, str], Maker] = {
    ("transformers.activations", "GELUActivation"): _GELU,
    ("transformers.activations", "GELUTanh"): _GELU_TANH,
    ("transformers.activations", "NewGELUActivation"): _GELU_TANH,
    ("transformers.activations", "FastGELUActivation"): _GELU_TANH,
    ("transformers.activations", "AccurateGELUActivation"): _GELU_TANH,
    ("transformers.activations", "QuickGELUActivation"): _QUICK_GELU,
    ("transformers.activations", "SiLUActivation"): _SILU,
    ("transformers.activations", "MishActivation"): _MISH,
    ("transformers.models.bloom.modeling_bloom", "BloomGelu"): _GELU_TANH,
    ("timm.layers.activations", "GELU"): _GELU,
    ("timm.layers.activations", "GELUTanh"): _GELU_TANH,
    ("timm.layers.activations", "QuickGELU"): _QUICK_GELU,
    ("timm.layers.activations", "Swish"): _SILU,
    ("timm.layers.activations", "Mish"): _MISH,
    ("timm.layers.activations", "HardSwish"): lambda m, bits, keep: ours.Hardswish(bits=bits),
}
"""The counterparts of other libraries' activations, by the class's module and name."""
_NAMES = {name for _, name in LIBRARY_CLASSES} | {"NewGELU"}


def _maker(cls: type[nn.Module]) -> Maker | None:
    """The maker for a class; None for others, also for one that only has the name of a known class."""
    if cls in TORCH:
        return TORCH[cls]
    key = (cls.__module__, cls.__name__)
    known = key in LIBRARY_CLASSES and getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls
    return LIBRARY_CLASSES[key] if known else None


def _is_as_defined(cls: type[nn.Module]) -> bool:
    """Whether a class's forward is the one of its source: nobody has put another function in its place."""
    return getattr(cls.forward, "__module__", None) == cls.__module__


# Activations and layers that save much and have no counterpart here.
NO_COUNTERPART = (
    *(nn.PReLU, nn.RReLU, nn.GLU, nn.Softmax, nn.LogSoftmax),
    *(nn.RNNBase, nn.MultiheadAttention),
)

# Functions whose input torch saves, and whose calls compress cannot change. Not threshold: much else has that name.
FUNCTIONS = frozenset(
    {
        *("gelu", "silu", "mish", "hardswish", "softplus", "leaky_relu", "hardtanh", "relu6"),
        *("elu", "celu", "selu", "logsigmoid", "softsign", "tanhshrink"),
        *("hardsigmoid", "hardshrink", "softshrink"),
    }
)


_REPLACED = "its class's forward has been replaced"


def activation(cls: type[nn.Module], module: Any, bits: int, keep: str) -> nn.Module | str | None:
    """The counterpart of ``module``, whose class is or was ``cls``, or the reason why there is none.

    None for a module that is no activation.
    """
    if is_own(cls):
        return None
    if (maker := _maker(cls)) is not None:
        if not _is_as_defined(cls):
            return _REPLACED
        try:
            return maker(module, bits, keep)
        except ValueError as error:  # of softplus' beta, CELU's alpha, softshrink's lambd
            return str(error)
    if base := next((base for base in cls.__mro__[1:] if _maker(base) is not None), None):
        return f"a subclass of {base.__module__.removesuffix('.modules.activation')}.{base.__name__} may do more"
    return f"{cls.__module__}.{cls.__name__} is no class that compress knows" if cls.__name__ in _NAMES else None


def _randomized_conv1d(cls: type[nn.Module]) -> type[RandomizedConv1D]:
    """The counterpart of a Conv1D: of transformers' own class a subclass, as PEFT and others test with isinstance."""
    library = sys.modules.get("transformers.pytorch_utils")
    if library is None or library.Conv1D is not cls:
        return RandomizedConv1D
    from ..nn import conv1d

    return conv1d.RandomizedConv1D


def linear(cls: type[nn.Module], module: Any, options: dict[str, Any]) -> nn.Module | str | None:
    """As :func:`activation`, for linear layers; the counterpart has no memory of its own."""
    if cls is nn.Linear:
        if not _is_as_defined(cls):
            return _REPLACED
        shape = (module.in_features, module.out_features, module.bias is not None)
        return RandomizedLinear(*shape, device="meta", **options)
    if cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils":
        return _randomized_conv1d(cls)(**options)
    if issubclass(cls, nn.Linear) and not is_own(cls):
        return "a subclass of torch.nn.Linear may do more"
    return None


def _function_name(value: Any) -> str | None:
    """The name of a function of torch.nn.functional, also of one with arguments bound."""
    function = value.func if isinstance(value, functools.partial) else value
    name = getattr(function, "__name__", None)
    return name if name in FUNCTIONS and getattr(torch.nn.functional, name) is function else None


def _codes(function: Any) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions inside of it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    waiting = [] if code is None else [code]
    while waiting:
        yield (code := waiting.pop())
        waiting += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def _methods(cls: type[nn.Module]) -> dict[str, Any]:
    """The methods of a module's class that torch.nn.Module does not have."""
    methods: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base not in (nn.Module, object):
            methods.update({k: v for k, v in vars(base).items() if inspect.isfunction(v) and k != "__init__"})
    return methods


def _names_in_forward(cls: type[nn.Module]) -> Iterator[str]:
    """Names in the code of forward, and of the methods that it names, and so on."""
    methods, visited = _methods(cls), {"forward"}
    waiting = [getattr(cls, "forward", None)]  # torch.jit.ScriptModule's class has none
    while waiting:
        for code in _codes(waiting.pop()):
            yield from code.co_names
            new_names = {name for name in code.co_names if name in methods and name not in visited}
            visited |= new_names
            waiting += [methods[name] for name in new_names]


def called_in_forward(module: nn.Module) -> str | None:
    """The name of one of FUNCTIONS that a module's forward, or a method that it calls, calls; None where none is seen.

    Seen are names in the methods' code, and functions that are attributes of the module.
    """
    if type(module) in TORCH or is_own(type(module)):
        return None
    children = dict(module.named_children())
    methods = _methods(type(module))
    named = (
        name
        for name in _names_in_forward(type(module))
        if name in FUNCTIONS and name not in children and name not in methods
    )
    held = filter(None, map(_function_name, vars(module).values()))
    return next(named, None) or next(held, None)


# Names in a method's code with which it may reach children that it does not name.
_ANY_CHILD = frozenset({"children", "named_children", "modules", "named_modules", "_modules", "getattr"})


class CalledNames:
    """The names in the code of a model's methods, by which it is told whether a child may be called."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        classes = {type(module) for module in modules} | {original_class(module) for module in modules}
        self.names: dict[type, set[str]] = {}
        for cls in classes:
            codes = [code for method in _methods(cls).values() for code in _codes(method)]
            texts = {constant for code in codes for constant in code.co_consts if isinstance(constant, str)}
            self.names[cls] = texts.union(*(code.co_names for code in codes))
        self.all_names: set[str] = set().union(*self.names.values())

    def may_call(self, parent: nn.Module, child: str) -> bool:
        """Whether a child may be called: some method of the model has its name, or its parent reaches any child."""
        cls = original_class(parent)
        if cls.__module__.startswith("torch.") or "forward" in vars(parent) or self.names[cls] & _ANY_CHILD:
            return True
        return child in self.all_names
