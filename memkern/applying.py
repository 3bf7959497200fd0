"""Applies techniques: to a model in place, and in the optimizer that is made for it."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import optim
from .options import CHECKPOINTING, Techniques, not_allowed
from .swap.block_lists import block_lists
from .swap.compress import compress


def weight_dtype(techniques: Techniques) -> torch.dtype:
    """The dtype to build the model in."""
    return torch.bfloat16 if techniques.precision == "bf16" else torch.float32


def autocast(techniques: Techniques, device: str) -> contextlib.AbstractContextManager[Any]:
    """The context of a forward pass on a type of device."""
    if techniques.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(device, {"bf16": torch.bfloat16, "fp16": torch.float16}[techniques.autocast])


def apply(model: nn.Module, techniques: Techniques) -> None:
    """Applies the techniques that change a model, in place: activations, linear layers, saved tensors, checkpoints.

    The others are the training loop's: the weights' dtype and autocast (``precision``), the loss in chunks
    (:class:`memkern.nn.LinearCrossEntropy`), micro-batches; and the optimizer's: :func:`memkern.make_optimizer`.
    ``str(memkern.plan(...))`` prints a loop with all of them.

    Raises:
        TypeError: model is no module, or techniques are no Techniques.
        OptionError: checkpoints for a model that has no list of like blocks. Nothing is changed then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    _check(techniques)
    if techniques.checkpointing:
        _block_lists_of(model, techniques.checkpointing)  # raises before anything is changed
    bits, saved, share = techniques.activation_bits, techniques.saved_bits, techniques.linear_share
    if bits or saved or share:
        activations = bits or ("recompute" if saved else None)
        compress(model, activations, linear=share, saved_bits=saved, offload=techniques.offload_saved)
    if techniques.checkpointing:
        checkpoint_blocks(model, techniques.checkpointing)


def _check(techniques: Any) -> None:
    if not isinstance(techniques, Techniques):
        raise TypeError(f"techniques must be memkern.Techniques, got {type(techniques).__name__}")


def optimizer_groups(
    model: nn.Module, techniques: Techniques, *, lr: float, weight_decay: float
) -> list[dict[str, Any]]:
    """The parameter groups of a model for the optimizer of the techniques; no decay for biases and norms."""
    if techniques.optimizer_class == "Muon":
        return optim.muon_groups(model, lr=lr, adamw_lr=lr, weight_decay=weight_decay)
    return optim.param_groups(model, weight_decay=weight_decay)


def make_optimizer(params: Iterable[Any], techniques: Techniques, **options: Any) -> torch.optim.Optimizer:
    """The optimizer of the techniques, wrapped in ``StepInBackward`` or ``HostOffload`` if they ask for it.

    Args:
        params: parameters or groups, as for torch.optim; for Muon those of :func:`memkern.optim.muon_groups`.
        options: the optimizer's own options beside those of the techniques: lr, weight_decay, ...

    Raises:
        TypeError: techniques are no Techniques, or the optimizer does not have an option.
    """
    _check(techniques)
    cls = getattr(torch.optim if techniques.is_torch else optim, techniques.optimizer_class)
    options = techniques.optimizer_options | options
    if not techniques.is_torch:
        options["state_bits"] = techniques.state_bits
        if techniques.master_weights and not techniques.host_copies:
            options["master_weights"] = techniques.master_weights
    if techniques.step_in_backward:
        return optim.StepInBackward(cls, params, **options)
    if techniques.offload and techniques.is_torch:
        # torch's optimizers have no max_grad_norm: gradients stay on the device, where the loop can clip them.
        return optim.HostOffload(cls, params, **options)
    if techniques.offload:
        host_dtype = torch.float32 if techniques.host_copies else None
        return optim.HostOffload(cls, params, host_dtype=host_dtype, offload_gradients=True, **options)
    return cls(params, **options)


def _without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A block's arguments without transformers' cache of keys and values.

    It would keep those of every block through the backward pass, and each block that is run again would append to it.
    transformers' own checkpoints leave it out too.
    """
    module = sys.modules.get("transformers.cache_utils")
    if module is None or not torch.is_grad_enabled():
        return args, kwargs
    kept = {name: None if isinstance(x, module.Cache) else x for name, x in kwargs.items()}
    if kept.get("use_cache"):
        kept["use_cache"] = False
    return tuple(None if isinstance(x, module.Cache) else x for x in args), kept


def _group(blocks: list[nn.Module]) -> None:
    """Makes the last block run all of them in one checkpoint; the blocks before it record their arguments.

    They return what they were given. So the model must hand each block that very tensor, which is seen at every call.
    """
    forwards = [block.forward for block in blocks]
    calls: list[tuple[Any, Any]] = []
    given: list[Tensor] = []

    def run(x: Tensor, calls: list[tuple[Any, Any]]) -> Tensor:
        for forward, (args, kwargs) in zip(forwards, calls, strict=True):
            x = forward(x, *args, **kwargs)
        return x

    def record(index: int, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if index == 0:  # also after a forward pass that was interrupted
            calls.clear()
            given[:] = [x]
        elif len(calls) != index or given[0] is not x:
            raise RuntimeError(
                "checkpointing='sqrt' runs several blocks in one checkpoint, and the model does something between "
                f"blocks {index - 1} and {index} of them; checkpointing='blocks' does not mind"
            )
        calls.append(_without_cache(args, kwargs))

    def forward(index: int, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        record(index, x, args, kwargs)
        if index < len(blocks) - 1:
            return x
        recorded = [*calls]
        calls.clear()
        given.clear()
        return checkpoint(run, x, recorded, use_reentrant=False)

    for index, block in enumerate(blocks):
        block.forward = functools.partial(forward, index)


def _block_lists_of(model: nn.Module, how: str) -> list[list[nn.Module]]:
    if how not in CHECKPOINTING[1:]:
        raise not_allowed("how", how, "'blocks', 'sqrt'")
    lists = list(block_lists(model))
    if not lists:
        raise not_allowed("checkpointing", how, "None for a model without a list of like blocks")
    return lists


def checkpoint_blocks(model: nn.Module, how: str) -> None:
    """Puts checkpoints around every block ("blocks"), or around groups of sqrt(L) of L blocks ("sqrt"), in place.

    A block takes a tensor and returns a tensor for the next block; its other arguments may differ from block to block.
    Where gradients are asked for, it gets no cache of keys and values (transformers' use_cache): it would be filled
    anew in the backward pass.

    Raises:
        OptionError: how is neither, or the model has no list of like blocks.
    """
    for blocks in _block_lists_of(model, how):
        size = 1 if how == "blocks" else math.isqrt(len(blocks) - 1) + 1
        for start in range(0, len(blocks), size):
            _group(blocks[start : start + size])
