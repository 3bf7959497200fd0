"""A transformer's block for the tests of this folder: with fused attention, and with attention by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Causal attention and an MLP with GELU, each after a layer norm; dropout after the MLP alone."""

    def __init__(self, width: int = 64, head: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head, self.dropout = head, dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), self.dropout, self.training)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class ByHand(Block):
    """Attention as a softmax between two products, whose probabilities autograd saves."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-1, -2) / 8, -1) @ v  # about the root of the head's size
