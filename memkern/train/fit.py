"""``--fit SIZE``: the planner chooses the techniques that are not given."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import gc
import os
import sys
from collections.abc import Collection
from typing import Any

from ..planner.outcome import LESS, Plan, rounded_up
from ..planner.planning import parse_memory, plan
from ..techniques.options import OptionError, Techniques
from .config import TrainConfig
from .interrupt import say
from .loop import Source


def planned_model(config: TrainConfig, source: Source) -> dict[str, Any]:
    """The arguments of :func:`memkern.plan` that say what is trained."""
    if not config.is_preset:
        from . import huggingface

        hf_config = copy.deepcopy(source.hf_config)
        hf_config.architectures = [huggingface.architecture(hf_config)]
        return {"model": hf_config, "seq_len": config.seq_len, "dropout": config.dropout}
    import torch

    from .model import GPT, cross_entropies

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


def return_freed_memory() -> None:
    """Makes glibc return what is free now, and each block of 64 KiB or more when it is freed, as predictions assume.

    By default it raises this threshold up to 32 MiB as large blocks are freed, and keeps freed blocks below it: most
    activations of a training step. No effect on other systems.
    """
    gc.collect()
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if library is not None and hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):
        library.mallopt(-3, 65536)  # M_MMAP_THRESHOLD of malloc.h
        library.malloc_trim(0)


def fit(
    config: TrainConfig, source: Source, size: str, given: Collection[str], device: str
) -> tuple[TrainConfig, Plan]:
    """The config with the techniques that the planner recommends, which are printed, and its plan. given: what stays.

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
            f"{made.together.techniques}. {LESS}",
        )
    techniques = made.recommended.techniques
    say(f"{size} fit {techniques}: {made.recommended.peak / 2**30:.2f} GiB predicted")
    fitted = config.replace(techniques=techniques.replace(accumulation=techniques.accumulation // config.batch_factor))
    fitted.validate()
    return_freed_memory()
    return fitted, made
