"""Has Inductor generate Triton kernels without a GPU, and runs them in the PTX emulator.

:func:`source` needs a process with fake CUDA (memkern.planner.fake_cuda). :func:`run` runs its result on CPU tensors,
inside of ``lab.emulators.triton_ptx.emulated()``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import tempfile
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

from memkern.planner.fake_cuda import gpu

H100 = SimpleNamespace(**vars(gpu.A100) | {"major": 9, "multi_processor_count": 132})


def source(function: Callable[..., Any], inputs: list[tuple[tuple[int, ...], torch.dtype]]) -> str:
    """The program that Inductor generates for a function of CUDA tensors of these shapes and dtypes."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode

    from memkern.compiled.torch_internals import make_fx, select_decomp_table

    with gpu.inductor_sees(H100), contextlib.ExitStack() as stack:
        fake = FakeTensorMode()
        with fake:
            arguments = [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in inputs]
            functional = torch.func.functionalize(function, remove="mutations")
            module = make_fx(functional, decomposition_table=select_decomp_table())(*arguments)
        module.graph.eliminate_dead_code()
        graph = GraphLowering(module, example_inputs=arguments)
        for handler in (tracing(TracingContext(fake)), V.set_fake_mode(fake), V.set_graph_handler(graph)):
            stack.enter_context(handler)
        stack.enter_context(V.set_debug_handler(mock.MagicMock()))
        stack.enter_context(V.set_extern_kernel_nodes([]))
        graph.run(*arguments)
        code = graph.codegen()[0]
    return str(getattr(code, "value", code))


def sources(functions: dict[str, tuple[Any, ...]]) -> dict[str, str]:
    """The programs by name, from the arguments of :func:`source`."""
    return {name: source(*arguments) for name, arguments in functions.items()}


class Kernel(NamedTuple):
    """A Triton kernel in a program of Inductor: its name and source."""

    name: str
    text: str

    @property
    def loads(self) -> list[str]:
        """The pointer of each load."""
        return re.findall(r"tl\.load\((\w+)", self.text)

    @property
    def stores(self) -> list[str]:
        return re.findall(r"tl\.store\((\w+)", self.text)

    def function(self) -> Any:
        """The Triton function, without Inductor's decorator, which chooses a configuration."""
        start = self.text.index("@triton.jit")
        imports = "\n".join(line for line in self.text[:start].splitlines() if re.match(r"(from|import) ", line))
        text = re.sub(r", eviction_policy='\w+'", "", self.text[start:])  # hints to a cache, unknown to the emulator
        with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:  # Triton reads a function's file
            file.write(f"{imports}\n\n{text}")
        spec = importlib.util.spec_from_file_location(self.name, file.name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, self.name)


def kernels(program: str) -> list[Kernel]:
    return [Kernel(*match) for match in re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", program, re.S)]


class _Launched:
    """Replaces Inductor's kernel object, which would choose a configuration; for tiles of one dimension."""

    def __init__(self, kernel: Kernel) -> None:
        self.function = kernel.function()
        self.block = 4 if "r0_numel" in kernel.text else 256  # rows of a reduction, or elements

    def run(self, *arguments: Any, stream: None) -> None:
        elements = dict(zip(self.function.arg_names, arguments, strict=False))["xnumel"]
        grid = (-(-elements // self.block),)
        self.function[grid](*arguments, XBLOCK=self.block, enable_fp_fusion=True)  # as Inductor has it


def run(program: str, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Runs a program on CPU tensors, inside of ``triton_ptx.emulated()``."""
    start = program.index("    def call(self, args):")
    body = textwrap.dedent(program[start : program.index("\nrunner = ")])
    body = re.sub(r"with torch\.cuda\._DeviceGuard.*:", "if True:", body)
    body = re.sub(r"^ *(torch\.cuda\.set_device|assert_size_stride).*\n", "", body, flags=re.M)
    names: dict[str, Any] = {kernel.name: _Launched(kernel) for kernel in kernels(program)}
    names |= {
        "torch": torch,
        "get_raw_stream": lambda _: None,
        "empty_strided_cuda": lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype),
        "reinterpret_tensor": torch.as_strided,
    }
    exec(body, names)
    results: tuple[torch.Tensor, ...] = names["call"](None, [*inputs])
    return results
