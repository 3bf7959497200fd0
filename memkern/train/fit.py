"""``--fit SIZE``: the planner chooses the techniques that are not given."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Collection
from typing import Any

from ..options import OptionError, Techniques
from ..planner.outcome import Plan, rounded_up, would_fit
from ..planner.planning import parse_memory, plan
from .build import Source
from .config import TrainConfig


def planned_model(config: TrainConfig, source: Source) -> dict[str, Any]:
    """The arguments of :func:`memkern.plan` that say what is trained."""
    if not config.is_preset:
        from . import huggingface

        hf_config = copy.deepcopy(source.hf_config)
        hf_config.architectures = [huggingface.architecture(hf_config)]
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


def given_techniques(config: TrainConfig, given: Collection[str]) -> dict[str, Any]:
    """The techniques that the planner does not choose: those that are given, and the class of the optimizer.

    With --micro-batch, --accumulation or --batch-factor the micro-batches are given too.
    """
    names = {field.name for field in dataclasses.fields(Techniques)} & {*given, "optimizer"}
    found = {name: getattr(config.techniques, name) for name in names}
    if {"micro_batch", "accumulation"} & {*given} or config.batch_factor > 1:
        found |= {"micro_batch": config.techniques.micro_batch, "accumulation": config.micro_batches}
    return found


def physical_memory() -> int | None:
    """Bytes of the host's memory; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def fit(
    config: TrainConfig, source: Source, size: str, given: Collection[str], device: str
) -> tuple[TrainConfig, Plan]:
    """The config with the techniques that the planner recommends, and its plan. given: the options that stay.

    Raises OptionError where nothing fits, with the least that could, and for a size that is none.
    """
    made = plan(
        **planned_model(config, source),
        memory=parse_memory(size, "fit"),
        device=device,
        techniques=given_techniques(config, given),
        batch_size=config.batch_size,
        clip=config.clip or 0.0,
        host_memory=None if device == "cpu" else physical_memory(),
    )
    if made.recommended is None:
        raise OptionError(
            "fit",
            f"{size} given; allowed: {rounded_up(made.least)} GiB or more, the least that could do, with "
            + " ".join([f"{made.together.techniques}.", *would_fit(made)]).removesuffix("."),
        )
    techniques = made.recommended.techniques
    fitted = config.replace(techniques=techniques.replace(accumulation=techniques.accumulation // config.batch_factor))
    fitted.validate()
    return fitted, made
