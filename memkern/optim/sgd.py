"""SGD with a 32-bit or block-wise 8-bit momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..schemas import SGD_STEP
from .base import BlockwiseOptimizer
from .checks import check_momentum
from .shared_options import DEFAULTS_8BIT, SharedOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SGD(BlockwiseOptimizer):
    r"""SGD with momentum, whose buffer has 32 bits or block-wise 8 bits; options under torch.optim's names.

    With gradient ``g``, all in fp32::

        d = g + weight_decay * p
        m = momentum * m + (1 - dampening) * d       (first step: m = d)
        p = p - lr * m                               (nesterov: p = p - lr * (d + momentum * m))

    Args:
        params: tensors, named tensors or groups, as for :class:`memkern.optim.Adam`.
        lr: learning rate, a float or a 0-dim tensor. Default 1e-3.
        momentum: decay of the momentum, from 0 to below 1. Default 0, as in torch.optim.SGD.
        dampening: see the formula. Default 0.
        weight_decay: default 0.
        nesterov: with momentum and without dampening. Default False.
        maximize: ascend instead of descend. Default False.
        foreach, fused: accepted and ignored; every step is one fused call for all tensors.
        differentiable: not supported, must be False.
        capturable, state_bits, block_size, codec, min_8bit_size, max_grad_norm, master_weights, stochastic_rounding:
            as for :class:`memkern.optim.Adam`.

    The state is ``momentum_buffer`` (m), in 8 bits with ``momentum_buffer_scale``: 1 + 4 / block_size bytes per
    parameter; and ``step``. A step with an 8-bit state reads and writes 14.06 bytes per fp32 parameter (8.06 in bf16).

    Differs from torch.optim.SGD: without momentum torch's has no state at all, and here ``momentum_buffer`` has the
    last gradient.

    Raises:
        ValueError: an option out of range or not supported, a parameter whose elements overlap in memory.
        TypeError: a parameter of another dtype.

    Sources: torch.optim.SGD; Sutskever et al., "On the importance of initialization and momentum in deep learning"
    (ICML 2013).
    """

    op = SGD_STEP

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[SharedOptions],
    ) -> None:
        super().__init__(params, locals(), options)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_momentum(group)
        if group["dampening"] and not group["momentum"]:
            raise ValueError(f"dampening needs a momentum above 0, got dampening {group['dampening']}, momentum 0")


class SGD8bit(SGD):
    """SGD with a block-wise 8-bit momentum: :class:`SGD`, where state_bits is 8 unless it is given.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize, foreach, fused, differentiable, capturable:
            as for :class:`SGD`.
        state_bits: default 8; 32 for momentum in fp32.
        block_size, codec, min_8bit_size, max_grad_norm, master_weights, stochastic_rounding: as for
            :class:`memkern.optim.Adam`.

    Takes 1 + 4 / block_size bytes per parameter; formula, state, errors and sources: :class:`SGD`.
    """

    option_defaults = DEFAULTS_8BIT
