"""What LAMB and LARS share: a trust ratio for each layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..quant.layout import EVERY_ROW, layer_count
from ..schemas import StepOp
from .base import BlockwiseOptimizer
from .loading import does_not_fit
from .storage import dense_like, moment_dtype


class LayerwiseOptimizer(BlockwiseOptimizer):
    """An optimizer whose steps are scaled by a trust ratio per layer; the last step's are in the state."""

    storage_options = (*BlockwiseOptimizer.storage_options, "layers")

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

    def _needs_norms(self, max_grad_norm: float | None) -> str | None:
        return type(self).__name__

    def _state_keys(self, op: StepOp | None = None) -> list[str]:
        return [*super()._state_keys(op), "trust_ratio"]

    @torch.inference_mode(False)
    def _init_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {**super()._init_state(p, group), "trust_ratio": _ones(p, group)}

    @torch.inference_mode(False)
    def _restore(self, p: Tensor, group: dict[str, Any]) -> bool:
        changed = super()._restore(p, group)
        if self.state.get(p) and len(self.state[p]["trust_ratio"]) != _layer_count(p, group):
            self.state[p]["trust_ratio"] = _ones(p, group)
            return True
        return changed

    def _hyperparameter(self, group: dict[str, Any], name: str) -> float:
        return layers_number(group) if name == "layers" else super()._hyperparameter(group, name)

    def _check_state(self, i: Any, state: dict[str, Any], p: Tensor, group: dict[str, Any]) -> None:
        super()._check_state(i, state, p, group)
        ratios, count = state["trust_ratio"], _layer_count(p, group)
        if ratios.dtype not in (torch.float32, torch.float64) or tuple(ratios.shape) != (count,):
            does_not_fit(
                self,
                i,
                f"trust_ratio must be float32 of shape ({count},), got {ratios.dtype} of shape {tuple(ratios.shape)}",
            )


def _ones(p: Tensor, group: dict[str, Any]) -> Tensor:
    return torch.ones(_layer_count(p, group), dtype=moment_dtype(p), device=p.device)


def _layer_count(p: Tensor, group: dict[str, Any]) -> int:
    return layer_count(dense_like(p), group["block_size"], layers_number(group))


def layers_number(group: dict[str, Any]) -> int:
    """The group's ``layers`` as the ops take it."""
    return EVERY_ROW if group["layers"] == "rows" else group["layers"]
