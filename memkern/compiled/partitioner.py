"""The partitioner that Inductor calls: cuts a joint graph into forward and backward pass, and saves 8-bit codes.

torch's min-cut decides what is saved, with the sizes that values have in codes. Each of these values that may stand in
codes (:mod:`memkern.compiled.codable`) is encoded when the forward pass has computed it, and decoded before its first
use in the backward pass.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from .._version import __version__
from ..techniques.options import SAVED_BITS
from . import budget as budgets
from . import codecs, few_bit, layouts, norms, written
from .attention import FORWARD
from .budget import Choice, size_of, storages
from .codable import UseChecker, codec_of, has_known_blocks, is_candidate, mark, share_normalized
from .gradients import Gradients
from .nodes import CODEC, COPIES, NOT_AGAIN, NOT_CODED, VIEWS, arguments, aten, numel, packet, value, views
from .operations import Operations, out_of_place
from .rules import MIN_NUMEL
from .torch_internals import CustomPartitionerFn, functorch_config, get_hash_for_files, partitioners

_NO_WARNING = 2**20
"""Bytes above a budget up to which there is no warning: small graphs, such as a loss, must save what they need."""


def _save_reductions(graph: fx.Graph) -> None:
    """Marks results below a quarter of the size of their inputs to be saved: tensors, as torch does, and tuples."""
    candidates = {n for n in graph.nodes if n.op == "call_function" and isinstance(value(n), (Tensor, tuple))}
    for node in candidates.difference(budgets.constants(graph)):
        if "recompute" not in node.meta:
            sizes = sum(partitioners._size_of(a) for a in node.args if isinstance(a, fx.Node))
            if 4 * partitioners._size_of(node) < sizes:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


class Partitioner(CustomPartitionerFn):
    """Decides what a compiled model saves: ``torch.compile(model, options={"custom_partitioner_fn": Partitioner(8)})``.

    bits: 8, or "exact", which rounds nothing: elementwise operations before a product are computed again.
    memory_budget, activations, codec_backend: as of :func:`memkern.compile`.
    """

    def __init__(
        self,
        bits: int | str = "exact",
        memory_budget: float | int | None = None,
        activations: int | None = None,
        codec_backend: str | None = None,
    ) -> None:
        if bits is None or bits not in SAVED_BITS:
            raise ValueError(f"saved_bits must be 8 or 'exact', got {bits!r}")
        budgets.check(memory_budget)
        few_bit.check(activations)
        codecs.check_backend(codec_backend)
        self.bits, self.memory_budget, self.activations = bits, memory_budget, activations
        self.codec_backend = codec_backend

    def _options(self) -> tuple[Any, ...]:
        return self.bits, self.memory_budget, self.activations, self.codec_backend

    def __eq__(self, other: object) -> bool:
        """For an equal partitioner TorchDynamo compiles nothing anew, such as the blocks of a copied model."""
        return isinstance(other, Partitioner) and self._options() == other._options()

    def __hash__(self) -> int:
        return hash(self._options())

    def uuid(self) -> Any:
        """A hash of memkern's sources and the options: torch's cache has no graph for others."""
        package = Path(__file__).parents[1]
        sources = sorted(path for name in ("compiled", "quant", "fewbit") for path in (package / name).glob("*.py"))
        options = " ".join(map(str, self._options()))
        return get_hash_for_files(tuple(map(str, sources)), f"{__version__} {options}")

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        with budgets.symbolic_sizes(gm.graph, self.memory_budget):
            return self._cut(gm, joint_inputs, **kwargs)

    def _cut(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Cuts the joint graph in two, in the steps that memkern/compiled/__init__.py lists."""
        out_of_place(gm.graph)
        if self.bits == 8:
            norms.use_normalized(gm.graph)
        operations = Operations(gm.graph)
        if functorch_config.cse:  # torch would do this next. Here it gives a value the uses of equal values, too
            gm.graph = partitioners.fx_graph_cse(gm.graph)
        if self.bits == 8:
            share_normalized(gm.graph, operations)
        written.read_copies(gm.graph, kwargs["num_fwd_outputs"])
        gradients = Gradients(gm.graph, operations)
        is_coded = self.bits == 8 and bool(gradients.nodes)
        if is_coded:
            recomputable = partitioners.get_default_op_list().is_recomputable
            mark(gm.graph, UseChecker(gradients), recomputable)
        _save_reductions(gm.graph)
        choice = Choice(self.memory_budget, is_coded)
        with choice.replacing_torch():
            fw, bw = partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        written.drop_unsaved_copies(fw)
        if self.activations is not None:
            _SavedValues(fw, bw, kwargs["num_fwd_outputs"], operations).use_few_bits(self.activations)
        saved = _SavedValues(fw, bw, kwargs["num_fwd_outputs"], operations)
        if choice.coded:
            saved.encode(choice.limit, self.codec_backend)
        if choice.limit is not None and (saved_bytes := saved.bytes()) > choice.limit + _NO_WARNING:
            warnings.warn(
                f"a compiled graph saves {saved_bytes:,} bytes, and not the {choice.limit:,} of"
                f" memory_budget={self.memory_budget}: what saves less has no lower peak",
                stacklevel=2,
            )
        layouts.keep_inputs(fw)
        for graph in (fw.graph, bw.graph):
            for node in graph.nodes:
                for key in (CODEC, NOT_AGAIN, NOT_CODED):
                    node.meta.pop(key, None)
                if node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE:
                    del node.meta["recompute"]
        return fw, bw


class _SavedValues:
    """The values that a forward graph saves for its backward graph, and their replacement by codes."""

    def __init__(self, fw: fx.GraphModule, bw: fx.GraphModule, returned: int, operations: Operations) -> None:
        self.fw, self.bw, self.operations = fw, bw, operations
        self.checker = UseChecker(Gradients(bw.graph, operations))
        self.output = fw.graph.output_node()
        outputs: list[Any] = [*self.output.args[0]]  # type: ignore[misc]
        # None where torch has made the output anew, for the states of random numbers that are drawn again.
        descriptions = self.output.meta.get("desc", [None] * len(outputs))
        self.returned = list(zip(outputs[:returned], descriptions[:returned], strict=True))  # (node, description)
        self.saved = list(zip(outputs[returned:], descriptions[returned:], strict=True))
        self.held_by_caller = {views(o)[0] for o, _ in self.returned if isinstance(o, fx.Node)}
        self.holders = {n.name: n for n in bw.graph.find_nodes(op="placeholder")}  # inputs of the backward graph
        # By saved value: the nodes that the forward graph saves for it, each with the backward graph's input for it
        self.pairs = {n: [(n, self.holders[n.name])] for n, _ in self.saved if n.name in self.holders}
        self.decoded: set[fx.Node] = set()  # values decoded from codes, in the backward graph

    def bytes(self) -> int:
        """The bytes that are saved, without inputs and what the caller holds anyway."""
        outputs: Any = self.output.args[0]
        saved = (n for n in outputs[len(self.returned) :] if isinstance(n, fx.Node))
        return size_of(storages(saved, self.held_by_caller))

    def use_few_bits(self, bits: int) -> None:
        """Saves codes of activations' derivatives in place of tensors that are saved for these alone."""
        gradients = self.checker.gradients.nodes
        for derivative in few_bit.derivatives(self.fw.graph, self.bw.graph, self.operations, gradients, bits):
            freed = {node for node, _ in self.saved if self.holders.get(node.name) in derivative.unused}
            still_saved = storages((node for node, _ in self.saved if node not in freed), self.held_by_caller)
            codes = few_bit.encode(self.fw.graph, derivative)
            if size_of(storages(freed, self.held_by_caller) - still_saved) <= size_of([codes]):
                self.fw.graph.erase_node(codes)
                continue
            first, description = next(pair for pair in self.saved if pair[0] in freed)
            with self.bw.graph.inserting_before(self.holders[first.name]):
                holder = self.bw.graph.placeholder(f"memkern_{derivative.x.name}_derivative")
            holder.meta.update(codes.meta)
            few_bit.use(self.bw.graph, derivative, holder)
            self.saved.insert(self.saved.index((first, description)), (codes, description))  # symbolic sizes come last
            self.pairs[codes] = [(codes, holder)]
        self._rebuild()

    def encode(self, limit: int | None, codec_backend: str | None) -> None:
        """Saves codes of all values that may be coded, or of as few as it takes to save ``limit`` bytes at most."""
        bytes_left = self.bytes()
        for first, members, codec in self._candidates(in_order=limit is not None):
            if limit is not None and bytes_left <= limit:
                break
            bytes_left += self._encode(first, members, codec, codecs.backend_for(value(first), codec_backend))
        for node in list(self.bw.graph.nodes):
            if self.operations.of(node).name in FORWARD and node in self.checker.gradients.nodes:
                self._recompute_attention(node)
        self._rebuild()

    def _candidates(self, in_order: bool) -> list[tuple[fx.Node, list[fx.Node], str]]:
        """The values that may be coded, each with those views of it that are saved, and the codec.

        in_order: whether to begin with values that cost the least time for a saved byte. Attention's inputs come last,
        as attention runs again if one of them is coded. Before them come values with codecs of distances from a limit,
        which take a root and more codes. Of all others fp32 values come first: codes save 3 of the 4 bytes of their
        elements, and 1 of the 2 bytes of 16-bit values.
        """
        groups: dict[fx.Node, list[fx.Node]] = {}
        for node, _ in self.saved:
            if node.name in self.holders and isinstance(value(node), Tensor):
                groups.setdefault(views(node)[0], []).append(node)
        candidates = []
        for base, members in groups.items():
            if base.op != "call_function" or base in self.held_by_caller:  # an input, or held by the caller anyway
                continue
            whole = is_candidate(value(base)) and 2 * sum(map(numel, members)) >= numel(base)
            # Where a small part of the base is saved, each of its views has codes of its own.
            for first, saved_views in [(base, members)] if whole else [(m, [m]) for m in members]:
                x = value(first)
                codec = codec_of(self.operations, first) if is_candidate(x) and numel(first) >= MIN_NUMEL else None
                holders = [self.holders[m.name] for m in saved_views]
                if codec is not None and self.checker.may_be_coded(holders, codec, first) and has_known_blocks(x):
                    candidates.append((first, saved_views, codec))

        def cost(candidate: tuple[fx.Node, list[fx.Node], str]) -> tuple[Any, ...]:
            first, members, codec = candidate
            to_attention = any(map(self._goes_to_attention, members))
            return to_attention, codec in codecs.DISTANCES, -value(first).element_size(), first

        return sorted(candidates, key=cost) if in_order else candidates

    def _goes_to_attention(self, node: fx.Node) -> bool:
        """Whether attention uses a value, also as a view or in another dtype."""
        return any(
            self.operations.of(user).name in FORWARD
            or ((packet(user) in VIEWS or packet(user) in COPIES) and self._goes_to_attention(user))
            for user in node.users
        )

    def _encode(self, first: fx.Node, members: list[fx.Node], codec: str, backend: str) -> int:
        """Saves codes of a value in place of its saved views. Returns the change in bytes, which is negative."""
        with self.fw.graph.inserting_before(first.next):
            data = codecs.encode(self.fw.graph, first, codec, backend)
        for node in data:
            if "saved_tensor_with_no_vc_check" in members[0].meta:
                node.meta["saved_tensor_with_no_vc_check"] = members[0].meta["saved_tensor_with_no_vc_check"]
        placeholders = self._decode(first, members, data, codec, backend)
        # The codes are saved in place of the first view, and nothing in place of the others.
        self.pairs |= {members[0]: list(zip(data, placeholders, strict=True))} | {m: [] for m in members[1:]}
        return size_of(data) - size_of([first])

    def _decode(
        self, first: fx.Node, members: list[fx.Node], data: tuple[fx.Node, ...], codec: str, backend: str
    ) -> list[fx.Node]:
        """Decodes a value before its first use in the backward graph. Returns the inputs that hold its codes."""
        graph, holders = self.bw.graph, [self.holders[m.name] for m in members]
        with graph.inserting_before(holders[0]):
            placeholders = []
            for i, node in enumerate(data):
                holder = graph.placeholder(f"memkern_{first.name}_{i}")
                holder.meta.update(node.meta)
                placeholders.append(holder)
        with graph.inserting_before(min(u for h in holders for u in h.users)):
            x = codecs.decode(graph, placeholders, codec, backend, value(first).dtype)
            self.decoded.add(x)
            for member, holder in zip(members, holders, strict=True):
                y, chain = x, views(member)
                for view in chain[chain.index(first) + 1 :]:
                    y = graph.node_copy(view, {view.all_input_nodes[0]: y}.__getitem__)
                    self.decoded.add(y)
                holder.replace_all_uses_with(y)
                graph.erase_node(holder)
        return placeholders

    def _recompute_attention(self, node: fx.Node) -> None:
        """Computes attention's output and log-sum-exp from decoded queries, keys and values (see attention.py)."""
        given = arguments(node)
        if not given or packet(node) in VIEWS:
            return
        forward = FORWARD[self.operations.of(node).name]
        inputs = [given[name] for name in ("query", "key", "value")]
        if not any(self.decoded & {i, *_ancestors(i)} for i in inputs):
            return
        if isinstance(mask := given.get(forward.mask or ""), fx.Node):
            inputs.append(mask)
        output = given["out"]
        while packet(output) in (aten.alias, aten.detach):
            output = output.args[0]
        # Where the output was in codes, its other uses get the new output, too. Else they keep the one that was saved.
        serves_others = output in self.decoded
        first_user = min(output.users) if serves_others else node
        # The inputs, and what they are computed from, move before the first node that needs the new output.
        for source in sorted({a for i in inputs for a in (i, *_ancestors(i))}):
            if source.op == "call_function" and source > first_user:
                first_user.prepend(source)

        def run(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> tuple[Tensor, ...]:
            mask = masks[0] if masks else None
            return tuple(forward.run(q, k, v, mask, given["is_causal"], given["scale"])[:2])

        with self.bw.graph.inserting_before(first_user):
            again, logsumexp = codecs.inline(self.bw.graph, run, *inputs)
        if serves_others:
            output.replace_all_uses_with(again)
        else:
            node.replace_input_with(given["out"], again)
        node.replace_input_with(given["logsumexp"], logsumexp)

    def _rebuild(self) -> None:
        """Leaves out of the forward graph's outputs what the backward graph does not use any more."""
        self.bw.graph.eliminate_dead_code()
        remaining = list(self.returned)
        for node, description in self.saved:
            for replacement, holder in self.pairs.get(node, [(node, None)]):
                if holder is not None and not holder.users and isinstance(value(replacement), Tensor):
                    self.bw.graph.erase_node(holder)
                else:
                    remaining.append((replacement, description))
        self.output.args = (tuple(node for node, _ in remaining),)
        if "desc" in self.output.meta:
            self.output.meta["desc"] = [description for _, description in remaining]
        if "output_stack_traces" in self.output.meta:
            self.output.meta["output_stack_traces"] = [
                node.meta.get("stack_trace") if isinstance(node, fx.Node) else None for node, _ in remaining
            ]
        for module in (self.fw, self.bw):
            module.graph.eliminate_dead_code()
            module.graph.lint()
            module.recompile()


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """All nodes that a node is computed from."""
    ancestors: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in ancestors:
                ancestors.add(source)
                waiting.append(source)
    return ancestors
