"""Activations that save a few bits per element for the backward pass. Modules: :mod:`memkern.nn`.

Forward is torch's own operation (fused kernels on a GPU: docs/numerics.md says how near). For the backward pass each
function saves the code of the nearest of ``2^bits`` levels of its derivative, as bit planes: ``bits / 8`` bytes per
element and less than 64 bytes more, where torch saves the input. Gradient: ``grad * level``, a fp32 product rounded
once. The levels and their errors: :mod:`memkern.fewbit.tables`, from :func:`memkern.nn.fit_levels`.

fp32, bf16 and fp16, any shape and strides. A fp64 input that needs a gradient raises TypeError. Nothing is saved under
``no_grad`` or ``inference_mode``, or where the input needs no gradient. torch.func.grad and vmap go through them.
Double backward, forward-mode AD and ONNX export raise, and name the way out. A NaN input gives NaN in the output; its
gradient is multiplied by one of the levels.

torch saves the output of tanh, sigmoid, ReLU, leaky ReLU in place and hardtanh in place, or their input. Often the
layer that follows saves the same tensor; then memory does not shrink, and the codes come on top.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .fewbit.activations import Activation, in_dtype
from .fewbit.levels import Levels
from .functions.activation import FewBit, activate, check_dtype
from .functions.autograd import apply, constant, needs_gradient
from .functions.cross_entropy import linear_cross_entropy
from .functions.glu import GELU, GELU_TANH, SILU, glu
from .functions.randomized_linear import randomized_linear

__all__ = [
    "celu",
    "elu",
    "few_bit",
    "geglu",
    "gelu",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "linear_cross_entropy",
    "logsigmoid",
    "mish",
    "quick_gelu",
    "randomized_linear",
    "relu",
    "selu",
    "sigmoid",
    "silu",
    "softplus",
    "softshrink",
    "softsign",
    "swiglu",
    "tanh",
    "tanhshrink",
    "threshold",
]


# torch.fx records a call of these as one node, without tracing the body, which depends on values.
for _name in ("activate", "few_bit", "glu", "linear_cross_entropy"):
    torch.fx.wrap(_name)


def few_bit(x: Tensor, fn: Callable[[Tensor], Tensor], levels: Levels) -> Tensor:
    """``fn(x)`` of any elementwise ``fn``, its derivative saved as codes; :func:`memkern.nn.few_bit` makes a module."""
    if not needs_gradient(x):
        return fn(x)
    check_dtype(x)
    return apply(FewBit, x, Activation("", levels, function=fn), None)


def gelu(x: Tensor, approximate: str = "none", *, bits: int = 3, keep: str = "codes") -> Tensor:
    """GELU: ``x Phi(x)``, or its tanh form with ``approximate="tanh"``.

    bits: 1 to 4 bits per element, used with ``keep="codes"``.
    keep: what is saved for backward. ``"codes"``: ``bits`` bits per element. ``"output"``: the output, which the layer
        that follows often saves anyway, and one bit per element; the derivative computed from them is off by about
        6e-5 rms in fp32 and 2e-3 in bf16 (x ~ N(0, 1)), and an in-place change of the output raises in the backward
        pass.
    """
    _check_approximate(approximate)
    check_keep(keep)
    return activate(x, "gelu" if approximate == "none" else "gelu_tanh", bits, keep)


def _check_approximate(approximate: str) -> None:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate must be 'none' or 'tanh', got {approximate!r}")


def silu(x: Tensor, inplace: bool = False, *, bits: int = 3, keep: str = "codes") -> Tensor:
    """SiLU: ``x sigmoid(x)``. ``keep`` as in :func:`gelu`; ``"output"`` not in place."""
    check_keep(keep, inplace)
    return activate(x, "silu", bits, keep, inplace)


def check_keep(keep: str, inplace: bool = False) -> None:
    """Raises ValueError unless ``keep`` is one of the tensors that an activation can save."""
    if keep == "input":
        raise ValueError(
            "keep='input' is what torch's own activation does, so it takes as much memory; use torch.nn.functional"
        )
    if keep not in ("codes", "output"):
        raise ValueError(f"keep must be 'codes' or 'output', got {keep!r}")
    if keep == "output" and inplace:
        raise ValueError("keep must be 'codes' where inplace=True, got 'output'")


def tanh(x: Tensor, *, bits: int = 3) -> Tensor:
    """Hyperbolic tangent."""
    return activate(x, "tanh", bits)


def sigmoid(x: Tensor, *, bits: int = 3) -> Tensor:
    """``1 / (1 + exp(-x))``."""
    return activate(x, "sigmoid", bits)


def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0, *, bits: int = 3) -> Tensor:
    """``log(1 + exp(beta x)) / beta``, and x where ``beta x > threshold``."""
    check_positive("beta", beta)
    return activate(x, "softplus", bits, parameters=(constant(beta), constant(threshold)))


def check_positive(name: str, value: float) -> None:
    """Raises ValueError unless an argument (softplus' ``beta``, CELU's ``alpha``) is positive."""
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value!r}")


def mish(x: Tensor, inplace: bool = False, *, bits: int = 3) -> Tensor:
    """``x tanh(softplus(x))``."""
    return activate(x, "mish", bits, inplace=inplace)


def hardswish(x: Tensor, inplace: bool = False, *, bits: int = 3) -> Tensor:
    """``x min(max(x + 3, 0), 6) / 6``."""
    return activate(x, "hardswish", bits, inplace=inplace)


def quick_gelu(x: Tensor, *, bits: int = 3) -> Tensor:
    """``x sigmoid(1.702 x)``, CLIP's."""
    return activate(x, "quick_gelu", bits)


def elu(x: Tensor, alpha: float = 1.0, inplace: bool = False, *, bits: int = 3) -> Tensor:
    """``x`` where positive, else ``alpha (exp(x) - 1)``; the derivative of positive x is exact."""
    return activate(x, "elu", bits, inplace=inplace, parameters=(constant(alpha), 0.0))


def celu(x: Tensor, alpha: float = 1.0, inplace: bool = False, *, bits: int = 3) -> Tensor:
    """``x`` where positive, else ``alpha (exp(x / alpha) - 1)``; the derivative of positive x is exact.

    Raises:
        ValueError: ``alpha`` is not positive.
    """
    check_positive("alpha", alpha)
    return activate(x, "celu", bits, inplace=inplace, parameters=(constant(alpha), 0.0))


def selu(x: Tensor, inplace: bool = False, *, bits: int = 3) -> Tensor:
    """1.0507 times ELU with an alpha of 1.6733 (Klambauer et al., arXiv 1706.02515); exact as :func:`elu`."""
    return activate(x, "selu", bits, inplace=inplace)


def logsigmoid(x: Tensor, *, bits: int = 3) -> Tensor:
    """``-log(1 + exp(-x))``."""
    return activate(x, "logsigmoid", bits)


def softsign(x: Tensor, *, bits: int = 3) -> Tensor:
    """``x / (1 + |x|)``."""
    return activate(x, "softsign", bits)


def tanhshrink(x: Tensor, *, bits: int = 3) -> Tensor:
    """``x - tanh(x)``."""
    return activate(x, "tanhshrink", bits)


def relu(x: Tensor, inplace: bool = False) -> Tensor:
    """``max(x, 0)``; its derivative is exact in one bit."""
    return activate(x, "relu", inplace=inplace)


def leaky_relu(x: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    """``x`` where positive, else ``negative_slope x``; its derivative is exact in one bit."""
    return activate(x, "leaky_relu", inplace=inplace, parameters=(constant(negative_slope), 0.0))


def hardtanh(x: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    """``min(max(x, min_val), max_val)``; its derivative is exact in one bit."""
    if not min_val < max_val:
        raise ValueError(f"max_val must be larger than min_val, got {max_val!r} and {min_val!r}")
    return activate(x, "hardtanh", inplace=inplace, parameters=(constant(min_val), constant(max_val)))


def hardsigmoid(x: Tensor, inplace: bool = False) -> Tensor:
    """``min(max(x + 3, 0), 6) / 6``; its derivative is exact in one bit."""
    return activate(x, "hardsigmoid", inplace=inplace)


def hardshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    """``x`` where ``|x| > lambd``, else 0; its derivative is exact in one bit."""
    return activate(x, "hardshrink", parameters=_lambd(x, lambd))


def softshrink(x: Tensor, lambd: float = 0.5) -> Tensor:
    """``x - lambd`` where ``x > lambd``, ``x + lambd`` where ``x < -lambd``, else 0; its derivative is exact in a bit.

    Raises:
        ValueError: ``lambd`` is negative.
    """
    check_lambd(lambd)
    return activate(x, "softshrink", parameters=_lambd(x, lambd))


def check_lambd(lambd: float) -> None:
    """Raises ValueError unless softshrink's ``lambd`` is 0 or more."""
    if not lambd >= 0:
        raise ValueError(f"lambd must be 0 or more, got {lambd!r}")


def _lambd(x: Tensor, lambd: float) -> tuple[float, float]:
    """``lambd``, and ``lambd`` in x's dtype, with which torch's backward pass of both functions compares x."""
    lambd = constant(lambd)
    return lambd, in_dtype(lambd, x.dtype)


def threshold(x: Tensor, threshold: float, value: float, inplace: bool = False) -> Tensor:
    """``x`` where ``x > threshold``, else ``value``; its derivative is exact in one bit."""
    return activate(x, "threshold", inplace=inplace, parameters=(constant(threshold), constant(value)))


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """``silu(gate) * up``, exact: what is saved is gate and up, once; the rest is computed anew for the backward pass.

    gate, up: of one shape and dtype; or gate alone, which holds gate and up along its last dimension as
        ``gate_up.chunk(2, -1)`` would cut it (Phi-3's and Mixtral's layout).

    Bytes saved per element of the output: 8 in fp32, where torch's two operations save 12 (gate, up and silu(gate)).
    Forward and gradients have the bits of torch's operations. Any number of derivatives. Source: Shazeer, "GLU Variants
    Improve Transformer" (arXiv 2002.05202).

    Raises:
        ValueError: gate and up differ in shape, or gate alone has an odd last dimension.
        TypeError: gate and up differ in dtype.
    """
    return glu(gate, up, SILU)


def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "none") -> Tensor:
    """``gelu(gate) * up``; everything else as in :func:`swiglu`. ``approximate``: ``"none"`` or ``"tanh"``."""
    _check_approximate(approximate)
    return glu(gate, up, GELU if approximate == "none" else GELU_TANH)
