"""Times memkern's LAMB and LARS beside timm's, AdamW8bit and torch. timm's Lamb is set to not clip gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tests.support import timm_optim

from .bench_optim import GPT2, Make, Shapes, gpt2_shapes, optimizer_of, stepper
from .harness import Case


def timm_optimizer(cls: str, **options: Any) -> Make:
    return lambda params: timm_optim.load(cls)(params, **options)


def reads_of(times_params: int, times_state: int) -> Callable[[int, int], int]:
    """stepper's ``reads`` for a pass that reads multiples of the parameters' bytes and of the state's."""
    return lambda params, state: times_params * params + times_state * state


NOTHING, NORMS, CLASSIC_NORMS = reads_of(0, 0), reads_of(2, 1), reads_of(2, 0)
"""Bytes read before the update: none; for norms of parameters and updates; for norms of parameters and gradients."""
LAMB = {
    "memkern LAMB8bit": (optimizer_of("memkern.optim", "LAMB8bit"), NORMS),
    "memkern LAMB": (optimizer_of("memkern.optim", "LAMB"), NORMS),
    "memkern AdamW8bit": (optimizer_of("memkern.optim", "AdamW8bit"), NOTHING),
    "timm Lamb": (timm_optimizer("Lamb", max_grad_norm=None), NORMS),
    "torch AdamW fused": (optimizer_of("torch.optim", "AdamW", fused=True), NOTHING),
}
RECIPE = {"lr": 1.0, "momentum": 0.9, "weight_decay": 1e-4, "trust_coeff": 1e-3}  # one recipe for both libraries
LARS = {
    "memkern LARS8bit": (optimizer_of("memkern.optim", "LARS8bit", **RECIPE), CLASSIC_NORMS),
    "memkern LARS": (optimizer_of("memkern.optim", "LARS", **RECIPE), CLASSIC_NORMS),
    "memkern LARS8bit, paper's form": (optimizer_of("memkern.optim", "LARS8bit"), NORMS),
    "timm Lars": (timm_optimizer("Lars", **RECIPE), CLASSIC_NORMS),
    "torch SGD fused": (optimizer_of("torch.optim", "SGD", lr=0.1, momentum=0.9, fused=True), NOTHING),
}


def case(name: str, makes: dict[str, Any], shapes: Shapes, device: str) -> Case:
    contenders = [stepper(name, make, shapes, device, reads=before) for name, (make, before) in makes.items()]
    return Case(name, sum(map(math.prod, shapes)), contenders)


def cases(size: int, device: str) -> list[Case]:
    single = [(max(1, size // 4096), 4096)]
    # GPT-2 at its full size, so that its matrices do not fit the cache.
    gpt2 = gpt2_shapes(GPT2 if size >= 2**24 else size)
    return [
        case("LAMB, one tensor", LAMB, single, device),
        case(f"LAMB, {len(gpt2)} tensors like GPT-2's", LAMB, gpt2, device),
        case("LARS, one tensor", LARS, single, device),
    ]
