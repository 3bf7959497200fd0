"""Values that stand for saved tensors: leaves, stored data, and functions of other values.

A value belongs to an edge of the autograd graph, (node, output number). The node's ``metadata`` holds a weak reference
to it, so no address or hash is needed and nothing outlives the graph. The owners of a value are the packed tensors that
autograd holds, and the values that are computed from it.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .codecs import Codec, Layout
from .edge import Edge
from .link import Away, Offload
from .offload import is_parameter, put
from .storage import (
    bytes_needed,
    check_place,
    check_version,
    is_managed,
    is_plain,
    is_present,
    place_of,
    version_of,
)


@functools.cache
def finer(a: torch.dtype, b: torch.dtype) -> bool:
    """Whether every value of dtype ``b`` is one of ``a``."""
    if a == b or not is_float8(a, b):
        return a == b or torch.promote_types(a, b) == a
    if a.itemsize == 1 or not a.is_floating_point:
        return False  # no float8 holds all of another
    one, other = torch.finfo(a), torch.finfo(b)  # torch promotes no float8
    return one.max >= other.max and one.smallest_normal * one.eps <= other.smallest_normal


def is_float8(*dtypes: torch.dtype) -> bool:
    return any(dtype.is_floating_point and dtype.itemsize == 1 for dtype in dtypes)


Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""Pack and unpack hooks, as torch.autograd.graph.saved_tensors_hooks takes them."""


@functools.cache
def _key(nr: int) -> str:
    """The key of an output's value in its node's metadata. A dict of outputs there would be one object more."""
    return f"memkern {nr}"


def registered(edge: Edge) -> Value | None:
    """The value at an edge, if one is saved."""
    found = edge.node.metadata.get(_key(edge.nr))
    return None if found is None else found()


def register(edge: Edge, value: Value) -> None:
    edge.node.metadata[_key(edge.nr)] = weakref.ref(value)


class Value:
    """The value that is saved for one edge.

    dtype: of the edge. precision: the dtype to which the value is right, coarser than dtype where only a cast of it was
    saved. lossy: whether 8-bit codes are in it. coarse: whether the codes have lost most of a block beside its largest
    value. block_size: of its codes, the largest of several. rounded: whether it is computed anew to within rounding
    only. clipped: whether it is log-probabilities whose codes end at a smallest one. managed: whether it is, or views,
    memory that others free and fill again (:func:`is_managed`).
    functions: how many are computed, one after another, from what is stored. steps: the same with views and copies.
    bases: what it is made of in the end, if it is a function of others.
    uses: how many will still ask for it: each Packed that holds it, and each value that is computed from it, adds one,
    and evaluating takes one off. A hint that affects speed and memory only.
    """

    dtype: torch.dtype
    precision: torch.dtype
    lossy = False
    coarse = False
    rounded = False
    clipped = False
    managed = False
    block_size = 0
    functions = steps = 0
    bases: tuple[Value, ...] = ()
    uses = 0

    def fresh(self) -> bool:
        """Whether nothing that it is made of has been changed in place or freed since."""
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
    """A parameter, or another leaf: the graph holds it anyway.

    torch saves the variable itself, so it follows ``.data`` to other memory. What is derived needs the value of the
    forward pass, which :meth:`as_it_is` holds.
    """

    def __init__(self, leaf: Tensor) -> None:
        self.leaf, self.version, self.place = leaf, leaf._version, place_of(leaf)
        self.dtype = self.precision = leaf.dtype

    def as_it_is(self) -> Leaf:
        """The leaf with the memory that it has now, whatever its ``.data`` is later."""
        value = Leaf(self.leaf.detach())
        value.managed = is_managed(self.leaf)
        return value

    def fresh(self) -> bool:
        return self.leaf._version == self.version and is_present(self.leaf)

    def is_work(self) -> bool:
        return False

    def is_at_hand(self) -> bool:
        return True

    def tensor(self, of: Callable[[Value], Tensor]) -> Tensor:
        check_version("a parameter or another leaf", self.leaf, self.version, self.leaf.shape)
        check_place(self.leaf, self.place)
        return self.leaf.detach()


_is_lossy = operator.attrgetter("lossy")  # no generator at every look
_is_fresh = operator.methodcaller("fresh")


def _itself(x: Tensor) -> Tensor:
    return x


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
        self.function, self.dtype, self.precision = function, dtype, precision
        self.stays_exact = False
        self._make_of(tuple(inputs), cost)

    def become(self, value: Value) -> None:
        """Is from now on the same as another value of its edge."""
        self.function, self.precision, self.rounded = _itself, value.precision, value.rounded
        self._make_of((value,), 0)

    def _make_of(self, inputs: tuple[Value, ...], cost: int) -> None:
        self.inputs = inputs
        self.steps = 1 + max((value.steps for value in inputs), default=0)
        for value in inputs:
            value.uses += 1
        if len(self.inputs) == 1:
            (value,) = self.inputs
            self.bases, self.functions = value.bases or self.inputs, cost + value.functions
        else:
            self.bases = tuple(base for value in self.inputs for base in value.bases or (value,))
            self.functions = cost + max((value.functions for value in self.inputs), default=0)

    @property
    def lossy(self) -> bool:  # type: ignore[override]
        """At this moment: stored tensors may be coded later, or held exactly again."""
        return any(map(_is_lossy, self.bases))

    @property
    def coarse(self) -> bool:  # type: ignore[override]
        return any(value.coarse for value in self.bases)

    @property
    def managed(self) -> bool:  # type: ignore[override]
        return any(value.managed for value in self.bases)

    @property
    def block_size(self) -> int:  # type: ignore[override]
        return max((value.block_size for value in self.bases), default=0)

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


_coded: set[int] = set()


def is_anything_coded() -> bool:
    """Whether a live value is in codes, or has been."""
    return bool(_coded)


class Stored(Value):
    """Data: the tensor as torch would hold it (``codec`` None), 8-bit codes, or bits.

    outer: the hooks around ours, which get what is stored, such as save_on_cpu's. offload: options of the data's
    transfer to the host, where there are no such hooks. source: the storage of what is encoded, and where in it.
    codec_before: to return to, while another owner keeps the tensor alive.
    """

    offload: Offload | None = None
    codec: Codec | None = None
    codec_before: Codec | None = None
    source: tuple[weakref.ref, int] | None = None

    def __init__(
        self,
        x: Tensor,
        dtype: torch.dtype,
        codec: Codec | None,
        outer: Hooks | None,
        offload: Offload | None = None,
    ) -> None:
        self.dtype, self.precision, self.outer = dtype, x.dtype, outer
        if is_managed(x):
            self.managed = True
        if offload is not None and outer is None and not is_parameter(x):
            self.offload = offload
        if codec is None and outer is None and self.offload is None:
            self._hold_itself(x)
            return
        self._watch(x)
        if codec is not None:
            self.encode(x, codec)
        if self.codec is None:
            # Outer hooks know parameters by identity.
            self.hold(x.detach() if outer is None or x.requires_grad else x)

    def _hold_itself(self, x: Tensor) -> None:
        """Holds x as torch does: a view of it has its version counter too."""
        self.counter = held = x.detach()
        self.version, self.data = x._version, (held,)

    def _watch(self, x: Tensor) -> None:
        self.counter = version_of(x) if is_plain(x) else x.detach()
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
        if codec.lossy:
            _coded.add(id(self))
        self.layout = Layout(x.shape, x.stride(), x.dtype)
        _spared[id(self)] = x.nbytes - sum(each.nbytes for each in encoded.data)
        if not isinstance(x, FakeTensor):
            self.source = weakref.ref(x.untyped_storage()), int(x.storage_offset())

    # At exit the module has no names any more.
    def __del__(self, forget: Callable[..., Any] = _spared.pop, discard: Callable[..., Any] = _coded.discard) -> None:
        forget(id(self), None)
        discard(id(self))

    def _give(self, data: Sequence[Tensor], may_leave: bool = True) -> Any:
        if self.outer is not None:
            return tuple(self.outer[0](x) for x in data)
        return put(data, self.offload) if may_leave and self.offload is not None else tuple(data)

    def _take(self) -> Sequence[Tensor]:
        if self.outer is not None:
            return [self.outer[1](x) for x in self.data]
        return self.data.tensors() if isinstance(self.data, Away) else self.data

    def fresh(self) -> bool:
        return self.counter._version == self.version and (not self.is_at_hand() or is_present(self.data[0]))

    def tensor(self, of: Callable[[Value], Tensor]) -> Tensor:
        data = self._take()
        if self.codec is not None:
            return self.codec.decode(data, self.layout, self.dtype)
        if self.outer is None:
            check_version("a tensor", self.counter, self.version, data[0].shape)
        return data[0].to(self.dtype)

    @property
    def block_size(self) -> int:  # type: ignore[override]
        return self.codec.block_size if self.codec is not None and self.lossy else 0

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
            if storage.nbytes() < bytes_needed(shape, stride, offset, dtype):
                return  # set_ would enlarge what was freed
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
        self._watch(x)
        self.hold(x.detach())
