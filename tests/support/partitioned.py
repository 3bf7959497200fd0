"""A backend of torch.compile that cuts a model's graph as Inductor does, and runs it without generated code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from memkern.compiled.partitioner import Partitioner


def backend(bits: Any) -> Callable[..., Any]:
    """Inductor's decompositions and a partitioner, torch's own for None; the graphs run operation by operation."""

    def as_it_is(graph: fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    partition = min_cut_rematerialization_partition if bits is None else Partitioner(bits)
    return aot_autograd(
        fw_compiler=as_it_is,
        bw_compiler=as_it_is,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
