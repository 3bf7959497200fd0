"""Every op's schema and fake implementation, and a record of each optimizer's step: its moments, options and scalars.

Plain Python, nothing imported but the standard library: ``csrc/generate.py`` runs this file to write the same schemas
and tables for C++ (``csrc/common/schemas.h``, ``csrc/core/hyperparameters.h``). Fakes import torch when they run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# ---- optimizer steps: one list of arguments for all of them

STEP_SCHEMA = (
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] moments, Tensor(c!)[] scales, Tensor(d!)[] steps, "
    "Tensor(e!)[] trust_ratios, Tensor(f!)[] weight_states, int[] group, Tensor[] lr, float[] hyperparameters, "
    "int[] codec, int[] block_size, int[] weight_storage, "
    "Tensor? grad_scale=None, Tensor? found_inf=None, Tensor? grad_norm=None, float max_grad_norm=0.0, "
    "Tensor(g!)? squares=None, bool squares_only=False) -> ()"
)


class StepArgs(NamedTuple):
    """The arguments of every optimizer step, in the order of :data:`STEP_SCHEMA`; ``StepArgs`` in C++ too.

    n tensors on one device, in groups that share their hyperparameters.
    """

    params: Sequence[Tensor]  # n: float32, bfloat16 or float16, dense
    grads: Sequence[Tensor]  # n: of the parameters' shapes
    moments: Sequence[Tensor] = ()  # the first moments of all n, then the second ones: codes, or float32
    scales: Sequence[Tensor] = ()  # of the moments in codes, in the order of moments: float32, one per block
    steps: Sequence[Tensor] = ()  # n: float32 of one element
    trust_ratios: Sequence[Tensor] = ()  # n: float32, one per layer; none where the optimizer has none
    weight_states: Sequence[Tensor] = ()  # of the tensors whose weight_storage has one, in their order
    group: Sequence[int] = ()  # n: the number of each tensor's group
    lr: Sequence[Tensor] = ()  # a float32 or float64 tensor of one element per group
    hyperparameters: Sequence[float] = ()  # the values of StepOp.hyperparameters, one group after the other
    codec: Sequence[int] = ()  # per group: memkern.quant.codec.CODECS
    block_size: Sequence[int] = ()  # per group
    weight_storage: Sequence[int] = ()  # per group: memkern.quant.codec.WEIGHTS; empty: all to the nearest
    grad_scale: Tensor | None = None  # a GradScaler's: gradients are divided by it
    found_inf: Tensor | None = None  # a GradScaler's: the step is skipped whole where it is not 0
    grad_norm: Tensor | None = None  # the norm of all gradients, unscaled
    max_grad_norm: float = 0.0  # the norm to which gradients are clipped, where grad_norm is given
    # (layers of all tensors, 2) float64: sums of squares over all ranks, used instead of the op's own.
    squares: Tensor | None = None
    squares_only: bool = False  # the op's own sums are written to squares, and nothing else is changed

    def moment(self, k: int) -> Sequence[Tensor]:
        """The k-th moment of all tensors."""
        return self.moments[k * len(self.params) : (k + 1) * len(self.params)]

    def storage_of(self, group: int) -> int:
        """The group's weight_storage."""
        return self.weight_storage[group] if self.weight_storage else 0

    def with_groups_of_one(self, more: Sequence[float]) -> StepArgs:
        """The same with a group for each tensor, which ends with that tensor's further hyperparameter of ``more``."""
        width = len(self.hyperparameters) // max(1, len(self.lr))
        return self._replace(
            group=[*range(len(self.group))],
            lr=[self.lr[k] for k in self.group],
            hyperparameters=[
                value
                for k, further in zip(self.group, more, strict=True)
                for value in (*self.hyperparameters[k * width : (k + 1) * width], further)
            ],
            codec=[self.codec[k] for k in self.group],
            block_size=[self.block_size[k] for k in self.group],
            weight_storage=[self.storage_of(k) for k in self.group] if self.weight_storage else [],
        )

    def scales_of(self, k: int, moments: int) -> Sequence[Tensor]:
        """The scales of the k-th of ``moments`` moments, for those tensors whose moments are codes."""
        coded = len(self.scales) // moments
        return self.scales[k * coded : (k + 1) * coded]


WEIGHT_STATES = {2: "int8", 3: "int16"}
"""weight_storage -> the dtype of weight states, the rounding errors of bf16 weights."""


class StepOp(NamedTuple):
    """The parts of a step that differ between optimizers. A moment is stored as int8 codes if signed, else uint8."""

    name: str
    moments: dict[str, bool]  # name in the state -> whether it has a sign
    hyperparameters: tuple[str, ...]  # beside lr; flags and whole numbers are passed as floats
    scalars: tuple[str, ...]  # computed from these for each tensor: a struct in csrc/core, slots in Triton
    has_trust_ratios: bool = False

    def group_hyperparameters(self, args: StepArgs) -> list[SimpleNamespace]:
        """The hyperparameters of each group, by name."""
        names, values = self.hyperparameters, args.hyperparameters
        starts = range(0, len(values), len(names))
        return [SimpleNamespace(**dict(zip(names, values[i : i + len(names)], strict=True))) for i in starts]


TWO_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
ADAM_SCALARS = (
    *("grad_factor", "beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "root_beta2"),
    *("eps", "step_size", "decay", "coupled_decay"),
)
SGD_SCALARS = ("grad_factor", "weight_decay", "momentum", "weight", "rate", "nesterov")

ADAM_STEP = StepOp(
    "adam_step_",
    TWO_MOMENTS,
    ("beta1", "beta2", "eps", "weight_decay", "decoupled_weight_decay", "maximize"),
    ADAM_SCALARS,
)
AMSGRAD_STEP = ADAM_STEP._replace(name="amsgrad_step_", moments={**TWO_MOMENTS, "max_exp_avg_sq": False})
"""Adam's with amsgrad, which the reference alone has: its moments are floats."""
LAMB_STEP = StepOp(
    "lamb_step_",
    TWO_MOMENTS,
    (
        *("beta1", "beta2", "eps", "weight_decay", "decoupled_decay", "bias_correction"),
        *("trust_clip", "always_adapt", "layers", "maximize"),
    ),
    (*ADAM_SCALARS, "update_decay", "rate"),
    has_trust_ratios=True,
)
LARS_STEP = StepOp(
    "lars_step_",
    {"exp_avg": True},
    (
        *("momentum", "dampening", "weight_decay", "nesterov", "trust_coeff", "eps"),
        *("trust_clip", "always_adapt", "layers", "maximize"),
    ),
    (*SGD_SCALARS, "grad_ratio", "classic"),
    has_trust_ratios=True,
)
LION_STEP = StepOp(
    "lion_step_",
    {"exp_avg": True},
    ("beta1", "beta2", "weight_decay", "maximize"),
    ("grad_factor", "beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "lr", "decay"),
)
SGD_STEP = StepOp(
    "sgd_step_",
    {"momentum_buffer": True},
    ("momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    SGD_SCALARS,
)
MUON_STEP = StepOp("muon_step_", {"momentum_buffer": True}, ("momentum", "nesterov", "weight_decay", "maximize"), ())
"""Arguments that Muon's two ops share. Not one of STEP_OPS: between the two, the updates are orthogonalized."""
STEP_OPS = {op.name: op for op in (ADAM_STEP, LAMB_STEP, LARS_STEP, LION_STEP, SGD_STEP)}

# ---- every op

SCHEMAS = {
    "quantize_blockwise": (
        "(Tensor x, int codec, bool signed, int block_size, int? step=None, bool mark_nonfinite=False) "
        "-> (Tensor, Tensor)"
    ),
    "dequantize_blockwise": ("(Tensor codes, Tensor scale, int codec, int block_size, ScalarType dtype) -> Tensor"),
    **dict.fromkeys(STEP_OPS, STEP_SCHEMA),
    # updates: bfloat16 of the parameters' shapes, before and after they are orthogonalized. sums: float64, of squares.
    "muon_momentum_": "(Tensor(h!)[] updates, Tensor(i!)[] sums, " + STEP_SCHEMA[1:],
    "muon_apply_": "(Tensor[] updates, float[] ratios, " + STEP_SCHEMA[1:],
    "grad_norm_": "(Tensor(a!) norm, Tensor[] grads, Tensor? grad_scale=None) -> ()",
    "few_bit_encode": "(Tensor x, int bits, float[] thresholds, int[] flips, int symmetry) -> Tensor",
    "few_bit_forward": (
        "(Tensor x, int fn, float a, float b, int bits, float[] thresholds, int[] flips, int symmetry) "
        "-> (Tensor, Tensor)"
    ),
    "few_bit_backward": "(Tensor grad, Tensor codes, float[] levels) -> Tensor",
    "few_bit_backward_from_output": (
        "(Tensor grad, Tensor output, Tensor codes, float minimum, float[] falling, float[] rising, "
        "float falling_reach, float rising_reach) -> Tensor"
    ),
}


def _fake_quantize(
    x: Tensor,
    codec: int,
    signed: bool,
    block_size: int,
    step: int | None = None,
    mark_nonfinite: bool = False,
) -> tuple[Tensor, Tensor]:
    import torch

    from .quant.layout import check_block_size, layout_of

    check_block_size(block_size)
    layout = layout_of(x, block_size)
    codes = torch.empty_like(x, dtype=torch.int8 if signed else torch.uint8)
    return codes, x.new_empty(layout.scale_shape, dtype=torch.float32)


def _fake_dequantize(codes: Tensor, scale: Tensor, codec: int, block_size: int, dtype: torch.dtype) -> Tensor:
    import torch

    return torch.empty_like(codes, dtype=dtype)


def _fake_in_place(*args: Any, **kwargs: Any) -> None:
    return None


def _fake_encode(x: Tensor, bits: int, thresholds: Sequence[float], flips: Sequence[int], symmetry: int) -> Tensor:
    import torch

    from .quant.codec import plane_bytes

    return x.new_empty((bits, plane_bytes(x.numel())), dtype=torch.uint8)


def _fake_forward(x: Tensor, fn: int, a: float, b: float, bits: int, *table: Any) -> tuple[Tensor, Tensor]:
    import torch

    return torch.empty_like(x), _fake_encode(x, bits, *table)


def _fake_backward(grad: Tensor, *args: Any) -> Tensor:
    import torch

    return torch.empty_like(grad)


FAKES: dict[str, Callable[..., Any]] = {
    "quantize_blockwise": _fake_quantize,
    "dequantize_blockwise": _fake_dequantize,
    **dict.fromkeys(STEP_OPS, _fake_in_place),
    "muon_momentum_": _fake_in_place,
    "muon_apply_": _fake_in_place,
    "grad_norm_": _fake_in_place,
    "few_bit_encode": _fake_encode,
    "few_bit_forward": _fake_forward,
    "few_bit_backward": _fake_backward,
    "few_bit_backward_from_output": _fake_backward,
}
