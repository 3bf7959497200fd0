"""For the tests of the ops as torch sees them: the namespaces, and small arguments for every op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.helpers import INTERPRETED
from tests.support.kernels.arguments import LAYERWISE, MATRICES, MUON, OPS, arguments
from tests.support.kernels.backends import map_tensors
from tests.support.kernels.cases import CASES

NAMESPACES = ("memkern", "memkern_reference", *(["memkern_triton"] if INTERPRETED else []))
over_namespaces = pytest.mark.parametrize("namespace", NAMESPACES)


def op(namespace: str, name: str) -> Any:
    return getattr(getattr(torch.ops, namespace), name).default


# Options of arguments() for each sample of a step.
STEPS: dict[str, dict[str, Any]] = {
    "8-bit": {"kinds": "codes"},
    "32-bit": {"kinds": "fp32"},
    "mixed, scaler": {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(0.0)},
    "nothing": {"layouts": ()},
}
# op: {sample: what makes its arguments}
SAMPLES: dict[str, dict[str, Callable[[], list[Any]]]] = {
    name: {
        kind: lambda name=name, options=options: arguments(
            name, **{"layouts": MATRICES[:3] if name in MUON else ("odd", "long rows", "channels_last"), **options}
        )
        for kind, options in STEPS.items()
    }
    for name in OPS
}
for name in LAYERWISE:
    squares = torch.tensor([[9.0, 4.0], [0.0, 1.0]], dtype=torch.float64)
    for title, alone in (("squares of others", False), ("squares alone", True)):
        SAMPLES[name][title] = lambda name=name, x=squares, alone=alone: arguments(
            name, layouts=("odd", "1-D"), squares=x, squares_only=alone
        )
for case in CASES.values():  # every twentieth call; without NaN, which opcheck takes to be unequal to itself
    if case.emulated and case.op not in OPS:
        for i in range(0, sum(1 for _ in case.calls()), 20):
            SAMPLES.setdefault(case.op, {})[f"{case.name}, {i}"] = lambda case=case, i=i: map_tensors(
                [*case.calls()][i], Tensor.nan_to_num
            )
# None of these calls of few_bit_forward has a tensor whose strides differ from a contiguous one's.
without_exponential = SAMPLES["few_bit_forward"]["few_bit_forward: without an exponential, float32, 0"]
SAMPLES["few_bit_forward"]["channels_last"] = lambda: [
    torch.linspace(-4, 4, 240).view(2, 8, 5, 3).contiguous(memory_format=torch.channels_last),
    *without_exponential()[1:],
]
