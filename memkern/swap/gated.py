"""Finds gated units whose gate and up come out of one linear layer, and says what ``compress`` makes of them.

torch saves the layer's output, silu(gate) and the product. memkern.functional.swiglu and geglu save the layer's output
alone. A few-bit activation would add its codes and free nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from .. import functional as F
from . import match
from .class_swap import ORIGINAL, original_class
from .proof import is_as_defined, is_called_plainly, is_gate, is_gated_mlp

Gate = Callable[[Tensor], Tensor]


def geglu_tanh(gate_up: Tensor) -> Tensor:
    """A function and not a functools.partial, so that it compares equal after unpickling."""
    return F.geglu(gate_up, approximate="tanh")


class GatedMLP(nn.Module):
    """Replaces a Phi-3 MLP: ``down_proj(gate(gate_up_proj(x)))``; children and parameters stay."""

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


_GATES: dict[str, Gate] = {"silu": F.swiglu, "gelu": F.geglu, "gelu_tanh": geglu_tanh}


def _gate_of(activation: nn.Module) -> Gate | None:
    cls = original_class(activation)
    if not is_called_plainly(activation):  # hooks would never run
        return None
    if cls in (nn.SiLU, nn.GELU) and not is_as_defined(cls):
        return None
    if cls is nn.SiLU:
        return F.swiglu
    if cls is nn.GELU:
        return geglu_tanh if vars(activation)["approximate"] == "tanh" else F.geglu
    return _GATES.get(match.kind_of(cls, activation) or "")


def find_gated_unit(cls: type[nn.Module], module: nn.Module) -> Unit | None:
    """The replacement of a gated unit whose class is or was ``cls``; None where its graph is another.

    Nothing about the module is changed, and it is not run.
    """
    children = dict(module.named_children())
    act = next((name for name in ("activation_fn", "act_fn") if name in children), None)
    gate = None if act is None else _gate_of(children[act])
    if act is None or gate is None:
        return None
    if is_gate(cls, module, "_apply_gate", act) and _is_own_gate(module):  # Mixtral's experts and their kin
        return Unit(cls, {"_apply_gate": gate}, children[act], None)
    up, down = children.get("gate_up_proj"), children.get("down_proj")
    if not (isinstance(up, nn.Linear) and isinstance(down, nn.Linear)) or len(children) != 3:
        return None
    if not is_gated_mlp(cls, module, act):
        return None
    return Unit(GatedMLP, {"gate": gate}, children[act], (down.in_features, "down_proj"))


def _is_own_gate(module: nn.Module) -> bool:
    """Whether the instance has the method of its class, or what an earlier call of compress has set."""
    return "_apply_gate" not in vars(module) or (original_class(module) is type(module) and ORIGINAL in vars(module))
