"""For transformers' Trainer: the pair ``optimizer_cls_and_kwargs``, and a callback that compresses the model.

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
    own = inspect.signature(cls).parameters
    kwargs: dict[str, Any] = {"lr": args.learning_rate}
    if "betas" in own:
        # The arguments' defaults are Adam's betas; Lion has others.
        defaults = {field.name: field.default for field in args.__dataclass_fields__.values()}
        given = any(getattr(args, name) != defaults[name] for name in ("adam_beta1", "adam_beta2"))
        if given or own["betas"].default == (defaults["adam_beta1"], defaults["adam_beta2"]):
            kwargs["betas"] = (args.adam_beta1, args.adam_beta2)
        if "eps" in own and "ns_steps" not in own and args.adam_epsilon != defaults["adam_epsilon"]:
            kwargs["eps"] = args.adam_epsilon
    from ..optim import Muon, muon_groups, param_groups

    rates = {"adamw_lr": options.pop("adamw_lr")} if issubclass(cls, Muon) and "adamw_lr" in options else {}
    kwargs |= options
    # Checks the options here rather than inside of the Trainer. Every option takes a bf16 parameter.
    cls([torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16, device="cpu"))], **kwargs)
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


def _inside(optimizer: Any) -> Any:
    """The optimizer in accelerate's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _check_clipping(args: TrainingArguments, optimizer: Any) -> None:
    """Raises ValueError where the Trainer would clip gradients that were freed in the backward pass."""
    optimizer = _inside(optimizer)
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
        optimizer = _inside(kwargs.get("optimizer"))
        if (
            state.global_step == self._first_step
            and args.process_index == 0
            and isinstance(optimizer, BlockwiseOptimizer)
        ):
            fp32 = 4 * len(optimizer.moments) * sum(p.numel() for p in optimizer.state)
            bytes_ = f"{optimizer_bytes(optimizer):,} bytes, {fp32:,} in fp32"
            print(f"memkern: states of {type(optimizer).__name__} take {bytes_}", flush=True)

    def _compress(self, model: nn.Module, tell: bool) -> None:
        if self._model is not model:
            self.report, self._model = compress(model, **self.options), model
            if tell:
                print(self.report, flush=True)
