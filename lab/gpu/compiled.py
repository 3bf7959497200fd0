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
from memkern.blocks.block_lists import block_lists
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


class Contender(NamedTuple):
    prepare: Prepare
    compiling: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext  # settings while it compiles


def with_budget(budget: float) -> Contender:
    """torch.compile with its activation_memory_budget."""
    return Contender(torch.compile, lambda: functorch_config.patch(activation_memory_budget=budget))


def whole(**options: Any) -> Contender:
    """memkern.compile of a model as one graph."""
    return Contender(functools.partial(memkern.compile, blocks=False, **options))


def half_checkpointed(model: nn.Module) -> Any:
    return torch.compile(prepare_by_mode("half checkpointed")(model))


def compile_blocks(model: nn.Module) -> nn.Module:
    """torch.compile of each block, as memkern.compile has by default."""
    for blocks in block_lists(model):
        for block in blocks:
            block.compile()
    return model


EAGER = {name: Contender(prepare_by_mode(name)) for name in ("torch", "half checkpointed", "checkpointing")}
WHOLE = {
    "torch.compile": Contender(torch.compile),
    "memkern.compile, 8 bits": whole(saved_bits=8),
    "memkern.compile, exact": whole(),
}
BLOCKS = {
    "torch.compile, blocks": Contender(compile_blocks),
    "memkern.compile, 8 bits, blocks": Contender(functools.partial(memkern.compile, saved_bits=8)),
    "memkern.compile, exact, blocks": Contender(memkern.compile),
}
REST = {
    "memkern.compile, 8 bits, ops": whole(saved_bits=8, codec_backend="ops"),
    "torch.compile, half checkpointed": Contender(half_checkpointed),
    "torch.compile, budget 0.5": with_budget(0.5),
    "torch.compile, reduce-overhead": Contender(functools.partial(torch.compile, mode="reduce-overhead")),
    "memkern.compile, 8 bits, reduce-overhead": whole(saved_bits=8, mode="reduce-overhead"),
    "torch.compile, budget 0.2": with_budget(0.2),
    "torch.compile, budget 0.8": with_budget(0.8),
    "memkern.compile, 8 bits, budget 0.5": whole(saved_bits=8, memory_budget=0.5),
}
CONTENDERS = EAGER | WHOLE | REST | BLOCKS
"""The most important first, as time may run out."""
_ALL, _WHOLE = (*EAGER, *WHOLE, *REST), (*EAGER, *WHOLE)
_LLAMA_4 = LLAMA_1B | {"num_hidden_layers": 4}
_VIT = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
WORKLOADS = (
    Workload("GPT-2, 124 M", "GPT-2", GPT2, 8, 1024, "bf16 autocast", _ALL),
    Workload("Llama, 1.1 B", "Llama", LLAMA_1B, 4, 2048, "bf16 autocast", (*EAGER, *BLOCKS)),
    Workload("Llama, 4 layers", "Llama", _LLAMA_4, 4, 2048, "bf16 autocast", _WHOLE),
    Workload("ViT-B, 1,024 patches", "ViT", _VIT, 8, 1024, "bf16 autocast", _WHOLE),
    Workload("GPT-2, 4 layers", "GPT-2", GPT2 | {"n_layer": 4}, 8, 1024, "fp32", _WHOLE),
)
TINY = (
    Workload("small GPT-2", "GPT-2", SMALL["GPT-2"] | {"n_layer": 2}, 1, 32, "fp32", (*CONTENDERS,)),
    Workload("small ViT", "ViT", {"num_hidden_layers": 1}, 2, 32, "bf16 autocast", _WHOLE),
)


def with_loss(prepare: Prepare) -> Prepare:
    """Sets a language model's loss_type before it is prepared."""

    def prepared(model: nn.Module) -> Callable[..., Any]:
        if getattr(model, "loss_type", None) is None:
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
            print(f"would measure {work.name}, {size}: {'; '.join(work.modes)}")
        return 0
    import transformers

    transformers.logging.set_verbosity_error()
    device, failed = "cpu" if args.small else "cuda", False
    end = time.monotonic() + args.seconds
    for work in TINY if args.small else WORKLOADS:
        if time.monotonic() > end:
            break
        exact, expected = exact_gradients(work, device), dict[str, torch.Tensor]()
        for name in work.modes:
            contender = CONTENDERS[name]
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
