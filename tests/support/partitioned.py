"""Cuts graphs as Inductor does and runs them without generated code: a backend of torch.compile, traced functions, and
what steps of compiled models save and compute.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from functorch.compile import aot_function, make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.lowering import lowerings
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from memkern import memory
from memkern.compiled.partitioner import Partitioner
from memkern.compiled.torch_internals import functorch_config, inductor_config, select_decomp_table

Look = Callable[[fx.GraphModule, fx.GraphModule, int], None]


def backend(
    bits: Any,
    look: Look | None = None,
    memory_budget: float | int | None = None,
    activations: int | None = None,
    codec_backend: str | None = None,
    in_graph: bool = True,
) -> Callable[..., Any]:
    """A backend with Inductor's decompositions and a partitioner; the graphs run operation by operation.

    bits: memkern's partitioner saves values in 8 bits (8) or as they are ("exact"); None is torch's own partitioner.
    look: is called with the graphs of the forward and the backward pass, and how many outputs are the function's own.
    in_graph: whether graphs write inputs themselves where they can, as Inductor's do.
    """
    table = select_decomp_table()

    def run_as_is(graph: fx.GraphModule, inputs: Any) -> Any:
        view_to_reshape(graph)  # as Inductor does, whose kernels' results may have other strides
        graph.recompile()
        return make_boxed_func(graph.forward)

    def partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        partitioner = Partitioner(bits, memory_budget, activations, codec_backend) if bits is not None else None
        fw, bw = _cut(partitioner, joint, inputs, kwargs)
        if look:
            look(fw, bw, kwargs["num_fwd_outputs"])
        return fw, bw

    return aot_autograd(
        fw_compiler=run_as_is,
        bw_compiler=run_as_is,
        partition_fn=partition,
        decompositions=table,
        keep_inference_input_mutations=in_graph,
    )


def _cut(
    partitioner: Partitioner | None, joint: fx.GraphModule, inputs: Any, kwargs: dict[str, Any]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward graph. Asserts that the cut adds no operations that Inductor has to decompose."""
    known = {node.target for node in joint.graph.nodes}
    fw, bw = (partitioner or min_cut_rematerialization_partition)(joint, inputs, **kwargs)
    new = {node.target for graph in (fw.graph, bw.graph) for node in graph.nodes} - known
    decomposed = new.intersection(select_decomp_table()) - {*lowerings}  # Inductor refuses them
    assert not decomposed, decomposed
    return fw, bw


def compiled(bits: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors, traced without Dynamo, with its graph cut as by :func:`backend`."""

    def partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        return _cut(Partitioner(bits) if bits is not None else None, joint, inputs, kwargs)

    table = select_decomp_table()
    call = aot_function(function, lambda graph, _: graph, partition_fn=partition, decompositions=table)

    def run(*inputs: Tensor) -> Any:
        with tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True))):
            return call(*inputs)

    return run


class _Traced(Exception):
    """Ends AOTAutograd where it would cut the graph."""


class Traced:
    """The joint graph of a loss of tensors, traced once without Dynamo; each call of gradients() cuts it anew."""

    def __init__(self, loss: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
        def stop(joint: fx.GraphModule, fakes: Any, **kwargs: Any) -> Any:
            self.joint, self.fakes, self.kwargs = joint, fakes, kwargs
            raise _Traced

        self.inputs = inputs
        mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
        fakes = [mode.from_tensor(x, static_shapes=True) for x in inputs]
        trace = aot_function(loss, None, partition_fn=stop, decompositions=select_decomp_table())
        try:
            trace(*fakes)
        except _Traced:
            return
        raise AssertionError("no graph of a forward and backward pass")

    def gradients(self, bits: Any, look: Look | None = None) -> list[Tensor | None]:
        """Gradients of the inputs, None where an input needs none. bits: as of :func:`backend`."""
        partitioner = Partitioner(bits) if bits is not None else None
        fw, bw = _cut(partitioner, copy.deepcopy(self.joint), self.fakes, self.kwargs)
        if look:
            look(fw, bw, self.kwargs["num_fwd_outputs"])
        with torch.no_grad():
            loss, *saved = fw(*self.inputs)
            return list(bw(*saved, torch.ones_like(loss)))


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Inductor makes its graphs and compiles none of their kernels, which do nothing."""
    with (
        mock.patch.object(AsyncCompile, "cpp_pybinding", return_value=lambda *tensors: None),
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch(fx_graph_cache=False),
    ):
        yield


def gradients_of(model: nn.Module) -> Tensor:
    """All parameters' gradients as one vector."""
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def step(model: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor] | None = None) -> tuple[int, Tensor]:
    """The bytes that ``call(x)`` saves beside the model and x, and the gradients of its mean square.

    call: a function of x; by default the model.
    """
    run = model if call is None else call
    outputs: list[Tensor] = []
    model.zero_grad()
    saved = memory.saved_bytes(lambda: outputs.append(run(x)), model, x)
    outputs[0].float().square().mean().backward()
    return saved, gradients_of(model)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The 2-norm of the error in shares of the 2-norm of ``expected``; NaN or infinity where that is 0.

    Gradients of small nets from 8-bit codes are off by 1 % or so, and tests bound the error by 2 or 3 %.
    """
    return float((actual - expected).norm() / expected.norm())


def peak(call: Callable[[], object]) -> int:
    """The peak bytes of torch's CPU allocator in a call, above what was allocated before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))
