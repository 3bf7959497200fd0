"""A model with its loss: the sum of the cross-entropies of a batch's targets, in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import functional
from ..nn.loss import with_weights
from ..options import OptionError
from .data import IGNORED
from .model import GPT


def cross_entropies(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of the targets' cross-entropies, in nats."""
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")


class Objective(nn.Module):
    """forward(inputs, targets): the sum of a :class:`~.data.Batch`'s losses. loss_chunk: classes at a time."""

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
            ignore_index=IGNORED,
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
