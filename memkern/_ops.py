"""Registers every op in torch.ops, and has the functions by which the rest of memkern calls them.

Schemas and fakes: :mod:`memkern.schemas`. Each op is in three namespaces: ``torch.ops.memkern`` with the kernels of the
tensors' device (C++ where it is built, else the reference), ``torch.ops.memkern_triton``, and
``torch.ops.memkern_reference``, the specification for any device. :func:`memkern.backend.select` decides which of them
a call goes to.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import backend, reference
from .fewbit.activations import Activation
from .fewbit.levels import Levels, TwoBranch
from .library import NAMESPACE
from .quant.codec import ACTIVATIONS, CODECS
from .quant.layout import laid_out_alike
from .schemas import ADAM_STEP, AMSGRAD_STEP, FAKES, SCHEMAS, STEP_OPS, STEP_SCHEMA, StepArgs, StepOp
from .tracing import assume_constant_result, vmap_one_by_one

NAMESPACES = {
    "cpu": NAMESPACE,
    "cuda": NAMESPACE,
    "triton": f"{NAMESPACE}_triton",
    "reference": f"{NAMESPACE}_reference",
}
"""The namespace in torch.ops of each backend's ops."""

_libraries: list[torch.library.Library] = []  # a library unregisters its ops when it is collected


def _triton(name: str, *args: Any) -> Any:
    # Imported when it is first used.
    return getattr(importlib.import_module(".triton", __package__), name)(*args)


def _aligned(args: StepArgs) -> StepArgs:
    """The arguments with gradients that have their parameters' strides, as Triton and the reference need them."""
    grads = laid_out_alike(args.grads, args.params)
    return args if grads is args.grads else args._replace(grads=grads)


def _triton_step(name: str, *args: Any) -> None:
    _triton(name, _aligned(StepArgs(*args)))


def _triton_muon(name: str, updates: Sequence[Tensor], second: Sequence[Any], *args: Any) -> None:
    _triton(name, updates, second, _aligned(StepArgs(*args)))


def _muon_momentum(updates: Sequence[Tensor], sums: Sequence[Tensor], *args: Any) -> None:
    computed = reference.muon_momentum_(_aligned(StepArgs(*args)), updates)
    for output, values in zip(sums, computed, strict=True):
        output.copy_(values)


def _muon_apply(updates: Sequence[Tensor], ratios: Sequence[float], *args: Any) -> None:
    reference.muon_apply_(_aligned(StepArgs(*args)), updates, ratios)


MUON_OPS: dict[str, Callable[..., Any]] = {"muon_momentum_": _muon_momentum, "muon_apply_": _muon_apply}
"""Muon's ops by the reference. The sums that it returns are copied into the op's argument ``sums``."""


def _kernel(namespace: str, name: str) -> Callable[..., Any]:
    """The implementation of an op on a device that has no C++ kernel of its own."""
    if namespace == NAMESPACES["triton"]:
        runs = dict.fromkeys(STEP_OPS, _triton_step) | dict.fromkeys(MUON_OPS, _triton_muon)
        return functools.partial(runs.get(name, _triton), name)
    if name in MUON_OPS:
        return MUON_OPS[name]
    function = torch.no_grad()(getattr(reference, name))
    return (lambda *args: function(_aligned(StepArgs(*args)))) if name.endswith("_step_") else function


@functools.cache
def _few_bit_forward_on_cpu() -> Callable[..., tuple[Tensor, Tensor]]:
    """The reference's ``few_bit_forward``, whose codes are made by the op in C++."""
    encode = getattr(torch.ops, NAMESPACE).few_bit_encode.default
    return functools.partial(reference.few_bit_forward, encode=encode)


def _register() -> None:
    """Registers the ops of all namespaces: schemas, implementations, fakes and rules for vmap."""
    has_cpp = backend.load_library() is None
    for namespace in {*NAMESPACES.values()}:
        is_defined = has_cpp and namespace == NAMESPACE  # by the compiled library
        library = torch.library.Library(namespace, "FRAGMENT" if is_defined else "DEF")
        _libraries.append(library)
        extra_schemas = {AMSGRAD_STEP.name: STEP_SCHEMA} if namespace == NAMESPACES["reference"] else {}
        for name, schema in {**SCHEMAS, **extra_schemas}.items():
            if not is_defined:
                library.define(name + schema)
            library.impl(name, _kernel(namespace, name), "CompositeExplicitAutograd")
            fake = FAKES[ADAM_STEP.name if name in extra_schemas else name]
            torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
        for name in ("few_bit_backward", "few_bit_backward_from_output"):
            op = getattr(getattr(torch.ops, namespace), name).default
            torch.library.register_vmap(f"{namespace}::{name}", functools.partial(vmap_one_by_one, op), lib=library)
        if is_defined:
            library.impl("few_bit_forward", torch.no_grad()(_few_bit_forward_on_cpu()), "CPU")


_register()


@assume_constant_result  # TorchDynamo would trace into the file system; it traces again for another asked_for
def _namespace(device: torch.device, asked_for: str | None) -> str:
    name = backend.select(device)
    if name == "reference":
        backend.warn_of_reference(device.type, asked_for)
    return NAMESPACES[name]


def _op(name: str, device: torch.device, by_reference: bool = False) -> Any:
    namespace = NAMESPACES["reference"] if by_reference else _namespace(device, backend._asked_for)
    return getattr(getattr(torch.ops, namespace), name).default


def quantize_blockwise(
    x: Tensor, codec: str, signed: bool, block_size: int, step: int | None, mark_nonfinite: bool = False
) -> tuple[Tensor, Tensor]:
    return _op("quantize_blockwise", x.device)(x, CODECS[codec], signed, block_size, step, mark_nonfinite)


def dequantize_blockwise(codes: Tensor, scale: Tensor, codec: str, block_size: int, dtype: torch.dtype) -> Tensor:
    return _op("dequantize_blockwise", codes.device)(codes, scale, CODECS[codec], block_size, dtype)


def _needs_no_dispatcher(args: StepArgs) -> bool:
    """Whether no compiler, dispatch mode or tensor subclass would see an op that is called through the dispatcher, and
    no gradient is negated lazily, as the imaginary part of a conjugate is: the dispatcher negates its numbers."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and {*map(type, args.params)} <= {Tensor, torch.nn.Parameter}
        and not any(map(Tensor.is_neg, args.grads))
    )


def step_(step: StepOp, args: StepArgs, by_reference: bool = False) -> None:
    """An optimizer's step on many tensors of one device, in place. ``by_reference``: for fp64, amsgrad."""
    op = _op(step.name, args.params[0].device, by_reference)
    if op.namespace == NAMESPACES["triton"] and _needs_no_dispatcher(args):
        # Python to Python: the dispatcher's way costs 100 us for 148 tensors and 640 us for 1,000, a fifth of a step.
        _triton(step.name, _aligned(args))
    else:
        op(*args)
    if not torch.compiler.is_compiling() and not args.squares_only:
        # A custom op that mutates its arguments does not do this by itself, and autograd's checks rely on it.
        torch.autograd.graph.increment_version(args.params)


def muon_momentum_(args: StepArgs, updates: Sequence[Tensor], by_reference: bool = False) -> list[Tensor]:
    """Updates the momentum, and writes what is to be orthogonalized into ``updates``, bfloat16.

    Returns the sums of the squares of the matrices in ``updates``, float64.
    """
    device = args.params[0].device
    sums = [torch.empty(u.shape[:-2], dtype=torch.float64, device=device) for u in updates]
    _op("muon_momentum_", device, by_reference)(updates, sums, *args)
    return sums


def muon_apply_(args: StepArgs, updates: Sequence[Tensor], ratios: Sequence[float], by_reference: bool = False) -> None:
    """p = p * (1 - lr * weight_decay) - lr * ratio * o, after :func:`muon_momentum_` with the same ``args``."""
    _op("muon_apply_", args.params[0].device, by_reference)(updates, ratios, *args)
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(args.params)


def grad_norm_(norm: Tensor, grads: Sequence[Tensor], grad_scale: Tensor | None) -> None:
    """norm = sqrt(sum of g^2 over all tensors) / grad_scale, for gradients of one device."""
    _op("grad_norm_", norm.device)(norm, grads, grad_scale)


def few_bit_encode(x: Tensor, table: Levels) -> Tensor:
    return _op("few_bit_encode", x.device)(x, table.bits, table.thresholds, table.flips, table.symmetry)


def few_bit_forward(x: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    table = activation.levels  # by attributes: Dynamo of torch 2.11 iterates over no constants
    namespace = _namespace(x.device, backend._asked_for)
    eager = not torch.compiler.is_compiling() and not torch.is_grad_enabled()
    if eager and x.is_cpu and namespace == NAMESPACE:
        forward = _few_bit_forward_on_cpu()  # saves the way through the dispatcher and back into Python
    else:
        forward = getattr(torch.ops, namespace).few_bit_forward.default
    fn = ACTIVATIONS[activation.name]
    return forward(x, fn, activation.a, activation.b, table.bits, table.thresholds, table.flips, table.symmetry)


def few_bit_backward(grad: Tensor, codes: Tensor, levels: Sequence[float]) -> Tensor:
    return _op("few_bit_backward", grad.device)(grad, codes, levels)


def few_bit_backward_from_output(grad: Tensor, output: Tensor, codes: Tensor, two_branch: TwoBranch) -> Tensor:
    return _op("few_bit_backward_from_output", grad.device)(grad, output, codes, *two_branch[1:])
