"""Adam and AdamW with 32-bit or block-wise 8-bit states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..schemas import ADAM_STEP, AMSGRAD_STEP, StepOp
from .base import BlockwiseOptimizer
from .format import Format
from .shared_options import DEFAULTS_8BIT, SharedOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Adam(BlockwiseOptimizer):
    r"""Adam with 32-bit or block-wise 8-bit states, and coupled (L2) weight decay.

    With gradient ``g``, at step ``t``, all in fp32::

        g = g + weight_decay * p                     (decoupled_weight_decay: p = p * (1 - lr * weight_decay) instead)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        p = p - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

    Args:
        params: tensors, named tensors or groups; float32, bfloat16 or float16. float64 too, with 32-bit states: its
            moments and its update are float64, on the plain PyTorch reference of every backend, which is slow and waits
            for the device. Parameters with gaps between their elements are stepped in a buffer that they share.
        lr: learning rate, a float or a 0-dim tensor. Default 1e-3.
        betas: decay of the two moments. Default (0.9, 0.999).
        eps: added to the root. Default 1e-8.
        weight_decay: default 0.
        amsgrad: divide by the largest v so far, kept as ``max_exp_avg_sq``. Needs 32-bit states; runs on the plain
            PyTorch reference, as float64 does. Default False.
        differentiable: not supported, must be False.
        maximize: ascend instead of descend. Default False.
        foreach, fused: accepted and ignored; every step is one fused call for all tensors.
        capturable: for CUDA graphs: lr becomes a tensor on the parameters' device, which schedulers fill in place, so
            that a replay sees their changes. Everything else of a step is on the device already. Default False.
        decoupled_weight_decay: as in torch.optim.Adam. Default False.
        state_bits: 32, or 8 for moments as codes. Default 32.
        block_size: elements that share one fp32 scale, a multiple of 8 from 8 to 4096. Default 128.
        codec: ``"power"`` or ``"dynamic"`` (see :mod:`memkern.quant.codec`). Default ``"power"``.
        min_8bit_size: tensors with fewer elements, and 1-D tensors with fewer than 16 times as many, keep 32-bit
            states. Default 4096.
        max_grad_norm: clips all gradients together to this norm inside the step, by the formula of
            torch.nn.utils.clip_grad_norm_, after unscaling; ``p.grad`` is not written. Default None.
        master_weights: what is kept of bf16 parameters, which lose each update below half a unit in the last place:
            ``"bf16+16"`` the rounding error in 16 bits (``weight_error``, int16): fp32's bits in 4 bytes in all;
            ``"bf16+8"`` the error in 8 bits (int8): weights of 24 bits, stochastically rounded. A step adds the error
            to the parameter's current value, also where that was loaded or edited. Default None.
        stochastic_rounding: rounds bf16 parameters up or down, to the nearer value more often, and keeps no error. The
            random bits come from the position in a block and the step, so runs repeat. Default False.

    Every number may be a NumPy number or a 0-dim tensor. ``lr``, ``betas``, ``eps``, ``weight_decay``, ``momentum``,
    ``dampening`` and ``trust_coeff`` stay tensors, read at each step: lr's on any device, the others' on the CPU.

    ``state_bits``, ``block_size``, ``codec``, ``master_weights``, ``stochastic_rounding``, ``min_8bit_size`` and
    ``capturable`` can differ between groups. The first four may change between steps: the next one converts the group's
    states, as it does after ``model.to(memory_format=torch.channels_last)``.

    The state is ``step`` (fp32), ``exp_avg`` and ``exp_avg_sq``, in 8 bits with ``exp_avg_scale`` and
    ``exp_avg_sq_scale``; ``exp_avg_sq`` holds codes of sqrt(v) (``power``) or v (``dynamic``). 8-bit states take
    2 + 8 / block_size bytes per parameter, and a step reads and writes 16.13 bytes per fp32 parameter (10.13 in bf16;
    12.13 with bf16+8, 14.13 with bf16+16). With ``master_weights`` the state has ``weight_error``, too.

    Differs from torch.optim: states are fp32 (or 8 bits) whatever the parameter's dtype, and a GradScaler's step does
    not write gradients.

    Raises:
        ValueError: an option out of range or not supported, a parameter whose elements overlap in memory.
        TypeError: a parameter of another dtype.

    Sources: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (arXiv 1412.6980); Dettmers et al., "8-bit
    Optimizers via Block-wise Quantization" (arXiv 2110.02861).
    """

    op = ADAM_STEP
    storage_options = (*BlockwiseOptimizer.storage_options, "amsgrad")
    converters = ("from_torch_state_dict", "from_bitsandbytes_state_dict")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **options: Unpack[SharedOptions],
    ) -> None:
        super().__init__(params, locals(), options)

    def _op_of(self, group: dict[str, Any]) -> StepOp:
        return AMSGRAD_STEP if group["amsgrad"] else ADAM_STEP

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if group["amsgrad"] and Format.of(group).has_codes:
            raise ValueError(f"amsgrad needs 32-bit states: state_bits must be 32, got {group['state_bits']}")


class AdamW(Adam):
    r"""AdamW with 32-bit or block-wise 8-bit states: :class:`Adam` with decoupled weight decay.

    ::

        p = p * (1 - lr * weight_decay)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        p = p - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as in torch.optim.AdamW.
        foreach, fused: accepted and ignored. differentiable: must be False. capturable: for CUDA graphs.
        state_bits, block_size, codec, min_8bit_size, max_grad_norm, master_weights, stochastic_rounding: how moments
            and bf16 weights are stored, and clipping inside the step; see :class:`Adam`.

    State and errors as for :class:`Adam`.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101).
    """

    fixed_options = {"decoupled_weight_decay": True}  # noqa: RUF012

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[SharedOptions],
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            **options,
        )


class Adam8bit(Adam):
    """Adam with block-wise 8-bit states: :class:`Adam`, where state_bits is 8 unless it is given.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, foreach, fused, differentiable, capturable,
            decoupled_weight_decay: as for :class:`Adam`.
        state_bits: default 8; 32 for moments in fp32.
        block_size, codec, min_8bit_size, max_grad_norm, master_weights, stochastic_rounding: as for :class:`Adam`.

    Takes 2 + 8 / block_size bytes per parameter; formula, state, errors and sources: :class:`Adam`.
    """

    option_defaults = DEFAULTS_8BIT


class AdamW8bit(AdamW):
    """AdamW with block-wise 8-bit states: :class:`AdamW`, where state_bits is 8 unless it is given.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as in torch.optim.AdamW.
        foreach, fused: accepted and ignored. differentiable: must be False. capturable: for CUDA graphs.
        state_bits: default 8; 32 for moments in fp32.
        block_size, codec, min_8bit_size: how moments are stored, see :class:`Adam`; tensors with fewer than
            ``min_8bit_size`` elements (1-D ones: 16 times as many) keep fp32.
        max_grad_norm: clips all gradients together to this norm inside the step. Default None.
        master_weights, stochastic_rounding: for bf16 parameters, see :class:`Adam`. Default None, False.

    Takes 2 + 8 / block_size bytes per parameter; formula and source: :class:`AdamW`; state and errors: :class:`Adam`.
    """

    option_defaults = DEFAULTS_8BIT
