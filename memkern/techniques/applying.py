"""Applies techniques: to a model in place, and in the optimizer that is made for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import optim
from ..blocks.checkpointing import check_blocks, checkpoint_blocks
from ..compiled.blocks import check_compilable, compile_arguments, compile_blocks
from ..optim.dtensor.shards import is_dtensor
from ..swap.compress import compress
from .options import Techniques, not_allowed


def weight_dtype(techniques: Techniques) -> torch.dtype:
    """The dtype to build the model in."""
    return torch.bfloat16 if techniques.precision == "bf16" else torch.float32


def autocast(techniques: Techniques, device: str) -> contextlib.AbstractContextManager[Any]:
    """The ``with`` block for a forward pass on a type of device: torch.autocast, where the techniques ask for it."""
    if techniques.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(device, {"bf16": torch.bfloat16, "fp16": torch.float16}[techniques.autocast])


def apply(
    model: nn.Module,
    techniques: Techniques,
    *,
    device: torch.device | str | None = None,
    pin_memory: bool = True,
) -> None:
    """Applies the techniques that change a model, in place: activations, linear layers, checkpoints, compiled blocks,
    and weights that stay on the host.

    Args:
        device: for ``weights_on_host``, where a block's weights are while it runs; default, the CUDA device if there is
            one, else the CPU. The model is on the host when it is given, and its inputs belong on the device.
        pin_memory: for ``weights_on_host``, whether the host's weights and gradients are pinned, so that their copies
            overlap the computation.

    With ``weights_on_host`` the model is sharded by torch's ``fully_shard`` with CPUOffloadPolicy, block by block, over
    the processes of the default process group; without one it is made, of this process alone. The optimizer is made
    afterwards, of its parameters. What is called in a forward pass is the module that was given, so a loss that reads
    weights (:class:`memkern.nn.LinearCrossEntropy`) belongs into its forward; docs/what-does-not-fit.md says what is
    where.

    The others are the training loop's: the weights' dtype and autocast (``precision``), the loss in chunks
    (:class:`memkern.nn.LinearCrossEntropy`), micro-batches; and the optimizer's: :func:`memkern.make_optimizer`.
    ``str(memkern.plan(...))`` prints a loop with all of them.

    Raises:
        TypeError: model is no module, or techniques are no Techniques.
        OptionError: checkpoints, ``compile`` or ``weights_on_host`` for a model that has no list of like blocks;
            ``compile`` for one that is compiled, without a C++ compiler, or with what this torch is too old for;
            ``weights_on_host`` for one that is sharded, compiled, on the meta device or of several dtypes. Nothing is
            changed then.
        RuntimeError: the host gives no more pinned memory; the message says what to do.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    _check(techniques)
    if techniques.weights_on_host:  # this and the next two checks raise before anything is changed
        from ..stream import streaming

        target = streaming_device(device)
        streaming.check(model)
    if techniques.compile:
        check_compilable(model, techniques)
    if techniques.checkpointing:
        check_blocks(model)
    activations = None if techniques.compile else techniques.activation_bits  # else compile_arguments has them
    if activations or techniques.linear_share:
        compress(model, activations, linear=techniques.linear_share)
    if techniques.compile:
        compile_blocks(model, compile_arguments(techniques))
    if techniques.checkpointing:
        checkpoint_blocks(model, bits=techniques.checkpoint_bits, every=techniques.checkpoint_every)
    if techniques.weights_on_host:
        streaming.stream(model, target, pin_memory=pin_memory)


def streaming_device(device: torch.device | str | None) -> torch.device:
    """The device that weights of the host are copied to. Raises OptionError unless it is the CPU or a CUDA device."""
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        parsed = torch.device(name)
    except RuntimeError:
        parsed = torch.device("meta")
    if parsed.type not in ("cpu", "cuda"):
        raise not_allowed("device", str(device), "None, 'cpu', 'cuda', 'cuda:N'")
    return parsed


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


def optimizer_type(techniques: Techniques) -> type[torch.optim.Optimizer]:
    """The class of the techniques' optimizer, of memkern.optim or of torch.optim."""
    return getattr(torch.optim if techniques.is_torch else optim, techniques.optimizer_class)


def make_optimizer(params: Iterable[Any], techniques: Techniques, **options: Any) -> torch.optim.Optimizer:
    """The optimizer of the techniques, wrapped in ``StepInBackward`` or ``HostOffload`` if they ask for it.

    Args:
        params: parameters or groups, as for torch.optim; for Muon those of :func:`memkern.optim.muon_groups`.
        options: the optimizer's own options beside those of the techniques: lr, weight_decay, ...

    Raises:
        TypeError: techniques are no Techniques, or the optimizer does not have an option.
        ValueError: with ``weights_on_host``, params of a model before :func:`memkern.apply`.
    """
    _check(techniques)
    cls = optimizer_type(techniques)
    options = techniques.optimizer_options | options
    if not techniques.is_torch:
        options["state_bits"] = techniques.state_bits
        if techniques.master_weights:
            options["master_weights"] = techniques.master_weights
    if techniques.weights_on_host:
        return _on_host(cls, params, techniques, options)
    if techniques.offload == "device":
        return optim.HostOffload(cls, params, step_on="device", step_in_backward=techniques.step_in_backward, **options)
    if techniques.step_in_backward:
        return optim.StepInBackward(cls, params, **options)
    if techniques.offload and techniques.is_torch:
        # torch's optimizers have no max_grad_norm: gradients stay on the device, where the loop can clip them.
        return optim.HostOffload(cls, params, **options)
    if techniques.offload:
        host_dtype = torch.float32 if techniques.host_copies else None
        return optim.HostOffload(cls, params, host_dtype=host_dtype, offload_gradients=True, **options)
    return cls(params, **options)


def _on_host(
    cls: type[torch.optim.Optimizer], params: Iterable[Any], techniques: Techniques, options: dict[str, Any]
) -> torch.optim.Optimizer:
    """The optimizer of weights that are on the host."""
    opt: Any = optim.StepInBackward(cls, params, **options) if techniques.step_in_backward else cls(params, **options)
    all_params = [p for group in opt.param_groups for p in group["params"]]
    if not any(map(is_dtensor, all_params)):
        raise ValueError(
            "params must be those that the model has after memkern.apply, which puts its weights on the host"
        )
    devices = {p.device_mesh.device_type for p in all_params if is_dtensor(p)} - {"cpu"}
    if isinstance(opt, optim.Muon) and devices:
        kind = devices.pop()
        opt.product_devices = OneDevice(torch.device(kind, torch.get_device_module(kind).current_device()))
    return opt


class OneDevice(Mapping[Tensor, torch.device]):
    """A mapping with one device for every tensor: where Muon computes products of weights that are on the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __getitem__(self, p: Tensor) -> torch.device:
        return self.device

    def __iter__(self) -> Iterator[Tensor]:
        return iter(())

    def __len__(self) -> int:
        return 0
