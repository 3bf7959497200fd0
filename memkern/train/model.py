"""A byte-level GPT (GPT-2's architecture, without dropout) from torch's own modules, and models with their loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import functional
from ..nn.loss import with_weights
from ..planner.fake_step import has_linear_head
from ..planner.models import ModuleWithInputs
from ..techniques.options import OptionError

VOCABULARY = 256


class Block(nn.Module):
    """(B, T, C) -> (B, T, C): x + attention(norm1(x)), which is causal, then x + down(act(up(norm2(x)))) through 4C
    hidden units and the tanh form of GELU. C is divisible by the number of heads."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU(approximate="tanh")
        self.down = nn.Linear(4 * width, width)

    def attention(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, C))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.act(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes (B, T) int64 -> logits (B, T, 256), T at most seq_len; the head is the transposed embedding.

    Parameters: 12 layers width^2 + (256 + seq_len) width, and 13 layers width + 2 width in biases and norms.
    """

    def __init__(self, layers: int, heads: int, width: int, seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.empty(seq_len, width))
        self.blocks = nn.ModuleList(Block(heads, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """GPT-2's initial values: N(0, 0.02^2), divided by sqrt(2 layers) where a layer adds to the residual stream."""
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * len(self.blocks)) ** 0.5)
            elif parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def features(self, tokens: Tensor) -> Tensor:
        """The input of the head's matrix product: (B, T, C)."""
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.features(tokens), self.embedding.weight)


def cross_entropies(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of the targets' cross-entropies, in nats."""
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="sum")


class Objective(nn.Module):
    """forward(inputs, targets): the sum of a batch's losses, of a GPT or a causal language model of transformers.

    loss_chunk: classes whose logits are in memory at a time. Raises OptionError where it is given and the model's
    logits are not its head of its last hidden states (some models scale or cap them).
    """

    def __init__(self, model: Any, loss_chunk: int | None = None) -> None:
        super().__init__()
        self.model: Any = model
        self.loss_chunk = loss_chunk
        self.is_gpt = isinstance(model, GPT)
        self.options = {} if self.is_gpt else {"use_cache": False}
        name, inputs = type(model).__name__, {"input_ids": torch.zeros(1, 2, dtype=torch.long), **self.options}
        if loss_chunk is not None and not (self.is_gpt or has_linear_head(ModuleWithInputs(name, model, inputs))):
            raise OptionError("loss_chunk", f"given with {name}, whose logits are no linear layer's")

    def logits(self, inputs: Tensor) -> Tensor:
        output = self.model(inputs, **self.options)
        return output if self.is_gpt else output.logits

    def features(self, inputs: Tensor) -> Tensor:
        """The input of the head: (B, T, C)."""
        if self.is_gpt:
            return self.model.features(inputs)
        return self.model.base_model(inputs, **self.options).last_hidden_state

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.loss_chunk is None:
            return cross_entropies(self.logits(inputs), targets)
        head = self.model.embedding if self.is_gpt else self.model.get_output_embeddings()
        options: dict[str, Any] = {"reduction": "sum", "chunk_size": self.loss_chunk}

        def loss(features: Tensor, targets: Tensor) -> Tensor:
            bias = getattr(head, "bias", None)
            return functional.linear_cross_entropy(features, head.weight, targets, linear_bias=bias, **options)

        return with_weights(head, loss, self.features(inputs), targets)
