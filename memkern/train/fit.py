"""``--fit SIZE``: the planner chooses the techniques that are not given."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection
from typing import Any

import torch

from ..memory import return_freed_memory
from ..planner.outcome import LESS, Plan, rounded_up
from ..planner.planning import parse_memory, plan
from ..techniques.options import OptionError, Techniques
from . import huggingface
from .config import TrainConfig
from .interrupt import say
from .model import GPT, Objective


def planned_model(config: TrainConfig) -> dict[str, Any]:
    """The arguments of :func:`memkern.plan` that say what is trained."""
    if not config.is_preset:
        return {"model": huggingface.load_config(config), "seq_len": config.seq_len, "dropout": config.dropout}
    with torch.device("meta"):
        model = Objective(GPT(*config.shape, seq_len=config.seq_len))
    tokens = torch.zeros(1, config.seq_len, dtype=torch.long)
    return {"model": model, "inputs": (tokens, tokens)}


def fit(config: TrainConfig, size: str, given: Collection[str], device: str) -> tuple[TrainConfig, Plan]:
    """The config with the techniques that the planner recommends, which are printed, and its plan.

    given: what stays. With --micro-batch, --accumulation or --batch-factor the micro-batches do, too.
    Raises OptionError where nothing fits, with the least that could, and for a size that is none.
    """
    names = {field.name for field in dataclasses.fields(Techniques)} & {*given, "optimizer", "compile"}
    techniques = {name: getattr(config, name) for name in names}
    if {"micro_batch", "accumulation"} & {*given} or config.batch_factor > 1:
        techniques |= {"micro_batch": config.micro_batch, "accumulation": config.batch_factor * config.accumulation}
    result = plan(
        **planned_model(config),
        memory=parse_memory(size, "fit"),
        device=device,
        techniques=techniques,
        batch_size=config.batch_size,
        clip=config.clip or 0.0,
        host_memory=None if device == "cpu" else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )
    if result.recommended is None:
        allowed = f"{rounded_up(result.least)} GiB or more, the least that could do, with {result.together.techniques}"
        raise OptionError("fit", f"{size} given; allowed: {allowed}. {LESS}")
    chosen = result.recommended.techniques
    say(f"{size} fit {chosen}: {result.recommended.peak / 2**30:.2f} GiB predicted")
    return_freed_memory()
    changes = dataclasses.asdict(chosen) | {"accumulation": chosen.accumulation // config.batch_factor}
    return config.replace(**changes), result
