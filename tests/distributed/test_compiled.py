"""Under fully_shard and DDP, compiled blocks that save 8-bit codes have gradients within 2 % of eager mode's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.support.partitioned import backend
from tests.support.ranks import Ranks

WIDTH = 64


class RMSNorm(nn.Module):
    """RMSNorm as transformers writes it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class Block(nn.Module):
    """RMSNorm, causal attention with heads of 16, RMSNorm, SwiGLU."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, 16)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def gradients(wrapper: str, bits: Any) -> dict[str, Tensor]:
    """The gradients of one forward pass (DDP) or of two (fully_shard).

    bits: those of :func:`backend`, "torch" for torch's own partitioner, None for eager mode.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, x = nn.Sequential(Block(), Block()), torch.randn(2, 128, WIDTH)
    compiler = backend(None if bits == "torch" else bits)
    if wrapper == "fully_shard":
        for block in net:
            if bits is not None:
                block.compile(backend=compiler)
            fully_shard(block)
        fully_shard(net)
        model: Any = net
    else:
        model = DistributedDataParallel(net)
        if bits is not None:
            model = torch.compile(model, backend=compiler)
    losses = [model(y).square().mean() for y in ((x, 2 * x) if wrapper == "fully_shard" else (x,))]
    for loss in losses:
        loss.backward()
    grads = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for name, g in grads.items()}


def error(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Relative error of all gradients together."""
    assert a.keys() == b.keys()
    squares = sum((a[name].double() - b[name].double()).square().sum() for name in b)
    return float((squares / sum(g.double().square().sum() for g in b.values())) ** 0.5)


def errors(wrapper: str) -> dict[Any, float]:
    """Errors of compiled gradients against eager mode's, by what is saved for the backward pass."""
    expected = gradients(wrapper, None)
    return {bits: error(gradients(wrapper, bits), expected) for bits in ("torch", "exact", 8)}


@pytest.mark.full
@pytest.mark.parametrize("wrapper", ["fully_shard", "DDP"])
def test_gradients_are_near_those_of_eager_mode(ranks: Ranks, wrapper: str) -> None:
    for rank_errors in ranks(2, errors, wrapper):
        assert rank_errors["exact"] <= max(1e-5, 2 * rank_errors["torch"])  # sums have another order
        assert 1e-5 < rank_errors[8] < 0.02  # above 1e-5: something was saved in codes
