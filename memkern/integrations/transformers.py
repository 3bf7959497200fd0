"""For transformers' Trainer: its optimizer, all arguments for techniques, a callback that compresses the model.

::

    from memkern.integrations.transformers import CompressCallback, optimizer_cls_and_kwargs

    trainer = Trainer(
        model,
        args,
        train_dataset=...,
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(args, "adamw8bit"),
        callbacks=[CompressCallback()],
    )

Needs ``pip install transformers accelerate``. The Trainer itself is not changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..memory import optimizer_bytes
from ..optim.base import BlockwiseOptimizer
from ..optim.foreign import unclipped
from ..swap.compress import compress
from ..swap.report import Report
from ..techniques.applying import apply, make_optimizer, optimizer_groups, optimizer_type, weight_dtype
from ..techniques.options import Techniques, not_allowed
from . import names


def optimizer_cls_and_kwargs(
    args: TrainingArguments,
    optimizer: str = "adamw8bit",
    *,
    model: torch.nn.Module | None = None,
    **options: Any,
) -> tuple[type[BlockwiseOptimizer], dict[str, Any]]:
    """The Trainer's argument of that name: an optimizer's class, and its options.

    Args:
        args: the Trainer's; ``learning_rate``, and for optimizers that have them ``adam_beta1``, ``adam_beta2`` and
            ``adam_epsilon`` become options. ``args.optim`` is not read. The Trainer makes the groups, with
            ``weight_decay`` or without, and clips to ``max_grad_norm`` itself.
        optimizer: the name, see :func:`memkern.integrations.names.optimizers`. Default ``"adamw8bit"``.
        model: with it, the groups are those of :func:`memkern.optim.param_groups`, in which parameters of modules
            that ask for it (embeddings after ``compress(model, embeddings=True)``) have 32-bit states. For one
            training only, as they name the model's parameters. Default None. Muon needs it: its groups are those of
            :func:`memkern.optim.muon_groups`, and ``adamw_lr`` is an option.
        options: further options, which win.

    Raises:
        ValueError: there is no optimizer of that name; Muon without a model.
        TypeError: an option that it does not have.
    """
    cls = names.optimizer(optimizer)
    kwargs = _rates(args, cls)
    from ..optim import Muon, muon_groups, param_groups

    rates = {"adamw_lr": options.pop("adamw_lr")} if issubclass(cls, Muon) and "adamw_lr" in options else {}
    kwargs |= options
    # Checks the options here rather than inside of the Trainer. Every option takes a frozen parameter.
    cls([torch.nn.Parameter(torch.zeros(1, 1, device="cpu"), requires_grad=False)], **kwargs)
    if issubclass(cls, Muon):
        if model is None:
            raise ValueError(
                f"model must be given with optimizer={optimizer!r}, got None: Muon's groups say which parameters are "
                "matrices (memkern.optim.muon_groups), and the Trainer's do not"
            )
        kwargs["params"] = muon_groups(model, lr=kwargs["lr"], weight_decay=args.weight_decay, **rates)
    elif model is not None:
        kwargs["params"] = param_groups(model, weight_decay=args.weight_decay)
    return cls, kwargs


def _rates(args: TrainingArguments, cls: type) -> dict[str, Any]:
    """The options of an optimizer that the Trainer's arguments have."""
    options = inspect.signature(cls).parameters
    kwargs: dict[str, Any] = {"lr": args.learning_rate}
    if "betas" in options:
        # The arguments' defaults are Adam's betas; Lion has others.
        defaults = {field.name: field.default for field in args.__dataclass_fields__.values()}
        are_given = any(getattr(args, name) != defaults[name] for name in ("adam_beta1", "adam_beta2"))
        if are_given or options["betas"].default == (defaults["adam_beta1"], defaults["adam_beta2"]):
            kwargs["betas"] = (args.adam_beta1, args.adam_beta2)
        if "eps" in options and "ns_steps" not in options and args.adam_epsilon != defaults["adam_epsilon"]:
            kwargs["eps"] = args.adam_epsilon
    return kwargs


def trainer_arguments(
    model: nn.Module,
    techniques: Techniques,
    *,
    output_dir: str = "out",
    clip: float = 1.0,
    **options: Any,
) -> dict[str, Any]:
    """What the Trainer takes to train a model with techniques, such as those that :func:`memkern.plan` recommends.

    ::

        plan = memkern.plan(model_name, memory="12GiB", techniques={"loss_chunk": None, "weights_on_host": None})
        arguments = memkern.trainer_arguments(model, plan.recommended.techniques, learning_rate=1e-4, max_steps=1000)
        Trainer(**arguments, train_dataset=rows).train()

    The model is changed in place: its weights' dtype, and what :func:`memkern.apply` does (activations, linear layers,
    checkpoints, compiled blocks).

    Args:
        model: of transformers, before the Trainer has it.
        techniques: ``micro_batch`` is per device. ``accumulation``, precision and the optimizer become arguments, too.
        clip: the global norm that gradients are clipped to, 0 for none: by the Trainer, or with ``offload="cpu"`` by
            the optimizer's step, as the Trainer does not see its gradients.
        output_dir, options: of ``TrainingArguments``, beside those that the techniques say. Rates, decay, betas and
            epsilon go to the optimizer.

    Returns:
        ``model``, ``args`` and ``optimizer_cls_and_kwargs``. Matrices have ``weight_decay``, biases and norms none.

    Raises:
        OptionError: loss_chunk and weights_on_host, as the Trainer computes the loss and shards the model itself; what
            :func:`memkern.apply` refuses; clip with step_in_backward. Nothing is changed then.
        TypeError: an option that the techniques say.
    """
    for name in ("loss_chunk", "weights_on_host"):
        if (given := getattr(techniques, name)) is not None:
            raise not_allowed(
                name, given, f"None with transformers' Trainer, as by plan(techniques={{{name!r}: None}})"
            )
    if techniques.step_in_backward and clip:
        raise not_allowed(
            "clip", clip, "0 with step_in_backward: the norm of all gradients is not known before the last"
        )
    in_step = techniques.offload == "cpu" and clip > 0 and not techniques.is_torch  # torch's have no max_grad_norm
    decided = {
        "per_device_train_batch_size": techniques.micro_batch,
        "gradient_accumulation_steps": techniques.accumulation,
        "bf16": techniques.autocast == "bf16",
        "fp16": techniques.autocast == "fp16",
        "max_grad_norm": 0.0 if in_step else clip,
    }
    if duplicates := sorted({*decided} & {*options}):
        raise TypeError(f"trainer_arguments() got {duplicates[0]}, which the techniques and clip say")
    args = TrainingArguments(output_dir, **decided, **options)
    apply(model, techniques)
    model.to(weight_dtype(techniques))

    class OfTechniques(torch.optim.Optimizer):
        """A class, because the Trainer calls functions in another way; an instance is make_optimizer's result."""

        def __new__(cls, params: Iterable[Any], **given: Any) -> Any:
            return make_optimizer(params, techniques, **given)

    groups = optimizer_groups(model, techniques, lr=args.learning_rate, weight_decay=args.weight_decay)
    kwargs = _rates(args, optimizer_type(techniques)) | {"params": groups}
    if in_step:
        kwargs["max_grad_norm"] = clip
    return {"model": model, "args": args, "optimizer_cls_and_kwargs": (OfTechniques, kwargs)}


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer in accelerate's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _check_clipping(args: TrainingArguments, optimizer: Any) -> None:
    """Raises ValueError where the Trainer would clip gradients that were freed in the backward pass."""
    optimizer = _unwrapped(optimizer)
    if args.max_grad_norm and getattr(optimizer, "frees_gradients", False):
        given = f"max_grad_norm={args.max_grad_norm}"
        raise unclipped(optimizer, given, "the Trainer", "TrainingArguments(max_grad_norm=0)")


class CompressCallback(TrainerCallback):
    """Compresses the Trainer's model before it is wrapped, and prints what that saves.

    Args:
        options: those of :func:`memkern.compress`.

    ``report`` is compress' report. After the first step the bytes of the optimizer's states are printed too, where it
    is memkern's. Only the first process prints. ``memkern.restore(model)`` undoes it.

    Raises:
        ValueError: when training begins with ``args.max_grad_norm`` and an optimizer that frees gradients in the
            backward pass (:class:`memkern.optim.StepInBackward`, :class:`memkern.optim.HostOffload` with
            ``offload_gradients``): the Trainer would clip nothing. Without the callback the first step raises.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.report: Report | None = None
        self._model: nn.Module | None = None
        self._first_step = 1

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._compress(kwargs["model"], args.process_index == 0)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compresses a model that ``model_init`` has made anew, and refuses clipping that would do nothing."""
        _check_clipping(args, kwargs.get("optimizer"))
        self._first_step = state.global_step + 1  # not 1 in a resumed run
        model = kwargs["model"]
        self._compress(getattr(model, "module", model), args.process_index == 0)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        optimizer = _unwrapped(kwargs.get("optimizer"))
        if (
            state.global_step == self._first_step
            and args.process_index == 0
            and isinstance(optimizer, BlockwiseOptimizer)
        ):
            fp32 = 4 * len(optimizer.moments) * sum(p.numel() for p in optimizer.state)
            sizes = f"{optimizer_bytes(optimizer):,} bytes, {fp32:,} in fp32"
            print(f"memkern: states of {type(optimizer).__name__} take {sizes}", flush=True)

    def _compress(self, model: nn.Module, is_first: bool) -> None:
        if self._model is not model:
            self.report, self._model = compress(model, **self.options), model
            if is_first:
                print(self.report, flush=True)
