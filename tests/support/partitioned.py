"""A backend of torch.compile that cuts a model's graph as Inductor does, and runs it without generated code."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.lowering import lowerings

from memkern.compiled.partitioner import Partitioner
from memkern.compiled.torch_internals import select_decomp_table

Look = Callable[[fx.GraphModule, fx.GraphModule, int], None]


def backend(
    bits: Any,
    look: Look | None = None,
    memory_budget: float | int | None = None,
    activations: int | None = None,
    codec_backend: str | None = None,
) -> Callable[..., Any]:
    """Inductor's decompositions and a partitioner, torch's own for None; the graphs run operation by operation.

    look: gets the graphs of the forward and the backward pass, and how many outputs are the function's own.
    """
    table = select_decomp_table()

    def as_it_is(graph: fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    def partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        ours = Partitioner(bits, memory_budget, activations, codec_backend) if bits is not None else None
        cut = ours or min_cut_rematerialization_partition
        known = {node.target for node in joint.graph.nodes}
        fw, bw = cut(joint, inputs, **kwargs)
        new = {node.target for graph in (fw.graph, bw.graph) for node in graph.nodes} - known
        decomposed = new.intersection(table) - {*lowerings}  # Inductor refuses them
        assert not decomposed, decomposed
        if look:
            look(fw, bw, kwargs["num_fwd_outputs"])
        return fw, bw

    return aot_autograd(fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=partition, decompositions=table)


def peak(call: Callable[[], object]) -> int:
    """Of torch's CPU allocator, above what was there."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))
