"""Saved tensors whose user is not known yet, so that they cannot be coded yet.

torch calls the pack hook while it builds the node that saves the tensor, so the hook cannot see that node. The next
packed tensor shows it: its graph contains all nodes that were built since. Until then the tensor is held unchanged. A
node is recognized by the tensors that it saved, never guessed. If no later tensor shows a node (the last operations of
a block), its tensors stay exact.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .edge import Edge
from .needs import Use
from .peek import saved_by
from .saved_value import Computed, Hooks, Stored, Value, is_anything_coded
from .storage import check_version, is_present
from .users import (
    BOUNDED,
    DENSE,
    LOG_SOFTMAX,
    NOT_TOLD,
    REDUCED,
    SPARSE,
    UNKNOWN,
    User,
    is_square,
    operation,
    passed_on,
    spread,
    user,
)

_STATE, _MARK = "memkern state", "memkern mark"
_LEAST_WAITING = 16  # entries, dead ones among them, before they are looked through
_NEVER = 1 << 62  # sequence numbers of AccumulateGrad are larger
_order = itertools.count()


class Waiting(Value):
    """A tensor that is held unchanged until its user is known.

    edge: of the tensor; None if the node has been built anew by looking at it, as of a view that was changed in place.
    seq: the sequence number of the node that saves the tensor. A node that saves its own result is not held here: the
    reference cycle would keep it forever if no backward pass runs through it. A node of that number has a mark
    instead, by which it is found again: it may as well be of another thread, which counts its own.
    """

    def __init__(self, x: Tensor, edge: Edge | None, store: Any, seq: int) -> None:
        self.dtype = self.precision = x.dtype
        self.x, self.version, self.store = x.detach(), x._version, store
        self.edge, self.mark, self.nr = edge, None, 0
        if edge is not None and edge.node._sequence_nr() == seq:
            self.edge, self.mark, self.nr = None, edge.node.metadata.setdefault(_MARK, object()), edge.nr
        self.order = next(_order)

    def edge_of(self, user: Any) -> Edge | None:
        """The tensor's edge, where ``user`` is the node that saves it; None if it cannot be: the tensor is not its."""
        if user is None:
            return self.edge
        sources = user.next_functions
        if self.edge is not None:
            return self.edge if (self.edge.node, self.edge.nr) in sources else None
        if self.mark is None:
            return None
        nodes = itertools.chain((user,), (node for node, nr in sources if nr == self.nr))
        found = (node for node in nodes if node is not None and node.metadata.get(_MARK) is self.mark)
        return next((Edge(node, self.nr) for node in found), None)

    def fresh(self) -> bool:
        return self.x._version == self.version and is_present(self.x)

    def is_work(self) -> bool:
        return False

    def tensor(self, of: Callable[[Value], Tensor]) -> Tensor:
        check_version("a tensor", self.x, self.version, self.x.shape)
        return self.x


class Undecided(threading.local):
    """The waiting tensors by the sequence number of the node that saves them. Per thread, as those numbers are.

    The number finds a node quickly; whether it is the one, its inputs tell.
    """

    def __init__(self) -> None:
        self.entries: dict[int, list[weakref.ref]] = {}
        self.most = _LEAST_WAITING  # twice what was alive the last time

    def add(self, seq: int, packed: Any) -> None:
        if len(self.entries) >= self.most:
            self.forget_the_dead()
        self.entries.setdefault(seq, []).append(weakref.ref(packed))

    def look(self, nodes: Iterable[Any], state: int = UNKNOWN, elements: int = NOT_TOLD) -> None:
        """Walks up the graph from ``nodes`` and decides the waiting tensors of the nodes that it meets.

        state, elements: of the gradients that arrive at the outputs of ``nodes`` (users.py). A node is met once for
        each state; what is behind it was met then. Values that were decided before are looked at, too: what is shown
        now may ask for some of them exactly.
        """
        if not self.entries and not is_anything_coded():
            return
        stack = [(node, state, elements) for node in nodes]
        found: list[tuple[Any, Use, Any]] = []
        while stack:
            node, state, elements = stack.pop()
            seq = node._sequence_nr()
            if seq > _NEVER:
                continue
            about = node.metadata
            if (known := about.get(_STATE)) is not None:
                if known[0] >= state and known[1] >= elements:
                    continue
                state, elements = max(state, known[0]), max(elements, known[1])
            about[_STATE] = state, elements
            name = operation(node)
            row = user(node, name)
            if seq in self.entries:
                found += self._decided(node, name, row, seq)
            if _is_too_late_for_codes(node, name, row):
                _exact_again(node, row)
            below, of = passed_on(row, node, name, state), spread(row, name, elements)
            stack += [(source, below, of) for source, _ in node.next_functions if source is not None]
        found.sort(key=lambda each: each[0].value.order)
        for packed, use, node in found:
            if use is Use.SHAPE and operation(node) == LOG_SOFTMAX:
                # Another user of the log-probabilities may have been met since.
                use = _use_of_logarithms(node) or use
            packed.value.store.settle(packed, use, node)

    def _decided(self, node: Any, name: str, row: User, seq: int) -> list[tuple[Any, Use, Any]]:
        """The waiting tensors of this node whose use is known now: (packed, use, node)."""
        every = [packed for ref in self.entries[seq] if (packed := ref()) is not None]
        waiting = [packed for packed in every if packed.value.edge_of(node) is not None]
        state = node.metadata[_STATE][0]
        coded, shape = _saved(node, row.coded), _saved(node, row.shape)
        found, left = [], [weakref.ref(packed) for packed in every if packed not in waiting]
        for packed in waiting:
            value = packed.value
            use: Use | None
            if value in shape:
                use = Use.SHAPE
            elif value not in coded:
                use = Use.EXACT
            elif name == LOG_SOFTMAX:
                use = _use_of_logarithms(node)
            elif row.kind == "product" or state == BOUNDED or (state == REDUCED and is_square(node, name)):
                use = Use.CODED
            else:
                use = Use.EXACT if state >= REDUCED else None
            if use is None:
                left.append(weakref.ref(packed))
            else:
                found.append((packed, use, node))
        if left:
            self.entries[seq] = left
        else:
            del self.entries[seq]
        return found

    def forget_the_dead(self) -> None:
        alive = [(seq, [r for r in refs if r() is not None]) for seq, refs in self.entries.items()]
        self.entries = {seq: refs for seq, refs in alive if refs}
        self.most = max(_LEAST_WAITING, 2 * len(self.entries))

    def give_up(self, outer: Hooks) -> None:
        """Stores all waiting tensors exactly, through the hooks around ours, which are about to be closed."""
        waiting = [packed for refs in self.entries.values() for ref in refs if (packed := ref()) is not None]
        given = [packed for packed in waiting if packed.value.store.outer is outer]
        for packed in sorted(given, key=lambda each: each.value.order):
            packed.value.store.settle(packed, Use.EXACT, None)
        done = {*map(id, given)}
        for seq, refs in self.entries.items():
            self.entries[seq] = [ref for ref in refs if id(ref()) not in done]
        self.forget_the_dead()


def _use_of_logarithms(node: Any) -> Use | None:
    """How log-softmax uses its log-probabilities; None if no operation after it tells."""
    state, elements = node.metadata[_STATE]
    if state >= REDUCED or elements == DENSE:
        return Use.EXACT
    return Use.SHAPE if elements == SPARSE else None


def _is_too_late_for_codes(node: Any, name: str, row: User) -> bool:
    """Whether a node whose tensors have been decided is now seen to need them exactly."""
    if name == LOG_SOFTMAX:
        return _use_of_logarithms(node) is Use.EXACT
    return row.kind == "smooth" and node.metadata[_STATE][0] >= REDUCED and not is_square(node, name)


def _saved(node: Any, attributes: tuple[str, ...]) -> set[Value]:
    found: set[Value] = set()
    for attribute in attributes:
        name = attribute if attribute == "saved_tensors" else f"_saved_{attribute}"
        found.update(saved_by(node, name) or ())
    return found


def _exact_again(node: Any, row: User) -> None:
    """Replaces the codes of what this node saved by the tensor itself, where somebody still holds it."""
    values = list(_saved(node, row.coded))
    while values:
        value = values.pop()
        if isinstance(value, Stored):
            if value.lossy:
                value.hold_if_alive(set())
            value.stay_exact()
        elif isinstance(value, Computed):
            values += value.inputs


undecided = Undecided()


def sequence_nr() -> int:
    """Of the node that was built last on this thread."""
    return torch.autograd._get_sequence_nr() - 1
