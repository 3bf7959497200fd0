"""Compiles the blocks of a model in place. Like blocks share one graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.torch_version import TorchVersion

from ..checkpointing import caches_of, is_filled, without_cache
from ..options import OptionError, Techniques, not_allowed
from ..swap.block_lists import block_lists
from .compiling import FIRST_VERSION, _options_of_inductor

MARK = "_memkern_compiled"
"""Attribute of a block whose forward method is compiled, beneath a checkpoint too: the function that was compiled."""


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of this module, not of those inside of it, run a compiled function."""
    return (
        hasattr(module, "_orig_mod")
        or hasattr(module, MARK)
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


def check_compilable(model: nn.Module, techniques: Techniques) -> None:
    """Raises OptionError for a model whose blocks cannot be compiled with these techniques. Changes nothing."""
    compiled = next((name or "the model" for name, m in model.named_modules() if is_compiled(m)), None)
    if compiled is not None:
        raise not_allowed("compile", True, f"False, as {compiled} is compiled already")
    if not any(True for _ in block_lists(model)):
        allowed = "False for a model without a list of like blocks, of which memkern.compile(model) compiles the whole"
        raise not_allowed("compile", True, allowed)
    try:
        _compiler(techniques)
    except RuntimeError as error:
        raise OptionError("compile", f"True given with saved_bits={techniques.saved_bits!r}: {error}") from error
    if any(p.device.type == "cpu" for p in model.parameters()):
        _check_cxx()


def compile_blocks(model: nn.Module, techniques: Techniques) -> None:
    """Compiles the forward method of every block in place, with ``memkern.compile`` where less is to be saved.

    A block is compiled by itself: of like blocks one graph is compiled, whatever their number. What is around a forward
    method stays outside of the graph: checkpoints, the hooks of ``fully_shard`` and DDP. Every shape has a graph of its
    own (``dynamic=False``): which graph runs must not depend on what ran before, or a resumed run would round
    otherwise.
    """
    compiler = _compiler(techniques)
    for blocks in block_lists(model):
        for block in blocks:
            function: Any = block.forward
            is_method = getattr(function, "__self__", None) is block
            if is_method:
                function = function.__func__
            run = _without_empty_cache(function, compiler)
            block.forward = MethodType(run, block) if is_method else run  # a copy gets a method of its own blocks
            setattr(block, MARK, function)


def _without_empty_cache(forward: Callable[..., Any], compiler: Callable[[Callable[..., Any]], Any]) -> Any:
    """A block's forward method, compiled, but where it is given transformers' cache of keys and values.

    A graph would be of one layer of the cache, so that each block had its own, up to TorchDynamo's limit of 8. In a
    training step transformers makes an empty cache by default (use_cache), which is left out. With a cache that is not
    empty, or that is to be filled (no gradients), the block runs uncompiled.
    """
    compiled = compiler(forward)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if caches := caches_of(args, kwargs):
            if not torch.is_grad_enabled() or any(map(is_filled, caches)):
                return forward(*args, **kwargs)
            args, kwargs = without_cache(args, kwargs)
        return compiled(*args, **kwargs)

    return run


def _compiler(techniques: Techniques) -> Callable[[Callable[..., Any]], Any]:
    """torch.compile for blocks. Raises RuntimeError where torch is too old for what is to be saved."""
    options = _options(techniques.saved_bits, techniques.activation_bits, techniques.memory_budget)
    return lambda forward: torch.compile(forward, options=options, dynamic=False)


@functools.cache
def _options(bits: Any, activations: int | None, budget: float | None) -> dict[str, Any] | None:
    """Inductor's. Made once: for unequal options dynamo compiles a block anew, and no two partitioners are equal."""
    if bits is None and activations is None and budget is None and TorchVersion(torch.__version__) < FIRST_VERSION:
        return None
    if bits is None and budget is None:
        budget = 1.0  # all that torch.compile saves, but for activations
    bits, budget = "exact" if bits is None else bits, None if budget is None else float(budget)
    return _options_of_inductor({}, None, bits, budget, activations, codec_backend=None)


def _check_cxx() -> None:
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        raise OptionError(
            "compile", "True given, and no C++ compiler is found, which Inductor needs on a CPU"
        ) from error
