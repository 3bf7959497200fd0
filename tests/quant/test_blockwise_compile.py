"""memkern.quantize_blockwise under torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import memkern


@pytest.mark.parametrize("shapes", [[(4, 256)], [(4, 256), (5, 300), (7, 320)]], ids=["one shape", "changing shapes"])
def test_one_graph(shapes: list[tuple[int, ...]]) -> None:
    def there_and_back(x: Tensor) -> Tensor:
        return memkern.dequantize_blockwise(*memkern.quantize_blockwise(x))

    torch._dynamo.reset()
    compiled = torch.compile(there_and_back, fullgraph=True, backend="eager")
    for shape in shapes:
        x = torch.randn(shape)
        assert torch.equal(compiled(x), there_and_back(x))
