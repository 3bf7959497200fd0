"""Puts checkpoints around the blocks of a model, which save the blocks' inputs exactly or in 8 bits."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from .. import _ops
from ..quant.layout import FLOATS, dense
from ..techniques.options import CHECKPOINT_BITS, OptionError, at_least, not_allowed
from .block_lists import block_lists

BLOCK_SIZE = 128


class _Link(torch.autograd.Function):
    """A tensor of x's shape without memory of its own, through which x gets its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Decode(torch.autograd.Function):
    """Decodes codes; the gradient of their values goes through the link."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        return _ops.dequantize_blockwise(codes, scale, "power", BLOCK_SIZE, link.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


def caches_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """transformers' caches of keys and values among a block's arguments."""
    module = sys.modules.get("transformers.cache_utils")
    return [] if module is None else [x for x in (*args, *kwargs.values()) if isinstance(x, module.Cache)]


def without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A block's arguments without transformers' cache of keys and values, where gradients are asked for.

    The cache would keep every block's keys and values for the backward pass, and blocks that run again would append.
    transformers' own checkpoints leave it out too.
    """
    caches = {id(x) for x in caches_of(args, kwargs)}
    if not torch.is_grad_enabled() or not (caches or kwargs.get("use_cache")):
        return args, kwargs
    new_kwargs = {name: None if id(x) in caches else x for name, x in kwargs.items()}
    if new_kwargs.get("use_cache"):
        new_kwargs["use_cache"] = False
    return tuple(None if id(x) in caches else x for x in args), new_kwargs


def is_filled(cache: Any) -> bool:
    """Whether a cache of transformers has keys and values already, such as those of a learned prefix."""
    try:
        return bool(cache.get_seq_length())
    except ValueError:  # a cache of linear attention's states has no length
        return False


def _tensors(arguments: Any) -> list[Tensor]:
    """The tensors in nested arguments whose changes in place can be noticed."""
    if torch.compiler.is_compiling():
        return []
    return [x for x in tree_leaves(arguments) if isinstance(x, Tensor) and not x.is_inference()]


def _run(
    block: nn.Module,
    forward: Callable[..., Any],
    first: str,
    bits: int | None,
    in_checkpoint: bool,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Runs a block in a checkpoint, which saves the first argument, or its codes, and holds the others.

    With codes both the forward pass and the recomputation use the decoded values, so that both compute the same, and a
    router, a mask or a top-k decides alike. The gradient of the argument is that of its decoded values. With a cache
    that is filled already the block runs without a checkpoint: to run it again would append to the cache again.

    first: the name of the first argument.
    """
    if not torch.is_grad_enabled() or any(map(is_filled, caches_of(args, kwargs))):
        return forward(block, *args, **kwargs)
    args, kwargs = without_cache(args, kwargs)
    if not in_checkpoint:
        return forward(block, *args, **kwargs)
    if not args and first in kwargs:
        args = (kwargs.pop(first),)
    x, others = args[:1], args[1:]
    held = _tensors((others, kwargs, *(each for each in x if not isinstance(each, Tensor))))
    versions = [each._version for each in held]

    def run(*x: Any) -> Any:
        if [each._version for each in held] != versions:
            raise RuntimeError(
                f"an argument of {type(block).__name__} has been changed in place since its forward pass, and the "
                "checkpoint cannot run it again with what it was: change a copy, or leave out its checkpoint"
            )
        return forward(block, *x, *others, **kwargs)

    if bits is None or not x or not isinstance(x[0], Tensor) or x[0].dtype not in FLOATS:
        return checkpoint(run, *x, use_reentrant=False)
    with torch.no_grad():
        codes, scale = _ops.quantize_blockwise(dense(*x), "power", True, BLOCK_SIZE, None, mark_nonfinite=True)
    link = _Link.apply(*x)

    def decoded(codes: Tensor, scale: Tensor) -> Any:
        return run(_Decode.apply(link, codes, scale))

    return checkpoint(decoded, codes, scale, use_reentrant=False)


def _unbound(block: nn.Module) -> Callable[..., Any]:
    """A block's forward method as a function of the block."""
    forward: Any = block.forward
    if getattr(forward, "__self__", None) is block:
        return forward.__func__
    return functools.partial(_call_without_block, forward)


def _call_without_block(forward: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls a ``forward`` that was set on a block and is no method of it."""
    return forward(*args, **kwargs)


def _blocks_of(model: nn.Module, name: str) -> list[list[nn.Module]]:
    """The model's lists of blocks. Raises OptionError, about the option ``name``, where it has none."""
    lists = list(block_lists(model))
    if not lists:
        raise OptionError(name, "'blocks' given, and the model has no list of like blocks")
    return lists


def check_blocks(model: nn.Module) -> None:
    """Raises OptionError unless :func:`checkpoint_blocks` can put checkpoints into the model."""
    _blocks_of(model, "checkpointing")


def checkpoint_blocks(model: nn.Module, blocks: str = "blocks", *, bits: int | None = None, every: int = 1) -> None:
    """Puts a checkpoint around each of a model's blocks, or around every second or third one, in place.

    A checkpoint saves the block's first argument, and runs the block again in the backward pass. It holds the other
    arguments, which may differ from block to block. What a block takes and returns, and which blocks the model runs,
    is as without checkpoints.

    Args:
        blocks: "blocks", all lists of like blocks.
        bits: None saves the inputs of checkpoints exactly. 8 saves them in block-wise 8-bit codes, 1.03 bytes per
            element, and each checkpoint computes with the decoded values, in both passes: the loss is that of a model
            whose blocks' inputs are rounded to 8 bits, and the gradient is the exact one of that model
            (docs/what-does-not-fit.md). A NaN or an infinity makes its block of 128 NaN. float64 stays as it is.
        every: 2 puts checkpoints around the first block of each list, the third, the fifth and so on; 3 around every
            third. The other blocks have no checkpoint.

    Where gradients are asked for, blocks get no empty cache of keys and values (transformers' use_cache): it would be
    filled anew in the backward pass. With one that is filled, as with a learned prefix, they run without checkpoints.
    Without gradients nothing is saved, and nothing rounded. As in torch's checkpoints, a block that runs again updates
    a second time what it updates, such as a batch norm's running statistics. The backward pass raises RuntimeError
    where an argument that a checkpoint holds has been changed in place.

    Raises:
        OptionError: blocks, bits or every is none of these, or the model has no list of like blocks.
    """
    if blocks != "blocks":
        raise not_allowed("blocks", blocks, "'blocks', with every=2 for every other one and so on")
    if bits not in CHECKPOINT_BITS:
        raise not_allowed("bits", bits, ", ".join(map(repr, CHECKPOINT_BITS)))
    if not at_least(1).accepts(every):
        raise not_allowed("every", every, at_least(1).words)
    for block_list in _blocks_of(model, "blocks"):
        for index, block in enumerate(block_list):
            first = next(iter(inspect.signature(block.forward).parameters), "")
            # A partial object, not a closure, so that a copy of the model runs its own blocks.
            block.forward = functools.partial(_run, block, _unbound(block), first, bits, index % every == 0)
