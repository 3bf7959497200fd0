"""A byte-level GPT (GPT-2's architecture, without dropout) from torch's own modules, and models with their loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import functional
from ..nn.loss import with_weights
from ..techniques.options import OptionError

VOCABULARY = 256


class Attention(nn.Module):
    """Causal self-attention: (B, T, C) -> (B, T, C), C divisible by the number of heads."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """(B, T, C) -> (B, T, C) through 4C hidden units and the tanh form of GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU(approximate="tanh")
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(heads, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Bytes (B, T) int64 -> logits (B, T, 256), T at most seq_len; the head is the transposed embedding.

    Parameters: 12 layers width^2 + (256 + seq_len) width, and 13 layers width + 2 width in biases and norms.
    """

    def __init__(self, *, layers: int, heads: int, width: int, seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.empty(seq_len, width))
        self.blocks = nn.ModuleList(Block(heads, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """GPT-2's: N(0, 0.02^2), divided by sqrt(2 layers) where a layer adds to the residual stream."""
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
    """forward(inputs, targets): the sum of a batch's losses. loss_chunk: classes at a time."""

    def __init__(self, model: nn.Module, loss_chunk: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.loss_chunk = loss_chunk

    def chunked(self, features: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        return functional.linear_cross_entropy(
            features,
            weight,
            targets,
            linear_bias=bias,
            reduction="sum",
            chunk_size=self.loss_chunk,
        )


class ByteModel(Objective):
    """The objective of the byte-level GPT."""

    model: GPT

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.loss_chunk is None:
            return cross_entropies(self.model(inputs), targets)
        return self.chunked(self.model.features(inputs), self.model.embedding.weight, None, targets)


class LanguageModel(Objective):
    """The objective of a causal language model of transformers.

    Raises OptionError where the loss is asked for in chunks and the model's logits are not its head of its last
    hidden states (some models scale or cap them).
    """

    def __init__(self, model: Any, loss_chunk: int | None = None) -> None:
        super().__init__(model, loss_chunk)
        if loss_chunk is not None and not self._head_is_linear():
            raise OptionError("loss_chunk", f"given with {type(model).__name__}, whose logits are no linear layer's")

    @torch.no_grad()
    def _head_is_linear(self) -> bool:
        model: Any = self.model
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or model.base_model is model:
            return False
        training = model.training
        model.eval()
        inputs = torch.zeros(1, 2, dtype=torch.long, device=head.weight.device)
        logits, features = model(input_ids=inputs, use_cache=False).logits, self.features(inputs)
        model.train(training)
        return torch.equal(logits, head(features))

    def features(self, inputs: Tensor) -> Tensor:
        model: Any = self.model
        return model.base_model(input_ids=inputs, use_cache=False).last_hidden_state

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        model: Any = self.model
        if self.loss_chunk is None:
            return cross_entropies(model(input_ids=inputs, use_cache=False).logits, targets)
        head = model.get_output_embeddings()
        return with_weights(
            head, lambda x, targets: self.chunked(x, head.weight, head.bias, targets), self.features(inputs), targets
        )
