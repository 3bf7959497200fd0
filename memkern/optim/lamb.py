"""LAMB with 32-bit or block-wise 8-bit states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..schemas import LAMB_STEP
from .layerwise import LayerwiseOptimizer
from .shared_options import DEFAULTS_8BIT, StorageOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LAMB(LayerwiseOptimizer):
    r"""LAMB for large batches, with 32-bit or block-wise 8-bit states; options under timm's names.

    With gradient ``g``, at step ``t``, all in fp32 but the norms, which are sums in fp64 (docs/numerics.md)::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        r = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
        u = r + weight_decay * p                     (decoupled_decay: u = r and first p = p * (1 - lr * weight_decay))
        p = p - lr * |p| / |u| * u                   (trust_clip: min(1, |p| / |u|))

    The trust ratio ``|p| / |u|`` is one number per tensor, or per layer of it (``layers``). It is 1 where a norm is
    0 or NaN, and where ``weight_decay`` is 0 unless ``always_adapt``: so for biases and norms in a group without decay.
    With ``trust_bounds`` it is ``phi(|p|) / |u|``, where ``phi(z) = min(max(z, low), high)``.

    Args:
        params: tensors, named tensors or groups, as for :class:`memkern.optim.Adam`.
        lr: learning rate, a float or a 0-dim tensor; the share of a layer's norm that a step moves. Default 1e-3.
        bias_correction: divide by ``1 - beta^t``; without, by 1. Default True.
        betas: decay of the two moments. Default (0.9, 0.999).
        eps: added to the root. Default 1e-6.
        weight_decay: default 0.01.
        grad_averaging, caution, corrected_weight_decay: timm's; only True, False and False are supported.
        trust_clip: no trust ratio above 1. Default False.
        always_adapt: trust ratios for parameters without decay too. Default False.
        decoupled_decay: shrink the parameter before its norm is taken, in place of decay in the update. Default False.
        layers: for tensors of two or more dimensions that are many layers: their number, each an equal run of rows
            along the outermost dimension in memory (3 for the ``(3 * width, width)`` weight of a fused q, k and v), or
            ``"rows"`` for a ratio per row. Layers are whole blocks, so rows shorter than one may not divide. Default 1.
        trust_bounds: (low, high) of phi, 0 <= low < high, or None for phi(z) = z, the paper's other choice.
            high may be ``math.inf``. With a low above 0 a layer of zeros has a ratio, too. Default None.
        maximize: ascend instead of descend. Default False.
        foreach, fused: accepted and ignored; every step is one fused call for all tensors.
        differentiable: not supported, must be False.
        capturable, state_bits, block_size, codec, min_8bit_size, max_grad_norm, master_weights, stochastic_rounding:
            as for :class:`memkern.optim.Adam`.

    The state is that of Adam, and ``trust_ratio``, float32 of shape (layers,). A step with 8-bit states reads and
    writes 26.19 bytes per fp32 parameter (16.19 in bf16): one pass reads everything for the norms, one updates.

    Differs from timm.optim.Lamb: ``max_grad_norm`` is None by default (timm: 1.0), ``step`` is each tensor's own.

    Raises:
        ValueError: an option out of range or not supported, a parameter whose elements overlap in memory or do
            not divide into ``layers``.
        TypeError: a parameter of another dtype.

    Sources: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (arXiv 1904.00962),
    algorithm 2, and section 3 for phi; the options are those of timm.optim.Lamb.
    """

    op = LAMB_STEP

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        grad_averaging: bool = True,
        max_grad_norm: float | None = None,
        trust_clip: bool = False,
        always_adapt: bool = False,
        caution: bool = False,
        decoupled_decay: bool = False,
        corrected_weight_decay: bool = False,
        foreach: bool | None = None,
        *,
        layers: int | str = 1,
        trust_bounds: tuple[float, float] | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[StorageOptions],
    ) -> None:
        super().__init__(params, locals(), {**options, "max_grad_norm": max_grad_norm})


class LAMB8bit(LAMB):
    """LAMB with block-wise 8-bit states: :class:`LAMB`, where state_bits is 8 unless it is given.

    Args:
        params, lr, bias_correction, betas, eps, weight_decay, grad_averaging, trust_clip, always_adapt, caution,
            decoupled_decay, corrected_weight_decay, layers, trust_bounds, maximize, foreach, fused, differentiable,
            capturable: as for :class:`LAMB`.
        state_bits: default 8; 32 for moments in fp32.
        block_size, codec, min_8bit_size, max_grad_norm, master_weights, stochastic_rounding: as for
            :class:`memkern.optim.Adam`.

    Takes 2 + 8 / block_size bytes per parameter; formula, state, errors and source: :class:`LAMB`.
    """

    option_defaults = DEFAULTS_8BIT
