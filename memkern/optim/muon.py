"""Muon for matrices and AdamW for everything else, in one optimizer, with 32-bit or 8-bit states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..reference.muon import ADJUST_LR_FNS, NS_COEFFICIENTS, check_newton_schulz
from ..schemas import ADAM_STEP, MUON_STEP, StepOp
from .base import BlockwiseOptimizer
from .checks import check_momentum
from .dtensor.shards import check_whole
from .muon_step import check_split
from .shared_options import DEFAULTS_8BIT, SharedOptions

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from .plan import Values

ALGORITHMS = ("muon", "adamw")  # the values of a group's ``algorithm``
_DEFAULT_EPS = {"muon": 1e-7, "adamw": 1e-8}


class Muon(BlockwiseOptimizer):
    r"""Muon, whose momentum has 32 bits or block-wise 8 bits; AdamW for the groups that ask for it.

    A group with ``algorithm="muon"`` has matrices, or tensors of three dimensions and more, which are batches of
    matrices. With gradient ``g`` of a matrix of A rows and B columns, and ``lerp(a, b, w) = a + w * (b - a)``::

        m = lerp(m, g, 1 - momentum)
        u = lerp(g, m, momentum)                        (nesterov; else u = m), in bf16
        x = u / max(|u|, eps)                           (transposed if A > B)
        repeat ns_steps times: x = a x + (b S + c S^2) x, S = x x^T, (a, b, c) = ns_coefficients
        p = p * (1 - lr * weight_decay) - lr * ratio * x
        ratio = sqrt(max(1, A / B))                     (adjust_lr_fn None or "original")
        ratio = 0.2 * sqrt(max(A, B))                   (adjust_lr_fn "match_rms_adamw")

    A group with ``algorithm="adamw"`` is stepped as by :class:`memkern.optim.AdamW`. :func:`muon_groups` makes the
    groups of a model.

    Args:
        params: tensors, named tensors or groups, as for :class:`memkern.optim.Adam`.
        lr: learning rate, a float or a 0-dim tensor. Default 1e-3.
        weight_decay: decoupled. Default 0.1.
        momentum: from 0 to below 1. Default 0.95.
        nesterov: default True.
        ns_coefficients: of the Newton-Schulz iterations. Default (3.4445, -4.775, 2.0315).
        eps: of the norm that a matrix is divided by, and in AdamW's groups AdamW's. Default None: 1e-7, and 1e-8 there.
        ns_steps: iterations, 1 to 99. Default 5.
        adjust_lr_fn: None, "original" or "match_rms_adamw", see the formula. Default None.
        split: None, or the sizes of parts of each matrix that are orthogonalized by themselves, such as
            ``(768, 768, 768)`` for query, key and value: along the rows, or along the columns where the sizes add up
            only to these. All parts of a matrix must have the same ratio. Default None.
        algorithm: "muon" or "adamw": what a group is stepped by where it does not say so itself. Default "muon". The
            groups of the other algorithm need an lr of their own, except with "match_rms_adamw", whose lr is AdamW's.
        betas: of AdamW's groups. Default (0.9, 0.999). OneCycleLR and CyclicLR cycle ``momentum``, as of
            torch.optim.Muon, and leave betas as they are; ``cycle_momentum=False`` leaves both.
        maximize: ascend instead of descend. Default False.
        state_bits, block_size, codec, min_8bit_size, max_grad_norm, master_weights, stochastic_rounding: as for
            :class:`memkern.optim.Adam`. max_grad_norm is the norm of all groups' gradients together.

    The state of a matrix is ``momentum_buffer`` (m), in 8 bits with ``momentum_buffer_scale``: 1 + 4 / block_size bytes
    per parameter; and ``step``. While a step runs, u takes 2 bytes per parameter of one bucket of matrices, which is
    64 MiB of u or one larger matrix, and the products take a few times as much.

    With state_bits=32 a step on the CPU has torch.optim.Muon's bits. On other devices matrices of one shape go through
    the products together, whose bits are those of the device's batched products. A step with a NaN or infinity in a
    gradient of a matrix, or with max_grad_norm in any gradient, is skipped whole, as a GradScaler would. A DTensor is
    orthogonalized whole, by one of its ranks.

    Raises:
        ValueError: an option out of range or not supported; a group of the other algorithm without an lr; a parameter
            without two dimensions in a group of Muon's.
        TypeError: a parameter of another dtype.

    Sources: Jordan et al., kellerjordan.github.io/posts/muon; Liu et al., "Muon is Scalable for LLM Training" (arXiv
    2502.16982); torch.optim.Muon; 8-bit momentum: "Effective Quantization of Muon Optimizer States" (arXiv 2509.23106).
    """

    op = ADAM_STEP  # of groups with algorithm="adamw"; _op_of has each group's
    converters = ("from_torch_muon_state_dict",)
    storage_options = (
        *BlockwiseOptimizer.storage_options,
        *("algorithm", "split", "ns_coefficients", "ns_steps", "adjust_lr_fn", "eps"),
    )
    _betas: tuple[float, float]
    product_devices: Mapping[Tensor, torch.device] | None = None
    """The devices of matrix products, where they are not the parameters' own. HostOffload sets it."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
        eps: float | None = None,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        split: Sequence[int] | None = None,
        algorithm: str = "muon",
        betas: tuple[float, float] = (0.9, 0.999),
        maximize: bool = False,
        **options: Unpack[SharedOptions],
    ) -> None:
        self._betas = betas
        del betas  # not among the defaults: see add_param_group
        super().__init__(params, {**locals(), "capturable": False}, options)

    # ---- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim's; ``eps`` defaults to that of the group's algorithm, and the other algorithm needs an lr.

        Raises:
            ValueError: a group of the other algorithm without an lr.
        """
        if isinstance(param_group, dict):
            group = {**self.defaults, **param_group}
            if group["eps"] is None:  # also where a wrapper's group has all defaults
                param_group = {**param_group, "eps": _DEFAULT_EPS.get(group["algorithm"], 0.0)}
            if "betas" not in group:
                # Not in defaults: torch's schedulers cycle betas if defaults have them, and momentum otherwise.
                param_group = {**param_group, "betas": self._betas}
            other = group["algorithm"] != self.defaults["algorithm"]
            if other and "lr" not in param_group and group["adjust_lr_fn"] != "match_rms_adamw":
                raise ValueError(
                    f"lr must be given for a group with algorithm={group['algorithm']!r}, got a group without one: "
                    f"{group['lr']}, the optimizer's, is for {self.defaults['algorithm']!r}, and one rate serves both "
                    "only with adjust_lr_fn='match_rms_adamw'; memkern.optim.muon_groups(model, lr=..., adamw_lr=...) "
                    "makes the groups"
                )
        super().add_param_group(param_group)

    def _op_of(self, group: dict[str, Any]) -> StepOp:
        return MUON_STEP if group["algorithm"] == "muon" else ADAM_STEP

    def _values(self, grads: list[Tensor]) -> Values:
        return super()._values(grads)._replace(product_devices=self.product_devices)

    def _hyperparameter(self, group: dict[str, Any], name: str) -> float:
        return 1.0 if name == "decoupled_weight_decay" else super()._hyperparameter(group, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_betas": self._betas}

    def _follow_groups(self) -> None:
        for number, group in enumerate(self.param_groups):
            other = "adamw" if group["algorithm"] == "muon" else "muon"
            moment = next(iter(self._op_of({"algorithm": other}).moments))
            for p in group["params"]:
                if moment in self.state.get(p, ()):
                    raise ValueError(
                        f"algorithm of group {number} was {other!r} and is now {group['algorithm']!r}, whose states "
                        "are others: make a new optimizer, or take its parameters' states out of optimizer.state and "
                        "add them in a group of their own"
                    )
        super()._follow_groups()

    def _check_group(self, group: dict[str, Any]) -> None:
        if group["algorithm"] not in ALGORITHMS:
            raise ValueError(f"algorithm must be one of {ALGORITHMS}, got {group['algorithm']!r}")
        super()._check_group(group)
        if "betas" not in group:
            raise ValueError(f"betas must be in every group, got only {', '.join(map(str, group))}")
        check_momentum(group)
        if group["adjust_lr_fn"] not in ADJUST_LR_FNS:
            raise ValueError(f"adjust_lr_fn must be one of {ADJUST_LR_FNS}, got {group['adjust_lr_fn']!r}")
        if group["capturable"]:
            raise ValueError(
                "capturable must be False: no step of Muon has been captured into a CUDA graph yet; capture the "
                "forward and backward passes alone"
            )
        if group["algorithm"] == "muon":
            check_newton_schulz(group["ns_coefficients"], group["ns_steps"], group["eps"])

    def _check_shape(self, p: Tensor, group: dict[str, Any]) -> None:
        if group["algorithm"] == "muon":
            check_whole("a parameter of a group with algorithm='muon'", p)
            if p.dim() < 2:
                raise ValueError(
                    f"params of a group with algorithm='muon' must have two dimensions or more, got shape "
                    f"{tuple(p.shape)}; others belong into a group with algorithm='adamw': "
                    "memkern.optim.muon_groups(model) makes both"
                )
            check_split(group, p.shape)


class Muon8bit(Muon):
    """Muon with a block-wise 8-bit momentum: :class:`Muon`, where state_bits is 8 unless it is given.

    Args:
        params, lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn, split, algorithm,
            betas, maximize: as for :class:`Muon`.
        state_bits: default 8, of AdamW's groups too; 32 for moments in fp32.
        block_size, codec, min_8bit_size, max_grad_norm, master_weights, stochastic_rounding: see :class:`Adam`.

    Takes 1 + 4 / block_size bytes per parameter of a matrix, and AdamW8bit's for others; formula, state, errors and
    sources: :class:`Muon`.
    """

    option_defaults = DEFAULTS_8BIT
