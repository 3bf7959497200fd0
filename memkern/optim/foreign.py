"""Raises for what works otherwise in other libraries: options of bitsandbytes and apex, clipping by training loops."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

_BNB, _APEX = "bitsandbytes", "apex"
_WRITE_GROUPS = (
    "give the parameters a group of their own with its options, {'params': [...], 'state_bits': 32}; "
    "memkern.optim.param_groups(model) does so for embeddings after memkern.compress(model, embeddings=True)"
)
CURES: dict[str, tuple[str, str]] = {
    "optim_bits": (_BNB, "write state_bits={value}"),
    "is_paged": (_BNB, "states are not paged; leave it out"),
    "percentile_clipping": (_BNB, "write max_grad_norm=..., which clips all gradients together inside the step"),
    "block_wise": (_BNB, "8-bit states are always block-wise; leave it out (block_size is the size of a block)"),
    "args": (_BNB, "write its entries as arguments"),
    "max_unorm": (
        _BNB,
        "trust ratios bound the update; write trust_clip=True for at most 1, or trust_bounds=(0, high)",
    ),
    "adam_w_mode": (_APEX, "take memkern.optim.AdamW for True, memkern.optim.Adam for False"),
    "bias_correction": (_APEX, "Adam and AdamW always have it; leave it out (LAMB has the argument)"),
    "set_grad_none": (_APEX, "leave it out; optimizer.zero_grad(set_to_none=...) has it"),
    "use_nvlamb": (_APEX, "write always_adapt=True"),
    "eps_inside_sqrt": (_APEX, "leave it out; eps is added to the root"),
}
"""By an argument of another library's optimizers: the library, and what to write in place of it."""


def check_arguments(optimizer: type, arguments: Mapping[str, Any]) -> None:
    """Raises TypeError for an argument of another library's that the optimizer does not have."""
    known = arguments.keys() & CURES.keys()
    if not known:
        return
    own = inspect.signature(optimizer).parameters
    for name, value in arguments.items():
        if name in known and name not in own:
            library, cure = CURES[name]
            cure = cure.format(value=value)
            raise TypeError(f"memkern.optim.{optimizer.__name__} has no argument {name} ({library}'s): {cure}")


def check_overrides(params: Iterable[Any]) -> None:
    """Raises ValueError for parameters whose options are set in bitsandbytes' GlobalOptimManager, by module."""
    module = sys.modules.get("bitsandbytes.optim.optimizer")
    manager = None if module is None else module.GlobalOptimManager._instance
    if manager is None:
        return
    own_ids = {id(p) for p in params}
    for owner, name, options in manager.module_weight_config_triple:
        if id(getattr(owner, name, None)) in own_ids:
            raise ValueError(
                f"bitsandbytes' GlobalOptimManager has the options {options} for the {name} of {owner}, and memkern's "
                f"optimizers do not read them: {_WRITE_GROUPS}"
            )


def lightning_asks() -> bool:
    """Whether it is Lightning that reads the property that calls this, which says whether a step unscales gradients.

    With ``precision="16-mixed"`` or ``"bf16-mixed"`` Lightning refuses to clip the gradients of optimizers whose
    step unscales them. memkern's step takes unscaled gradients, too: where Lightning reads False, it unscales, clips,
    and calls GradScaler.step(), which reads the property by itself.
    """
    caller: str = sys._getframe(2).f_globals.get("__name__", "")
    return caller.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric")


_CLIPPING = {  # by a framework's package: the attribute of its loop that has the norm, and how to turn clipping off
    "transformers": ("args.max_grad_norm", "TrainingArguments(max_grad_norm=0)"),
    "lightning": ("trainer.gradient_clip_val", "lightning.Trainer(gradient_clip_val=None)"),
    "pytorch_lightning": ("trainer.gradient_clip_val", "pytorch_lightning.Trainer(gradient_clip_val=None)"),
}


def refuse_clipping(optimizer: Any) -> None:
    """Raises ValueError where a framework's loop that clips gradients calls ``step()``.

    For optimizers that free gradients in the backward pass, before the loop clips: torch's clip_grad_norm_ leaves out
    parameters without a gradient, so that the run would be unclipped without an error.
    """
    frame = sys._getframe(1).f_back
    while frame is not None:
        package = frame.f_globals.get("__name__", "").split(".")[0]
        if package in _CLIPPING:
            path, cure = _CLIPPING[package]
            norm = frame.f_locals.get("self")
            for name in path.split("."):
                norm = getattr(norm, name, None)
            if norm:
                raise unclipped(optimizer, f"{path.split('.')[1]}={norm}", package, cure)
        frame = frame.f_back


def unclipped(optimizer: Any, given: str, framework: str, cure: str) -> ValueError:
    """The error for a framework's clipping. ``given``: its option. ``cure``: what turns it off."""
    advice = "and the optimizer's own max_grad_norm" if optimizer.clips_by_norm else "or an optimizer that keeps them"
    return ValueError(
        f"{given} given with {type(optimizer).__name__}, which frees gradients in the backward pass, before "
        f"{framework} clips them; allowed: {cure}, {advice}"
    )


class GlobalOptimManager:
    """bitsandbytes' registry of options by parameter: every use raises, and names parameter groups instead."""

    def __init__(self) -> None:
        self.get_instance()

    @classmethod
    def get_instance(cls) -> NoReturn:
        raise TypeError(f"memkern.optim has no GlobalOptimManager: {_WRITE_GROUPS}")
