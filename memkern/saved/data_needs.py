"""What the data of a tensor ask of its codes, where plain ones would be too coarse.

The mean of a norm's input, or of attention's keys, values or output over all tokens, may be large beside the deviation:
then the difference from the mean is coded. Most of this is asked on a CPU only, as elsewhere the answer would wait for
the device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..quant.layout import FLOATS
from .attention import is_attention, stays_exact
from .codecs import BLOCK_SIZE, SMALLEST_BLOCK, Codec, inside
from .needs import SAME_BITS, Need
from .peek import saved_by
from .rules import signed
from .saved_value import Value
from .users import is_leaf, is_square, operation, user

NORMS = (
    *("NativeLayerNormBackward0", "NativeGroupNormBackward0", "NativeBatchNormBackward0"),
    *("CudnnBatchNormBackward0", "MiopenBatchNormBackward0"),
)
_STATISTICS = ("_saved_result1", "_saved_result2")  # of these nodes: mean and inverse deviation
_RUNNING = ("_saved_running_mean", "_saved_running_var")
LARGEST = 1.0
"""Of |mean| / deviation. Codes are right to a share of the largest value, which is then 4 deviations or less."""
LARGEST_SPREAD = 8.0
"""Of the largest deviation to the smallest, where one block of codes holds values of several rows or channels."""


class Normalization(NamedTuple):
    """What is coded in place of x: (x - mean) * inverse, both of which broadcast over it; None for 1."""

    mean: Tensor
    inverse: Tensor | None = None


def _of(value: Value) -> Tensor:
    return value.tensor(_of)


def _read(node: Any, name: str) -> tuple[Tensor, Tensor] | None:
    found = [saved_by(node, attribute) for attribute in _STATISTICS]
    if all(found) and _of(found[0][0]).numel():  # type: ignore[index]
        return _of(found[0][0]), _of(found[1][0])  # type: ignore[index]
    running = [saved_by(node, attribute) for attribute in _RUNNING] if "BatchNorm" in name else []
    if not running or not all(running):
        return None
    # Any epsilon does: codes are decoded with the same one.
    return _of(running[0][0]), (_of(running[1][0]) + 1e-5).rsqrt()  # type: ignore[index]


LARGEST_MEAN = 4.0
"""Of attention's keys, values and output, in deviations: codes are then off by 2 % of a deviation.

Gradients take differences of them between tokens, in which their mean cancels.
"""
_ATTENTION = ("_saved_key", "_saved_value")


def _token_mean(x: Tensor, dims: tuple[int, ...]) -> Tensor | None:
    """The mean over tokens, where it is larger than LARGEST_MEAN deviations from it. On a CPU only."""
    if x.device.type != "cpu" or x.dtype not in FLOATS or isinstance(x, FakeTensor):
        return None
    mean = x.mean(dims, keepdim=True, dtype=torch.float32)
    tokens = x.numel() // mean.numel()
    energy = torch.linalg.vector_norm(x, dtype=torch.float32).item() ** 2
    of_mean = tokens * torch.linalg.vector_norm(mean).item() ** 2
    return mean if of_mean > LARGEST_MEAN**2 * (energy - of_mean) else None


def mean_of_attention(node: Any, data: Tensor, before_views: bool = False) -> Normalization | None:
    """The mean over tokens, if it is large, of attention's output, or of what its keys or values are a view of.

    before_views: the latter, whose dimensions but the last are tokens.
    """
    if not is_attention(node) or data.dim() < 2:
        return None
    mean = _token_mean(data, tuple(range(data.dim() - 1)) if before_views else (-2,))
    return None if mean is None else Normalization(mean)


def normalization(node: Any, x: Tensor, waiting: Value | None = None) -> Normalization | None:
    """What is coded in place of x; None for x itself.

    For attention's keys and values: x less its mean over tokens, if that is large. For a norm's input: by the norm's
    statistics, if a mean is large or a block of codes would hold values of large and of small deviation; elsewhere than
    on a CPU always. waiting: what the node has saved of x.
    """
    name = operation(node)
    if is_attention(node):
        shown = any(waiting in (saved_by(node, attribute) or ()) for attribute in _ATTENTION)
        return mean_of_attention(node, x) if shown else None
    if name not in NORMS or isinstance(x, FakeTensor):
        return None
    statistics = _read(node, name)
    if statistics is None:
        return None
    mean, inverse = (each.float() for each in statistics)
    if x.device.type == "cpu" and not (mean.abs() * inverse > LARGEST).any():
        is_whole = _run(x, _shared(mean, name, x)) % BLOCK_SIZE == 0
        if is_whole or inverse.amax() <= LARGEST_SPREAD * inverse.amin():
            return None
    return Normalization(_broadcast(mean, name, x), _broadcast(inverse, name, x))


def _shared(mean: Tensor, name: str, x: Tensor) -> list[int]:
    """By dimension of a norm's input: the number of neighbours that have one mean and deviation."""
    if name == "NativeLayerNormBackward0":
        return [size // groups for size, groups in zip(x.shape, mean.shape, strict=True)]
    if name == "NativeGroupNormBackward0":
        return [1, x.numel() // mean.numel() // max(1, x.shape[2:].numel()), *x.shape[2:]]
    return [x.shape[0], 1, *x.shape[2:]]


def _run(x: Tensor, shared: Sequence[int]) -> int:
    """The length of the runs in x's memory that belong together, given the same by dimension."""
    length = 1
    for dim in sorted((dim for dim in range(x.dim()) if x.shape[dim] > 1), key=x.stride):
        length *= shared[dim]
        if shared[dim] < x.shape[dim]:
            break
    return length


def row(node: Any, name: str, x: Tensor) -> int | None:
    """The length in memory of the rows of x that an RMS norm scales, each by its own deviation; None for no norm.

    Such as the norms of queries and keys, whose rows are heads. Written in several operations, a norm is a square and a
    product with one factor for each row.
    """
    if name == "FusedRmsNormBackward0":
        dims = len(node._saved_normalized_shape)
    elif is_square(node, name) or _is_product_of_rows(node, name):
        dims = 1
    else:
        return None
    first = x.dim() - dims
    return None if first <= 0 else _run(x, [1] * first + list(x.shape[first:]))


def _is_product_of_rows(node: Any, name: str) -> bool:
    if name != "MulBackward0" or any(source is None for source, _ in node.next_functions):
        return False
    shapes = [torch.Size(source._input_metadata[nr].shape) for source, nr in node.next_functions if not is_leaf(source)]
    return len(shapes) == 2 and all(map(len, shapes)) and (shapes[0][-1] == 1) != (shapes[1][-1] == 1)


def block_size(node: Any, x: Tensor) -> int | None:
    """The block size for which no block of x's codes holds values of several rows of a norm; None if there is none."""
    length = row(node, operation(node), x)
    return BLOCK_SIZE if length is None else _block_size(x, length)


def _block_size(x: Tensor, length: int) -> int | None:
    size = math.gcd(length, BLOCK_SIZE)
    if size >= SMALLEST_BLOCK:
        return size
    if x.device.type != "cpu" or isinstance(x, FakeTensor):
        return None
    largest = x.abs().amax(-1).float()  # on a CPU, where asking is free, rows of about one size share a block
    return BLOCK_SIZE if largest.amax() <= LARGEST_SPREAD * largest.amin() else None


def _broadcast(each: Tensor, name: str, x: Tensor) -> Tensor:
    if name == "NativeLayerNormBackward0":
        return each
    rest = (1,) * (x.dim() - 2)
    if name == "NativeGroupNormBackward0":
        each = each.reshape(x.shape[0], -1)
        return each.repeat_interleave(x.shape[1] // each.shape[1], 1).view(*x.shape[:2], *rest)
    return each.view(1, -1, *rest)


TAILS = {
    **dict.fromkeys(("SiluBackward0", "MishBackward0", "SoftplusBackward0", "EluBackward0", "CeluBackward0"), -3.0),
    **dict.fromkeys(("GeluBackward0", "memkern.Glu", "memkern.Recompute"), -1.5),
    "GluBackward0": -3.0,
}
"""Below these the derivative of a function is nearly 0: that of its logarithm is 1, of GELU's -x."""


def in_tail(node: Any, x: Tensor) -> bool:
    """Whether all values are where a function's derivative is so small that codes of x are too coarse for it.

    The derivative is about e ** x there, so that codes' errors, .5 % of x, are relative ones of it. Where there are
    larger values, too, their derivatives are larger and hide it. On a CPU only.
    """
    name = operation(node)
    limit = TAILS.get(name)
    if limit is None or x.device.type != "cpu" or isinstance(x, FakeTensor) or not x.numel():
        return False
    if name == "GluBackward0":  # the sigmoid of the second half has two tails
        low, high = (each.item() for each in x.chunk(2, signed(node._saved_dim))[1].aminmax())
        return high < limit or low > -limit
    if name == "memkern.Glu" and x.shape != torch.Size(node._input_metadata[0].shape):
        x = x.chunk(2, -1)[0]  # gate and up
    return x.amax().item() < limit


BOUNDED_RESULTS = {f"{name}Backward0" for name in ("Softmax", "SafeSoftmax", "LogSoftmax", "Sigmoid", "Tanh")}


def bears_coarse(node: Any) -> bool:
    """Whether codes that lose small values beside a large one serve a node.

    They serve sums over many values, and functions of results between -1 and 1, whose absolute errors are small. Any
    other elementwise function would find 0 in place of the small values.
    """
    name = operation(node)
    return user(node, name).kind != "smooth" or name in BOUNDED_RESULTS


MASKED = ("HardtanhBackward0", "HardsigmoidBackward0")
"""They only ask whether a value is between two limits."""


def mask_of(node: Any, x: Tensor) -> Codec | None:
    """The code of one bit for a node that only asks whether a value is between two limits."""
    name = operation(node)
    if name not in MASKED:
        return None
    limits = -3.0, 3.0
    if name == "HardtanhBackward0":
        limits = float(node._saved_min_val), float(node._saved_max_val)
    return inside(*limits, x.dtype) if x.dtype in FLOATS else None


JUMPS = {"HardswishBackward0": (-3.0, 3.0)}
"""Where the derivative of a node's function jumps: a value whose code is on the other side is off by the jump.

ReLU, leaky ReLU and ELU jump at 0, which codes do not cross.
"""


@functools.cache
def _codes(coarse: bool, block_size: int) -> Need:
    return Need(exact=False, coarse=coarse, block_size=block_size)


def need_of(node: Any, x: Tensor, waiting: Value | None) -> tuple[Need, Normalization | None]:
    """What a node that may get codes of x needs for these data, and what is coded in place of x."""
    if stays_exact(node, waiting) or in_tail(node, x) or (size := block_size(node, x)) is None:
        return SAME_BITS, None
    return _codes(bears_coarse(node), size), normalization(node, x, waiting)
