"""Lion with a 32-bit or block-wise 8-bit state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..schemas import LION_STEP
from .base import BlockwiseOptimizer
from .shared_options import DEFAULTS_8BIT, SharedOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Lion(BlockwiseOptimizer):
    r"""Lion with a 32-bit or block-wise 8-bit state, and decoupled weight decay.

    With gradient ``g``, all in fp32::

        u = sign(beta1 * m + (1 - beta1) * g)
        p = p * (1 - lr * weight_decay) - lr * u
        m = beta2 * m + (1 - beta2) * g

    Args:
        params: tensors, named tensors or groups, as for :class:`memkern.optim.Adam`.
        lr: learning rate, a float or a 0-dim tensor; a third to a tenth of AdamW's. Default 1e-4.
        betas: of the update and of the moment. Default (0.9, 0.99).
        weight_decay: three to ten times AdamW's. Default 0.
        maximize: ascend instead of descend. Default False.
        foreach, fused: accepted and ignored; every step is one fused call for all tensors.
        capturable: for CUDA graphs: lr becomes a tensor on the parameters' device, which schedulers fill in place, so
            that a replay sees their changes. Everything else of a step is on the device already. Default False.
        differentiable: not supported, must be False.
        state_bits, block_size, codec, min_8bit_size, max_grad_norm, master_weights, stochastic_rounding: as for
            :class:`memkern.optim.Adam`.

    The state is ``exp_avg``, in 8 bits with ``exp_avg_scale``: 1 + 4 / block_size bytes per parameter; and ``step``,
    which the rounding of 8-bit codes depends on. A state saved before there was one loads with 0. A step reads and
    writes 14.06 bytes per fp32 parameter (8.06 in bf16).

    Raises:
        ValueError: an option out of range or not supported, a parameter whose elements overlap in memory.
        TypeError: a parameter of another dtype.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (arXiv 2302.06675).
    """

    op = LION_STEP
    converters = ("from_bitsandbytes_state_dict",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[SharedOptions],
    ) -> None:
        super().__init__(params, locals(), options)


class Lion8bit(Lion):
    """Lion with a block-wise 8-bit state: :class:`Lion`, where state_bits is 8 unless it is given.

    Args:
        params, lr, betas, weight_decay, maximize, foreach, fused, differentiable, capturable: as for :class:`Lion`.
        state_bits: default 8; 32 for moments in fp32.
        block_size, codec, min_8bit_size, max_grad_norm, master_weights, stochastic_rounding: as for
            :class:`memkern.optim.Adam`.

    Takes 1 + 4 / block_size bytes per parameter; formula, state, errors and source: :class:`Lion`.
    """

    option_defaults = DEFAULTS_8BIT
