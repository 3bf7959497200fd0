"""The base class of LAMB and LARS, which scale the step of each layer by its trust ratio."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import replaced, step_errors
from .base import BlockwiseOptimizer
from .state import count_layers, layers_for_ops
from .trust_bounds import check_trust_bounds


class LayerwiseOptimizer(BlockwiseOptimizer):
    """An optimizer that scales each layer's step by a trust ratio. The state has the last step's ratios."""

    storage_options = (*BlockwiseOptimizer.storage_options, "layers", "trust_bounds")

    def trust_ratios(self) -> dict[str, Tensor]:
        """The trust ratios of the last step, for logging: the state's own tensors, which the next step overwrites.

        Returns:
            For each parameter that has stepped, under its name (where the optimizer was given named parameters) or
            its number, a float32 tensor of shape (layers,) on its device. 1 where a layer was not adapted.
        """
        states = replaced.states_of(self)
        params = [p for group in self.param_groups for p in group["params"]]
        return {
            str(number) if name is None else name: states[p]["trust_ratio"]
            for number, (p, name) in enumerate(zip(params, step_errors.names_of(self.param_groups), strict=True))
            if p in states
        }

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_trust_bounds(group.get("trust_bounds"))
        layers = group["layers"]
        if layers != "rows" and (not isinstance(layers, int) or isinstance(layers, bool) or layers < 1):
            raise ValueError(f"layers must be a number of layers, 1 or more, or 'rows', got {layers!r}")

    def _check_shape(self, p: Tensor, group: dict[str, Any]) -> None:
        count_layers(p, group)

    def _needs_norms(self, max_grad_norm: float | None) -> str | None:
        return type(self).__name__

    def _hyperparameter(self, group: dict[str, Any], name: str) -> float:
        return layers_for_ops(group) if name == "layers" else super()._hyperparameter(group, name)
