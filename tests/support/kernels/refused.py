"""The table of arguments that every op refuses on every backend, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memkern.fewbit.tables import LEVELS, TWO_BRANCHES
from memkern.quant.codec import ACTIVATIONS
from memkern.schemas import STEP_OPS, StepArgs
from tests.support.kernels.arguments import BF16, F16, F32, arguments, names_of


class Refused(NamedTuple):
    op: str
    args: Callable[[], list[Any]]
    message: str | None = None
    """A pattern of the error's message, where it is the same on every backend."""


def ones(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.ones(*shape, dtype=dtype)


# ---- steps

I8, U8, F64 = torch.int8, torch.uint8, torch.float64
ODD, LONG = (37, 53), (3, 1000)  # the two tensors' shapes, both with codes
BF16_PARAMS = {"params": [ones(*ODD, dtype=BF16), ones(*LONG, dtype=BF16)]}
GAPS = ones(3, 2000)[:, ::2]
BAD_STEPS: dict[str, dict[str, Any]] = {
    "a gradient fewer": {"grads": [ones(*ODD)]},
    "a state fewer": {"exp_avgs": [ones(*ODD, dtype=I8)]},
    "a step fewer": {"steps": [torch.tensor(0.0)]},
    "a group number fewer": {"group": [0]},
    "a scale fewer": {"exp_avg_scales": [ones(3, 8)]},
    "a scale too many": {"exp_avg_scales": [ones(19), ones(3, 8), ones(1)]},
    "a codec fewer": {"codec": [0]},
    "a block size fewer": {"block_size": [128]},
    "a beta fewer": {"beta1": [0.9]},
    "an eps fewer": {"eps": [1e-8]},
    "a momentum fewer": {"momentum": [0.9]},
    "a decay too many": {"weight_decay": [0.1] * 3},
    "a group out of range": {"group": [0, 2]},
    "a negative group": {"group": [0, -1]},
    "an unknown codec": {"codec": [0, 7]},
    "a bad block size": {"block_size": [128, 100]},
    "a block size too large": {"block_size": [128, 8192]},
    "scales of other blocks": {"block_size": [128, 256]},
    "fp64 parameter": {"params": [ones(*ODD), ones(*LONG, dtype=F64)]},
    "integer gradient": {"grads": [ones(*ODD), ones(*LONG, dtype=torch.int32)]},
    "gradient of another shape": {"grads": [ones(*ODD), ones(1000, 3)]},
    "parameter that is not dense": {"params": [ones(*ODD), GAPS], "grads": [ones(*ODD), GAPS]},
    "parameter with gaps, dense gradient": {"params": [ones(*ODD), GAPS]},
    "state in bf16": {"exp_avgs": [ones(*ODD, dtype=I8), ones(*LONG, dtype=BF16)]},
    "unsigned codes of m": {"exp_avgs": [ones(*ODD, dtype=I8), ones(*LONG, dtype=U8)]},
    "signed codes of v": {"exp_avg_sqs": [ones(*ODD, dtype=U8), ones(*LONG, dtype=I8)]},
    "m in codes and v in fp32": {"exp_avg_sqs": [ones(*ODD, dtype=U8), ones(*LONG)]},
    "state of another shape": {"exp_avgs": [ones(*ODD, dtype=I8), ones(1000, 3, dtype=I8)]},
    "state of other strides": {"exp_avgs": [ones(*ODD, dtype=I8), ones(1000, 3, dtype=I8).t()]},
    "scale in fp16": {"exp_avg_scales": [ones(19), ones(3, 8, dtype=F16)]},
    "scale of another shape": {"exp_avg_scales": [ones(19), ones(24)]},
    "steps of two numbers": {"steps": [torch.tensor(0.0), torch.zeros(2)]},
    "steps as int64": {"steps": [torch.tensor(0.0), torch.tensor(0)]},
    "lr of two numbers": {"lr": [torch.ones(()), torch.ones(2)]},
    "grad_scale of two numbers": {"grad_scale": torch.ones(2)},
    "found_inf of two numbers": {"found_inf": torch.zeros(2)},
    "grad_norm of two numbers": {"grad_norm": torch.zeros(2)},
    "an unknown weight storage": {"weight_storage": [0, 5]},
    "a weight storage fewer": {"weight_storage": [0]},
    "weight storage of fp32 parameters": {"weight_storage": [0, 1]},
    "a weight state too many": {"weight_states": [ones(*ODD)]},
    "a weight state fewer": BF16_PARAMS | {"weight_storage": [2, 3], "weight_states": [ones(*ODD, dtype=I8)]},
    "a weight state of another dtype": BF16_PARAMS
    | {"weight_storage": [2, 0], "weight_states": [ones(*ODD, dtype=torch.int16)]},
    "a weight state of other strides": BF16_PARAMS
    | {"weight_storage": [3, 0], "weight_states": [ones(*ODD[::-1], dtype=torch.int16).t()]},
    "a trust ratio fewer": {"trust_ratios": [torch.ones(1)]},
    "trust ratios of two layers": {"trust_ratios": [torch.ones(1), torch.ones(2)]},
    "trust ratio as a number": {"trust_ratios": [torch.ones(1), torch.ones(())]},
    "trust ratio in fp64": {"trust_ratios": [torch.ones(1), torch.ones(1, dtype=F64)]},
    "a number of layers fewer": {"layers": [1]},
    "layers that do not divide": {"layers": [2, 1]},
    "layers that end inside a block": {"layers": [37, 1], "trust_ratios": [torch.ones(37), torch.ones(1)]},
    "layers below 0": {"layers": [-1, 1]},
    "squares in fp32": {"squares": torch.zeros(2, 2)},
    "squares of a layer fewer": {"squares": torch.zeros(1, 2, dtype=F64)},
    "squares of other strides": {"squares": torch.zeros(2, 2, dtype=F64).t()},
    "squares_only without squares": {"squares_only": True},
}
"""Arguments that take the place of good ones, for every op that has them; those of Muon's ops follow below."""


def bad_step(op: str, kinds: str = "codes", **wrong: Any) -> list[Any]:
    return arguments(op, layouts=("odd", "long rows"), kinds=kinds, codec=(0, 0), wrong=wrong)


REFUSED: dict[str, Refused] = {
    f"{op}: {title}": Refused(op, lambda op=op, wrong=wrong: bad_step(op, **wrong))
    for op in STEP_OPS
    for title, wrong in BAD_STEPS.items()
    if wrong.keys() <= names_of(op)
}


def bad_muon(op: str, change: Callable[[list[Any]], list[Any]]) -> Callable[[], list[Any]]:
    return lambda: change(bad_step(op, "fp32"))


def with_vectors(args: list[Any]) -> list[Any]:
    step = StepArgs(*args[2:])
    flat = {name: [x.flatten() for x in getattr(step, name)] for name in ("params", "grads", "moments")}
    return [[u.flatten() for u in args[0]], args[1], *step._replace(**flat)]


for op in ("muon_momentum_", "muon_apply_"):
    for title, change, message in (
        ("one update less", lambda a: [a[0][1:], *a[1:]], "updates must have"),
        ("fp32 updates", lambda a: [[u.float() for u in a[0]], *a[1:]], r"updates\[0\] must be bfloat16"),
        ("other strides", lambda a: [[u.mT for u in a[0]], *a[1:]], r"updates\[0\] must be bfloat16"),
        ("a vector", with_vectors, r"params\[0\] must have two dimensions"),
        ("hyperparameters", lambda a: [*a[:2], *StepArgs(*a[2:])._replace(hyperparameters=[0.9])], "hyperparameters"),
        ("a scale", lambda a: [*a[:2], *StepArgs(*a[2:])._replace(scales=[ones(19)])], "scale"),
        ("a step fewer", lambda a: [*a[:2], *StepArgs(*a[2:])._replace(steps=[torch.zeros(())])], "steps must have"),
    ):
        REFUSED[f"{op}: {title}"] = Refused(op, bad_muon(op, change), message)
REFUSED["muon_apply_: one ratio"] = Refused(
    "muon_apply_", bad_muon("muon_apply_", lambda a: [a[0], [1.0], *a[2:]]), "ratios must have"
)

# ---- other ops

X, CODES, PLANES = ones(4, 256), ones(4, 256, dtype=I8), torch.zeros(3, 128, dtype=U8)  # codes for X, 3 bits each
GELU = (3, *(list(part) if isinstance(part, tuple) else part for part in LEVELS["gelu", 3][2:]))
TWO = TWO_BRANCHES["silu"][1:]
BAD_CALLS: dict[str, dict[str, tuple[Any, ...]]] = {
    "quantize_blockwise": {
        "block size": (X, 0, True, 12),
        "block size 0": (X, 0, True, 0),
        "codec": (X, 2, True, 128),
        "fp64": (X.double(), 0, True, 128),
        "int": (X.int(), 0, True, 128),
        "gaps": (X[:, ::2], 0, True, 128),
    },
    "dequantize_blockwise": {
        "block size": (CODES, ones(4, 2), 0, 20, F32),
        "codec": (CODES, ones(4, 2), -1, 128, F32),
        "codes": (X, ones(4, 2), 0, 128, F32),
        "gaps": (CODES[:, ::2], ones(4, 1), 0, 128, F32),
        "scale shape": (CODES, ones(8), 0, 128, F32),
        "too few scales": (CODES, ones(4, 1), 0, 128, F32),
        "scale dtype": (CODES, ones(4, 2, dtype=F16), 0, 128, F32),
        "fp64": (CODES, ones(4, 2), 0, 128, F64),
    },
    "grad_norm_": {
        "fp32": (ones(()), [X]),
        "two numbers": (ones(2, dtype=F64), [X]),
        "int": (ones((), dtype=F64), [X.int()]),
    },
    "few_bit_encode": {
        "no bits": (X, 0, [], [], 0),
        "5 bits": (X, 5, [], [], 0),
        "a flip fewer": (X, 2, [0.5, 1.0], [1], 0),
        "too many": (X, 2, [0.5] * 65, [1] * 65, 0),
        "a flip of no plane": (X, 2, [0.5], [4], 0),
        "a negative flip": (X, 2, [0.5], [-1], 0),
        "symmetry": (X, 2, [0.5], [1], 3),
        "int": (X.int(), *GELU),
        "gaps": (X[:, ::2], *GELU),
    },
    "few_bit_forward": {
        "no such function": (X, len(ACTIVATIONS), 0.0, 0.0, *GELU),
        "gaps": (X[:, ::2], 0, 0.0, 0.0, *GELU),
    },
    "few_bit_backward": {
        "codes of less": (X, PLANES[:, :112].contiguous(), [0.5] * 8),
        "rows with gaps": (X, PLANES.repeat(1, 2)[:, ::2], [0.5] * 8),
        "five planes": (X, PLANES.repeat(2, 1)[:5], [0.5] * 32),
        "signed codes": (X, PLANES.to(I8), [0.5] * 8),
        "a level fewer": (X, PLANES, [0.5] * 7),
        "a plane fewer": (X, PLANES[:2], [0.5] * 8),
        "gaps": (ones(4, 512)[:, ::2], PLANES, [0.5] * 8),
        "int": (X.int(), PLANES, [0.5] * 8),
    },
    "few_bit_backward_from_output": {
        "two planes": (X, X, PLANES[:2], *TWO),
        "another shape": (X, ones(256, 4), PLANES[:1], *TWO),
        "other strides": (X, ones(256, 4).t(), PLANES[:1], *TWO),
        "int": (X, X.int(), PLANES[:1], *TWO),
        "a coefficient fewer": (X, X, PLANES[:1], TWO[0], TWO[1][1:], *TWO[2:]),
        "no coefficients": (X, X, PLANES[:1], TWO[0], [], [], *TWO[3:]),
    },
}
REFUSED |= {
    f"{op}: {title}": Refused(op, lambda args=args: [*args])
    for op, calls in BAD_CALLS.items()
    for title, args in calls.items()
}


# ---- memory that has been freed


def freed(x: Tensor) -> Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def with_freed(op: str, field: str) -> list[Any]:
    """A step's arguments, in which the second tensor of a list has been freed."""
    args = StepArgs(*bad_step(op))
    tensors = getattr(args, field)
    return [*args._replace(**{field: [tensors[0], freed(tensors[1]), *tensors[2:]]})]


FREED: dict[str, Refused] = {
    "x": Refused("quantize_blockwise", lambda: [freed(X), 0, True, 128]),
    "codes": Refused("dequantize_blockwise", lambda: [freed(CODES), ones(4, 2), 0, 128, F32]),
    "scale": Refused("dequantize_blockwise", lambda: [CODES, freed(ones(4, 2)), 0, 128, F32]),
    "a gradient of a norm": Refused("grad_norm_", lambda: [ones((), dtype=F64), [freed(X)]]),
    "an activation's input": Refused("few_bit_encode", lambda: [freed(X), 1, [0.0], [1], 0]),
    "a gradient": Refused("few_bit_backward", lambda: [freed(X), PLANES[:1], [0.5, 1.0]]),
    "planes": Refused("few_bit_backward", lambda: [X, freed(PLANES[:1]), [0.5, 1.0]]),
    "an activation's output": Refused("few_bit_backward_from_output", lambda: [X, freed(X), PLANES[:1], *TWO]),
    "a norm": Refused("grad_norm_", lambda: [freed(ones((), dtype=F64)), [X]]),
    "sums of squares": Refused(
        "muon_momentum_",
        bad_muon("muon_momentum_", lambda a: [a[0], [freed(sums) for sums in a[1]], *a[2:]]),
    ),
    "squares of layers": Refused(
        "lamb_step_", lambda: bad_step("lamb_step_", squares=freed(torch.zeros(2, 2, dtype=F64)), squares_only=True)
    ),
    **{
        f"{field} of a step": Refused("lamb_step_", lambda field=field: with_freed("lamb_step_", field))
        for field in ("params", "grads", "moments", "scales", "steps", "trust_ratios")
    },
}
"""Tensors whose memory has been freed: kernels raise; the reference is torch's own functions, which end the process."""
