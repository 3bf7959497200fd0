"""Python functions of torch that run one known operation: while one of them packs a tensor, the user is known.

A shortcut: the next packed tensor would show the same (undecided.py). It matters where no tensor follows, and it frees
tensors earlier. Functions are recognized by their code objects.
"""

from __future__ import annotations

from types import CodeType, FrameType

from torch import Tensor, nn
from torch.nn import functional as F

from .built import note_built
from .edge import Edge
from .leaves import leaves
from .needs import Use
from .saved_value import Computed, Leaf, Value
from .storage import is_plain
from .users import is_leaf, operation

PRODUCTS: set[CodeType] = {
    nn.Linear.forward.__code__,
    nn.Conv1d._conv_forward.__code__,
    nn.Conv2d._conv_forward.__code__,
    nn.Conv3d._conv_forward.__code__,
}
_CHECKPOINT = "torch.utils.checkpoint"
_CONV1D = "transformers.pytorch_utils"  # GPT-2's linear layers
_CASTS = ("ToCopyBackward0", "TBackward0")
_NODES_OF_A_CALL = 8  # at most: casts, views and the operation


def of(frame: FrameType) -> FrameType:
    """The function that runs an operation: torch's function modes, as a default device is one, lie in between."""
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def use(frame: FrameType) -> Use | None:
    """How the tensor that is packed under a Python frame is used; None if the frame does not tell."""
    code = frame.f_code
    if code in PRODUCTS:
        return Use.CODED
    if is_checkpoint(frame):
        return Use.EXACT  # a checkpoint's input: what it recomputes from another one is another function
    if code is F.cross_entropy.__code__:
        soft = frame.f_locals["target"].is_floating_point() or frame.f_locals["label_smoothing"] > 0
        return None if soft else Use.SHAPE
    return None


def note_weight(frame: FrameType) -> None:
    """Notes the version of an embedding's weight, which the embedding itself does not save."""
    if frame.f_code is F.embedding.__code__:
        weight = frame.f_locals["weight"]
        if isinstance(weight, Tensor) and weight.is_leaf:
            leaves.note(weight)


def is_checkpoint(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == _CHECKPOINT


def is_conv1d(frame: FrameType) -> bool:
    return frame.f_code.co_name == "forward" and frame.f_globals.get("__name__") == _CONV1D


def frozen_weight(frame: FrameType, x: Tensor) -> Value | None:
    """A frozen layer's weight, cast again in the backward pass, where x is the cast that autocast has made of it.

    x can be nothing else: of a product with a frozen weight, torch saves the weight alone.
    """
    if frame.f_code is nn.Linear.forward.__code__:
        transpose = True
    elif is_conv1d(frame):
        transpose = False
    else:
        return None
    weight = vars(frame.f_locals["self"])["_parameters"].get("weight")
    if weight is None or weight.requires_grad or weight.dtype == x.dtype or not is_plain(weight):
        return None
    seen = weight.t() if transpose and weight.dim() == 2 else weight
    if x.device.type not in ("cpu", "cuda") or x.shape != seen.shape or x.stride() != seen.stride():
        return None
    dtype = x.dtype
    function = (lambda w: w.to(dtype).t()) if transpose else (lambda w: w.to(dtype))
    return Computed(function, [Leaf(weight).as_it_is()], dtype, dtype, 0)


def note_cast(frame: FrameType, edge: Edge, seq: int) -> None:
    """Notes the version of a parameter or argument whose cast a linear layer or convolution uses, as under autocast.

    The layer was given the leaf itself, so that the cast is autocast's: of this thread, as autocast's cache is, and its
    sequence number tells whether it has just been made.
    """
    if operation(edge.node) not in _CASTS or not (frame.f_code in PRODUCTS or is_conv1d(frame)):
        return
    last = node = edge.node
    while node is not None and seq - _NODES_OF_A_CALL <= node._sequence_nr() <= seq:
        inner = node.next_functions
        name = operation(node)
        if name not in _CASTS:
            return
        last, node = node, inner[0][0]
    if node is None or not is_leaf(node):
        return
    given = (*vars(frame.f_locals["self"])["_parameters"].values(), *frame.f_locals.values())
    if any(node.variable is each for each in given):
        leaves.note(node.variable)
        note_built(last)
