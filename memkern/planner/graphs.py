"""Runs compiled blocks on fake tensors: Inductor's graphs allocate their buffers, and their kernels do nothing.

dynamo, AOTAutograd, the partitioner and Inductor's scheduler run as for real tensors. What Inductor writes allocates a
buffer for each result of a fused kernel and frees it after its last use, so that fake tensors show what a graph
allocates. Its kernels are not compiled, and do nothing.
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

MANY = 2**30  # for limits that a plan must not reach


class _Kernel:
    """Does nothing, in place of a kernel that Inductor compiles: Triton's are run, C++'s called."""

    def run(self, *args: Any, **kwargs: Any) -> None:
        pass

    __call__ = run


class _Session:
    """The state of :func:`session`, which may hold several traces: equal graphs are compiled once."""

    entered = False
    mode: FakeMode | None = None
    """The mode of the trace that runs: a backward pass on a GPU has a thread of its own, without modes."""
    codes: ClassVar[set[Any]] = set()  # of functions whose graphs are forgotten at the end


@contextlib.contextmanager
def session() -> Iterator[None]:
    """Compiled graphs allocate and compute nothing in it, and are forgotten at its end. May be nested."""
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
        for code in _Session.codes:  # their graphs compute nothing
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

    # Every trace has other sizes. Sizes that only a plan has seen must not make a later graph dynamic.
    dynamo: dict[str, Any] = {
        "recompile_limit": MANY, "accumulated_recompile_limit": MANY, "automatic_dynamic_shapes": False,
    }  # fmt: skip
    for patch in (
        inductor_config.patch(fx_graph_cache=False, compile_threads=1, shape_padding=False),
        functorch_config.patch(enable_autograd_cache=False),
        dynamo_config.patch(**dynamo),
        mock.patch.object(PyCodeCache, "modules", []),
        mock.patch.object(PyCodeCache, "modules_no_attr", {}),
        mock.patch.object(UniformValueConstantFolder, "_deduce_value", _on_cpu(UniformValueConstantFolder)),
        mock.patch.object(guards, "assert_alignment", _nothing),
        mock.patch.object(guards, "copy_if_misaligned", lambda x: x),
        mock.patch.object(guards, "_reinterpret_tensor", _reinterpret),
        *(mock.patch.object(guards, f"_empty_strided_{device}", _allocator(device)) for device in ("cpu", "cuda")),
        *(mock.patch.object(AsyncCompile, name, _compiled) for name in ("cpp_pybinding", "triton")),
    ):
        stack.enter_context(patch)


@contextlib.contextmanager
def without_kernels(mode: FakeMode, model: nn.Module) -> Iterator[None]:
    """Around a forward and a backward pass of a model with compiled blocks, on the mode's fake tensors."""
    is_fake = torch.cuda.is_available() and not fake_cuda.torch_has_gpus()
    with session(), gpu.inductor_sees() if is_fake else contextlib.nullcontext():
        outer_mode, _Session.mode = _Session.mode, mode
        # What torch.compile compiles in place of a forward method of torch's own, as nn.Sequential's.
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
    """Makes Inductor's constant folding compute the constant that fills a tensor on the CPU, not on a fake device."""
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
    """Does nothing, in place of a function that asks for an address."""


def _compiled(*args: Any, **kwargs: Any) -> _Kernel:
    return _Kernel()


def _allocator(device: str) -> Any:
    def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        assert _Session.mode is not None
        with _Session.mode:
            return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return empty_strided


def _reinterpret(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Tensor:
    return torch.as_strided(x, size, stride, x.storage_offset() + offset)
