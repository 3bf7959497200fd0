"""Functions of torch that are known to save for one operation: there the user is known while the tensor is packed.

Only a shortcut: the same is found in the graph when the next tensor is packed (undecided.py). It matters where none
follows, and it frees what is coded earlier. Functions are told by their code objects.
"""

from __future__ import annotations

from types import CodeType, FrameType

from torch import Tensor, nn
from torch.nn import functional as F

from .leaves import leaves
from .undecided import ANY, CODED
from .users import operation
from .values import Edge

_PRODUCTS: set[CodeType] = {
    nn.Linear.forward.__code__,
    nn.Conv1d._conv_forward.__code__,
    nn.Conv2d._conv_forward.__code__,
    nn.Conv3d._conv_forward.__code__,
}
_CHECKPOINT = "torch.utils.checkpoint"
_CASTS = ("ToCopyBackward0", "TBackward0")
_FEW = 8  # nodes of one call of a function: casts, views and the operation


def use(frame: FrameType) -> str | None:
    """How what is packed under a Python frame is used, where the frame tells."""
    code = frame.f_code
    if code in _PRODUCTS:
        return CODED
    if frame.f_globals.get("__name__") == _CHECKPOINT:
        return CODED  # the input of a block of a model, which is saved for no node
    if code is F.cross_entropy.__code__:
        return None if frame.f_locals["target"].is_floating_point() else ANY
    return None


def note_weight(frame: FrameType, seq: int) -> None:
    """An embedding saves its indices, and not the weight whose rows they are: it is seen here."""
    if frame.f_code is F.embedding.__code__:
        weight = frame.f_locals["weight"]
        if isinstance(weight, Tensor) and weight.is_leaf:
            leaves.note(weight, seq)


def note_cast(edge: Edge, seq: int) -> None:
    """A parameter of which the running function itself has made a copy, as autocast does, is the one that it uses."""
    name = operation(edge.node)
    if name not in _CASTS:
        return
    last = node = edge.node
    while node is not None and seq - _FEW <= node._sequence_nr() <= seq:
        inner = node.next_functions
        name = operation(node)
        if name not in _CASTS:
            return
        last, node = node, inner[0][0]
    if node is not None and node.name() == "torch::autograd::AccumulateGrad":
        leaves.note(node.variable, last._sequence_nr())
