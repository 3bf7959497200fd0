"""Arguments that an optimizer's step refuses, whatever its backend."""

from typing import Any

import torch
from torch import Tensor

from tests.support.op_helpers import SAMPLES
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
