"""Compiles the blocks of a model in place. Like blocks share one graph."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from ..blocks.block_lists import block_lists
from ..blocks.checkpointing import caches_of, is_filled, without_cache
from ..techniques.options import OptionError, Techniques, not_allowed
from .inductor import FIRST_VERSION, options_of_inductor

MARK = "_memkern_compiled"
"""Attribute of a block whose forward method is compiled, beneath a checkpoint too: the function that was compiled."""

_GRAPHS = 32
"""The most graphs of one kind of block, where torch's limit is 8: one for each range of lengths that torch tells apart,
with and without a gradient of the input."""


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
        compile_arguments(techniques)
    except RuntimeError as error:
        raise OptionError("compile", f"True given with saved_bits={techniques.saved_bits!r}: {error}") from error
    if any(p.device.type == "cpu" for p in model.parameters()):
        _check_cxx()


def has_uncompiled_blocks(model: Any) -> TypeGuard[nn.Module]:
    """Whether ``model`` is a module that has a list of like blocks, and no module in it is compiled."""
    return isinstance(model, nn.Module) and any(block_lists(model)) and not any(map(is_compiled, model.modules()))


def is_made_of_blocks(model: nn.Module) -> bool:
    """Whether most layers are inside of blocks, so that little stays uncompiled around these.

    A block that is itself a layer, as in a list of norms or of Linear modules, has no layers inside.
    """
    layers = {module for module in model.modules() if module._parameters}
    inside = {m for blocks in block_lists(model) for block in blocks for m in block.modules() if m is not block}
    return 2 * len(layers & inside) > len(layers)


def compile_blocks(model: nn.Module, arguments: dict[str, Any]) -> nn.Module:
    """Compiles the forward method of every block in place, and returns the model. arguments: of torch.compile.

    Like blocks share one graph, whatever their number. Checkpoints and the hooks of ``fully_shard`` and DDP stay
    outside of it. The graph for a second sequence length serves further lengths (torch's automatic dynamic shapes).
    Where torch compiles no more graphs, a warning names the bytes that an uncompiled block saves. Copies of a model,
    pickled ones too, have compiled blocks of their own.
    """
    for blocks in block_lists(model):
        compiled: dict[int, _Compiled] = {}
        for block in blocks:
            function: Any = block.forward
            is_method = getattr(function, "__self__", None) is block
            if is_method:
                function = function.__func__
            if id(function) not in compiled:
                compiled[id(function)] = _Compiled(function, arguments)
            run = compiled[id(function)]
            block.forward = functools.partial(run, block) if is_method else run
            setattr(block, MARK, function)
    return model


class _Compiled:
    """A block's compiled forward method, as a function of the block and without transformers' cache.

    With the cache as an argument each block would need a graph of its own, for its layer of keys and values, and
    TorchDynamo's limit is 8. In a training step transformers makes an empty cache by default (use_cache), which is left
    out. With a cache that is not empty, or that is to be filled (no gradients), the block runs uncompiled.

    An object and no closure, so that it can be pickled: it is compiled again then.
    """

    def __init__(self, forward: Callable[..., Any], arguments: dict[str, Any]) -> None:
        functools.update_wrapper(self, forward)
        self.forward, self.arguments = forward, arguments
        self.compiled = torch.compile(forward, **arguments)
        self.is_at_limit = False

    def __reduce__(self) -> Any:
        return _Compiled, (self.forward, self.arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if caches := caches_of(args, kwargs):
            if not torch.is_grad_enabled() or any(map(is_filled, caches)):
                return self.forward(*args, **kwargs)
            args, kwargs = without_cache(args, kwargs)
        if self.is_at_limit:
            return self.compiled(*args, **kwargs)
        config = torch._dynamo.config
        limit, raises = config.recompile_limit, config.fail_on_recompile_limit_hit  # the caller's settings
        most_graphs = max(limit, _GRAPHS)
        config.recompile_limit, config.fail_on_recompile_limit_hit = most_graphs, True
        try:
            return self.compiled(*args, **kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            if raises:
                raise
            self.is_at_limit = True
        finally:
            config.recompile_limit, config.fail_on_recompile_limit_hit = limit, raises
        out, saved = _run_counting(self.forward, args, kwargs)
        name = getattr(self.forward, "__qualname__", "a block")
        warnings.warn(
            f"{name} has as many graphs as torch may compile ({most_graphs}, or what torch._dynamo.config."
            f"recompile_limit has): for other inputs it runs uncompiled, as now, and saves {saved:,} bytes",
            stacklevel=2,
        )
        return out


def _run_counting(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
    """A call's result, and the bytes that it saves without parameters, counted by hooks that call the caller's."""
    saved: dict[int, torch.UntypedStorage] = {}
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False) or (lambda x: x, lambda x: x)

    def count(x: Tensor) -> Any:
        if not isinstance(x if x._base is None else x._base, nn.Parameter):
            saved[x.untyped_storage()._cdata] = x.untyped_storage()
        return pack(x)

    with torch.autograd.graph.saved_tensors_hooks(count, unpack):
        out = function(*args, **kwargs)
    return out, sum(storage.nbytes() for storage in saved.values())


def compile_arguments(techniques: Techniques) -> dict[str, Any]:
    """torch.compile's arguments for what techniques save. Raises RuntimeError where torch is too old for these."""
    bits, activations, budget = techniques.saved_bits, techniques.activation_bits, techniques.memory_budget
    if bits is None and activations is None and budget is None and TorchVersion(torch.__version__) < FIRST_VERSION:
        return {}
    if bits is None and budget is None:
        budget = 1.0  # all that torch.compile saves, except for activations
    bits, budget = "exact" if bits is None else bits, None if budget is None else float(budget)
    return {"options": options_of_inductor({}, None, bits, budget, activations, codec_backend=None)}


def _check_cxx() -> None:
    """Raises OptionError where there is no C++ compiler, which Inductor needs on a CPU."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        raise OptionError(
            "compile", "True given, and no C++ compiler is found, which Inductor needs on a CPU"
        ) from error
