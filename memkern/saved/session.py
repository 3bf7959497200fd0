"""The pack and unpack hooks of one ``with memkern.quantize_saved()`` block, or of one forward pass of a module."""

from __future__ import annotations

import importlib
import sys
import threading
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from . import callers, extension, peek
from .edge import Edge
from .leaves import leaves, parameters_of
from .link import Offload
from .needs import Use
from .packed import Packed, is_last_use
from .saved_value import Hooks, Leaf, Value
from .storage import is_plain
from .store import Notes, Store
from .undecided import Waiting, sequence_nr, undecided
from .users import BOUNDED, NOT_TOLD, SPARSE, UNKNOWN

EXACT = "exact"
_CHECKPOINT = "torch.utils.checkpoint"


def check_bits(bits: Any, name: str = "bits") -> None:
    """Raises ValueError unless ``bits`` is 8 or "exact"."""
    if isinstance(bits, bool) or bits not in (8, EXACT):
        raise ValueError(f"{name} must be 8 or 'exact', got {bits!r}")


def top_hooks() -> Hooks | None:
    """The hooks that torch calls in this thread now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def session_of(hooks: Hooks | None) -> Session | None:
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
        self.bits, self.store = bits, Store(bits != 8, offload)
        self.module, self.frame = module, frame  # whose call opens it, if one does
        self.opened = True
        self.hooks_around: Hooks | None = None
        self.enclosing: Session | None = None

    def enter(self) -> None:
        top = top_hooks()
        # Descriptors have no module.
        if top is not None and getattr(top[0], "__module__", None) == _CHECKPOINT:
            # Inside of a checkpoint nothing is saved; its hooks count, and the recomputation must come to the same.
            self.opened = False
            return
        self.hooks_around, self.enclosing = top, session_of(top)
        self.store.outer = top if self.enclosing is None else self.enclosing.store.outer
        torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)

    def note_leaves(self) -> None:
        """Notes the versions of all known leaves and of the module's parameters, before its first operation."""
        leaves.note_all(parameters_of(self.module) if self.module is not None else ())

    def exit(self, passing: Iterable[Tensor] = (), outputs: Iterable[Tensor] = ()) -> None:
        """passing: tensors that whoever calls holds for a moment only. outputs: what the block has made."""
        if not self.opened:
            return
        self._pop_hooks()
        for x in outputs:
            if x.grad_fn is not None:
                self.look(x)
        # torch.func's tensors are others around the ones that are saved, and have no storage.
        self.finish([x for x in passing if not torch._C._functorch.is_functorch_wrapped_tensor(x)])

    def look(self, x: Tensor) -> None:
        """Looks at the graph behind an output."""
        # The gradient of a loss is a number.
        undecided.look([x.grad_fn], BOUNDED if x.numel() == 1 else UNKNOWN)

    def finish(self, passing: list[Tensor]) -> None:
        """At the block's end: gives what it has noted to the block around it, or drops codes of what is held anyway."""
        if self.enclosing is not None:
            self.enclosing.store.notes.add_all(self.store.notes)
        else:
            if self.store.outer is not None:
                undecided.give_up(self.store.outer)
            self.store.end(passing)
        self.store.notes = Notes()

    def _pop_hooks(self) -> None:
        self.opened, self.frame = False, None
        # A block around an interrupted module call, such as save_on_cpu's, ends first and pops these hooks in place of
        # its own, which are on top then.
        if session_of(top := top_hooks()) is self or (top is not None and top == self.hooks_around):
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

    # ---- the hooks

    def pack(self, x: Tensor) -> Any:
        """Finds who uses x (callers.py, undecided.py), then its value (store.py)."""
        if self.frame is not None and self.interrupted():
            close_interrupted()
            self.bits = None  # whatever runs now is not of that call: it is saved as torch does
        if self.enclosing is not None and not self.opened:
            return self.enclosing.pack(x)
        if self.bits is None or not _has_graph(x):
            return Packed(self.store.stored(x), x, is_plain(x))
        seq = sequence_nr()  # before grad_fn is asked for: of a view that may build a node
        frame = callers.of(sys._getframe(1))
        node = x.grad_fn
        if node is None:  # also where torch does not show it to the hooks: then nothing is coded
            return Packed(self._without_node(x, frame), x)
        packed = Packed(self._of_node(x, node, frame, seq), x)
        if isinstance(packed.value, Waiting):
            undecided.add(seq, packed)
        return packed

    def _without_node(self, x: Tensor, frame: types.FrameType) -> Value:
        if x.requires_grad:
            leaves.note(x)
            return Leaf(x)
        callers.note_weight(frame)
        return callers.frozen_weight(frame, x) or self.store.constant(x)

    def _of_node(self, x: Tensor, node: Any, frame: types.FrameType, seq: int) -> Value:
        edge = Edge(node, x.output_nr)
        use = callers.use(frame)
        callers.note_cast(frame, edge, seq)
        # A node with this number may be the one that is being built, and has not saved everything yet.
        if node._sequence_nr() != seq:
            elements = SPARSE if use is Use.SHAPE else NOT_TOLD  # of a loss of classes
            undecided.look([node], BOUNDED if use is Use.CODED else UNKNOWN, elements)
        value = self.store.at_once(x, edge, use)
        if value is None:
            rebuilt = sequence_nr() != seq
            value = Waiting(x, None if rebuilt else edge, self.store, seq)
        return value

    def unpack(self, packed: Packed) -> Tensor:
        if peek.peeked(packed):
            return torch.empty(0)
        is_last = is_last_use(sys._getframe().f_back)
        if not torch.is_grad_enabled():  # as in any backward pass without create_graph
            return packed.tensor(is_last)
        with torch.no_grad():
            return packed.tensor(is_last)


def _has_graph(x: Tensor) -> bool:
    """Whether a saved tensor is one of a graph that shows what it is made of."""
    is_dual = forward_ad._current_level >= 0  # a tangent belongs to the tensor itself
    return not is_dual and is_plain(x) and not x.is_conj() and not x.is_neg()


def new_session(
    bits: int | str | None,
    module: nn.Module | None = None,
    frame: types.FrameType | None = None,
    offload: Offload | None = None,
) -> Session:
    """A session; in Python also under a mode, and inside of one in Python."""
    kind = Session
    if extension.missing() is None and not torch._C._len_torch_dispatch_stack():
        native = importlib.import_module(f"{__package__}.native").NativeSession
        around = session_of(top_hooks())
        if around is None or isinstance(around, native):
            kind = native
    return kind(bits, module, frame, offload)
