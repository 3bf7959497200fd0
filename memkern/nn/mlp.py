"""Linear, GELU, Linear as one module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import functional as F
from ..functions.mlp import check_mlp


class MLP(nn.Module):
    """``fc2(gelu(fc1(x)))``; ``keep``, what is saved for backward: see :func:`memkern.functional.mlp`.

    fc1, fc2: torch.nn.Linear, whose forward hooks do not run. out_features: default in_features.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = True,
        approximate: str = "none",
        *,
        bits: int = 3,
        keep: str = "codes",
        **factory: Any,
    ) -> None:
        super().__init__()
        check_mlp(approximate, bits, keep)
        self.fc1 = nn.Linear(in_features, hidden_features, bias, **factory)
        self.fc2 = nn.Linear(hidden_features, out_features or in_features, bias, **factory)
        self.approximate, self.bits, self.keep = approximate, bits, keep

    def forward(self, input: Tensor) -> Tensor:
        return F.mlp(
            input,
            self.fc1.weight,
            self.fc1.bias,
            self.fc2.weight,
            self.fc2.bias,
            self.approximate,
            bits=self.bits,
            keep=self.keep,
        )

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}, bits={self.bits}, keep={self.keep!r}"
