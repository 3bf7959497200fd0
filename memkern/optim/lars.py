"""LARS with a 32-bit or block-wise 8-bit momentum."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..schemas import LARS_STEP
from .checks import check_momentum, number
from .layerwise import LayerwiseOptimizer
from .shared_options import DEFAULTS_8BIT, SharedOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LARS(LayerwiseOptimizer):
    r"""LARS for large batches, with a 32-bit or block-wise 8-bit momentum; options have timm's names.

    There are two forms. Both compute in fp32, and norms as sums in fp64 (docs/numerics.md). The first, by default, is
    that of the LAMB paper: a step of the momentum's direction. With gradient ``g``::

        m = momentum * m + (1 - momentum) * (g + weight_decay * p)
        p = p - lr * |p| / |m| * m                   (trust_clip: min(1, |p| / |m|))

    The classic form, with a ``trust_coeff``, is that of the LARS paper and of timm.optim.Lars: SGD with momentum, whose
    gradients are scaled. Published ResNet recipes are for this one::

        ratio = trust_coeff * |p| / (|g| + weight_decay * |p| + eps)     (trust_clip: min(1, ratio / lr))
        d = ratio * (g + weight_decay * p)
        m = momentum * m + (1 - dampening) * d       (first step: m = d)
        p = p - lr * m                               (nesterov: p = p - lr * (d + momentum * m))

    The trust ratio, ``|p| / |m|`` or ``ratio``, is one number per tensor, or per layer of it (``layers``). It is 1
    where ``|p|`` is 0 or NaN, or ``|m|`` is (in the classic form ``|g|``). It is also 1 where ``weight_decay`` is 0,
    unless ``always_adapt``: so for biases and weights of normalization layers in a group without decay. With
    ``trust_bounds`` the ratio has ``phi(|p|) = min(max(|p|, low), high)`` in place of ``|p|``.

    Args:
        params: tensors, named tensors or groups, as for :class:`memkern.optim.Adam`.
        lr: learning rate, a float or a 0-dim tensor. Without ``trust_coeff`` a step moves a layer by ``lr * |p|``,
            unless its trust ratio is 1. Default 1e-3.
        momentum: decay of the momentum, from 0 to below 1. Default 0.9.
        dampening: classic form only. Default 0.
        weight_decay: default 1e-4.
        nesterov: classic form only, with momentum and without dampening. Default False.
        trust_coeff: None for the first form, or the classic form's coefficient, above 0 (1e-3 in most recipes).
            Default None.
        eps: added to the classic form's denominator. Default 1e-8.
        trust_clip: see the formulas. Default False.
        always_adapt: trust ratios for parameters without decay too. Default False.
        foreach, fused: accepted and ignored; every step is one fused call for all tensors.
        differentiable: not supported, must be False.
        layers: as for :class:`memkern.optim.LAMB`. Default 1.
        trust_bounds: (low, high) of phi, as for :class:`memkern.optim.LAMB`. Default None.
        maximize: ascend instead of descend. Default False.
        capturable, state_bits, block_size, codec, min_8bit_size, max_grad_norm, master_weights, stochastic_rounding:
            as for :class:`memkern.optim.Adam`.

    The state is ``step``, ``exp_avg`` (m), in 8 bits with ``exp_avg_scale``, and ``trust_ratio``, float32 of shape
    (layers,). With an 8-bit state a step reads and writes 23.09 bytes per fp32 parameter (bf16: 13.09) in the first
    form, and 22.06 (12.06) in the classic form. Of its two passes the first reads for the norms, the second updates.

    Differs from timm.optim.Lars: ``trust_coeff`` is None by default (timm: 1e-3), lr 1e-3 (1.0), momentum 0.9 (0)
    and weight_decay 1e-4 (0, which turns the trust ratio off).

    Raises:
        ValueError: an option out of range or not supported, a parameter whose elements overlap in memory or do
            not divide into ``layers``.
        TypeError: a parameter of another dtype.

    Sources: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (arXiv 1904.00962),
    algorithm 1, and section 3 for phi; classic: You, Gitman and Ginsburg, "Large Batch Training of Convolutional
    Networks" (arXiv 1708.03888), with the options of timm.optim.Lars.
    """

    op = LARS_STEP

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0.0,
        weight_decay: float = 1e-4,
        nesterov: bool = False,
        trust_coeff: float | None = None,
        eps: float = 1e-8,
        trust_clip: bool = False,
        always_adapt: bool = False,
        foreach: bool | None = None,
        *,
        layers: int | str = 1,
        trust_bounds: tuple[float, float] | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[SharedOptions],
    ) -> None:
        super().__init__(params, locals(), options)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_momentum(group)
        coeff = group["trust_coeff"]
        if coeff is not None and not 0 < number("trust_coeff", coeff) < math.inf:
            raise ValueError(f"trust_coeff must be None or above 0 and finite, got {coeff!r}")
        if coeff is None and (group["dampening"] or group["nesterov"]):
            raise ValueError(
                "dampening and nesterov are of LARS's classic form: they need a trust_coeff (1e-3 in most recipes)"
            )

    def _hyperparameter(self, group: dict[str, Any], name: str) -> float:
        if name == "trust_coeff":
            return group[name] or 0.0  # 0: the op takes the first form, which has none
        return super()._hyperparameter(group, name)


class LARS8bit(LARS):
    """LARS with a block-wise 8-bit momentum: :class:`LARS`, where state_bits is 8 unless it is given.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, trust_coeff, eps, trust_clip, always_adapt, layers,
            trust_bounds, maximize, foreach, fused, differentiable, capturable: as for :class:`LARS`.
        state_bits: default 8; 32 for moments in fp32.
        block_size, codec, min_8bit_size, max_grad_norm, master_weights, stochastic_rounding: as for
            :class:`memkern.optim.Adam`.

    Takes 1 + 4 / block_size bytes per parameter; formulas, state, errors and sources: :class:`LARS`.
    """

    option_defaults = DEFAULTS_8BIT
