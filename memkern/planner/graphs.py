"""Runs compiled blocks on fake tensors: Inductor's graphs allocate their buffers, and their kernels do nothing.

dynamo, AOTAutograd, the partitioner and Inductor's scheduler run as for real tensors. The code that Inductor generates
allocates a buffer for each result of a fused kernel and frees it after its last use, so that fake tensors show what a
graph allocates. Its kernels are not compiled, and do nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, nn

from ..blocks.block_lists import block_lists
from ..compiled.blocks import MARK
from . import fake_cuda
from .fake_cuda import gpu
from .fake_mode import FakeMode

UNLIMITED = 2**30  # recompilations: a plan must not reach the limit


class _Kernel:
    """Does nothing in place of a kernel. Inductor's code calls Triton kernels by ``run``, C++ ones directly."""

    def run(self, *args: Any, **kwargs: Any) -> None:
        pass

    __call__ = run


class _Session:
    """The state of :func:`session`, of which there is one in a process."""

    entered = False
    mode: FakeMode | None = None
    """The mode of the trace that is being made, for the thread of a backward pass on a GPU, which has no mode."""
    codes: ClassVar[set[Any]] = set()  # code objects of compiled functions, whose graphs are forgotten at the end


@contextlib.contextmanager
def session() -> Iterator[None]:
    """A ``with`` block in which graphs are compiled without kernels, equal ones of several traces once. They are
    forgotten at its end. May be nested."""
    if _Session.entered:
        yield
        return
    _Session.entered = True
    try:
        with contextlib.ExitStack() as entered:
            _enter(entered)
            yield
    finally:
        _Session.entered = False
        for code in _Session.codes:
            torch._dynamo.eval_frame.reset_code(code)
        _Session.codes.clear()


def _enter(stack: contextlib.ExitStack) -> None:
    """Patches dynamo and Inductor so that graphs are compiled up to their kernels."""
    import torch._dynamo.config as dynamo_config
    from torch._C._dynamo import guards
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder

    from ..compiled.torch_internals import functorch_config, inductor_config

    replaced = mock.patch.object
    # Every trace has other sizes. Sizes that only a plan has seen must not make a later graph dynamic.
    dynamo: dict[str, Any] = {
        "recompile_limit": UNLIMITED, "accumulated_recompile_limit": UNLIMITED, "automatic_dynamic_shapes": False,
    }  # fmt: skip
    for patch in (
        dynamo_config.patch(**dynamo),
        # Graphs without kernels must not come into torch's caches, nor graphs with kernels out of them.
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
        replaced(PyCodeCache, "modules", []),
        replaced(PyCodeCache, "modules_no_attr", {}),
        # Inductor would run matrix products with and without padding and compare their times.
        inductor_config.patch(shape_padding=False),
        # Kernels are not compiled, so that processes which would compile them are not needed.
        inductor_config.patch(compile_threads=1),
        *(replaced(AsyncCompile, name, _compiled) for name in ("cpp_pybinding", "triton")),
        # What the generated code calls must take fake tensors, which have no address.
        replaced(guards, "assert_alignment", _nothing),
        *(replaced(guards, name, lambda x: x) for name in ("copy_if_misaligned",) if hasattr(guards, name)),
        replaced(guards, "_reinterpret_tensor", _reinterpret),
        *(replaced(guards, f"_empty_strided_{device}", _allocator(device)) for device in ("cpu", "cuda")),
        # Inductor computes constants with real tensors, for which there may be no GPU.
        replaced(UniformValueConstantFolder, "_deduce_value", _on_cpu(UniformValueConstantFolder)),
    ):
        stack.enter_context(patch)


@contextlib.contextmanager
def without_kernels(mode: FakeMode, model: nn.Module) -> Iterator[None]:
    """A ``with`` block for a forward and a backward pass of a model with compiled blocks on the mode's fake tensors."""
    has_fake_cuda = torch.cuda.is_available() and not fake_cuda.torch_has_gpus()
    with session(), gpu.inductor_sees() if has_fake_cuda else contextlib.nullcontext():
        outer_mode, _Session.mode = _Session.mode, mode
        # For a module of torch's own, such as nn.Sequential, torch.compile compiles a function that wrap_inline makes,
        # which calls the forward method. All of these have one code object.
        _Session.codes.add(torch._dynamo.external_utils.wrap_inline(_nothing).__code__)
        for blocks in block_lists(model):
            for block in blocks:
                code = getattr(getattr(block, MARK, None), "__code__", None)
                if code is not None:
                    _Session.codes.add(code)
        try:
            yield
        finally:
            _Session.mode = outer_mode


def _on_cpu(folder: Any) -> Any:
    """Inductor's method that computes a constant with which a tensor is filled, made to do so on the CPU."""
    deduce = folder._deduce_value

    def deduced(self: Any, node: torch.fx.Node) -> Any:
        kwargs = node.kwargs
        if "device" in kwargs:
            node.kwargs = {**kwargs, "device": torch.device("cpu")}
        try:
            return deduce(self, node)
        finally:
            node.kwargs = kwargs

    return deduced


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Does nothing."""


def _compiled(*args: Any, **kwargs: Any) -> _Kernel:
    return _Kernel()


def _allocator(device: str) -> Any:
    """A function in place of the one by which Inductor's code allocates, which makes fake tensors."""

    def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        assert _Session.mode is not None
        with _Session.mode:
            return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return empty_strided


def _reinterpret(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Tensor:
    """A view, in place of the function by which Inductor's code makes views, which takes no fake tensors."""
    return torch.as_strided(x, size, stride, x.storage_offset() + offset)
