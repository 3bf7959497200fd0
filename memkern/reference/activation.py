"""The ops of activations whose derivative is kept in a few bits per element.

Codes are bit planes: byte i of plane p holds bit p of the codes of elements 8i to 8i + 7, in memory order. A plane is
padded with zeros to a multiple of 16 bytes, so that ``bits`` planes take ``bits / 8`` bytes per element and less than
64 bytes more. Levels and thresholds: :mod:`memkern.fewbit.levels`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..fewbit.levels import SYMMETRIES, Levels
from ..quant.codec import ACTIVATIONS, MAX_BITS, MAX_COEFFICIENTS, MAX_THRESHOLDS, plane_bytes, to_fp32
from ..quant.layout import FLOATS, arithmetic, is_dense, memory_order, same_layout
from .blockwise import sqrt

# fp64 is for gradcheck; kernels take FLOATS alone.
FLOATS_AND_FP64 = (*FLOATS, torch.float64)

_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "selu": F.selu,
    "logsigmoid": F.logsigmoid,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "hardsigmoid": F.hardsigmoid,
}
_WITH_PARAMETERS: dict[str, Callable[[float, float], Callable[..., Tensor]]] = {
    "softplus": lambda beta, threshold: functools.partial(F.softplus, beta=beta, threshold=threshold),
    "leaky_relu": lambda slope, _: functools.partial(F.leaky_relu, negative_slope=slope),
    "hardtanh": lambda low, high: functools.partial(F.hardtanh, min_val=low, max_val=high),
    "elu": lambda alpha, _: functools.partial(F.elu, alpha=alpha),
    "celu": lambda alpha, _: functools.partial(F.celu, alpha=alpha),
    "hardshrink": lambda lambd, _: functools.partial(F.hardshrink, lambd=lambd),
    "softshrink": lambda lambd, _: functools.partial(F.softshrink, lambd=lambd),
    "threshold": lambda threshold, value: functools.partial(F.threshold, threshold=threshold, value=value),
}
_NAMES = [*ACTIVATIONS]


def function_of(name: str, a: float = 0.0, b: float = 0.0) -> Callable[..., Tensor]:
    """torch's own function, with the parameters a and b of those that have any."""
    return _FUNCTIONS[name] if name in _FUNCTIONS else _WITH_PARAMETERS[name](a, b)


def activate(x: Tensor, fn: int, a: float = 0.0, b: float = 0.0) -> Tensor:
    """The activation of a number in ``ACTIVATIONS``, with the strides of x."""
    y = function_of(_NAMES[fn], a, b)(x)
    if _NAMES[fn] == "logsigmoid" and not x.is_contiguous():  # on a CPU torch's is contiguous whatever x is
        return torch.empty_like(x).copy_(y)
    return y


def check_function(fn: int) -> None:
    """Raises ValueError unless ``fn`` is one of ACTIVATIONS' numbers."""
    if not 0 <= fn < len(ACTIVATIONS):
        raise ValueError(f"fn must be from 0 to {len(ACTIVATIONS) - 1}, got {fn}")


def check_table(bits: int, thresholds: Sequence[float], flips: Sequence[int], symmetry: int) -> None:
    """Raises ValueError unless these make a table of codes."""
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"bits must be from 1 to {MAX_BITS}, got {bits}")
    if len(thresholds) != len(flips) or len(thresholds) > MAX_THRESHOLDS:
        raise ValueError(
            f"thresholds and flips must have as many entries, at most {MAX_THRESHOLDS}, "
            f"got {len(thresholds)} and {len(flips)}"
        )
    if symmetry not in SYMMETRIES:
        raise ValueError(f"symmetry must be one of {', '.join(map(str, SYMMETRIES))}, got {symmetry}")
    for flip in flips:
        if not 0 <= flip < 2**bits:
            raise ValueError(f"flips must be from 0 to {2**bits - 1}, got {flip}")


def check_values(x: Tensor, name: str, dtypes: Sequence[torch.dtype] = FLOATS) -> None:
    """Raises unless ``x`` is a dense tensor of one of the dtypes."""
    if x.dtype not in dtypes:
        raise TypeError(f"{name} must be float32, bfloat16 or float16, got {x.dtype}")
    if not is_dense(x.shape, x.stride()):
        raise ValueError(
            f"{name} must be dense, got shape {tuple(x.shape)} with strides {x.stride()}; use contiguous()"
        )


def few_bit_encode(x: Tensor, bits: int, thresholds: Sequence[float], flips: Sequence[int], symmetry: int) -> Tensor:
    """The codes of a dense tensor: uint8 of shape (bits, bytes of a plane)."""
    check_table(bits, thresholds, flips, symmetry)
    check_values(x, "x", FLOATS_AND_FP64)
    code = torch.zeros(plane_bytes(x.numel()) * 8, dtype=torch.uint8, device=x.device)
    table = Levels(bits, (), tuple(thresholds), tuple(flips), symmetry)
    code[: x.numel()] = table.codes(memory_order(x))
    place = torch.arange(8, dtype=torch.uint8, device=x.device)
    planes = [((code >> p & 1).view(-1, 8) << place).sum(1, dtype=torch.uint8) for p in range(bits)]
    return torch.stack(planes)


def decode(codes: Tensor, numel: int) -> Tensor:
    """The code of each element, one int64 each."""
    place = torch.arange(8, dtype=torch.uint8, device=codes.device)
    bits = (codes[:, :, None] >> place & 1).view(codes.shape[0], -1)[:, :numel].long()
    weight = 2 ** torch.arange(codes.shape[0], device=codes.device)
    return (bits * weight[:, None]).sum(0)


def few_bit_forward(
    x: Tensor,
    fn: int,
    a: float,
    b: float,
    bits: int,
    thresholds: Sequence[float],
    flips: Sequence[int],
    symmetry: int,
    encode: Callable[..., Tensor] = few_bit_encode,
) -> tuple[Tensor, Tensor]:
    """The activation of a dense tensor, and the codes of its derivative.

    The C++ backend calls this with its own ``encode``: torch's operations give other bits on a part of a tensor than on
    the whole, so no kernel of ours can replace them.
    """
    check_function(fn)
    return activate(x, fn, a, b), encode(x, bits, thresholds, flips, symmetry)


def check_codes(codes: Tensor, numel: int) -> None:
    """Raises unless ``codes`` are the bit planes of ``numel`` elements."""
    if codes.dtype != torch.uint8 or codes.dim() != 2 or not codes.is_contiguous():
        raise TypeError(f"codes must be contiguous uint8 with a row per bit, got {codes.dtype} {codes.shape}")
    if not 1 <= codes.shape[0] <= MAX_BITS or codes.shape[1] != plane_bytes(numel):
        raise ValueError(
            f"codes of {numel} elements must have 1 to {MAX_BITS} rows of {plane_bytes(numel)} bytes, "
            f"got {tuple(codes.shape)}"
        )


def check_levels(grad: Tensor, codes: Tensor, levels: Sequence[float], dtypes: Sequence[torch.dtype] = FLOATS) -> None:
    """Raises unless :func:`few_bit_backward` takes these arguments."""
    check_values(grad, "grad", dtypes)
    check_codes(codes, grad.numel())
    if len(levels) != 2 ** codes.shape[0]:
        raise ValueError(f"levels must have {2 ** codes.shape[0]} entries, one per code, got {len(levels)}")


def check_from_output(
    grad: Tensor, output: Tensor, codes: Tensor, falling: Sequence[float], rising: Sequence[float]
) -> None:
    """Raises unless :func:`few_bit_backward_from_output` takes these arguments."""
    check_values(grad, "grad")
    check_codes(codes, grad.numel())
    if codes.shape[0] != 1:
        raise ValueError(f"codes must have one row, got {codes.shape[0]}")
    if output.dtype not in FLOATS or not same_layout(output, grad):
        raise ValueError(
            f"output must have grad's shape and strides, {tuple(grad.shape)} and {grad.stride()}, "
            f"got {tuple(output.shape)} and {output.stride()} of {output.dtype}"
        )
    if len(falling) != len(rising) or not 1 <= len(rising) <= MAX_COEFFICIENTS:
        raise ValueError(
            f"falling and rising must have as many coefficients, 1 to {MAX_COEFFICIENTS}, "
            f"got {len(falling)} and {len(rising)}"
        )


@torch.no_grad()
def few_bit_backward(grad: Tensor, codes: Tensor, levels: Sequence[float]) -> Tensor:
    """grad times the level of each element's code: one fp32 product. ``grad`` has the input's order in memory."""
    check_levels(grad, codes, levels, FLOATS_AND_FP64)
    wide = arithmetic(grad.dtype)
    table = torch.tensor([to_fp32(v) for v in levels], dtype=wide, device=grad.device)
    result = torch.empty_like(grad)
    product = memory_order(grad).to(wide) * table[decode(codes, grad.numel())]
    memory_order(result).copy_(product)
    return result


@torch.no_grad()
def few_bit_backward_from_output(
    grad: Tensor,
    output: Tensor,
    codes: Tensor,
    minimum: float,
    falling: Sequence[float],
    rising: Sequence[float],
    falling_reach: float,
    rising_reach: float,
) -> Tensor:
    """grad times the derivative, in fp32, that a TwoBranch (memkern.fewbit.levels) has for the output and one bit."""
    check_from_output(grad, output, codes, falling, rising)
    above = memory_order(output).float() - to_fp32(minimum)
    root = sqrt(torch.where(above > 0, above, 0))
    is_rising = decode(codes, grad.numel())

    def choose(rises: float, falls: float) -> Tensor:
        return torch.tensor([to_fp32(falls), to_fp32(rises)], dtype=torch.float32, device=grad.device)[is_rising]

    reach = choose(rising_reach, falling_reach)
    z = torch.minimum(root, reach) * choose(2 / rising_reach, 2 / falling_reach) - 1.0
    derivative = choose(rising[0], falling[0])
    for rises, falls in zip(rising[1:], falling[1:], strict=True):
        derivative = derivative * z + choose(rises, falls)
    result = torch.empty_like(grad)
    memory_order(result).copy_(memory_order(grad).float() * derivative)
    return result
