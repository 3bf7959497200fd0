"""Times memkern's LAMB and LARS beside timm's, AdamW8bit and torch. timm's Lamb is set to not clip gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tests.support import timm_factory

from .bench_optim import GPT2, Make, Shapes, gpt2_shapes, optimizer_of, stepper
from .harness import Case


def timm_optimizer(cls: str, **options: Any) -> Make:
    return lambda params: timm_factory.optimizer(cls)(params, **options)


def reads_of(times_params: int, times_state: int) -> Callable[[int, int], int]:
    """The argument ``reads`` of ``stepper``: the bytes of all parameters and of the state, each times a number."""
    return lambda params, state: times_params * params + times_state * state


# The bytes that an optimizer reads before its update. Gradients have as many bytes as parameters.
NOTHING = reads_of(0, 0)
NORMS = reads_of(2, 1)  # parameters, gradients and states, for the norms of parameters and updates
CLASSIC_NORMS = reads_of(2, 0)  # parameters and gradients, for the norms that LARS's classic form takes
LAMB = {
    "memkern LAMB8bit": (optimizer_of("memkern.optim", "LAMB8bit"), NORMS),
    "memkern LAMB": (optimizer_of("memkern.optim", "LAMB"), NORMS),
    "memkern AdamW8bit": (optimizer_of("memkern.optim", "AdamW8bit"), NOTHING),
    "timm Lamb": (timm_optimizer("Lamb", max_grad_norm=None), NORMS),
    "torch AdamW fused": (optimizer_of("torch.optim", "AdamW", fused=True), NOTHING),
}
# For both libraries. memkern's LARS has its classic form where trust_coeff is given, timm's has no other form.
RECIPE = {"lr": 1.0, "momentum": 0.9, "weight_decay": 1e-4, "trust_coeff": 1e-3}
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
    # GPT-2 at its full size, whose matrices do not fit the cache; a quick run has fewer elements.
    gpt2 = gpt2_shapes(GPT2 if size >= 2**24 else size)
    return [
        case("LAMB, one tensor", LAMB, single, device),
        case(f"LAMB, {len(gpt2)} tensors like GPT-2's", LAMB, gpt2, device),
        case("LARS, one tensor", LARS, single, device),
    ]
