"""Checkpoints around the blocks of a model, whose inputs are saved exactly or in 8 bits."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_leaves, tree_structure, tree_unflatten
from torch.utils.checkpoint import checkpoint

from . import _ops
from .options import CHECKPOINT_BITS, CHECKPOINTING, OptionError, not_allowed
from .quant.layout import FLOATS, dense
from .swap.block_lists import block_lists

BLOCK_SIZE = 128

Calls = list[tuple[Any, Any]]
"""The further arguments of each block, by position and by name."""


class _Link(torch.autograd.Function):
    """A tensor of x's shape without memory of its own, through which x gets its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Decode(torch.autograd.Function):
    """The values of codes, whose gradient goes through the link."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        return _ops.dequantize_blockwise(codes, scale, "power", BLOCK_SIZE, link.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


def _checkpoint(run: Callable[[Tensor, Calls], Any], x: Tensor, calls: Calls, bits: int | None) -> Any:
    """``run(x, calls)`` in a checkpoint, which saves x, or its codes.

    From codes the forward pass goes on with the decoded values, and so does the recomputation: both are one function,
    and decide alike in a router, a mask or a top-k. The gradient of x is that of its decoded values.
    """
    if bits is None or x.dtype not in FLOATS or not torch.is_grad_enabled():
        return checkpoint(run, x, calls, use_reentrant=False)
    with torch.no_grad():
        codes, scale = _ops.quantize_blockwise(dense(x), "power", True, BLOCK_SIZE, None, mark_nonfinite=True)
    link = (_Link.apply(x),)  # in a tuple: a checkpoint saves the tensors among its arguments

    def decoded(codes: Tensor, scale: Tensor, link: tuple[Tensor], calls: Calls) -> Any:
        return run(_Decode.apply(*link, codes, scale), calls)

    return checkpoint(decoded, codes, scale, link, calls, use_reentrant=False)


def caches_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """transformers' caches of keys and values among a block's arguments."""
    module = sys.modules.get("transformers.cache_utils")
    return [] if module is None else [x for x in (*args, *kwargs.values()) if isinstance(x, module.Cache)]


def without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A block's arguments without transformers' cache of keys and values, where gradients are asked for.

    It would keep those of every block through the backward pass, and each block that is run again would append to it.
    transformers' own checkpoints leave it out too.
    """
    caches = {id(x) for x in caches_of(args, kwargs)}
    if not torch.is_grad_enabled() or not (caches or kwargs.get("use_cache")):
        return args, kwargs
    kept = {name: None if id(x) in caches else x for name, x in kwargs.items()}
    if kept.get("use_cache"):
        kept["use_cache"] = False
    return tuple(None if id(x) in caches else x for x in args), kept


class _Group:
    """Blocks that the last one runs in one checkpoint; the blocks before it record their arguments.

    They return what they were given, in the structure of what a block returns: a tensor, or a tuple with one. So the
    model must hand each block that very tensor, which is seen at every call. returned: that structure, for all groups.
    While it is empty, a group's first block has a checkpoint of its own, and fills it.

    An object and no closure, so that a copy of the model has groups of its own blocks.
    """

    def __init__(self, blocks: list[nn.Module], bits: int | None, returned: list[TreeSpec]) -> None:
        self.blocks, self.bits, self.returned = blocks, bits, returned
        self.forwards = [_unbound(block) for block in blocks]
        self.calls: Calls = []
        self.given: list[Tensor] = []
        self.start = 0
        for index, block in enumerate(blocks):
            block.forward = functools.partial(self.forward, index)

    def __getstate__(self) -> dict[str, Any]:
        """Without what a forward pass that was interrupted has left, which a copy cannot have."""
        return self.__dict__ | {"calls": [], "given": [], "start": 0}

    def forward(self, index: int, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """That of the block at an index."""
        if index == 0:
            self.start = 0
        self._record(index, x, args, kwargs)
        is_first_call = index == 0 and not self.returned
        if index < len(self.blocks) - 1 and not is_first_call:
            return _as_returned(x, *self.returned)
        recorded, run = [*self.calls], functools.partial(self._run, self.start)
        self.calls.clear()
        self.given.clear()
        if is_first_call and len(self.blocks) > 1:
            self.start = 1
            out = _checkpoint(run, x, recorded, self.bits)
            self.returned.append(_structure_of(out))
            return out
        return _checkpoint(run, x, recorded, self.bits)

    def _record(self, index: int, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if index == self.start:  # also after a forward pass that was interrupted
            self.calls.clear()
            self.given[:] = [x]
        elif len(self.calls) != index - self.start or self.given[0] is not x:
            raise RuntimeError(
                "checkpointing='sqrt' runs several blocks in one checkpoint, and the model does something between "
                f"blocks {index - 1} and {index} of them; checkpointing='blocks' does not mind"
            )
        self.calls.append(without_cache(args, kwargs))

    def _run(self, first: int, x: Any, calls: Calls) -> Any:
        """As many blocks as there are calls."""
        for index, (args, kwargs) in enumerate(calls, first):
            x = self.forwards[index](self.blocks[index], x if isinstance(x, Tensor) else x[0], *args, **kwargs)
        return x


def _unbound(block: nn.Module) -> Callable[..., Any]:
    """A block's forward method as a function of the block."""
    forward: Any = block.forward
    if getattr(forward, "__self__", None) is block:
        return forward.__func__
    return functools.partial(_call_without_block, forward)


def _call_without_block(forward: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _structure_of(out: Any) -> TreeSpec:
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    if [id(x) for x in tree_leaves(out) if isinstance(x, Tensor)] != [id(first)]:
        raise RuntimeError(
            "checkpointing='sqrt' runs several blocks in one checkpoint, and these return more than one tensor; "
            "checkpointing='blocks' does not mind"
        )
    return tree_structure(out)


def _as_returned(x: Tensor, structure: TreeSpec) -> Any:
    return tree_unflatten([x, *[None] * (structure.num_leaves - 1)], structure)


def _block_lists_of(model: nn.Module, how: str) -> list[list[nn.Module]]:
    if how not in CHECKPOINTING[1:]:
        raise not_allowed("how", how, "'blocks', 'sqrt'")
    lists = list(block_lists(model))
    if not lists:
        raise OptionError("checkpointing", f"{how!r} given, and the model has no list of like blocks")
    return lists


def check_blocks(model: nn.Module, how: str) -> None:
    """Raises OptionError unless :func:`checkpoint_blocks` can put checkpoints into the model."""
    _block_lists_of(model, how)


def checkpoint_blocks(model: nn.Module, how: str, *, bits: int | None = None) -> None:
    """Puts checkpoints around every block ("blocks"), or around groups of sqrt(L) of L blocks ("sqrt"), in place.

    Args:
        bits: None saves the inputs of checkpoints exactly. 8 saves them in block-wise 8-bit codes, 1.03 bytes per
            element, and each checkpoint computes with the decoded values, in both passes: the loss is that of a model
            whose blocks' inputs are rounded to 8 bits, and the gradient is the exact one of that model
            (docs/what-does-not-fit.md). A NaN or an infinity makes its block of 128 NaN. float64 stays as it is.

    A block takes a tensor and returns one for the next block, or a tuple that begins with it ("sqrt": and has no other
    tensor); its other arguments may differ from block to block.
    Where gradients are asked for, it gets no cache of keys and values (transformers' use_cache): it would be filled
    anew in the backward pass.

    Raises:
        OptionError: how or bits is none of these, or the model has no list of like blocks.
    """
    if bits not in CHECKPOINT_BITS:
        raise not_allowed("bits", bits, ", ".join(map(repr, CHECKPOINT_BITS)))
    for blocks in _block_lists_of(model, how):
        returned: list[TreeSpec] = []
        size = 1 if how == "blocks" else math.isqrt(len(blocks) - 1) + 1
        for start in range(0, len(blocks), size):
            _Group(blocks[start : start + size], bits, returned)
