"""What one block stores: the value of each saved tensor, found among what is stored already or stored anew."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..quant.layout import FLOATS
from . import attention, bases, bounded, codecs, data_needs, needs
from .data_needs import Normalization
from .derive import derive
from .edge import Edge
from .link import Offload
from .needs import Need, Use
from .packed import Packed
from .rules import Kind
from .saved_value import Computed, Hooks, Stored, Value, finer, register, registered
from .storage import is_plain
from .undecided import Waiting
from .users import operation

MIN_NUMEL = 1024
"""Smaller tensors are not worth codes: they are saved as torch does, once."""
_LEAST_NOTES = 64


class Store:
    """The values of one block.

    exact: whether nothing of it is stored in codes. outer: the hooks around the block, which get what is stored.
    offload: options of its transfer to the host.
    """

    def __init__(self, exact: bool, offload: Offload | None) -> None:
        self.exact, self.offload = exact, offload
        self.needs = needs.OF_USE_EXACTLY if exact else needs.OF_USE
        self.outer: Hooks | None = None
        self.notes = Notes()

    # ---- the value of a tensor

    def at_once(self, x: Tensor, edge: Edge, use: Use | None) -> Value | None:
        """The value, if the user is known or any user gets the same; else None."""
        if use is not None:
            return self.value(x, edge, use)
        if self.exact:
            value = self.value(x, edge, Use.CODED)
            return None if value.rounded else value
        if _is_small(x):
            return self.value(x, edge, Use.EXACT)
        if registered(edge) is None and not bases.is_copy(edge):
            return None
        return derive(edge, x.dtype, needs.SAME_BITS, min(Kind.COPY, _reach(x)), beside_codes=True)

    def settle(self, packed: Packed, use: Use, node: Any) -> None:
        """Stores a waiting tensor in the way that its user, ``node``, allows."""
        waiting = packed.value
        assert isinstance(waiting, Waiting)
        if not waiting.fresh():
            return  # it was changed in place or freed: it stays what torch would hold
        edge = waiting.edge_of(node)
        if edge is None:
            packed.value = self.stored(waiting.x)
        elif use is Use.CODED and not self.exact and attention.runs_again(node, waiting):
            packed.value = attention.run_again(node)
        else:
            value = self.value(waiting.x, edge, use, node, waiting)
            packed.value = self._to_its_side(value, waiting.x, node) if value.lossy else value
        packed.value.uses += 1

    def value(self, x: Tensor, edge: Edge, use: Use, node: Any = None, waiting: Value | None = None) -> Value:
        """The value of an edge for a user: derived from what is stored, else stored.

        node: the user, where it is known; waiting: what it has saved of x.
        """
        before = registered(edge)
        value = self._derived_or_stored(x, edge, use, node, waiting)
        # What an earlier user was to compute has lost its inputs to a change in place, and x is still what it saved.
        if isinstance(before, Computed) and x._version == 0 and not before.fresh() and not value.lossy:
            before.become(value)
        return value

    def _derived_or_stored(self, x: Tensor, edge: Edge, use: Use, node: Any, waiting: Value | None) -> Value:
        need, normalization = self.needs[use], None
        if need is needs.CODES and node is not None:
            if (mask := data_needs.mask_of(node, x)) is not None:
                return self._masked(x, edge, mask)
            need, normalization = data_needs.need_of(node, x, waiting)
        find = functools.partial(derive, edge, x.dtype, reach=_reach(x), beside_codes=not self.exact)
        # Codes of others are of x itself, which the node's mean makes too coarse.
        value = find(need if normalization is None else needs.EXACT)
        if value is not None:
            return value
        base, data = bases.base(edge, x, _reach(x) == Kind.VIEW)
        if normalization is None:
            codec = self._fitted(base, data, need)
        else:
            codec = self._normalized(normalization, base, data, need, None if base is edge else node)
        stored = self._store(base, data, codec)
        if stored.coarse and not need.coarse:
            stored.upgrade(data)
        if base is edge:
            return stored
        value = find(need)
        if value is None:
            value = self.stored(x)
            register(edge, value)
        return value

    def _masked(self, x: Tensor, edge: Edge, mask: codecs.Codec) -> Value:
        """One bit per element, for an operation that only reads whether x is between two limits. Not shared."""
        value = derive(edge, x.dtype, needs.EXACT, _reach(x), beside_codes=True)
        if value is None:
            value = self.stored(x, mask)
            self.notes.add(value)
        return value

    def _to_its_side(self, value: Value, x: Tensor, node: Any) -> Value:
        """The decoded value on the side of a jump on which x was, where the node's derivative has jumps."""
        if operation(node) not in data_needs.JUMPS:
            return value
        codec, function = sides_of(node)
        return Computed(function, (value, self.stored(x, codec)), value.dtype, value.precision, 1)

    # ---- what is stored

    def codec(self, base: Edge, data: Tensor, need: Need) -> codecs.Codec | None:
        """The codes for the data of an edge, by the operation that made them; None: they are stored as they are."""
        if need.exact or _is_small(data) or data.dtype not in FLOATS or base.dtype not in FLOATS:
            return None
        codec = bases.codec_of(base)
        return None if codec is bounded.LOGARITHM and not need.clipped else codec

    def _fitted(self, base: Edge, data: Tensor, need: Need) -> codecs.Codec | None:
        """The same, as the data and the user ask for it."""
        codec = self.codec(base, data, need)
        if codec is not None and (normalization := data_needs.mean_of_attention(base.node, data)) is not None:
            return codecs.normalized(*normalization)
        if codec in (codecs.POWER, codecs.UNSIGNED) and need.block_size < codecs.BLOCK_SIZE:
            return codecs.in_blocks_of(codec, need.block_size)
        return codec

    def _normalized(
        self, normalization: Normalization, base: Edge, data: Tensor, need: Need, viewer: Any
    ) -> codecs.Codec | None:
        """The same, of what is coded in place of the data; viewer: the node, where it has saved a view of them."""
        found = normalization if viewer is None else data_needs.mean_of_attention(viewer, data, True)
        # What is stored of the edge already serves others as it is: this node's codes would be beside it.
        if found is None or registered(base) is not None or self.codec(base, data, need) is None:
            return None
        return codecs.normalized(*found)

    def stored(self, x: Tensor, codec: codecs.Codec | None = None, dtype: torch.dtype | None = None) -> Stored:
        """Stores a tensor; dtype: that of its edge, its own by default."""
        return Stored(x, dtype or x.dtype, codec, self.outer, self.offload)

    def _store(self, base: Edge, data: Tensor, codec: codecs.Codec | None) -> Stored:
        """Stores the data of an edge, or what was stored of it again in a form that serves all users."""
        if codec is None and finer(data.dtype, base.dtype):
            data = data.to(base.dtype)
        old = registered(base)
        if isinstance(old, Stored) and old.fresh():
            if codec is None:
                if old.lossy or finer(data.dtype, base.dtype) or finer(data.dtype, old.precision):
                    old.upgrade(data)
                    old.clipped = False
                return old  # of fp16 and bf16 neither holds the other: the caller stores another
            if codec.block_size < old.block_size:
                old.encode(data, codec)
                return old
        stored = self.stored(data, codec, base.dtype)
        stored.clipped = stored.codec is bounded.LOGARITHM
        register(base, stored)
        self.notes.add(stored)
        return stored

    def constant(self, x: Tensor) -> Stored:
        """Stores a tensor that needs no gradient, exactly: masks in bits, indices in fewer bytes."""
        if isinstance(x, FakeTensor) or x.numel() < MIN_NUMEL:
            return self.stored(x)
        stored = self.notes.constant_of(x)
        if stored is None:
            stored = self.stored(x, codecs.CONSTANT)
            self.notes.add_constant(x, stored)
        return stored

    # ---- at the block's end

    def end(self, passing: list[Tensor]) -> None:
        """Drops codes of tensors that the caller holds anyway, such as cached keys and values.

        passing: tensors that the caller holds for a moment only: what the module before returned was alive at its end,
        and is coded again.
        """
        for x in passing if not self.exact else ():
            if is_plain(x) and x.grad_fn is not None:
                value = registered(bases.base(Edge(x.grad_fn, x.output_nr), x, x._version > 0)[0])
                if isinstance(value, Stored):
                    value.encode_again()
                    self.notes.add(value)
        storages = {x.untyped_storage()._cdata for x in passing}
        for stored in self.notes.coded():
            stored.hold_if_alive(storages)


def sides_of(node: Any) -> tuple[codecs.Codec, Callable[[Tensor, Tensor], Tensor]]:
    """The codec of the sides of a node's jumps, and what moves a value back to its side."""
    limits = data_needs.JUMPS[operation(node)]
    return codecs.sides(*limits), functools.partial(codecs.to_side, *limits)


class Notes:
    """What a block has stored: values in codes, and constants by their storage."""

    def __init__(self) -> None:
        self._coded: list[weakref.ref[Stored]] = []
        self._constants: dict[int, tuple[weakref.ref, Any, weakref.ref[Stored]]] = {}
        self._most = _LEAST_NOTES  # dead ones among them, before they are looked through

    def __len__(self) -> int:
        return len(self._coded) + len(self._constants)

    def add(self, stored: Stored) -> None:
        if stored.codec is not None:
            self._coded.append(weakref.ref(stored))
        if len(self) >= self._most:  # one block may hold a whole training loop
            self._coded = [ref for ref in self._coded if ref() is not None]
            self._constants = {key: known for key, known in self._constants.items() if known[2]() is not None}
            self._most = max(_LEAST_NOTES, 2 * len(self))

    def add_all(self, other: Notes) -> None:
        """Those of a block inside of this one."""
        self._coded += other._coded

    def coded(self) -> Iterator[Stored]:
        return (stored for ref in self._coded if (stored := ref()) is not None)

    def add_constant(self, x: Tensor, stored: Stored) -> None:
        storage = x.untyped_storage()
        self._constants[storage._cdata] = weakref.ref(storage), _place(x), weakref.ref(stored)
        self.add(stored)

    def constant_of(self, x: Tensor) -> Stored | None:
        """The value of the same memory, if it is stored and x is as it was."""
        storage = x.untyped_storage()
        known = self._constants.get(storage._cdata)
        if known is None or known[0]() is not storage or known[1] != _place(x):
            return None
        return known[2]()


def _place(x: Tensor) -> tuple[Any, ...]:
    return x.storage_offset(), x.shape, x.stride(), x.dtype, x._version


def _is_small(x: Tensor) -> bool:
    return x.numel() < MIN_NUMEL or x.shape[-1] == 1


def _reach(x: Tensor) -> Kind:
    """Once changed in place, x need not be what its operation made of its inputs: only views are seen through."""
    return Kind.VIEW if x._version > 0 else Kind.FUNCTION
