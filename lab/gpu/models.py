"""Measures time, memory and errors of whole models on a GPU, by what they save: ``python -m lab.gpu.models``.

Models of transformers with random weights (tests/support/zoo.py), forward and backward pass without the optimizer.
A line of JSON for each model and mode: ms of a step, the median over rounds of STEPS steps without a wait in between;
the time of its kernels alone, from torch's profiler; bytes kept from the forward to the backward pass, and the peak
above parameters and gradients; and the error of the gradients beside torch's. "small" models have layers of width 64
at 32 tokens, whose steps take the CPU's time, not the GPU's.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memkern
from lab.studies.saved_compiled import error_and_cosine
from memkern.blocks.block_lists import block_lists
from tests.support import zoo

STEPS, ROUNDS = 5, 3
Prepare = Callable[[nn.Module], Callable[..., Any]]
"""Prepares a model, and returns the callable to use in its place."""


class Workload(NamedTuple):
    """A model of zoo.py, its sizes, and a step's batch."""

    name: str
    model: str
    sizes: dict[str, Any]
    sequences: int
    tokens: int
    precision: str  # "bf16", "bf16 autocast" or "fp32"
    modes: tuple[str, ...] = ("torch", "checkpointing", "half checkpointed", "compress")


LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
_SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 8, "intermediate_size": 176}
SMALL: dict[str, dict[str, Any]] = {
    "Llama": _SMALL | {"num_key_value_heads": 2},
    "GPT-2": {"n_embd": 64, "n_head": 4, "n_layer": 8},
}
GPT2 = {"n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257}
WORKLOADS = (
    Workload("GPT-2, 124 M", "GPT-2", GPT2, 8, 1024, "bf16 autocast"),
    Workload("Llama, 1.1 B", "Llama", LLAMA_1B, 4, 2048, "bf16"),
    *(Workload(f"small {name}", name, SMALL[name], 1, 32, "bf16") for name in ("Llama", "GPT-2")),
)


def batch_of(work: Workload, device: str) -> dict[str, Any]:
    """Sequences (or images) of zoo.py's, each shifted by one."""
    sequence = zoo.batch(work.model, work.tokens)
    tensors = {name: x for name, x in sequence.items() if isinstance(x, torch.Tensor)}
    shifts = range(work.sequences)
    return sequence | {name: torch.cat([x.roll(i, -1) for i in shifts]).to(device) for name, x in tensors.items()}


def _busy_ms(step: Callable[[], object]) -> float:
    """Milliseconds of the kernels of a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e3


def loss_of(work: Workload, prepare: Prepare, device: str) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """A prepared model, and its forward pass."""
    with torch.device(device):
        model: nn.Module = zoo.build(work.model, work.tokens, **work.sizes)
    if work.precision == "bf16":
        model = model.to(torch.bfloat16)
    call, batch = prepare(model), batch_of(work, device)

    def forward() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=work.precision == "bf16 autocast"):
            return call(**batch).loss

    return model, forward


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def measured(
    work: Workload,
    prepare: Prepare,
    device: str,
    expected: dict[str, torch.Tensor],
    exact: dict[str, torch.Tensor] | None = None,
    steps: int = STEPS,
) -> dict[str, object]:
    """The figures of a row. ``expected``: torch's gradients, filled by the first call; ``exact``: those in fp32."""
    on_gpu = device == "cuda"
    before_model = torch.cuda.memory_allocated() if on_gpu else 0
    model, forward = loss_of(work, prepare, device)

    def step() -> None:
        forward().backward()

    def finish() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    begin = finish()
    step()
    row: dict[str, object] = {"first_s": round(finish() - begin, 2)}
    gradients = gradients_of(model)
    if not expected:
        expected.update({name: grad.clone() for name, grad in gradients.items()})
    else:
        error, cosine = error_and_cosine(gradients, expected)
        row |= {"gradient_error": float(f"{error:.3g}"), "cosine": round(cosine, 6)}
    if exact is not None:
        row["fp32_error"] = float(f"{error_and_cosine(gradients, exact)[0]:.3g}")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        loss = forward()
        row["saved_mib"] = round((torch.cuda.memory_allocated() - start) / 2**20, 1)
        loss.backward()
        row["peak_mib"] = round((torch.cuda.max_memory_allocated() - start) / 2**20, 1)
        row["model_mib"] = round((start - before_model) / 2**20, 1)
        del loss
    times = []
    for _ in range(ROUNDS):
        begin = finish()
        for _ in range(steps):
            step()
        times.append(1e3 * (finish() - begin) / steps)
    row["ms"] = round(statistics.median(times), 3)
    if on_gpu:
        row["kernels_ms"] = round(_busy_ms(step), 3)
    return row


def _checkpoint_half(model: nn.Module) -> None:
    """Checkpoints every other block."""
    for blocks in block_lists(model):
        for block in blocks[::2]:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


MODES: dict[str, Callable[[Any], object]] = {  # change a model in place
    "torch": lambda model: None,
    "checkpointing": lambda model: model.gradient_checkpointing_enable({"use_reentrant": False}),
    "half checkpointed": _checkpoint_half,
    "compress": memkern.compress,
}


def prepare_by_mode(mode: str) -> Prepare:
    """Prepares a model by changing it in place, as the mode does."""

    def prepare(model: nn.Module) -> Callable[..., Any]:
        MODES[mode](model)
        return model

    return prepare


def workload_columns(work: Workload) -> dict[str, object]:
    """The columns that all rows of a workload begin with."""
    batch = {"sequences": work.sequences, "tokens": work.tokens, "precision": work.precision}
    return {"model": work.name, **batch}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", action="store_true", help="prints what it would measure")
    parser.add_argument("--small", action="store_true", help="the small models on the CPU: a test of this script")
    args = parser.parse_args(argv)
    if args.plan:
        for work in WORKLOADS:
            print(f"would measure {work.name}, {work.sequences} x {work.tokens} tokens: {', '.join(work.modes)}")
        return 0
    import transformers

    transformers.logging.set_verbosity_error()
    device, failed = "cpu" if args.small else "cuda", False
    for work in WORKLOADS[-2:] if args.small else WORKLOADS:
        expected: dict[str, torch.Tensor] = {}
        for mode in work.modes:
            try:
                row = measured(work, prepare_by_mode(mode), device, expected, steps=1 if args.small else STEPS)
            except Exception as error:  # the other modes go on
                row, failed = {"error": f"{type(error).__name__}: {error}"[:500]}, True
            print(json.dumps(workload_columns(work) | {"mode": mode} | row), flush=True)
            if device == "cuda":
                torch.cuda.empty_cache()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
