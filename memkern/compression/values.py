"""What a tensor that autograd saves is made of: a leaf, data that is stored, or a function of such.

A value belongs to an edge of the autograd graph, (node, output number). The node's ``metadata`` holds a weak reference
to it, so that nobody else needs a key for it: no address, no hash, nothing that outlives the graph. What owns a value
is the packed tensors that autograd holds, and other values that are computed from it.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .. import _ops
from ..fewbit.levels import Levels
from ..quant.layout import FLOATS, is_dense

BLOCK_SIZE = 128
CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: {what} of shape "
    "{shape} is at version {now}, it was saved at version {then}"
)

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""Pack and unpack hooks, as torch.autograd.graph.saved_tensors_hooks takes them."""


class Edge(NamedTuple):
    """A value's place in the autograd graph."""

    node: Any
    nr: int

    @property
    def shape(self) -> torch.Size:
        return self.node._input_metadata[self.nr].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.node._input_metadata[self.nr].dtype

    @property
    def device(self) -> torch.device:
        return self.node._input_metadata[self.nr].device

    def inputs(self) -> list[Edge | None]:
        return [None if node is None else Edge(node, nr) for node, nr in self.node.next_functions]


_KEY = "memkern"


def registered(edge: Edge) -> Value | None:
    """The value at an edge, if one is saved."""
    values = edge.node.metadata.get(_KEY)
    found = values.get(edge.nr) if values else None
    return None if found is None else found()


def register(edge: Edge, value: Value) -> None:
    edge.node.metadata.setdefault(_KEY, {})[edge.nr] = weakref.ref(value)


def version_of(x: Tensor) -> Tensor:
    """A tensor without memory that has ``x``'s version counter: it tells of in-place changes and holds nothing."""
    counter = x.detach()
    if isinstance(x, FakeTensor):
        return counter
    counter.data = torch.empty(0, dtype=x.dtype, device=x.device)
    return counter


class Value:
    """What is saved of one edge.

    dtype: of the edge. precision: the dtype to which the value is right, coarser than dtype where only a cast of it was
    saved. lossy: whether 8-bit codes are in it. depth: functions between it and what is stored. uses: how often it is
    still asked for, of which only speed depends.
    """

    dtype: torch.dtype
    precision: torch.dtype
    lossy = False
    depth = 0

    def __init__(self) -> None:
        self.uses = 0

    def fresh(self) -> bool:
        """Whether what it was made of has not been changed in place since."""
        raise NotImplementedError

    def tensor(self, of: Callable[[Value], Tensor]) -> Tensor:
        """The tensor; ``of`` gives those of other values."""
        raise NotImplementedError

    def is_work(self) -> bool:
        """Whether there is something to compute for the tensor."""
        return True


class Leaf(Value):
    """A parameter, or another leaf: the graph holds it anyway."""

    def __init__(self, leaf: Tensor) -> None:
        super().__init__()
        self.leaf, self.version = leaf, leaf._version
        self.dtype = self.precision = leaf.dtype

    def fresh(self) -> bool:
        return self.leaf._version == self.version

    def is_work(self) -> bool:
        return False

    def tensor(self, of: Callable[[Value], Tensor]) -> Tensor:
        _check_version("a parameter or another leaf", self.leaf, self.version, self.leaf.shape)
        return self.leaf.detach()


def _check_version(what: str, counter: Tensor, version: int, shape: Sequence[int]) -> None:
    if counter._version != version:
        raise RuntimeError(CHANGED.format(what=what, shape=tuple(shape), now=counter._version, then=version))


class Computed(Value):
    """A function of other values, computed anew whenever it is asked for."""

    def __init__(
        self,
        function: Callable[..., Tensor],
        inputs: Sequence[Value],
        dtype: torch.dtype,
        precision: torch.dtype,
        cost: int,
    ) -> None:
        super().__init__()
        self.function, self.inputs, self.dtype, self.precision = function, tuple(inputs), dtype, precision
        self.lossy = any(value.lossy for value in inputs)
        self.depth = cost + max((value.depth for value in inputs), default=0)
        for value in inputs:
            value.uses += 1

    def fresh(self) -> bool:
        return all(value.fresh() for value in self.inputs)

    def tensor(self, of: Callable[[Value], Tensor]) -> Tensor:
        return self.function(*map(of, self.inputs))


class Number(Value):
    """A Python number that an operation was given: autograd has it as a tensor without dimensions."""

    def __init__(self, number: Tensor) -> None:
        super().__init__()
        self.number, self.dtype, self.precision = number, number.dtype, number.dtype

    def fresh(self) -> bool:
        return True

    def is_work(self) -> bool:
        return False

    def tensor(self, of: Callable[[Value], Tensor]) -> Tensor:
        return self.number


class Stored(Value):
    """Data: the tensor as torch would hold it (``codec`` None), 8-bit codes, or bits.

    outer: the hooks around ours, which get what is stored, such as save_on_cpu's.
    """

    def __init__(self, x: Tensor, dtype: torch.dtype, codec: Codec | None, outer: Hooks | None) -> None:
        super().__init__()
        self.dtype, self.precision, self.shape, self.outer = dtype, x.dtype, x.shape, outer
        self.counter, self.version = (x.detach() if codec is None else version_of(x)), x._version
        self.source: tuple[weakref.ref, int] | None = None  # the storage and where in it
        self.codec: Codec | None = None
        if codec is not None:
            self.encode(x, codec)
        if self.codec is None:
            self.hold(x.detach())

    def hold(self, x: Tensor) -> None:
        self.codec, self.data, self.lossy, self.precision = None, self._give((x,)), False, x.dtype

    def encode(self, x: Tensor, codec: Codec) -> None:
        if (data := codec.encode(x)) is None:
            self.counter = x.detach()
            return
        self.codec, self.data, self.lossy, self.precision = codec, self._give(data), codec.lossy, self.dtype
        self.layout = Layout(x.shape, x.stride(), x.dtype)
        if not isinstance(x, FakeTensor):
            self.source = weakref.ref(x.untyped_storage()), int(x.storage_offset())

    def _give(self, data: Sequence[Tensor]) -> list[Any]:
        return list(data) if self.outer is None else [self.outer[0](x) for x in data]

    def _take(self) -> list[Tensor]:
        return self.data if self.outer is None else [self.outer[1](x) for x in self.data]

    def fresh(self) -> bool:
        return self.counter._version == self.version

    def tensor(self, of: Callable[[Value], Tensor]) -> Tensor:
        data = self._take()
        if self.codec is not None:
            return self.codec.decode(data, self.layout, self.dtype)
        if self.outer is None:
            _check_version("a tensor", self.counter, self.version, self.shape)
        return data[0].to(self.dtype)

    def is_work(self) -> bool:
        return self.codec is not None

    def hold_if_alive(self, passing: set[int]) -> None:
        """Goes back to the tensor itself, where its storage is held by somebody else anyway.

        passing: storages that are held for a moment only, alive while this runs.
        """
        if self.codec is None or self.source is None or self.outer is not None or not self.fresh():
            return
        storage, offset = self.source[0](), self.source[1]
        if storage is not None and storage._cdata not in passing:
            shape, stride, dtype = self.layout
            x = torch.empty(0, dtype=dtype, device=storage.device)
            self.hold(x.set_(storage, offset, shape, stride))
            self.source = None

    def upgrade(self, x: Tensor) -> None:
        """The same value, exactly or in a finer dtype."""
        self.counter, self.version, self.source = x.detach(), x._version, None
        self.hold(x.detach())


# ---- codecs


class Layout(NamedTuple):
    """Of the tensor that was encoded."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Codec(NamedTuple):
    """encode: the tensors that stand for one, or None if it cannot; decode: back from them, in a dtype."""

    name: str
    lossy: bool
    encode: Callable[[Tensor], tuple[Tensor, ...] | None]
    decode: Callable[[Sequence[Tensor], Layout, torch.dtype], Tensor]


def _dense(x: Tensor) -> Tensor:
    return x if is_dense(x.shape, x.stride()) else torch.empty_like(x).copy_(x)


def _finite_or_marked(x: Tensor, scale: Tensor) -> Tensor | None:
    """The scale, or None where x has a NaN or inf; NaN on devices where asking would wait."""
    if isinstance(x, FakeTensor):
        return scale
    total = x.sum(dtype=torch.float32)
    if x.device.type == "cpu":
        return scale if bool(total.isfinite()) else None
    return scale + total * 0


def _encode_power(signed: bool, x: Tensor) -> tuple[Tensor, ...] | None:
    x = _dense(x)
    codes, scale = _ops.quantize_blockwise(x, "power", signed, BLOCK_SIZE, None)
    marked = _finite_or_marked(x, scale)
    return None if marked is None else (codes, marked)


def _decode_power(data: Sequence[Tensor], layout: Layout, dtype: torch.dtype) -> Tensor:
    return _ops.dequantize_blockwise(data[0], data[1], "power", BLOCK_SIZE, dtype)


POWER = Codec("power", True, functools.partial(_encode_power, True), _decode_power)
UNSIGNED = Codec("unsigned power", True, functools.partial(_encode_power, False), _decode_power)

_SAMPLE = 256
_LEAST = -torch.finfo(torch.float32).max


def _only(x: Tensor, low: Tensor, high: Tensor) -> bool:
    return bool(((x == low) | (x == high)).all())


def _encode_constant(x: Tensor) -> tuple[Tensor, ...] | None:
    """What needs no gradient, exactly: two values (dropout and attention masks) in bits, integers in fewer bytes.

    On the CPU only: elsewhere the question would wait for the device, and dropout masks are boolean anyway.
    """
    if x.device.type != "cpu" or isinstance(x, FakeTensor) or not is_dense(x.shape, x.stride()):
        return None
    flat = x.as_strided((x.numel(),), (1,))
    if x.dtype == torch.int64:
        low, high = flat.aminmax()
        narrow = next((d for d in (torch.uint8, torch.int16, torch.int32) if _fits(low, high, d)), None)
        return None if narrow is None else (flat.to(narrow),)
    if x.dtype not in FLOATS:
        return None
    low, high = flat[:_SAMPLE].aminmax()
    threshold = max(float(low), _LEAST)
    if not high > threshold and low != high:
        return None
    if not (_only(flat[:_SAMPLE], low, high) and _only(flat, low, high)):
        return None
    codes = _ops.few_bit_encode(flat, Levels(1, (), (threshold,), (1,)))
    return codes, torch.stack((low, high)).float()


def _fits(low: Tensor, high: Tensor, dtype: torch.dtype) -> bool:
    limits = torch.iinfo(dtype)
    return limits.min <= int(low) and int(high) <= limits.max


def _decode_constant(data: Sequence[Tensor], layout: Layout, dtype: torch.dtype) -> Tensor:
    if len(data) == 1:
        flat = data[0].to(layout.dtype)
    else:
        ones = torch.ones(layout.shape.numel(), dtype=layout.dtype, device=data[0].device)
        flat = _ops.few_bit_backward(ones, data[0], data[1].tolist())
    return flat.as_strided(layout.shape, layout.stride)


CONSTANT = Codec("constant", False, _encode_constant, _decode_constant)
CODECS = {"power": POWER, "unsigned power": UNSIGNED, "affine": POWER}


# ---- evaluation

_MOST_HELD = 8
_Held = OrderedDict[Value, tuple[Tensor, int]]  # with the tensor's version
_held: dict[int, _Held] = {}  # by the backward pass that runs


def _forget(task: int) -> None:
    _held.pop(task, None)


def _held_in_this_backward() -> _Held | None:
    """Tensors that will be asked for again in the backward pass that runs; freed at its end."""
    task = torch._C._current_graph_task_id()
    if task == -1:
        return None
    if task not in _held:
        _held[task] = OrderedDict()
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_forget, task))
    return _held[task]


def evaluate(value: Value) -> Tensor:
    """The tensor of a value that autograd asks for."""
    held = _held_in_this_backward()

    def of(value: Value) -> Tensor:
        value.uses -= 1
        x, version = held.get(value, (None, 0)) if held is not None else (None, 0)
        if x is None or x._version != version:
            x = value.tensor(of)
        if held is not None and value.is_work():
            if value.uses > 0:
                held[value] = x, x._version
                if len(held) > _MOST_HELD:
                    held.popitem(last=False)
            else:
                held.pop(value, None)
        return x

    return of(value)
