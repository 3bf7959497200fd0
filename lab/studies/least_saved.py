"""The least that a compiled model could save exactly: no product, attention, convolution or table is computed again.

The smallest cut of the joint graph of forward and backward pass, in bytes, where everything else (elementwise
operations, norms, other reductions, gathers, copies) costs nothing to compute again, and inputs and outputs nothing to
save. memkern's "exact" also looks at time and at the peak, so it may save more: lab/results/saved-compiled.csv has
both (``python -m lab.studies.least_saved``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import networkx  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd

from lab.studies import study
from memkern.compiled.budget import size_of
from memkern.compiled.nodes import tangents, value, views
from memkern.compiled.torch_internals import partitioners, select_decomp_table

from .saved_compiled import COLUMNS, run
from .saved_models import built, step


def least_bytes(graph: fx.Graph, num_fwd_outputs: int) -> int:
    ops, gradients = partitioners.get_default_op_list(), tangents(graph)
    outputs: Any = graph.output_node().args[0]
    free = {views(o)[0] for o in outputs[:num_fwd_outputs] if isinstance(o, fx.Node)}
    network = networkx.DiGraph()
    for node in graph.nodes:
        if node.op not in ("placeholder", "call_function") or node in gradients:
            continue
        is_view = views(node)[0] is not node
        if node.op == "placeholder" or node in free:
            size: float = 0
        else:
            size = size_of([node]) if isinstance(value(node), Tensor) and not is_view else math.inf
        network.add_edge((node, "in"), (node, "out"), capacity=size)
        if node.op == "placeholder" or not (is_view or ops.is_recomputable(node)):
            network.add_edge("source", (node, "in"), capacity=math.inf)
        for user in node.users:
            if user in gradients:
                network.add_edge((node, "out"), "sink", capacity=math.inf)
            elif user.op != "output":
                network.add_edge((node, "out"), (user, "in"), capacity=math.inf)
    return int(networkx.minimum_cut_value(network, "source", "sink"))


class _Found(BaseException):
    """Ends AOTAutograd where it would cut the graph: the bytes."""


def least(name: str, precision: str, tokens: int) -> int:
    torch._dynamo.reset()
    model, batch, autocast = built(name, precision, tokens)

    def stop(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> Any:
        outputs: Any = joint.graph.output_node().args[0]
        if value(outputs[0]).dim():
            raise NotImplementedError(f"{name} has a graph that does not end with the loss")
        raise _Found(least_bytes(joint.graph, num_fwd_outputs))

    table = select_decomp_table()
    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph, partition_fn=stop, decompositions=table)
    try:
        with autocast:
            torch.compile(model, backend=backend)(**batch)
    except _Found as found:
        return int(found.args[0])
    raise AssertionError("no graph of a forward and backward pass")


def rows(names: list[str], precisions: list[str], tokens: int) -> Iterator[dict[str, str]]:
    provenance = study.provenance_with_transformers()
    for name in names:
        for precision in precisions:
            try:
                count = least(name, precision, tokens)
            except torch._dynamo.exc.BackendCompilerFailed as error:
                print(f"{name}: {error.inner_exception}")
                continue
            of, _, _ = step(name, precision, tokens, "torch")
            values = (name, precision, str(tokens), "least", str(count // tokens), f"{count / of:.4f}", "")
            yield study.row(provenance, COLUMNS, values)


def main(argv: list[str] | None = None) -> None:
    run("least_saved", __doc__, rows, argv)


if __name__ == "__main__":
    main()
