"""The hooks in C++ (memkern._saved), and what they ask of Python: the tables, and all rules that are rare.

csrc/saved has the common rules of this package, under the same names. Importing this loads the extension;
:mod:`memkern.saved.extension` decides whether it may be.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from .. import _ops, _saved, backend
from ..quant.codec import CODECS as QUANT_CODECS
from ..quant.codec import LARGEST_MARKED_SCALE
from . import (
    attention,
    bases,
    bounded,
    callers,
    codecs,
    data_needs,
    derive,
    offload,
    packed,
    peek,
    rules,
    saved_value,
    storage,
    store,
    users,
)
from .codecs import Codec
from .edge import Edge
from .link import Offload
from .needs import Need
from .session import Session, close_interrupted  # noqa: F401 - C++ calls the second


class NativeSession(_saved.Session, Session):
    """A session whose hooks are those of C++."""

    def __init__(
        self,
        bits: int | str | None,
        module: nn.Module | None = None,
        frame: FrameType | None = None,
        offload: Offload | None = None,
    ) -> None:
        Session.__init__(self, bits, module, frame, offload)
        self.begin(bits != 8)

    def enter(self) -> None:
        super().enter()
        self.send(self.store.outer, self.store.offload)

    def note_leaves(self) -> None:
        _saved.note_all(self.module)


# ---- the tables


def facts(name: str) -> dict[str, Any]:
    """What the tables say of an operation."""
    maker = rules.CODEC_BY_MAKER.get(name, "")
    return {
        "rule": rules.RULES.get(name),
        "user": users.USERS.get(name, users.UNKNOWN_USER),
        "codec": bases.CODECS.get(maker),
        "tail": data_needs.TAILS.get(name),
        "is_seen_through": name in bases.SEEN_THROUGH,
        "is_copy": name in bases.COPIES,
        "is_mean": name in users.MEANS,
        "is_picking": name in users.PICKING,
        "is_log_softmax": name == users.LOG_SOFTMAX,
        "is_attention": name in attention.FORWARD,
        "bears_coarse_result": name in data_needs.BOUNDED_RESULTS,
        "has_mask": name in data_needs.MASKED,
        "has_jumps": name in data_needs.JUMPS,
        "is_glu": name == "memkern.Glu",
        "asks_python": name == "GluBackward0" or (name in data_needs.NORMS and name != "NativeLayerNormBackward0"),
    }


def constants() -> dict[str, Any]:
    return {
        "power": QUANT_CODECS["power"],
        "block_size": codecs.BLOCK_SIZE,
        "smallest_block": codecs.SMALLEST_BLOCK,
        "sample": attention.SAMPLE,
        "largest_scale": LARGEST_MARKED_SCALE,
        "largest_share": codecs.LARGEST_SHARE,
        "largest_mean": data_needs.LARGEST_MEAN,
        "largest_deviations": data_needs.LARGEST,
        "largest_spread": data_needs.LARGEST_SPREAD,
        "largest_score_deviation": attention.LARGEST_SCORE_DEVIATION,
        "largest_sureness": attention.LARGEST_SURENESS,
    }


def most_exponent() -> int:
    return users.MOST_EXPONENT


def own_function(node: Any) -> str:
    """The name of a Python function's operation."""
    return users.operation(node)


def kind_of_codec(codec: Codec) -> str:
    if codec.name in (codecs.POWER.name, codecs.UNSIGNED.name):
        return "signed" if codec.name == codecs.POWER.name else "unsigned"
    return "logarithm" if codec is bounded.LOGARITHM else "other"


def constant_codec() -> Codec:
    return codecs.CONSTANT


def parameter_class() -> type:
    return nn.Parameter


def fake_class() -> type:
    return FakeTensor


def engine_code() -> Any:
    return packed.ENGINE


def forward_ad_level() -> dict[str, Any]:
    """The variables of a module, for the level of forward-mode differentiation."""
    return vars(forward_ad)


def peek_local() -> Any:
    return peek.local


# ---- of tensors and memory

finer = saved_value.finer
spared = saved_value.spared
is_managed = storage.is_managed
is_parameter = offload.is_parameter
put = offload.put
check_present = storage.check_present


def raise_changed(what: str, now: int, then: int, x: Tensor) -> None:
    raise RuntimeError(storage.CHANGED.format(what=what, shape=tuple(x.shape), now=now, then=then))


def check_place(leaf: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    storage.check_place(leaf, (tuple(shape), dtype, device))


def raise_used() -> None:
    """Raises torch's error for a second backward pass."""
    packed.USED.tensor(saved_value.Value.tensor)  # type: ignore[arg-type]


def direct(value: saved_value.Value) -> Tensor:
    """The tensor of a value and of the values that it is computed from, without counting uses."""
    return value.tensor(direct)


# ---- codes


def settings() -> tuple[bool, int]:
    """What may change from block to block: whether the ops of a CPU are the compiled ones, and MIN_NUMEL."""
    return backend.select(torch.device("cpu")) == "cpu", store.MIN_NUMEL


def quantize(x: Tensor, signed: bool, block_size: int) -> tuple[Tensor, Tensor]:
    """On a device."""
    return _ops.quantize_blockwise(x, "power", signed, block_size, None, mark_nonfinite=True)


def dequantize(codes: Tensor, scale: Tensor, block_size: int, dtype: torch.dtype) -> Tensor:
    return _ops.dequantize_blockwise(codes, scale, "power", block_size, dtype)


def decode(
    codec: Codec,
    data: Sequence[Tensor],
    shape: Sequence[int],
    stride: Sequence[int],
    own: torch.dtype,
    dtype: torch.dtype,
) -> Tensor:
    """own: the dtype of what was encoded."""
    return codec.decode(data, codecs.Layout(torch.Size(shape), tuple(stride), own), dtype)


is_coarse = codecs.is_coarse
in_blocks_of = codecs.in_blocks_of
normalized = codecs.normalized


# ---- rare rules


def make(rule_make: Any, node: Any, nr: int) -> Any:
    """The function that computes an edge anew."""
    return derive.made(rule_make, Edge(node, nr))


def need_of(node: Any, x: Tensor, waiting: Any) -> tuple[Need, data_needs.Normalization | None]:
    return data_needs.need_of(node, x, waiting)


mask_of = data_needs.mask_of
run_again = attention.run_again
sides = store.sides_of


# ---- callers

PRODUCT, TELLS, EMBEDDING, FREEZES, TORCH_FUNCTION = 1, 2, 4, 8, 16


def caller(frame: FrameType) -> int:
    """What is known of the Python function that runs in a frame."""
    code = frame.f_code
    is_layer = code is nn.Linear.forward.__code__ or callers.is_conv1d(frame)
    flags = {
        PRODUCT: code in callers.PRODUCTS,
        TELLS: callers.is_checkpoint(frame) or code is F.cross_entropy.__code__,
        EMBEDDING: code is F.embedding.__code__,
        FREEZES: is_layer,
        TORCH_FUNCTION: code.co_name == "__torch_function__",
    }
    return sum(flag for flag, is_so in flags.items() if is_so)


use = callers.use
frozen_weight = callers.frozen_weight


def weight_of(frame: FrameType) -> Tensor | None:
    """The weight of an embedding, if its version is to be noted."""
    weight = frame.f_locals["weight"]
    return weight if isinstance(weight, Tensor) and weight.is_leaf else None


_saved.start(sys.modules[__name__])
