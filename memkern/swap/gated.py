"""Finds gated units whose gate and up come out of one linear layer, and says what ``compress`` makes of them.

torch saves the layer's output, silu(gate) and the product. memkern.functional.swiglu and geglu save the layer's output
alone. A few-bit activation would add its codes and free nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional as F
from .class_swap import original_class

Gate = Callable[[Tensor], Tensor]


def geglu_tanh(gate_up: Tensor) -> Tensor:
    """A function and not a functools.partial, so that it compares equal after unpickling."""
    return F.geglu(gate_up, approximate="tanh")


class GatedMLP(nn.Module):
    """What a Phi-3 MLP becomes: ``down_proj(gate(gate_up_proj(x)))``; children and parameters stay."""

    gate: Gate
    gate_up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate(self.gate_up_proj(x)))


class Unit(NamedTuple):
    """cls, attributes: the module's new class and attributes. activation: the child that is no longer called."""

    cls: type[nn.Module]
    attributes: dict[str, Any]
    activation: nn.Module
    width: tuple[int, str] | None


_APPROXIMATE = {
    "NewGELUActivation": "tanh",
    "FastGELUActivation": "tanh",
    "AccurateGELUActivation": "tanh",
    "GELUTanh": "tanh",
    "PytorchGELUTanh": "tanh",
    "GELUActivation": "none",
}


def _gate_of(activation: nn.Module) -> Gate | None:
    cls = original_class(activation)
    if cls is nn.SiLU or cls.__name__ == "SiLUActivation":
        return F.swiglu
    if cls is nn.GELU:
        approximate = vars(activation)["approximate"]
    elif cls.__name__ in _APPROXIMATE:
        approximate = _APPROXIMATE[cls.__name__]
    else:
        return None
    return geglu_tanh if approximate == "tanh" else F.geglu


def _activation_of(module: nn.Module) -> nn.Module | None:
    children = dict(module.named_children())
    return children.get("activation_fn", children.get("act_fn"))


def _computes_the_same(cls: type[nn.Module], module: Any, stand_in: Any) -> bool:
    """Whether the module's own forward gives what GatedMLP's gives, on two rows of numbers."""
    up = stand_in.gate_up_proj
    if up.weight.device.type == "meta":
        return False
    width, options = up.in_features, {"dtype": up.weight.dtype, "device": up.weight.device}
    x = torch.linspace(-1, 1, 2 * width, **options).view(1, 2, width)
    try:
        with torch.no_grad():
            theirs, ours = cls.forward(module, x), GatedMLP.forward(stand_in, x)
            return torch.allclose(theirs, ours, rtol=1e-2, atol=1e-5)
    except (
        Exception
    ):  # a forward of unknown code may raise anything: then it is not the unit that its children suggest
        return False


def find_gated_unit(cls: type[nn.Module], module: nn.Module) -> Unit | None:
    """What a gated unit, whose class is or was ``cls``, becomes; None where the module is none.

    A module with a Phi-3 MLP's children is run once without gradients, to see that it computes what they suggest.
    Nothing about it is changed.
    """
    activation = _activation_of(module)
    gate = None if activation is None else _gate_of(activation)
    if activation is None or gate is None:
        return None
    experts = getattr(cls, "_apply_gate", None)
    if getattr(experts, "__module__", "") == "transformers.integrations.moe":  # Mixtral's and its kin
        return Unit(cls, {"_apply_gate": gate}, activation, None)
    children = dict(module.named_children())
    up, down = children.get("gate_up_proj"), children.get("down_proj")
    if not (isinstance(up, nn.Linear) and isinstance(down, nn.Linear)) or len(children) != 3:
        return None
    if not _computes_the_same(cls, module, SimpleNamespace(gate=gate, gate_up_proj=up, down_proj=down)):
        return None
    return Unit(GatedMLP, {"gate": gate}, activation, (down.in_features, "down_proj"))
