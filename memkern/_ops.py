"""Every op: its schema where C++ is absent, its fake, and the function that the rest of memkern calls.

Ops live three times: in ``torch.ops.memkern`` with the kernels that the tensors' device has (C++ where it is built,
else the reference), in ``torch.ops.memkern_triton``, and in ``torch.ops.memkern_reference``, the specification for any
device. :func:`memkern.backend.select` decides which of them a call goes to.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _cpu, backend, reference
from .fewbit.levels import Levels, Valley
from .quant.codec import CODECS
from .quant.layout import check_block_size, layout_of
from .reference.activation import plane_bytes

SCHEMAS = {
    "quantize_blockwise": (
        "(Tensor x, int codec, bool signed, int block_size, int? step=None) -> (Tensor, Tensor)"
    ),
    "dequantize_blockwise": (
        "(Tensor codes, Tensor scale, int codec, int block_size, ScalarType dtype) -> Tensor"
    ),
    "adam_step_": (
        "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
        "Tensor(d!)[] exp_avg_scales, Tensor(e!)[] exp_avg_sq_scales, Tensor(f!)[] steps, int[] group, Tensor[] lr, "
        "float[] beta1, float[] beta2, float[] eps, float[] weight_decay, int[] decoupled, int[] maximize, "
        "int[] codec, int[] block_size, Tensor? grad_scale=None, Tensor? found_inf=None, "
        "Tensor? grad_norm=None, float max_grad_norm=0.0) -> ()"
    ),
    "lamb_step_": (
        "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
        "Tensor(d!)[] exp_avg_scales, Tensor(e!)[] exp_avg_sq_scales, Tensor(f!)[] steps, "
        "Tensor(g!)[] trust_ratios, int[] group, Tensor[] lr, float[] beta1, float[] beta2, float[] eps, "
        "float[] weight_decay, int[] decoupled, int[] bias_correction, int[] trust_clip, int[] always_adapt, "
        "int[] layers, int[] maximize, int[] codec, int[] block_size, Tensor? grad_scale=None, "
        "Tensor? found_inf=None, Tensor? grad_norm=None, float max_grad_norm=0.0) -> ()"
    ),
    "lars_step_": (
        "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_scales, "
        "Tensor(d!)[] steps, Tensor(e!)[] trust_ratios, int[] group, Tensor[] lr, float[] momentum, "
        "float[] dampening, float[] weight_decay, int[] nesterov, float[] trust_coeff, float[] eps, "
        "int[] trust_clip, int[] always_adapt, int[] layers, int[] maximize, int[] codec, int[] block_size, "
        "Tensor? grad_scale=None, Tensor? found_inf=None, Tensor? grad_norm=None, float max_grad_norm=0.0) -> ()"
    ),
    "lion_step_": (
        "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_scales, "
        "int[] group, Tensor[] lr, float[] beta1, float[] beta2, float[] weight_decay, int[] maximize, int[] codec, "
        "int[] block_size, Tensor? grad_scale=None, Tensor? found_inf=None, "
        "Tensor? grad_norm=None, float max_grad_norm=0.0) -> ()"
    ),
    "grad_norm_": "(Tensor(a!) norm, Tensor[] grads, Tensor? grad_scale=None) -> ()",
    "few_bit_encode": "(Tensor x, int bits, float[] thresholds, int[] flips, int symmetry) -> Tensor",
    "few_bit_forward": (
        "(Tensor x, int fn, float a, float b, int bits, float[] thresholds, int[] flips, int symmetry) "
        "-> (Tensor, Tensor)"
    ),
    "few_bit_backward": "(Tensor grad, Tensor codes, float[] levels) -> Tensor",
    "few_bit_backward_from_output": (
        "(Tensor grad, Tensor output, Tensor codes, float minimum, float[] falling, float[] rising, "
        "float falling_reach, float rising_reach) -> Tensor"
    ),
}


def _fake_quantize(
    x: Tensor, codec: int, signed: bool, block_size: int, step: int | None = None
) -> tuple[Tensor, Tensor]:
    check_block_size(block_size)
    layout = layout_of(x, block_size)
    codes = torch.empty_like(x, dtype=torch.int8 if signed else torch.uint8)
    return codes, x.new_empty(layout.scale_shape, dtype=torch.float32)


def _fake_dequantize(codes: Tensor, scale: Tensor, codec: int, block_size: int, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(codes, dtype=dtype)


def _fake_step(*args: Any, **kwargs: Any) -> None:
    return None


def _fake_encode(
    x: Tensor, bits: int, thresholds: Sequence[float], flips: Sequence[int], symmetry: int
) -> Tensor:
    return x.new_empty((bits, plane_bytes(x.numel())), dtype=torch.uint8)


def _fake_forward(x: Tensor, fn: int, a: float, b: float, bits: int, *table: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), _fake_encode(x, bits, *table)


def _fake_backward(grad: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(grad)


FAKES: dict[str, Callable[..., Any]] = {
    "quantize_blockwise": _fake_quantize,
    "dequantize_blockwise": _fake_dequantize,
    "adam_step_": _fake_step,
    "lamb_step_": _fake_step,
    "lars_step_": _fake_step,
    "lion_step_": _fake_step,
    "grad_norm_": _fake_step,
    "few_bit_encode": _fake_encode,
    "few_bit_forward": _fake_forward,
    "few_bit_backward": _fake_backward,
    "few_bit_backward_from_output": _fake_backward,
}

NAMESPACES = {
    "cpu": "memkern",
    "cuda": "memkern",
    "triton": "memkern_triton",
    "reference": "memkern_reference",
}
"""Where the ops of each backend are."""

_libraries: list[torch.library.Library] = []  # a library unregisters its ops when it is collected


def _triton(name: str, *args: Any) -> Any:
    return getattr(importlib.import_module("memkern.triton"), name)(*args)


def _register() -> None:
    has_cpp = backend.load_library() is None
    for namespace in {*NAMESPACES.values()}:
        defined = has_cpp and namespace == "memkern"
        library = torch.library.Library(namespace, "FRAGMENT" if defined else "DEF")
        _libraries.append(library)
        for name, schema in SCHEMAS.items():
            if not defined:
                library.define(name + schema)
            # The kernel of every device that has none of its own. Triton is imported when it is first used.
            kernel = functools.partial(_triton, name) if "triton" in namespace else getattr(reference, name)
            library.impl(name, kernel, "CompositeExplicitAutograd")
            torch.library.register_fake(f"{namespace}::{name}", FAKES[name], lib=library)
        if defined:
            library.impl("few_bit_forward", _cpu.few_bit_forward, "CPU")


_register()


@torch.compiler.assume_constant_result  # TorchDynamo would trace into the file system; asked_for guards the answer
def _namespace(device: torch.device, asked_for: str | None) -> str:
    return NAMESPACES[backend.select(device)]


def _op(name: str, device: torch.device) -> Any:
    return getattr(getattr(torch.ops, _namespace(device, backend._asked_for)), name).default


def quantize_blockwise(
    x: Tensor, codec: str, signed: bool, block_size: int, step: int | None
) -> tuple[Tensor, Tensor]:
    return _op("quantize_blockwise", x.device)(x, CODECS[codec], signed, block_size, step)


def dequantize_blockwise(
    codes: Tensor, scale: Tensor, codec: str, block_size: int, dtype: torch.dtype
) -> Tensor:
    return _op("dequantize_blockwise", codes.device)(codes, scale, CODECS[codec], block_size, dtype)


def _nothing_watches(params: Sequence[Tensor]) -> bool:
    """Whether nobody would see an op that is called through the dispatcher: no compiler, mode, or subclass."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and {*map(type, params)} <= {Tensor, torch.nn.Parameter}
    )


def step_(name: str, params: Sequence[Tensor], *args: Any) -> None:
    """Calls the op ``name`` on many tensors of one device, in place."""
    op = _op(name, params[0].device)
    if op.namespace == "memkern_triton" and _nothing_watches(params):
        # Python to Python: the dispatcher's way costs 100 us for 148 tensors and 640 us for 1,000, a fifth of a step.
        _triton(name, params, *args)
    else:
        op(params, *args)
    if not torch.compiler.is_compiling():
        # A custom op that mutates its arguments does not do this by itself, and autograd's checks rely on it.
        torch.autograd.graph.increment_version(params)


def grad_norm_(norm: Tensor, grads: Sequence[Tensor], grad_scale: Tensor | None) -> None:
    """norm = sqrt(sum of g^2 over all tensors) / grad_scale, for gradients of one device."""
    _op("grad_norm_", norm.device)(norm, grads, grad_scale)


def few_bit_encode(x: Tensor, table: Levels) -> Tensor:
    bits, _, thresholds, flips, symmetry = table
    return _op("few_bit_encode", x.device)(x, bits, thresholds, flips, symmetry)


def few_bit_forward(x: Tensor, fn: int, a: float, b: float, table: Levels) -> tuple[Tensor, Tensor]:
    bits, _, thresholds, flips, symmetry = table
    return _op("few_bit_forward", x.device)(x, fn, a, b, bits, thresholds, flips, symmetry)


def few_bit_backward(grad: Tensor, codes: Tensor, levels: Sequence[float]) -> Tensor:
    return _op("few_bit_backward", grad.device)(grad, codes, levels)


def few_bit_backward_from_output(grad: Tensor, output: Tensor, codes: Tensor, valley: Valley) -> Tensor:
    return _op("few_bit_backward_from_output", grad.device)(grad, output, codes, *valley[1:])
