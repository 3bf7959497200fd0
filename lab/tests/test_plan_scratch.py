"""scratch_bytes bounds the scratch memory that convolutions allocate, which the planner's fake tensors do not show."""

from typing import Any

import pytest
import torch

from benchmarks.harness import largest_temporary
from memkern.planner.trace import scratch_bytes

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("x", "weight", "stride", "padding", "groups"),  # x and weight: shapes
    [
        ((2, 3, 224, 224), (192, 3, 16, 16), 16, 0, 1),
        ((2, 64, 28, 28), (128, 64, 3, 3), 1, 1, 1),
        ((2, 512, 200), (512, 512, 3), 1, 0, 1),
        ((2, 96, 28, 28), (96, 1, 7, 7), 1, 3, 96),
        ((2, 3, 112, 112), (64, 3, 7, 7), 2, 3, 1),
    ],
    ids=str,
)
def test_a_convolution_allocates_no_more_scratch(
    x: Any, weight: Any, stride: int, padding: int, groups: int, dtype: torch.dtype
) -> None:
    x, weight = torch.ones(x, dtype=dtype), torch.ones(weight, dtype=dtype)
    n = x.dim() - 2
    options = ([stride] * n, [padding] * n, [1] * n, False, [0] * n, groups)  # dilation 1, not transposed
    out = aten.convolution(x, weight, None, *options)
    scratch = largest_temporary(lambda: aten.convolution(x, weight, None, *options), "cpu") - out.nbytes
    assert scratch <= scratch_bytes(aten.convolution.default, (x, weight), out)

    def backward() -> None:
        aten.convolution_backward(out, x, weight, [0], *options, [True, True, False])

    scratch = largest_temporary(backward, "cpu") - x.nbytes - weight.nbytes
    assert scratch <= scratch_bytes(aten.convolution_backward.default, (out, x, weight), None)
