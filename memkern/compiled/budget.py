"""Chooses the values that a compiled graph saves: under a memory budget, the cheapest choice within it.

The choices, each of which saves less and costs more time than the one before: what torch saves; elementwise operations
before a product computed again; as many values in codes as it takes, or in full precision products and attention
computed again.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from . import codecs, written
from .nodes import CODEC, NOT_AGAIN, arguments, number, value, views
from .peaks import Backward
from .torch_internals import HINT, MinCutOptions, functorch_config, guard_or_false, partitioners

_LIFTED = {  # bans on recomputation that torch's cut has by default and this one has not
    # torch saves an elementwise result that a product needs; here it is computed again.
    "ban_recompute_materialized_backward": False,
    # torch finds reductions by comparing sizes, and ours are those of codes: _save_reductions marks them before.
    "ban_recompute_reductions": False,
}
_PRODUCTS_AGAIN = [
    MinCutOptions(
        ban_if_used_far_apart=banned,
        ban_if_long_fusible_chains=False,
        ban_if_materialized_backward=False,
        ban_if_not_in_allowlist=True,  # else torch draws random numbers anew (pytorch issue 190758)
        ban_if_reduction=False,
    )
    for banned in (True, False)
]
"""Options of cuts that compute products again. What is used far from where it is computed, as sums of residuals are, is
computed again only where nothing else saves less: Inductor fuses layers that read the same values, and all of them wait
for the last. So a Llama of two layers has 0.89 of torch.compile's peak; with these sums again it would be 1.10."""

_STEPS = 12
"""The number of steps in which products are added to those that are computed again: a cut and a peak for each."""


def check(budget: Any) -> None:
    """Raises ValueError for what is no budget."""
    if budget is None or (isinstance(budget, int) and not isinstance(budget, bool) and budget > 1):
        return
    if isinstance(budget, float) and 0 < budget <= 1:
        return
    raise ValueError(
        "memory_budget must be a share of what torch.compile saves, above 0.0 and at most 1.0, or bytes, an int above"
        f" 1, got {budget!r}"
    )


def size_in_codes(node: fx.Node, size: int) -> int:
    """The bytes of a value's codes, or ``size``, its plain bytes, if it has no codec."""
    if (codec := node.meta.get(CODEC)) is None:
        return size
    return max(1, int(size * codecs.BY_BACKEND["ops"][codec].bytes / value(node).element_size()))


@contextlib.contextmanager
def symbolic_sizes(graph: fx.Graph, budget: float | int | None) -> Iterator[None]:
    """Gives torch's cut fixed numbers for symbolic sizes, not hints: the first call must not decide for later ones.

    A budget in bytes is kept for sizes up to a power of two, with guards: longer sizes get a graph of their own.
    """
    symbols: dict[Any, int] = {}
    if isinstance(budget, int):
        for x in map(value, graph.find_nodes(op="placeholder")):
            for size in x.shape if isinstance(x, Tensor) else (x,):
                if isinstance(size, torch.SymInt) and size.node.expr.is_symbol and size.node.hint is not None:
                    limit = 1 << (size.node.hint - 1).bit_length()
                    if guard_or_false(size <= limit):
                        symbols[size.node.expr] = limit
    hint = getattr(partitioners, HINT)
    setattr(partitioners, HINT, functools.partial(number, symbols=symbols))
    try:
        yield
    finally:
        setattr(partitioners, HINT, hint)


@contextlib.contextmanager
def _sizes_in_codes() -> Iterator[None]:
    """Makes torch's cut count the size of codes for a value that may be coded."""
    plain = partitioners._size_of
    partitioners._size_of = lambda node: size_in_codes(node, plain(node))
    try:
        yield
    finally:
        partitioners._size_of = plain


def constants(graph: fx.Graph) -> list[fx.Node]:
    """Nodes computed from no input, which are not saved, such as the numbers of T5's buckets of distances."""
    is_recomputable = partitioners.get_default_op_list().is_recomputable
    independent: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "call_function" and is_recomputable(node) and all(a in independent for a in node.all_input_nodes):
            independent[node] = None
    return [*independent]


@contextlib.contextmanager
def _marked(policies: dict[CheckpointPolicy, list[fx.Node]]) -> Iterator[None]:
    """Tells torch's cut to save or to recompute these nodes, except those that have a checkpoint's policy."""
    marked = {node: policy for policy, nodes in policies.items() for node in nodes if "recompute" not in node.meta}
    for node, policy in marked.items():
        node.meta["recompute"] = policy
    try:
        yield
    finally:
        for node in marked:
            del node.meta["recompute"]


def storages(saved: Iterable[fx.Node], held_by_caller: set[fx.Node]) -> set[fx.Node]:
    """The computed values that are alive because these are saved: a view keeps its whole base alive.

    held_by_caller: what the caller holds anyway, which does not count.
    """
    bases = {views(node)[0] for node in saved if isinstance(value(node), Tensor)}
    return {base for base in bases if base.op == "call_function" and base not in held_by_caller}


def size_of(nodes: Iterable[fx.Node]) -> int:
    """The bytes of nodes' values."""
    return sum(partitioners._size_of(node) for node in nodes)


class Choice:
    """Chooses what one graph saves, in place of torch's ``choose_saved_values_set``.

    budget: see :func:`memkern.compile`. coded: whether values with a codec in ``meta[CODEC]`` are saved in codes;
    with a budget, whether this was chosen. limit: the bytes of the budget, known after the choice.
    """

    def __init__(self, budget: float | int | None, coded: bool) -> None:
        self.budget, self.coded = budget, coded
        self.limit: int | None = None
        self._plain = partitioners.choose_saved_values_set

    @contextlib.contextmanager
    def replacing_torch(self) -> Iterator[None]:
        """A ``with`` block in which torch's cut asks this object, in all threads: one of them compiles at a time."""
        partitioners.choose_saved_values_set = self.__call__
        try:
            yield
        finally:
            partitioners.choose_saved_values_set = self._plain

    def __call__(self, joint_graph: fx.Graph, node_info: Any, memory_budget: float = 1) -> list[fx.Node]:
        graph, info = joint_graph, node_info
        written.claim_copies(graph, info)
        if memory_budget != 1:
            raise ValueError(
                f"memkern.compile has memory_budget= in place of torch's activation_memory_budget, got {memory_budget}"
            )
        if self.budget is None:
            return self._lifted(graph, info, self.coded)
        can_be_coded, self.coded = self.coded, False
        saved = self._plain(graph, info)
        torch_bytes = self._bytes(graph, saved)
        self.limit = self.budget if isinstance(self.budget, int) else math.floor(self.budget * torch_bytes)
        if torch_bytes > self.limit:
            saved = self._lifted(graph, info, coded=False)
        if self._bytes(graph, saved) > self.limit:
            self.coded = can_be_coded
            saved = self._lifted(graph, info, True) if can_be_coded else self._products_again(graph, info, saved)
        return saved

    def _lifted(self, graph: fx.Graph, info: Any, coded: bool) -> list[fx.Node]:
        """The values that torch's cut saves without the bans of ``_LIFTED``.

        By default torch's cut saves a value that is used both soon and much later. Where less is saved and the peak is
        no higher if such values are computed again, they are: a router's results for experts are an example. For sums
        that the next layer needs the peak is mostly higher.
        """
        policies = {CheckpointPolicy.PREFER_RECOMPUTE: constants(graph)}
        if coded:
            policies[CheckpointPolicy.MUST_SAVE] = [n for n in graph.nodes if NOT_AGAIN in n.meta]
        sizes = _sizes_in_codes() if coded else contextlib.nullcontext()
        with functorch_config.patch(_LIFTED), _marked(policies), sizes:
            saved: list[fx.Node] = self._plain(graph, info)
            with functorch_config.patch({"ban_recompute_used_far_apart": False}):
                smaller: list[fx.Node] = self._plain(graph, info)
            if self._bytes(graph, smaller) >= self._bytes(graph, saved):
                return saved
            backward, held_by_caller = Backward(graph, info), _held_by_caller(graph)
            return smaller if backward.peak(smaller, held_by_caller) <= backward.peak(saved, held_by_caller) else saved

    @staticmethod
    def _bytes(graph: fx.Graph, saved: Iterable[fx.Node]) -> int:
        return size_of(storages(saved, _held_by_caller(graph)))

    def _products_again(self, graph: fx.Graph, info: Any, best: list[fx.Node]) -> list[fx.Node]:
        """The values to save: with as few products computed again as the limit takes, else those of the lowest peak.

        best: the values with no product computed again. Of the products those are computed again first that take the
        fewest operations for a byte of their results (torch's estimate). Of equal ones the earlier ones come first:
        their results are needed when most of the others are freed. The peak rises where one value is computed again
        through many layers, because the results of all these layers are there at once.
        """
        ops = partitioners.get_default_op_list()
        products = [n for n in info.required_fw_nodes if _is_repeatable_product(n, ops)]
        cost = {n: partitioners.estimate_runtime(n) / max(1, partitioners._size_of(n)) for n in products}
        products.sort(key=cost.__getitem__)  # a stable sort
        backward, held_by_caller = Backward(graph, info), _held_by_caller(graph)
        lowest_peak = backward.peak(best, held_by_caller)
        bytes_before = self._bytes(graph, best)
        for options in _PRODUCTS_AGAIN:
            for i in range(_STEPS + 1):
                recomputed: Any = {*products[: len(products) * i // _STEPS]}
                saved: list[fx.Node] = partitioners.solve_min_cut(graph, info, options, recomputed)[0]
                if (peak := backward.peak(saved, held_by_caller)) <= lowest_peak:
                    best, lowest_peak = saved, peak
                    if self._bytes(graph, saved) <= (self.limit or 0):
                        return saved
            if self._bytes(graph, best) < bytes_before:
                break
        return best


def _held_by_caller(graph: fx.Graph) -> set[fx.Node]:
    """What the caller holds anyway: the graph's outputs, or what they are views of."""
    return {views(n)[0] for n in graph.output_node().all_input_nodes}


def _is_repeatable_product(node: fx.Node, ops: Any) -> bool:
    """Whether an operation is a product or attention that draws no random numbers."""
    return ops.is_compute_intensive(node) and not arguments(node).get("dropout_p")
