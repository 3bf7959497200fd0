"""The pack and unpack hooks of one ``with memkern.quantize_saved()`` block, or of one forward pass of a module."""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from ..quant.layout import FLOATS
from . import attention, bounded, callers, codecs, peek, ranges, resolve
from .edge import Edge
from .leaves import leaves
from .link import Offload
from .packed import Packed, is_last_use
from .resolve import Resolver
from .saved_value import Computed, Hooks, Leaf, Stored, Value, register, registered
from .storage import is_plain
from .undecided import CODED_USE, EXACT_USE, SHAPE_USE, Waiting, sequence_nr, undecided
from .users import BOUNDED, SPARSE, UNKNOWN

EXACT = "exact"
_CHECKPOINT = "torch.utils.checkpoint"
_LEAST_NOTES = 64
MIN_NUMEL = 1024
"""Smaller tensors are not worth codes: they are saved as torch does, once."""


def check_bits(bits: Any, name: str = "bits") -> None:
    """Raises ValueError unless ``bits`` is 8 or "exact"."""
    if isinstance(bits, bool) or bits not in (8, EXACT):
        raise ValueError(f"{name} must be 8 or 'exact', got {bits!r}")


def _top_hooks() -> Hooks | None:
    """The hooks that torch calls in this thread now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _session_of(hooks: Hooks | None) -> Session | None:
    session = None if hooks is None else getattr(hooks[0], "__self__", None)
    return session if isinstance(session, Session) else None


_local = threading.local()


def open_sessions() -> list[Session]:
    """Those that module calls have opened in this thread."""
    if not hasattr(_local, "sessions"):
        _local.sessions = []
    return _local.sessions


def close_interrupted() -> None:
    """Closes what module calls have left open: torch runs always_call hooks after Exception, not KeyboardInterrupt."""
    sessions = open_sessions()
    while sessions and sessions[-1].interrupted():
        sessions.pop().exit()


class Session:
    """The hooks of one ``with`` block, or of one forward pass of a module; ``bits`` None saves as torch does."""

    def __init__(
        self,
        bits: int | str | None,
        module: nn.Module | None = None,
        frame: types.FrameType | None = None,
        offload: Offload | None = None,
    ) -> None:
        self.bits, self.exact, self.offload = bits, bits == EXACT, offload
        self.module, self.frame = module, frame  # whose call opens it, if one does
        self.opened = True
        self.below: Hooks | None = None
        self.outer: Hooks | None = None
        self.inside: Session | None = None
        self.coded: list[weakref.ref[Stored]] = []
        self.constants: dict[int, tuple[weakref.ref, Any, weakref.ref[Stored]]] = {}
        self.most = (
            _LEAST_NOTES  # notes of what is stored, dead ones among them, before they are looked through
        )

    def enter(self) -> None:
        top = _top_hooks()
        if (
            top is not None and getattr(top[0], "__module__", None) == _CHECKPOINT
        ):  # descriptors have no module
            # Inside of a checkpoint nothing is saved; its hooks count, and the recomputation must come to the same.
            self.opened = False
            return
        self.below, self.inside = top, _session_of(top)
        self.outer = top if self.inside is None else self.inside.outer
        torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)

    def exit(self, passing: Iterable[Tensor] = (), outputs: Iterable[Tensor] = ()) -> None:
        """passing: tensors that whoever calls holds for a moment only. outputs: what the block has made."""
        if not self.opened:
            return
        self._pop_hooks()
        self._look_at(outputs)
        if self.inside is not None:
            self.inside.coded += self.coded
        else:
            # torch.func's tensors are others around the ones that are saved, and have no storage.
            held = [x for x in passing if not torch._C._functorch.is_functorch_wrapped_tensor(x)]
            self._encode_what_passes(held)
            self._hold_what_is_alive({x.untyped_storage()._cdata for x in held})
        self.coded, self.constants = [], {}

    def _pop_hooks(self) -> None:
        self.opened, self.frame = False, None
        # A block around an interrupted module call, such as save_on_cpu's, ends first and pops these hooks in place of
        # its own, which are on top then.
        if _session_of(top := _top_hooks()) is self or (top is not None and top == self.below):
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def interrupted(self) -> bool:
        """Whether the module call that opened it is over."""
        if self.frame is None:
            return False
        try:
            self.frame.clear()
        except RuntimeError:  # it is executing
            return False
        return True

    def _encode_what_passes(self, passing: list[Tensor]) -> None:
        """Codes again the arguments of this module: the module before returned them, so they were alive then."""
        for x in passing:
            if self.bits is not None and not self.exact and is_plain(x) and x.grad_fn is not None:
                value = registered(resolve.root(Edge(x.grad_fn, x.output_nr), x, x._version > 0)[0])
                if isinstance(value, Stored):
                    value.encode_again()
                    self._note(value)

    def _look_at(self, outputs: Iterable[Tensor]) -> None:
        for x in outputs:
            if x.grad_fn is not None:  # the gradient of a loss is a number
                undecided.look([x.grad_fn], BOUNDED if x.numel() == 1 else UNKNOWN)
        if self.outer is not None and self.inside is None:
            undecided.give_up(self.outer)

    def _hold_what_is_alive(self, passing: set[int]) -> None:
        """Drops codes of tensors that the caller holds anyway, such as cached keys and values."""
        for ref in self.coded:
            if (stored := ref()) is not None:
                stored.hold_if_alive(passing)

    # ---- the hooks

    def pack(self, x: Tensor) -> Any:
        if self.frame is not None and self.interrupted():
            close_interrupted()
            self.bits = None
        if self.inside is not None and not self.opened:
            return self.inside.pack(x)
        if (
            self.bits is None
            or forward_ad._current_level >= 0  # a tangent belongs to the tensor itself
            or not is_plain(x)
            or x.is_conj()
            or x.is_neg()
        ):
            return Packed(Stored(x, x.dtype, None, self.outer), x, is_plain(x))
        seq = sequence_nr()  # before grad_fn is asked for: of a view that may build a node
        node = x.grad_fn
        if node is None:  # also where torch does not show it to the hooks: then nothing is coded
            if not x.requires_grad:
                frame = callers.of(sys._getframe(1))
                callers.note_weight(frame)
                return Packed(callers.frozen_weight(frame, x) or self._constant(x), x)
            leaves.note(x)
            return Packed(Leaf(x), x)
        edge = Edge(node, x.output_nr)
        frame = callers.of(sys._getframe(1))
        use = callers.use(frame)
        callers.note_cast(frame, edge, seq)
        if (
            node._sequence_nr() != seq
        ):  # else it may be the one that is being built, and has not saved everything yet
            elements = SPARSE if use == SHAPE_USE else 0  # of a loss of classes
            undecided.look([node], BOUNDED if use == CODED_USE else UNKNOWN, elements)
        value = self._at_once(x, edge, use)
        if value is not None:
            return Packed(value, x)
        rebuilt = sequence_nr() != seq
        packed = Packed(Waiting(x, None if rebuilt else edge, self, seq), x)
        undecided.add(seq, packed)
        return packed

    def unpack(self, packed: Packed) -> Tensor:
        if peek.peeked(packed):
            return torch.empty(0)
        is_last = is_last_use(sys._getframe().f_back)
        if not torch.is_grad_enabled():  # as in any backward pass without create_graph
            return packed.tensor(is_last)
        with torch.no_grad():
            return packed.tensor(is_last)

    # ---- what is stored

    def _at_once(self, x: Tensor, edge: Edge, use: str | None) -> Value | None:
        """The value, if the user is known or any user gets the same; else None."""
        if use is not None:
            return self._value(x, edge, use, None)
        if self.exact:
            value = self._value(x, edge, CODED_USE, None)
            return None if value.rounded else value
        if x.numel() < MIN_NUMEL or x.shape[-1] == 1:
            return self._value(x, edge, EXACT_USE, None)
        if registered(edge) is None and not resolve.is_copy(edge):
            return None
        options = {"rounded": False, "copies_only": True, "beside_codes": True}
        return Resolver(True, x._version > 0, **options).resolve(edge, x.dtype)

    def settle(self, packed: Packed, use: str, node: Any) -> None:
        """Stores a waiting tensor in the way that its user, ``node``, allows."""
        waiting = packed.value
        assert isinstance(waiting, Waiting)
        if waiting.fresh():  # else it was changed in place or freed: it stays what torch would hold
            edge = waiting.edge_of(node)
            if edge is None:
                packed.value = Stored(waiting.x, waiting.dtype, None, self.outer, self.offload)
            elif use == CODED_USE and not self.exact and attention.runs_again(node, waiting):
                packed.value = attention.run_again(node)
            else:
                value = self._value(waiting.x, edge, use, node, waiting)
                packed.value = self._to_its_side(value, waiting.x, node) if value.lossy else value
            packed.value.uses += 1

    def _to_its_side(self, value: Value, x: Tensor, node: Any) -> Value:
        """The decoded value on the side of a jump on which x was, where the node's derivative has jumps."""
        if (limits := ranges.jumps(node)) is None:
            return value
        sides = Stored(x, x.dtype, codecs.sides(*limits), self.outer, self.offload)
        function = functools.partial(codecs.to_side, *limits)
        return Computed(function, (value, sides), value.dtype, value.precision, 1)

    def _value(self, x: Tensor, edge: Edge, use: str, node: Any, waiting: Value | None = None) -> Value:
        """The value of an edge for a user, found or stored."""
        before = registered(edge)
        value = self._found_or_stored(x, edge, use, node, waiting)
        # What an earlier user was to compute has lost its inputs to a change in place, and x is still what it saved.
        if isinstance(before, Computed) and x._version == 0 and not before.fresh() and not value.lossy:
            before.become(value)
        return value

    def _found_or_stored(
        self, x: Tensor, edge: Edge, use: str, node: Any, waiting: Value | None = None
    ) -> Value:
        # Once changed in place, x need not be what its operation made of its inputs: only views are seen through.
        views_only = x._version > 0
        coarse, normal, block_size = True, None, codecs.BLOCK_SIZE
        if use == CODED_USE and node is not None and not self.exact:
            if attention.stays_exact(node, waiting) or ranges.in_tail(node, x):
                use = EXACT_USE
            elif (mask := self._mask(x, edge, node)) is not None:
                return mask
            elif (size := ranges.block_size(node, x)) is None:
                use = EXACT_USE
            else:
                coarse, block_size = ranges.bears_coarse(node), size
                normal = ranges.normal(node, x, waiting)
        exact = self.exact or use == EXACT_USE

        def find(exact: bool) -> Value | None:
            resolver = Resolver(
                exact,
                views_only,
                use != EXACT_USE,
                use == SHAPE_USE,
                False,
                not self.exact,
                coarse,
                block_size,
            )
            return resolver.resolve(edge, x.dtype)

        value = find(exact or normal is not None)
        if value is not None:
            return value
        root, data = resolve.root(edge, x, views_only)
        codec = self._codec(root, data, use)
        if normal is not None and codec is not None:
            if root is not edge:
                normal = ranges.normal_before_views(node, data)
            codec = None if normal is None or registered(root) is not None else codecs.normalized(*normal)
        elif codec is not None and (normal := ranges.normal_of_output(root.node, data)) is not None:
            codec = codecs.normalized(*normal)
        elif codec in (codecs.POWER, codecs.UNSIGNED) and block_size < codecs.BLOCK_SIZE:
            codec = codecs.in_blocks_of(codec, block_size)
        stored = self._store(root, data, codec)
        if stored.coarse and not coarse:
            stored.upgrade(data)
        if root is edge:
            return stored
        value = find(exact)
        return stored_itself(edge, x, self.outer, self.offload) if value is None else value

    def _mask(self, x: Tensor, edge: Edge, node: Any) -> Value | None:
        """One bit per element, for an operation that only reads whether x is between two limits. Not shared."""
        limits = ranges.limits(node)
        if limits is None or x.dtype not in FLOATS or (codec := codecs.inside(*limits, x.dtype)) is None:
            return None
        value = Resolver(True, x._version > 0, beside_codes=True).resolve(edge, x.dtype)
        if value is not None:
            return value
        stored = Stored(x, x.dtype, codec, self.outer, self.offload)
        self.coded.append(weakref.ref(stored))
        return stored

    def _store(self, root: Edge, data: Tensor, codec: codecs.Codec | None) -> Stored:
        if codec is None and resolve.finer(data.dtype, root.dtype):
            data = data.to(root.dtype)
        old = registered(root)
        if isinstance(old, Stored) and old.fresh() and codec is None:
            if old.lossy or resolve.finer(data.dtype, root.dtype) or resolve.finer(data.dtype, old.precision):
                old.upgrade(data)  # the exact one serves all users
                old.clipped = False
            return old  # of fp16 and bf16 neither holds the other: the caller stores another
        if (
            isinstance(old, Stored)
            and old.fresh()
            and codec is not None
            and codec.block_size < old.block_size
        ):
            old.encode(data, codec)  # smaller blocks serve all users, too
            return old
        stored = Stored(data, root.dtype, codec, self.outer, self.offload)
        stored.clipped = stored.codec is bounded.LOGARITHM
        register(root, stored)
        self._note(stored)
        return stored

    def _codec(self, root: Edge, data: Tensor, use: str) -> codecs.Codec | None:
        if (
            self.exact
            or use == EXACT_USE
            or data.numel() < MIN_NUMEL
            or data.shape[-1] == 1
            or data.dtype not in FLOATS
            or root.dtype not in FLOATS
        ):
            return None
        codec = bounded.CODECS.get(resolve.codec_of(root) or "")
        return None if codec is bounded.LOGARITHM and use != SHAPE_USE else codec

    def _note(self, stored: Stored) -> None:
        if stored.codec is not None:
            self.coded.append(weakref.ref(stored))
        if len(self.coded) + len(self.constants) >= self.most:  # one block may hold a whole training loop
            self.coded = [ref for ref in self.coded if ref() is not None]
            self.constants = {key: known for key, known in self.constants.items() if known[2]() is not None}
            self.most = max(_LEAST_NOTES, 2 * (len(self.coded) + len(self.constants)))

    def _constant(self, x: Tensor) -> Stored:
        """Saves a tensor that needs no gradient, exactly; masks in bits."""
        if isinstance(x, FakeTensor) or x.numel() < MIN_NUMEL:
            return Stored(x, x.dtype, None, self.outer, self.offload)
        storage = x.untyped_storage()
        place = (x.storage_offset(), x.shape, x.stride(), x.dtype, x._version)
        known = self.constants.get(storage._cdata)
        if (
            known is not None
            and known[0]() is storage
            and known[1] == place
            and (stored := known[2]()) is not None
        ):
            return stored
        stored = Stored(x, x.dtype, codecs.CONSTANT, self.outer, self.offload)
        self.constants[storage._cdata] = weakref.ref(storage), place, weakref.ref(stored)
        self._note(stored)
        return stored


def stored_itself(edge: Edge, x: Tensor, outer: Hooks | None, offload: Offload | None) -> Stored:
    stored = Stored(x, x.dtype, None, outer, offload)
    register(edge, stored)
    return stored
