"""What stands for a saved tensor: a leaf, stored data, or a function of other values.

A value belongs to an edge of the autograd graph, (node, output number). The node's ``metadata`` holds a weak reference
to it, so no address or hash is needed and nothing outlives the graph. The owners of a value are the packed tensors that
autograd holds, and the values that are computed from it.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .codecs import Codec, Layout
from .offload import Away, Offload, is_parameter, put

CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: {what} of shape "
    "{shape} is at version {now}, it was saved at version {then}"
)

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""Pack and unpack hooks, as torch.autograd.graph.saved_tensors_hooks takes them."""


class Edge:
    """A value's place in the autograd graph: output ``nr`` of ``node``."""

    __slots__ = ("_metadata", "device", "dtype", "node", "nr")
    dtype: torch.dtype
    device: torch.device

    def __init__(self, node: Any, nr: int) -> None:
        self.node, self.nr = node, nr

    def __getattr__(self, name: str) -> Any:
        """dtype, device and shape at the first look; torch makes a new list of them at every look."""
        if name not in self.__slots__:
            raise AttributeError(name)
        self._metadata = about = self.node._input_metadata[self.nr]
        self.dtype, self.device = about.dtype, about.device
        return object.__getattribute__(self, name)

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._metadata.shape)

    def inputs(self) -> list[Edge | None]:
        return [None if node is None else Edge(node, nr) for node, nr in self.node.next_functions]


_KEY = "memkern"


def registered(edge: Edge) -> Value | None:
    """The value at an edge, if one is saved."""
    values = edge.node.metadata.get(_KEY)
    found = values.get(edge.nr) if values else None
    return None if found is None else found()


def register(edge: Edge, value: Value) -> None:
    about = edge.node.metadata
    if _KEY in about:
        about[_KEY][edge.nr] = weakref.ref(value)
    else:
        about[_KEY] = {edge.nr: weakref.ref(value)}


_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)


def is_plain(x: Tensor) -> bool:
    """Neither sparse nor of a subclass, such as nested tensors and DTensor."""
    return type(x) in _PLAIN and x.layout == torch.strided


def version_of(x: Tensor) -> Tensor:
    """A tensor without memory that has ``x``'s version counter: it tells of in-place changes and holds nothing."""
    counter = x.detach()
    counter.data = counter.new_empty(0)
    return counter


class Value:
    """What is saved for one edge.

    dtype: of the edge. precision: the dtype to which the value is right, coarser than dtype where only a cast of it was
    saved. lossy: whether 8-bit codes are in it. rounded: whether it is computed anew to within rounding only. clipped:
    whether it is log-probabilities whose codes end at a smallest one. depth: functions between it and what is stored.
    uses: how many users are left, a hint that affects speed only.
    """

    dtype: torch.dtype
    precision: torch.dtype
    lossy = False
    coarse = False
    rounded = False
    clipped = False
    depth = 0

    def __init__(self) -> None:
        self.uses = 0

    def fresh(self) -> bool:
        """Whether nothing that it is made of has been changed in place since."""
        raise NotImplementedError

    def tensor(self, of: Callable[[Value], Tensor]) -> Tensor:
        """The tensor; ``of`` gives those of other values."""
        raise NotImplementedError

    def is_work(self) -> bool:
        """Whether :meth:`tensor` computes something."""
        return True

    def is_at_hand(self) -> bool:
        """Whether :meth:`tensor` returns a tensor that the value holds on the device."""
        return False

    def stay_exact(self) -> None:
        """A user needs the exact value: what it is made of is not coded again."""


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

    def is_at_hand(self) -> bool:
        return True

    def tensor(self, of: Callable[[Value], Tensor]) -> Tensor:
        check_version("a parameter or another leaf", self.leaf, self.version, self.leaf.shape)
        return self.leaf.detach()


def check_version(what: str, counter: Tensor, version: int, shape: Sequence[int]) -> None:
    if counter._version != version:
        raise RuntimeError(CHANGED.format(what=what, shape=tuple(shape), now=counter._version, then=version))


_is_lossy, _is_fresh = (
    operator.attrgetter("lossy"),
    operator.methodcaller("fresh"),
)  # no generator at every look


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
        self.stays_exact = False
        self.bases: list[Value] = []  # what it is made of in the end, which is no function of others
        depth = 0
        for value in inputs:
            value.uses += 1
            if isinstance(value, Computed):
                self.bases += value.bases
                depth = max(depth, value.depth)
            else:
                self.bases.append(value)
        self.depth = cost + depth

    @property
    def lossy(self) -> bool:  # type: ignore[override]
        """At this moment: stored tensors may be coded later, or held exactly again."""
        return any(map(_is_lossy, self.bases))

    @property
    def coarse(self) -> bool:  # type: ignore[override]
        return any(value.coarse for value in self.bases)

    def stay_exact(self) -> None:
        if not self.stays_exact:
            self.stays_exact = True
            for value in self.inputs:
                value.stay_exact()

    def fresh(self) -> bool:
        return all(map(_is_fresh, self.bases))

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


_spared: dict[int, int] = {}


def spared() -> int:
    """Bytes that all live codes save, compared with the tensors that they stand for."""
    return sum(list(_spared.values()))


class Stored(Value):
    """Data: the tensor as torch would hold it (``codec`` None), 8-bit codes, or bits.

    outer: the hooks around ours, which get what is stored, such as save_on_cpu's. offload: options of the data's
    transfer to the host, where there are no such hooks.
    """

    def __init__(
        self,
        x: Tensor,
        dtype: torch.dtype,
        codec: Codec | None,
        outer: Hooks | None,
        offload: Offload | None = None,
    ) -> None:
        super().__init__()
        self.dtype, self.precision, self.shape, self.outer = dtype, x.dtype, x.shape, outer
        self.offload = None if offload is None or outer is not None or is_parameter(x) else offload
        self._watch(x, codec is None)
        self.source: tuple[weakref.ref, int] | None = None  # the storage and where in it
        self.codec: Codec | None = None
        self.codec_before: Codec | None = None  # to return to, while another owner keeps the tensor alive
        if codec is not None:
            self.encode(x, codec)
        if self.codec is None:
            # Outer hooks know parameters by identity.
            self.hold(x.detach() if outer is None or x.requires_grad else x)

    def _watch(self, x: Tensor, held: bool) -> None:
        """Notes x's version. held: x itself is stored, and a view of it shows the version counter."""
        held = held and self.outer is None and self.offload is None
        self.counter = x.detach() if held or not is_plain(x) else version_of(x)
        self.version = x._version

    def hold(self, x: Tensor, may_leave: bool = True) -> None:
        self.codec, self.data, self.lossy, self.precision = None, self._give((x,), may_leave), False, x.dtype
        self.codec_before, self.coarse = None, False
        _spared.pop(id(self), None)

    def encode(self, x: Tensor, codec: Codec) -> None:
        if (encoded := codec.encode(x)) is None:
            return
        self.codec, self.data, self.lossy, self.precision = (
            codec,
            self._give(encoded.data),
            codec.lossy,
            self.dtype,
        )
        self.coarse = encoded.coarse
        self.layout = Layout(x.shape, x.stride(), x.dtype)
        _spared[id(self)] = x.nbytes - sum(each.nbytes for each in encoded.data)
        if not isinstance(x, FakeTensor):
            self.source = weakref.ref(x.untyped_storage()), int(x.storage_offset())

    def __del__(self) -> None:
        _spared.pop(id(self), None)

    def _give(self, data: Sequence[Tensor], may_leave: bool = True) -> Any:
        if self.outer is not None:
            return [self.outer[0](x) for x in data]
        return put(data, self.offload) if may_leave and self.offload is not None else list(data)

    def _take(self) -> Sequence[Tensor]:
        if self.outer is not None:
            return [self.outer[1](x) for x in self.data]
        return self.data.tensors() if isinstance(self.data, Away) else self.data

    def fresh(self) -> bool:
        return self.counter._version == self.version

    def tensor(self, of: Callable[[Value], Tensor]) -> Tensor:
        data = self._take()
        if self.codec is not None:
            return self.codec.decode(data, self.layout, self.dtype)
        if self.outer is None:
            check_version("a tensor", self.counter, self.version, self.shape)
        return data[0].to(self.dtype)

    def is_work(self) -> bool:
        return self.codec is not None

    def is_at_hand(self) -> bool:
        return self.codec is None and self.outer is None and self.offload is None

    def hold_if_alive(self, passing: set[int]) -> None:
        """Goes back to the tensor itself, where its storage is held by somebody else anyway.

        passing: storages that are held for a moment only, alive while this runs.
        """
        if self.codec is None or self.source is None or self.outer is not None or not self.fresh():
            return
        storage, offset = self.source[0](), self.source[1]
        if storage is not None and storage._cdata not in passing:
            shape, stride, dtype = self.layout
            x, codec = torch.empty(0, dtype=dtype, device=storage.device), self.codec
            self.hold(x.set_(storage, offset, shape, stride), may_leave=False)
            self.source, self.codec_before = None, codec

    def stay_exact(self) -> None:
        self.codec_before = None

    def encode_again(self) -> None:
        """Returns to codes: the other owner will free the tensor soon."""
        if self.codec_before is not None and self.fresh():
            codec, self.codec_before = self.codec_before, None
            self.encode(self.data[0], codec)

    def upgrade(self, x: Tensor) -> None:
        """The same value, exactly or in a finer dtype."""
        self.source = None
        self._watch(x, held=True)
        self.hold(x.detach())


# ---- what a node has saved, not computed


_local = threading.local()


@contextlib.contextmanager
def peeking() -> Iterator[list[Value]]:
    """Inside, what autograd asks the unpack hook for is noted and not computed."""
    found: list[Value] = []
    _local.found = found
    try:
        yield found
    finally:
        _local.found = None


def peeked(value: Value) -> bool:
    """For the unpack hook: notes the value and says True if it is only to be noted."""
    found = getattr(_local, "found", None)
    if found is None:
        return False
    found.append(value)
    return True


def saved_by(node: Any, attribute: str) -> list[Value] | None:
    """The values of what a node has saved; [] where that is None, None where it is freed or unknown."""
    found: list[Value] = []
    _local.found = found  # as peeking() does, in a third of the time
    try:
        shown = getattr(node, attribute)
    except (RuntimeError, AttributeError):  # freed, or another version of torch
        return None
    finally:
        _local.found = None
    if shown is None or found:
        return found
    # Autograd packs no numbers.
    return [Number(shown)] if isinstance(shown, Tensor) and shown.dim() == 0 else None
