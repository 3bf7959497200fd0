"""torch.ops.memkern and torch.ops.memkern_reference refuse bad arguments, before anything is changed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.interpreted import interpreted
from tests.support.op_helpers import SAMPLES, TABLE, op, over_namespaces, step_args
from tests.support.step_lists import names_of


def p(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, dtype=dtype)


ODD, LONG = (37, 53), (3, 1000)  # the shapes that step_args gives to the first two
BF16_PARAMS = {"params": [p(*ODD, dtype=torch.bfloat16), p(*LONG, dtype=torch.bfloat16)]}
BAD_STEPS: dict[str, dict[str, Any]] = {
    "a gradient fewer": {"grads": [p(*ODD)]},
    "a state fewer": {"exp_avgs": [p(*ODD).to(torch.int8)]},
    "a group number fewer": {"group": [0]},
    "a scale fewer": {"exp_avg_scales": [p(3, 8)]},
    "a scale too many": {"exp_avg_scales": [p(19), p(3, 8), p(1)]},
    "a group out of range": {"group": [0, 2]},
    "a negative group": {"group": [0, -1]},
    "a codec fewer": {"codec": [0]},
    "a block size fewer": {"block_size": [128]},
    "a beta fewer": {"beta1": [0.9]},
    "a decay too many": {"weight_decay": [0.1] * 3},
    "an unknown codec": {"codec": [0, 7]},
    "a bad block size": {"block_size": [128, 100]},
    "a block size too large": {"block_size": [128, 8192]},
    "scales of other blocks": {"block_size": [128, 256]},
    "fp64 parameter": {"params": [p(*ODD), p(*LONG, dtype=torch.float64)]},
    "integer gradient": {"grads": [p(*ODD), p(*LONG, dtype=torch.int32)]},
    "gradient of another shape": {"grads": [p(*ODD), p(1000, 3)]},
    "parameter that is not dense": {
        "params": [p(*ODD), p(3, 2000)[:, ::2]],
        "grads": [p(*ODD), p(3, 2000)[:, ::2]],
    },
    "parameter with gaps, dense gradient": {"params": [p(*ODD), p(3, 2000)[:, ::2]]},
    "state in bf16": {"exp_avgs": [p(*ODD).to(torch.int8), p(*LONG, dtype=torch.bfloat16)]},
    "unsigned codes of m": {"exp_avgs": [p(*ODD).to(torch.int8), p(*LONG, dtype=torch.uint8)]},
    "state of another shape": {"exp_avgs": [p(*ODD).to(torch.int8), p(1000, 3, dtype=torch.int8)]},
    "state of other strides": {"exp_avgs": [p(*ODD).to(torch.int8), p(1000, 3, dtype=torch.int8).t()]},
    "scale in fp16": {"exp_avg_scales": [p(19), p(3, 8, dtype=torch.float16)]},
    "scale of another shape": {"exp_avg_scales": [p(19), p(24)]},
    "lr of two numbers": {"lr": [torch.ones(()), torch.ones(2)]},
    "grad_scale of two numbers": {"grad_scale": torch.ones(2)},
    "found_inf of two numbers": {"found_inf": torch.zeros(2)},
    "grad_norm of two numbers": {"grad_norm": torch.zeros(2)},
    "an unknown weight storage": {"weight_storage": [0, 5]},
    "a weight storage fewer": {"weight_storage": [0]},
    "weight storage of fp32 parameters": {"weight_storage": [0, 1]},
    "a weight state too many": {"weight_states": [p(*ODD)]},
    "a weight state fewer": {
        **BF16_PARAMS,
        "weight_storage": [2, 3],
        "weight_states": [p(*ODD, dtype=torch.int8)],
    },
    "a weight state of another dtype": {
        **BF16_PARAMS,
        "weight_storage": [2, 0],
        "weight_states": [p(*ODD, dtype=torch.int16)],
    },
    "a weight state of other strides": {
        **BF16_PARAMS,
        "weight_storage": [3, 0],
        "weight_states": [p(*ODD[::-1], dtype=torch.int16).t()],
    },
}
# A case is for the ops that have its argument.
BAD_STEPS |= {
    "a step fewer": {"steps": [torch.tensor(0.0)]},
    "an eps fewer": {"eps": [1e-8]},
    "m in codes and v in fp32": {"exp_avg_sqs": [p(*ODD).to(torch.uint8), p(*LONG)]},
    "signed codes of v": {"exp_avg_sqs": [p(*ODD).to(torch.uint8), p(*LONG, dtype=torch.int8)]},
    "steps of two numbers": {"steps": [torch.tensor(0.0), torch.zeros(2)]},
    "steps as int64": {"steps": [torch.tensor(0.0), torch.tensor(0)]},
    "a momentum fewer": {"momentum": [0.9]},
    "a trust ratio fewer": {"trust_ratios": [torch.ones(1)]},
    "trust ratios of two layers": {"trust_ratios": [torch.ones(1), torch.ones(2)]},
    "trust ratio as a number": {"trust_ratios": [torch.ones(1), torch.ones(())]},
    "trust ratio in fp64": {"trust_ratios": [torch.ones(1), torch.ones(1, dtype=torch.float64)]},
    "a number of layers fewer": {"layers": [1]},
    "layers that do not divide": {"layers": [2, 1]},
    "layers that end inside a block": {"layers": [37, 1], "trust_ratios": [torch.ones(37), torch.ones(1)]},
    "layers below 0": {"layers": [-1, 1]},
    "squares in fp32": {"squares": torch.zeros(2, 2)},
    "squares of a layer fewer": {"squares": torch.zeros(1, 2, dtype=torch.float64)},
    "squares of other strides": {"squares": torch.zeros(2, 2, dtype=torch.float64).t()},
    "squares_only without squares": {"squares_only": True},
}
BAD_CASES = [
    (name, case)
    for name in SAMPLES
    if "step" in name
    for case, override in BAD_STEPS.items()
    if override.keys() <= names_of(name)
]


@interpreted(name=("adam_step_", "lion_step_"))
@over_namespaces
@pytest.mark.parametrize(("name", "case"), BAD_CASES)
def test_bad_steps_raise_before_anything_changes(namespace: str, name: str, case: str) -> None:
    args = step_args(name, ["codes", "codes"], **BAD_STEPS[case])
    before = [[t.clone() for t in a] for a in args if isinstance(a, list) and a and isinstance(a[0], Tensor)]
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        op(namespace, name)(*args)
    after = [a for a in args if isinstance(a, list) and a and isinstance(a[0], Tensor)]
    for a, b in zip(after, before, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


X, CODES = p(4, 256), p(4, 256, dtype=torch.int8)
BAD_CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "quantize, block size": ("quantize_blockwise", (X, 0, True, 12)),
    "quantize, block size 0": ("quantize_blockwise", (X, 0, True, 0)),
    "quantize, codec": ("quantize_blockwise", (X, 2, True, 128)),
    "quantize, fp64": ("quantize_blockwise", (X.double(), 0, True, 128)),
    "quantize, int": ("quantize_blockwise", (X.int(), 0, True, 128)),
    "quantize, gaps": ("quantize_blockwise", (X[:, ::2], 0, True, 128)),
    "dequantize, block size": ("dequantize_blockwise", (CODES, p(4, 2), 0, 20, torch.float32)),
    "dequantize, codec": ("dequantize_blockwise", (CODES, p(4, 2), -1, 128, torch.float32)),
    "dequantize, codes": ("dequantize_blockwise", (X, p(4, 2), 0, 128, torch.float32)),
    "dequantize, gaps": ("dequantize_blockwise", (CODES[:, ::2], p(4, 1), 0, 128, torch.float32)),
    "dequantize, scale shape": ("dequantize_blockwise", (CODES, p(8), 0, 128, torch.float32)),
    "dequantize, too few scales": ("dequantize_blockwise", (CODES, p(4, 1), 0, 128, torch.float32)),
    "dequantize, scale dtype": ("dequantize_blockwise", (CODES, p(4, 2).half(), 0, 128, torch.float32)),
    "norm, fp32": ("grad_norm_", (p(()), [X])),
    "norm of two numbers": ("grad_norm_", (p(2, dtype=torch.float64), [X])),
    "norm, int": ("grad_norm_", (p((), dtype=torch.float64), [X.int()])),
    "dequantize, fp64": ("dequantize_blockwise", (CODES, p(4, 2), 0, 128, torch.float64)),
}

PLANES = torch.zeros(3, 128, dtype=torch.uint8)  # codes for X, 3 bits each
TWO_BRANCH = SAMPLES["few_bit_backward_from_output"]["odd, torch.float32"]()[3:]
BAD_CALLS |= {
    "encode, no bits": ("few_bit_encode", (X, 0, [], [], 0)),
    "encode, 5 bits": ("few_bit_encode", (X, 5, [], [], 0)),
    "encode, a flip fewer": ("few_bit_encode", (X, 2, [0.5, 1.0], [1], 0)),
    "encode, too many": ("few_bit_encode", (X, 2, [0.5] * 65, [1] * 65, 0)),
    "encode, a flip of no plane": ("few_bit_encode", (X, 2, [0.5], [4], 0)),
    "encode, a negative flip": ("few_bit_encode", (X, 2, [0.5], [-1], 0)),
    "encode, symmetry": ("few_bit_encode", (X, 2, [0.5], [1], 3)),
    "encode, int": ("few_bit_encode", (X.int(), *TABLE)),
    "encode, gaps": ("few_bit_encode", (X[:, ::2], *TABLE)),
    "forward, no such function": ("few_bit_forward", (X, 12, 0.0, 0.0, *TABLE)),
    "forward, gaps": ("few_bit_forward", (X[:, ::2], 0, 0.0, 0.0, *TABLE)),
    "backward, codes of less": ("few_bit_backward", (X, PLANES[:, :112].contiguous(), [0.5] * 8)),
    "backward, rows with gaps": ("few_bit_backward", (X, PLANES.repeat(1, 2)[:, ::2], [0.5] * 8)),
    "backward, five planes": ("few_bit_backward", (X, PLANES.repeat(2, 1)[:5], [0.5] * 32)),
    "backward, signed codes": ("few_bit_backward", (X, PLANES.to(torch.int8), [0.5] * 8)),
    "backward, a level fewer": ("few_bit_backward", (X, PLANES, [0.5] * 7)),
    "backward, gaps": ("few_bit_backward", (p(4, 512)[:, ::2], PLANES, [0.5] * 8)),
    "backward, int": ("few_bit_backward", (X.int(), PLANES, [0.5] * 8)),
    "output, two planes": ("few_bit_backward_from_output", (X, X, PLANES[:2], *TWO_BRANCH)),
    "output, another shape": ("few_bit_backward_from_output", (X, p(256, 4), PLANES[:1], *TWO_BRANCH)),
    "output, other strides": ("few_bit_backward_from_output", (X, p(256, 4).t(), PLANES[:1], *TWO_BRANCH)),
    "output, int": ("few_bit_backward_from_output", (X, X.int(), PLANES[:1], *TWO_BRANCH)),
    "output, a coefficient fewer": (
        "few_bit_backward_from_output",
        (X, X, PLANES[:1], TWO_BRANCH[0], TWO_BRANCH[1][1:], *TWO_BRANCH[2:]),
    ),
    "output, no coefficients": (
        "few_bit_backward_from_output",
        (X, X, PLANES[:1], TWO_BRANCH[0], [], [], *TWO_BRANCH[3:]),
    ),
}


@interpreted(case=[case for case in BAD_CALLS if "quantize" in case or "scaler" in case])
@over_namespaces
@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_raise(namespace: str, case: str) -> None:
    name, args = BAD_CALLS[case]
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        op(namespace, name)(*args)
