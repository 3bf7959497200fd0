"""A linear layer and the cross entropy of its outputs as one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..functions.cross_entropy import check_options, linear_cross_entropy
from .linear import RandomizedLinear

torch.fx.wrap("linear_cross_entropy")  # one node of a traced graph


def with_weights(module: nn.Module, function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """Calls ``function(*args)``, which reads a module's weights.

    ``fully_shard`` gathers them only while the module is called, so there the function is called as its forward.
    """
    if not hasattr(module, "set_requires_gradient_sync"):
        return function(*args)
    own_forward = vars(module).get("forward")
    module.forward = function
    try:
        return module(*args)
    finally:
        if own_forward is None:
            del module.forward
        else:
            module.forward = own_forward


def is_plain_linear(module: Any) -> bool:
    """Whether a module is a linear layer whose output is computed from its weight and bias alone."""
    return isinstance(module, nn.Linear) and type(module).forward in (nn.Linear.forward, RandomizedLinear.forward)


class LinearCrossEntropy(nn.Module):
    r"""``cross_entropy(linear(input), target)`` without more than a chunk of the logits: :func:`linear_cross_entropy`.

    Args:
        in_features, num_classes, bias, device, dtype: of :attr:`linear`, a torch.nn.Linear; bias is by default False.
        weight, reduction, ignore_index, label_smoothing, chunk_size: as for :func:`linear_cross_entropy`.

    Tied weights: ``loss.linear.weight = embedding.weight``. For a model that has its last layer already,
    :meth:`from_linear` takes that layer; call the model up to it::

        loss_fn = memkern.nn.LinearCrossEntropy.from_linear(model.lm_head)
        hidden = model.transformer(tokens, use_cache=False).last_hidden_state
        loss = loss_fn(hidden[:, :-1], tokens[:, 1:])

    ``state_dict``: ``linear.weight``, ``linear.bias`` and, where given, ``weight``.

    Raises:
        ValueError: an option out of range.
    """

    linear: nn.Linear
    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        weight: Tensor | None = None,
        reduction: str = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        chunk_size: int | None = None,
    ) -> None:
        check_options(reduction, label_smoothing, chunk_size)
        super().__init__()
        self.linear = nn.Linear(in_features, num_classes, bias, device, dtype)
        self.register_buffer("weight", weight)
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.chunk_size = chunk_size

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> LinearCrossEntropy:
        """A loss on a layer that exists: the same module, and so the same parameters.

        Raises:
            TypeError: linear is no torch.nn.Linear, or a subclass whose forward may do more, as an adapter's.
        """
        if not is_plain_linear(linear):
            given = f"{type(linear).__module__}.{type(linear).__qualname__}"
            raise TypeError(f"linear must be a torch.nn.Linear, or a subclass with its forward, got {given}")
        loss = cls(linear.in_features, linear.out_features, linear.bias is not None, "meta", **options)
        loss.linear = linear
        return loss

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return with_weights(self.linear, self._loss, input, target)

    def _loss(self, input: Tensor, target: Tensor) -> Tensor:
        return linear_cross_entropy(
            input,
            self.linear.weight,
            target,
            linear_bias=self.linear.bias,
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            chunk_size=self.chunk_size,
        )

    def extra_repr(self) -> str:
        return (
            f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, "
            f"chunk_size={self.chunk_size}"
        )
