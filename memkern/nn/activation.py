"""torch.nn's activations that save a few bits per element: :mod:`memkern.functional` as modules.

Each is a subclass of its namesake in torch.nn, with its arguments, and has no parameters and no buffers: state_dict
keys stay. ``bits``: 1 to 4 bits per element saved for the backward pass. Those without ``bits`` need one and are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .. import functional as F
from ..fewbit.fit import Derivative, fit_levels
from ..fewbit.levels import Levels, check_bits


class _ShowsBits(nn.Module):
    """A mixin before a class of torch.nn: adds the option ``bits``, and shows it in the repr."""

    def __init__(self, *args: Any, bits: int) -> None:
        super().__init__(*args)
        check_bits(bits)
        self.bits = bits

    def extra_repr(self) -> str:
        return _joined(super().extra_repr(), f"bits={self.bits}")


def _joined(*parts: str) -> str:
    return ", ".join(filter(None, parts))


class GELU(_ShowsBits, nn.GELU):
    """GELU; ``keep``, what is saved for backward: see :func:`memkern.functional.gelu`."""

    def __init__(self, approximate: str = "none", *, bits: int = 3, keep: str = "codes") -> None:
        super().__init__(approximate, bits=bits)
        F.check_keep(keep)
        self.keep = keep

    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(input, self.approximate, bits=self.bits, keep=self.keep)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, keep={self.keep!r}"


class SiLU(_ShowsBits, nn.SiLU):
    """SiLU; ``keep``, what is saved for backward: see :func:`memkern.functional.gelu`."""

    def __init__(self, inplace: bool = False, *, bits: int = 3, keep: str = "codes") -> None:
        super().__init__(inplace, bits=bits)
        F.check_keep(keep, inplace)
        self.keep = keep

    def forward(self, input: Tensor) -> Tensor:
        return F.silu(input, self.inplace, bits=self.bits, keep=self.keep)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, keep={self.keep!r}"


class Tanh(_ShowsBits, nn.Tanh):
    """Hyperbolic tangent."""

    def __init__(self, *, bits: int = 3) -> None:
        super().__init__(bits=bits)

    def forward(self, input: Tensor) -> Tensor:
        return F.tanh(input, bits=self.bits)


class Sigmoid(_ShowsBits, nn.Sigmoid):
    """``1 / (1 + exp(-x))``."""

    def __init__(self, *, bits: int = 3) -> None:
        super().__init__(bits=bits)

    def forward(self, input: Tensor) -> Tensor:
        return F.sigmoid(input, bits=self.bits)


class Softplus(_ShowsBits, nn.Softplus):
    """``log(1 + exp(beta x)) / beta``; ``beta`` positive."""

    def __init__(self, beta: float = 1.0, threshold: float = 20.0, *, bits: int = 3) -> None:
        super().__init__(beta, threshold, bits=bits)
        F.check_positive("beta", beta)

    def forward(self, input: Tensor) -> Tensor:
        return F.softplus(input, self.beta, self.threshold, bits=self.bits)


class Mish(_ShowsBits, nn.Mish):
    """``x tanh(softplus(x))``."""

    def __init__(self, inplace: bool = False, *, bits: int = 3) -> None:
        super().__init__(inplace, bits=bits)

    def forward(self, input: Tensor) -> Tensor:
        return F.mish(input, self.inplace, bits=self.bits)


class Hardswish(_ShowsBits, nn.Hardswish):
    """``x min(max(x + 3, 0), 6) / 6``."""

    def __init__(self, inplace: bool = False, *, bits: int = 3) -> None:
        super().__init__(inplace, bits=bits)

    def forward(self, input: Tensor) -> Tensor:
        return F.hardswish(input, self.inplace, bits=self.bits)

    def extra_repr(self) -> str:
        return _joined("inplace=True" if self.inplace else "", super().extra_repr())


class QuickGELU(_ShowsBits):
    """``x sigmoid(1.702 x)``, CLIP's."""

    def __init__(self, *, bits: int = 3) -> None:
        super().__init__(bits=bits)

    def forward(self, input: Tensor) -> Tensor:
        return F.quick_gelu(input, bits=self.bits)


class ELU(_ShowsBits, nn.ELU):
    """``x`` where positive, else ``alpha (exp(x) - 1)``."""

    def __init__(self, alpha: float = 1.0, inplace: bool = False, *, bits: int = 3) -> None:
        super().__init__(alpha, inplace, bits=bits)

    def forward(self, input: Tensor) -> Tensor:
        return F.elu(input, self.alpha, self.inplace, bits=self.bits)


class CELU(_ShowsBits, nn.CELU):
    """``x`` where positive, else ``alpha (exp(x / alpha) - 1)``; ``alpha`` positive."""

    def __init__(self, alpha: float = 1.0, inplace: bool = False, *, bits: int = 3) -> None:
        super().__init__(alpha, inplace, bits=bits)
        F.check_positive("alpha", alpha)

    def forward(self, input: Tensor) -> Tensor:
        return F.celu(input, self.alpha, self.inplace, bits=self.bits)


class SELU(_ShowsBits, nn.SELU):
    """1.0507 times ELU with an alpha of 1.6733."""

    def __init__(self, inplace: bool = False, *, bits: int = 3) -> None:
        super().__init__(inplace, bits=bits)

    def forward(self, input: Tensor) -> Tensor:
        return F.selu(input, self.inplace, bits=self.bits)


class LogSigmoid(_ShowsBits, nn.LogSigmoid):
    """``-log(1 + exp(-x))``."""

    def __init__(self, *, bits: int = 3) -> None:
        super().__init__(bits=bits)

    def forward(self, input: Tensor) -> Tensor:
        return F.logsigmoid(input, bits=self.bits)


class Softsign(_ShowsBits, nn.Softsign):
    """``x / (1 + |x|)``."""

    def __init__(self, *, bits: int = 3) -> None:
        super().__init__(bits=bits)

    def forward(self, input: Tensor) -> Tensor:
        return F.softsign(input, bits=self.bits)


class Tanhshrink(_ShowsBits, nn.Tanhshrink):
    """``x - tanh(x)``."""

    def __init__(self, *, bits: int = 3) -> None:
        super().__init__(bits=bits)

    def forward(self, input: Tensor) -> Tensor:
        return F.tanhshrink(input, bits=self.bits)


class ReLU(nn.ReLU):
    """``max(x, 0)``: one bit, exact."""

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(input, self.inplace)


class LeakyReLU(nn.LeakyReLU):
    """``x`` where positive, else ``negative_slope x``: one bit, exact."""

    def forward(self, input: Tensor) -> Tensor:
        return F.leaky_relu(input, self.negative_slope, self.inplace)


class Hardtanh(nn.Hardtanh):
    """``min(max(x, min_val), max_val)``: one bit, exact."""

    def forward(self, input: Tensor) -> Tensor:
        return F.hardtanh(input, self.min_val, self.max_val, self.inplace)


class Hardsigmoid(nn.Hardsigmoid):
    """``min(max(x + 3, 0), 6) / 6``: one bit, exact."""

    def forward(self, input: Tensor) -> Tensor:
        return F.hardsigmoid(input, self.inplace)


class Hardshrink(nn.Hardshrink):
    """``x`` where ``|x| > lambd``, else 0: one bit, exact."""

    def forward(self, input: Tensor) -> Tensor:
        return F.hardshrink(input, self.lambd)


class Softshrink(nn.Softshrink):
    """``x`` less ``lambd`` of its magnitude, and 0 where it has no more: one bit, exact. ``lambd`` 0 or more."""

    def __init__(self, lambd: float = 0.5) -> None:
        super().__init__(lambd)
        F.check_lambd(lambd)

    def forward(self, input: Tensor) -> Tensor:
        return F.softshrink(input, self.lambd)


class Threshold(nn.Threshold):
    """``x`` where ``x > threshold``, else ``value``: one bit, exact."""

    def forward(self, input: Tensor) -> Tensor:
        return F.threshold(input, self.threshold, self.value, self.inplace)


class FewBit(nn.Module):
    """An elementwise function, its derivative saved as codes of ``levels``. :func:`few_bit` makes one."""

    def __init__(self, fn: Callable[[Tensor], Tensor], levels: Levels) -> None:
        super().__init__()
        self.fn, self.levels = fn, levels

    def forward(self, input: Tensor) -> Tensor:
        return F.few_bit(input, self.fn, self.levels)

    def extra_repr(self) -> str:
        return f"{getattr(self.fn, '__name__', self.fn)}, bits={self.levels.bits}"


def few_bit(fn: Callable[[Tensor], Tensor], derivative: Derivative, bits: int = 3, **options: Any) -> FewBit:
    """A module that computes any elementwise ``fn`` and saves ``bits`` bits of its derivative per element.

    fn: takes a tensor, of any dtype that it supports, and does not change it; what else it reads, such as a parameter,
    gets no gradient. derivative: takes a fp64 tensor; called here only, to fit the levels. options: those of
    :func:`memkern.nn.fit_levels`.
    """
    return FewBit(fn, fit_levels(derivative, bits, **options).levels)
