"""What one block stores: the value of each saved tensor, found among what is stored already or stored anew."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..quant.layout import FLOATS
from . import attention, bases, bounded, codecs, needs, ranges
from .derive import derive
from .edge import Edge
from .link import Offload
from .needs import Need, Use
from .packed import Packed
from .rules import Kind
from .saved_value import Computed, Hooks, Stored, Value, finer, register, registered
from .storage import is_plain
from .undecided import Waiting

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
        self.needs = dict.fromkeys(Use, needs.EXACT) | {Use.EXACT: needs.SAME_BITS} if exact else needs.OF_USE
        self.outer: Hooks | None = None
        self.coded: list[weakref.ref[Stored]] = []
        self.constants: dict[int, tuple[weakref.ref, Any, weakref.ref[Stored]]] = {}
        self.most = (
            _LEAST_NOTES  # notes of what is stored, dead ones among them, before they are looked through
        )

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
        need, normal = self.needs[use], None
        if need is needs.CODES and node is not None:
            if (mask := ranges.mask(node, x)) is not None:
                return self._masked(x, edge, mask)
            need, normal = ranges.need(node, x, waiting)
        find = functools.partial(derive, edge, x.dtype, reach=_reach(x), beside_codes=not self.exact)
        value = find(need if normal is None else needs.EXACT)
        if value is not None:
            return value
        base, data = bases.base(edge, x, _reach(x) == Kind.VIEW)
        if normal is not None and base is not edge:
            normal = ranges.normal_before_views(node, data)
            codec = None if normal is None else self.codec(base, data, need, normal)
        else:
            codec = self.codec(base, data, need, normal)
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
            self.coded.append(weakref.ref(value))
        return value

    def _to_its_side(self, value: Value, x: Tensor, node: Any) -> Value:
        """The decoded value on the side of a jump on which x was, where the node's derivative has jumps."""
        if (limits := ranges.jumps(node)) is None:
            return value
        sides = self.stored(x, codecs.sides(*limits))
        function = functools.partial(codecs.to_side, *limits)
        return Computed(function, (value, sides), value.dtype, value.precision, 1)

    # ---- what is stored

    def codec(
        self, base: Edge, data: Tensor, need: Need, normal: ranges.Affine | None
    ) -> codecs.Codec | None:
        """The codes for the data of an edge; None: it is stored as it is. normal: what is coded in place of it."""
        if need.exact or _is_small(data) or data.dtype not in FLOATS or base.dtype not in FLOATS:
            return None
        codec = bounded.CODECS.get(bases.codec_of(base) or "")
        if codec is None or (codec is bounded.LOGARITHM and not need.clipped):
            return None
        if normal is not None and registered(base) is not None:
            return None
        if normal is None:
            normal = ranges.normal_of_output(base.node, data)
        if normal is not None:
            return codecs.normalized(*normal)
        if codec in (codecs.POWER, codecs.UNSIGNED) and need.block_size < codecs.BLOCK_SIZE:
            return codecs.in_blocks_of(codec, need.block_size)
        return codec

    def stored(
        self, x: Tensor, codec: codecs.Codec | None = None, dtype: torch.dtype | None = None
    ) -> Stored:
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
        self._note(stored)
        return stored

    def constant(self, x: Tensor) -> Stored:
        """Stores a tensor that needs no gradient, exactly; masks in bits."""
        if isinstance(x, FakeTensor) or x.numel() < MIN_NUMEL:
            return self.stored(x)
        storage = x.untyped_storage()
        place = (x.storage_offset(), x.shape, x.stride(), x.dtype, x._version)
        known = self.constants.get(storage._cdata)
        found = known[2]() if known is not None and known[0]() is storage and known[1] == place else None
        if found is not None:
            return found
        stored = self.stored(x, codecs.CONSTANT)
        self.constants[storage._cdata] = weakref.ref(storage), place, weakref.ref(stored)
        self._note(stored)
        return stored

    def _note(self, stored: Stored) -> None:
        if stored.codec is not None:
            self.coded.append(weakref.ref(stored))
        if len(self.coded) + len(self.constants) >= self.most:  # one block may hold a whole training loop
            self.coded = [ref for ref in self.coded if ref() is not None]
            self.constants = {key: known for key, known in self.constants.items() if known[2]() is not None}
            self.most = max(_LEAST_NOTES, 2 * (len(self.coded) + len(self.constants)))

    # ---- at the block's end

    def forget(self) -> None:
        """Ends the notes of what is stored."""
        self.coded, self.constants = [], {}

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
                    self._note(value)
        storages = {x.untyped_storage()._cdata for x in passing}
        for ref in self.coded:
            if (stored := ref()) is not None:
                stored.hold_if_alive(storages)


def _is_small(x: Tensor) -> bool:
    return x.numel() < MIN_NUMEL or x.shape[-1] == 1


def _reach(x: Tensor) -> Kind:
    """Once changed in place, x need not be what its operation made of its inputs: only views are seen through."""
    return Kind.VIEW if x._version > 0 else Kind.FUNCTION
