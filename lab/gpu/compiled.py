"""Measures time, memory and errors of compiled models on a GPU: ``python -m lab.gpu.compiled``.

Like models.py, with torch.compile and memkern.compile: a line of JSON for each model and contender. first_s: seconds of
the first step with compilation; fp32_error: the gradients' error beside those of fp32 without a compiler. loss_type is
set, as transformers else warns in GPT-2's forward pass, which breaks the graph. No contender begins after --seconds:
Inductor takes half a minute for 12 layers, and 5 minutes for all.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn

import memkern
from memkern.compiled.torch_internals import functorch_config

from .models import (
    GPT2,
    LLAMA_1B,
    SMALL,
    Prepare,
    Workload,
    gradients_of,
    loss_of,
    measured,
    prepare_by_mode,
    workload_columns,
)

STEPS = 3  # steps in a round of measuring
LAST_START_S = 100.0  # no contender begins after so many seconds
BUDGET = 0.5  # torch.compile's activation_memory_budget


class Contender(NamedTuple):
    prepare: Prepare
    compiling: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext  # settings while it compiles


CONTENDERS = {
    "torch": Contender(prepare_by_mode("torch")),
    "checkpointing": Contender(prepare_by_mode("checkpointing")),
    "half checkpointed": Contender(prepare_by_mode("half checkpointed")),
    "torch.compile": Contender(torch.compile),
    "memkern.compile, 8 bits": Contender(functools.partial(memkern.compile, saved_bits=8, blocks=False)),
    "memkern.compile, exact": Contender(functools.partial(memkern.compile, blocks=False)),
    f"torch.compile, budget {BUDGET}": Contender(
        torch.compile, lambda: functorch_config.patch(activation_memory_budget=BUDGET)
    ),
}
"""The most important first, as time may run out."""
_FOUR_LAYERS = {"GPT-2": {"n_layer": 4}, "Llama": {"num_hidden_layers": 4}}
WORKLOADS = (
    Workload("GPT-2, 124 M", "GPT-2", GPT2, 8, 1024, "bf16 autocast"),
    Workload("Llama, 4 layers", "Llama", LLAMA_1B | _FOUR_LAYERS["Llama"], 4, 2048, "bf16 autocast"),
    Workload("GPT-2, 4 layers", "GPT-2", GPT2 | _FOUR_LAYERS["GPT-2"], 8, 1024, "fp32"),
    Workload("Llama, 4 layers", "Llama", LLAMA_1B | _FOUR_LAYERS["Llama"], 4, 2048, "fp32"),
)
TINY = (
    Workload("small GPT-2", "GPT-2", SMALL["GPT-2"] | {"n_layer": 1}, 1, 32, "bf16 autocast"),
    Workload("small Llama", "Llama", SMALL["Llama"] | {"num_hidden_layers": 1}, 1, 32, "fp32"),
)


def with_loss(prepare: Prepare) -> Prepare:
    """Sets a model's loss_type before it is prepared."""

    def prepared(model: nn.Module) -> Callable[..., Any]:
        model.loss_type = "ForCausalLM"  # type: ignore[assignment]
        return prepare(model)

    return prepared


def exact_gradients(work: Workload, device: str) -> dict[str, torch.Tensor]:
    """The gradients in fp32 without a compiler."""
    model, forward = loss_of(work._replace(precision="fp32"), prepare_by_mode("torch"), device)
    forward().backward()
    return gradients_of(model)


def forget(device: str) -> None:
    """Frees the last contender's model, which the compiler's caches hold."""
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", action="store_true", help="prints what it would measure")
    parser.add_argument("--small", action="store_true", help="small models on the CPU: a test of this script")
    parser.add_argument("--seconds", type=float, default=LAST_START_S, help="after which no contender begins")
    args = parser.parse_args(argv)
    if args.plan:
        for work in WORKLOADS:
            size = f"{work.sequences} x {work.tokens} tokens, {work.precision}"
            print(f"would measure {work.name}, {size}: {', '.join(CONTENDERS)}")
        return 0
    import transformers

    transformers.logging.set_verbosity_error()
    device, failed = "cpu" if args.small else "cuda", False
    end = time.monotonic() + args.seconds
    for work in TINY if args.small else WORKLOADS:
        if time.monotonic() > end:
            break
        exact, expected = exact_gradients(work, device), dict[str, torch.Tensor]()
        for name, contender in CONTENDERS.items():
            if time.monotonic() > end:
                break
            forget(device)
            try:
                with contender.compiling():
                    row = measured(work, with_loss(contender.prepare), device, expected, exact, STEPS)
            except Exception as error:  # the other contenders go on
                row, failed = {"error": f"{type(error).__name__}: {error}"[:2000]}, True
            print(json.dumps(workload_columns(work) | {"mode": name} | row), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
