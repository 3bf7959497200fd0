"""torch.nn.Linear that saves a random projection of its input for backward."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..functions.randomized_linear import MIN_TOKENS, check_options, randomized_linear

torch.fx.wrap("randomized_linear")  # one node of a traced graph


class RandomizedLinear(nn.Linear):
    r"""torch.nn.Linear by :func:`randomized_linear`: exact except for the weight's gradient, which is unbiased.

    Args:
        in_features, out_features, bias, device, dtype: as for torch.nn.Linear, and the same state_dict.
        share, projection, generator, min_tokens: as for :func:`randomized_linear`.

    ``train()`` and ``eval()`` make no difference; nothing is saved where no gradient is needed.

    Raises:
        ValueError: share, projection or min_tokens out of range.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        share: float = 0.2,
        projection: str = "rows",
        generator: torch.Generator | None = None,
        min_tokens: int = MIN_TOKENS,
    ) -> None:
        check_options(share, projection, min_tokens)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.share = share
        self.projection = projection
        self.generator = generator
        self.min_tokens = min_tokens

    def forward(self, x: Tensor) -> Tensor:
        return randomized_linear(
            x,
            self.weight,
            self.bias,
            share=self.share,
            projection=self.projection,
            generator=self.generator,
            min_tokens=self.min_tokens,
        )

    @property
    def qconfig(self) -> NoReturn:
        """torch.ao.quantization reads this of every module, and would skip a subclass of Linear silently.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "torch.ao.quantization and torch.jit know torch.nn.Linear and not memkern.nn.RandomizedLinear: call "
            "memkern.restore(model) before them"
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, share={self.share}, projection={self.projection!r}"


class RandomizedConv1D(nn.Module):
    """transformers' Conv1D, a linear layer whose weight is (in, out), by :func:`randomized_linear`.

    ``memkern.compress`` puts the subclass of :mod:`memkern.nn.conv1d` in its place.
    """

    weight: Tensor
    bias: Tensor
    nx: int
    nf: int

    def __init__(
        self,
        *,
        share: float = 0.2,
        projection: str = "rows",
        generator: torch.Generator | None = None,
        min_tokens: int = MIN_TOKENS,
    ) -> None:
        check_options(share, projection, min_tokens)
        nn.Module.__init__(self)  # not Conv1D's __init__, which makes a weight
        self.share = share
        self.projection = projection
        self.generator = generator
        self.min_tokens = min_tokens

    def forward(self, x: Tensor) -> Tensor:
        return randomized_linear(
            x,
            self.weight.t(),
            self.bias,
            share=self.share,
            projection=self.projection,
            generator=self.generator,
            min_tokens=self.min_tokens,
        )

    def extra_repr(self) -> str:
        return f"nf={self.nf}, nx={self.nx}, share={self.share}, projection={self.projection!r}"
