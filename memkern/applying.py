"""Applies techniques: to a model in place, and in the optimizer that is made for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from . import optim
from .checkpointing import check_blocks, checkpoint_blocks
from .options import Techniques
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
        check_blocks(model, techniques.checkpointing)  # raises before anything is changed
    bits, saved, share = techniques.activation_bits, techniques.saved_bits, techniques.linear_share
    if bits or saved or share:
        activations = bits or ("recompute" if saved else None)
        compress(model, activations, linear=share, saved_bits=saved, offload=techniques.offload_saved)
    if techniques.checkpointing:
        checkpoint_blocks(model, techniques.checkpointing, bits=techniques.checkpoint_bits)


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
