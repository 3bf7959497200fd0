"""The base of memkern's autograd functions: torch.func, torch.compile, export, and errors for second derivatives."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

from ..tracing import assume_constant_result, vmap_one_by_one

_WAY_OUT = "use torch.nn.functional's own (memkern.restore(model)) where it is needed"


class SavesLess(torch.autograd.Function):
    """Base of the functions: a first derivative in eager mode, under torch.compile, torch.func.grad and vmap.

    A subclass has a ``forward`` without a context, which returns its result and then all that is saved, and a
    ``setup_context``. vmap runs one example after another, as codes are packed and projections are of one example.
    """

    reason = "a few-bit activation saves its derivative rounded"
    transformed: type[torch.autograd.Function]
    """This function with a jvp, which raises, for torch.func. TorchDynamo takes no function that has one."""
    eager: type[torch.autograd.Function]
    """This function with a context in forward: what is saved is then no result, and is freed as torch's own is."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.vmap = staticmethod(functools.partial(_vmap, cls))  # type: ignore[method-assign]
        if "jvp" not in vars(cls):
            raising = {"jvp": staticmethod(functools.partial(_no_jvp, cls.reason))}
            cls.transformed = type(cls.__name__, (cls,), raising)
            with_context = {
                "forward": staticmethod(functools.partial(_forward_with_context, cls)),
                "setup_context": torch.autograd.Function.setup_context,
            }
            cls.eager = type(cls.__name__, (cls,), raising | with_context)


def _forward_with_context(function: type[SavesLess], ctx: Any, *args: Any) -> Any:
    """The result, and the tag where there is one."""
    results = function.forward(*args)
    function.setup_context(ctx, args, results)
    return results if isinstance(results, Tensor) else (results[0], results[-1])


def _vmap(function: type[SavesLess], *args: Any) -> tuple[Any, int]:
    def apply(*example: Any) -> Any:
        # Contiguous: codes are in the memory order of the result, which torch.stack makes contiguous.
        return function.apply(*(x.contiguous() if isinstance(x, Tensor) else x for x in example))

    return vmap_one_by_one(apply, *args)


def _no_jvp(reason: str, ctx: Any, *tangents: Any) -> Any:
    raise RuntimeError(f"{reason} for the backward pass, so forward-mode AD is not possible; {_WAY_OUT}")


@assume_constant_result  # TorchDynamo, which runs in some ONNX exports, cannot trace the function that tells so
def _exports_to_onnx() -> bool:
    return torch.onnx.is_in_onnx_export()


@assume_constant_result  # traced by the TorchDynamo of torch 2.10, is_exporting() is True under torch.compile too
def _is_exporting() -> bool:
    return torch.compiler.is_exporting()


def apply(function: type[SavesLess], *args: Any) -> Tensor:
    """The first result of a function.

    Raises:
        RuntimeError: under torch.onnx.export, whose format has none of memkern's operations.
    """
    compiling = torch.compiler.is_compiling()
    # torch.onnx's own answer takes 5 us, as it imports a module at each call.
    is_program = compiling or _is_exporting() or torch._C._get_tracing_state() is not None
    if is_program and _exports_to_onnx():
        raise RuntimeError(
            f"ONNX has no operation for memkern's functions ({function.__name__}): call memkern.restore(model) before "
            "torch.onnx.export, or export under torch.no_grad(), where they are torch's own"
        )
    if compiling:
        results = function.apply(*args)
    elif torch._C._are_functorch_transforms_active():
        results = function.transformed.apply(*args)
    else:  # Function.apply without its inspect.signature, which takes 60 us to find no defaults
        results = super(torch.autograd.Function, function.eager).apply(*args)  # type: ignore[misc]
    return results if isinstance(results, Tensor) else results[0]


def is_eager() -> bool:
    """Whether neither torch.compile nor a transform of torch.func sees what is called."""
    return not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()


def is_recorded() -> bool:
    """Whether torch.export or torch.jit.trace records a program: in it an op without its autograd function would have
    no gradient, so torch's own operations are recorded. ONNX export raises instead, in :func:`apply`."""
    tracing = not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None
    return (_is_exporting() or tracing) and not _exports_to_onnx()


def needs_gradient(x: Tensor | None) -> bool:
    """Whether a gradient of ``x`` may be asked for, by autograd or by a transform of torch.func at any level."""
    if x is None or not torch.is_grad_enabled() or is_recorded():
        return False
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        # vmap's tensors do not show what those inside of them need.
        while not x.requires_grad and torch._C._functorch.is_functorch_wrapped_tensor(x):
            x = torch._C._functorch.get_unwrapped(x)
    return x.requires_grad


def constant(x: float) -> float:
    """``x`` as a constant: with dynamic=True TorchDynamo makes variables of numbers, such as a module's attributes."""
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_scalar

        return guard_scalar(x)
    return x


class _NoSecondDerivative(SavesLess):
    """The identity on a gradient; its own backward raises.

    ``tag`` is a saved result without elements. Through it the gradient depends on the function's inputs: codes have no
    gradient, and the incoming gradient may be a constant. There torch's once_differentiable would give a wrong result
    without an error.
    """

    @staticmethod
    def forward(grad: Tensor, tag: Tensor, reason: str) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.reason = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError(f"{ctx.reason}, so it has no second derivative: double backward is not possible; {_WAY_OUT}")


def no_second_derivative(grad: Tensor, tag: Tensor, reason: str = SavesLess.reason) -> Tensor:
    """``grad``, made to raise RuntimeError with ``reason`` if it is differentiated in turn."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
        return _NoSecondDerivative.apply(grad, tag, reason)
    return grad


@assume_constant_result  # which torch 2.11 does not trace
def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of the autocast state that is on for a type of device; None for off."""
    if _has_autocast(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Autocast off, on devices that have it (meta has not)."""
    if _has_autocast(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
