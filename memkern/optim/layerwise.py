"""What LAMB and LARS share: a trust ratio for each layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..quant.layout import EVERY_ROW, layer_count
from .base import BlockwiseOptimizer


class LayerwiseOptimizer(BlockwiseOptimizer):
    """An optimizer whose steps are scaled by a trust ratio per layer; the last step's are in the state."""

    def trust_ratios(self) -> dict[str, Tensor]:
        """The trust ratios of the last step, for logging: the state's own tensors, which the next step overwrites.

        Returns:
            For each parameter that has stepped, under its name (where the optimizer was given named parameters) or
            its number, a float32 tensor of shape (layers,) on its device. 1 where a layer was not adapted.
        """
        found, number = {}, 0
        for group in self.param_groups:
            for p, name in zip(
                group["params"], group.get("param_names", [None] * len(group["params"])), strict=True
            ):
                if p in self.state:
                    found[str(number) if name is None else name] = self.state[p]["trust_ratio"]
                number += 1
        return found

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        layers = group["layers"]
        if layers != "rows" and (not isinstance(layers, int) or isinstance(layers, bool) or layers < 1):
            raise ValueError(f"layers must be a number of layers, 1 or more, or 'rows', got {layers!r}")
        for item in group["params"]:
            p = item[1] if isinstance(item, tuple) else item
            if isinstance(p, Tensor) and p.layout == torch.strided:
                _layer_count(p, group)

    def _state_keys(self) -> list[str]:
        return [*super()._state_keys(), "trust_ratio"]

    def _init_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        ratios = torch.ones(_layer_count(p, group), dtype=torch.float32, device=p.device)
        return {**super()._init_state(p, group), "trust_ratio": ratios}

    def _hyperparameter(self, group: dict[str, Any], name: str) -> float:
        return layers_number(group) if name == "layers" else super()._hyperparameter(group, name)

    def _check_state(self, i: Any, state: dict[str, Any], p: Tensor, group: dict[str, Any]) -> None:
        super()._check_state(i, state, p, group)
        ratios, count = state["trust_ratio"], _layer_count(p, group)
        if ratios.dtype != torch.float32 or tuple(ratios.shape) != (count,):
            raise ValueError(
                f"the state of parameter {i} does not fit {type(self).__name__}: trust_ratio must be float32 of "
                f"shape ({count},), got {ratios.dtype} of shape {tuple(ratios.shape)}"
            )


def _layer_count(p: Tensor, group: dict[str, Any]) -> int:
    return layer_count(p, group["block_size"], layers_number(group))


def layers_number(group: dict[str, Any]) -> int:
    """The group's ``layers`` as the ops take it."""
    return EVERY_ROW if group["layers"] == "rows" else group["layers"]
