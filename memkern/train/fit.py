"""``--fit SIZE``: the planner chooses the techniques that are not given."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from ..planner.planning import plan
from ..planner.report import Plan, rounded_up, would_fit
from ..planner.smaller import Change
from ..planner.techniques import TechniqueError, Techniques
from .build import Source
from .config import ArgumentError, TrainConfig

# The planner's name of an option, where it is another.
OPTIONS = {
    "memory": "fit",
    "precision": "dtype",
    "state_bits": "optimizer",
    "randomized_linear": "linear_keep",
    "micro_batch": "batch_size",
    "accumulation": "accumulate",
    "techniques": "fit",
    "inputs": "model",
}


def pinned(config: TrainConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """The techniques that are given, which the planner does not choose; the class of the optimizer is one."""
    techniques = dataclasses.asdict(config.techniques)
    names = {"optimizer"}
    same = ("master_weights", "checkpointing", "activation_bits", "saved_bits", "loss_chunk", "offload")
    names |= {name for name in (*same, "step_in_backward") if name in given}
    if "optimizer" in given:
        names.add("state_bits")
    if "linear_keep" in given:
        names.add("randomized_linear")
    if "amp" in given or "dtype" in given:
        names.add("precision")
    if "accumulate" in given or config.batch_factor > 1:
        names |= {"micro_batch", "accumulation"}
    return {name: techniques[name] for name in names}


def chosen(config: TrainConfig, techniques: Techniques) -> TrainConfig:
    """The options of a run with these techniques; those of an optimizer of torch's are not changed."""
    optimizer = config.optimizer
    if not techniques.is_torch:
        optimizer = f"{techniques.optimizer}8bit" if techniques.state_bits == 8 else techniques.optimizer
    amp = config.amp if config.amp != "off" else "bf16"
    changes: dict[str, Any] = {
        "amp": amp if techniques.precision == "amp" else "off",
        "dtype": "bf16" if techniques.precision == "bf16" else "fp32",
        "saved_bits": str(techniques.saved_bits or "none"),
        "linear_keep": techniques.linear_share,
        "master_weights": techniques.master_weights or "none",
        "batch_size": techniques.micro_batch,
        "accumulate": techniques.accumulation // config.batch_factor,
        "optimizer": optimizer,
    }
    same = ("checkpointing", "activation_bits", "loss_chunk", "offload", "step_in_backward")
    changes |= {name: getattr(techniques, name) for name in same}
    return dataclasses.replace(config, **changes)


def planned_model(config: TrainConfig, source: Source) -> dict[str, Any]:
    """The arguments of :func:`memkern.plan` that say what is trained."""
    if not config.is_preset:
        from . import huggingface

        classes = getattr(source.corpus, "classes", ())
        hf_config = copy.deepcopy(source.hf_config)
        hf_config.architectures = [huggingface.architecture(hf_config, classifier=bool(classes))]
        return {"model": hf_config, "seq_len": config.seq_len, "dropout": config.dropout}
    import torch

    from .model import GPT
    from .objective import cross_entropies

    layers, heads, width = config.shape
    with torch.device("meta"):
        model = GPT(layers=layers, heads=heads, width=width, seq_len=config.seq_len)
    tokens = torch.zeros(1, config.seq_len, dtype=torch.long)
    loss = lambda gpt, batch: cross_entropies(gpt(batch[0]), batch[1])  # noqa: E731
    return {"model": model, "inputs": (tokens, tokens), "loss": loss}


def option(change: Change) -> str:
    """A change of what was asked of the planner, as ``python -m memkern train`` takes it."""
    name, value = change.name, change.value
    if name == "clip":
        return "--clip 0"
    if name == "precision":
        return f"--{'amp bf16' if value == 'amp' else 'dtype ' + value}"
    if name == "state_bits":
        return f"an --optimizer with {value}-bit states"
    flag = "--" + OPTIONS.get(name, name).replace("_", "-")
    return flag if value is True else f"{flag} {value}"


def fit(
    config: TrainConfig, source: Source, size: str, given: Mapping[str, Any], device: str
) -> tuple[TrainConfig, Plan]:
    """The options with the techniques that the planner recommends, and its plan.

    Raises ArgumentError where nothing fits, with the least that could, and for a size that is none.
    """
    arguments: dict[str, Any] = {
        "memory": size,
        "device": device,
        "techniques": pinned(config, given),
        "batch_size": config.batch_size * config.micro_batches,
        "clip": bool(config.clip),
    }
    try:
        made = plan(**planned_model(config, source), **arguments)
    except TechniqueError as error:
        raise ArgumentError(OPTIONS.get(error.name, error.name), error.message) from error
    if made.recommended is None:
        raise ArgumentError(
            "fit",
            f"{size} given; allowed: {rounded_up(made.least)} GiB or more, the least that could do, with "
            + " ".join([f"{made.together.techniques}.", *would_fit(made, option)]).removesuffix("."),
        )
    fitted = chosen(config, made.recommended.techniques)
    fitted.validate()
    return fitted, made
