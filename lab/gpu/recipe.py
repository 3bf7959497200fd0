"""Trains a model with memkern in 12 GiB of a GPU, and on the whole GPU: ``python -m lab.gpu.recipe gpt2-xl|llama-8b``.

GPT-2-XL with what ``memkern plan --model gpt2-xl --memory 12GiB --batch-size 8 --step-in-backward`` recommends, with
weights and states on the device, and as torch trains it: fp32 weights, bf16 autocast, fused AdamW. Llama-3.1-8B with
its weights on the device, and on the host with and without memkern's prefetch of a block's weights.

Tokens are random, and the loss of a memkern run is in chunks. Each run has a process of its own, as the limit of
torch's allocator holds for a process. A line of JSON for each run and batch: the allocator's peaks, what the device has
in use (nvidia-smi's number), the median seconds of a step, the share of them in which kernels run (without copies), the
losses.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import memkern
from memkern.stream import streaming
from memkern.stream.prefetch import Prefetch

GIB = 2**30
STEPS = 6  # the first two are not counted in the median
LIMIT_GIB = 12.0
Batch = tuple[int, int]
"""Sequences, and tokens of each."""


class Model(NamedTuple):
    """A model of transformers, by its configuration. Smaller batches come first, as reserved memory never shrinks."""

    name: str  # of a pair of classes: GPT2 of GPT2Config and GPT2LMHeadModel
    layers: str  # the option with the number of blocks
    sizes: dict[str, Any]
    small: dict[str, Any]  # changes for a test on the CPU
    batches: tuple[Batch, ...]


class Run(NamedTuple):
    techniques: dict[str, Any] | None  # arguments of Techniques; None for torch's own training
    limit_gib: float | None = None  # the most that torch's allocator may take; None for all of the card
    checkpointing: bool = False  # of torch's own training
    prefetch: bool = True  # of weights on the host


MODELS = {
    "gpt2-xl": Model(
        "GPT2",
        "n_layer",
        {"n_embd": 1600, "n_layer": 48, "n_head": 25, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1000},
        ((8, 1024),),
    ),
    "llama-8b": Model(
        "Llama",
        "num_hidden_layers",
        {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
        },
        {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 256,
        },
        ((1, 2048), (2, 8192)),
    ),
}  # fmt: skip
SMALL_BATCHES: tuple[Batch, ...] = ((1, 32), (2, 64))
_RECIPE = {
    "precision": "bf16", "checkpointing": "blocks", "step_in_backward": True, "loss_chunk": 4096,
}  # fmt: skip
_PLANNED = {"master_weights": "bf16+16", "activation_bits": 3, "checkpoint_every": 2, "weights_on_host": "layers"}
_8_BITS = {"master_weights": "bf16+8", "state_bits": 8}
_LLAMA = _RECIPE | _8_BITS | {"checkpoint_bits": 8}
_ON_HOST = _LLAMA | {"weights_on_host": "layers"}
RUNS = {
    "gpt2-xl": {
        "memkern, as planned, 12 GiB": Run(_RECIPE | _PLANNED, LIMIT_GIB),
        "memkern, 12 GiB": Run(_RECIPE | _8_BITS | {"activation_bits": 3}, LIMIT_GIB),
        "torch": Run(None),
        "torch, checkpointing": Run(None, checkpointing=True),
    },
    "llama-8b": {
        "on the device": Run(_LLAMA),
        "on the host, 12 GiB": Run(_ON_HOST, LIMIT_GIB),
        "on the host, 12 GiB, no prefetch": Run(_ON_HOST, LIMIT_GIB, prefetch=False),
    },
}


class WithLoss(nn.Module):
    """A language model with its loss in chunks of classes. The loss reads weights, so it is streamed with the model."""

    def __init__(self, model: Any, chunk: int) -> None:
        super().__init__()
        head = model.get_output_embeddings()
        self.model, self.loss = model, memkern.nn.LinearCrossEntropy.from_linear(head, chunk_size=chunk)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.model.base_model(ids, use_cache=False).last_hidden_state
        return self.loss(hidden[:, :-1], ids[:, 1:])


class NoPrefetch(Prefetch):
    """Begins no copy, so that fully_shard copies a block's weights when the block begins."""

    def begin_copy(self, group: Any) -> None:
        pass


def build(model: Model, dtype: torch.dtype, small: bool) -> Any:
    """The model on the host, its blocks copies of the first."""
    import transformers

    sizes = model.sizes | (model.small if small else {})
    layers = sizes[model.layers]
    config = getattr(transformers, f"{model.name}Config")(**sizes | {model.layers: 1})
    torch.manual_seed(0)
    causal = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM"}[model.name]
    built = getattr(transformers, causal)(config).to(dtype).train()
    blocks = built.base_model.h if model.name == "GPT2" else built.base_model.layers
    blocks.extend(copy.deepcopy(blocks[0]) for _ in range(layers - 1))
    setattr(config, model.layers, layers)
    return built


def memkern_loss(model: Any, techniques: memkern.Techniques, device: str) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """The optimizer, and the forward pass."""
    on_device = "cpu" if techniques.weights_on_host else device
    with_loss = WithLoss(model.to(on_device), techniques.loss_chunk or 0)
    memkern.apply(with_loss, techniques, device=device)
    return memkern.make_optimizer(with_loss.parameters(), techniques, lr=1e-4), with_loss


def torch_loss(model: Any, checkpointing: bool, device: str) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """The optimizer, and the forward pass."""
    model.to(device)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(ids: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return model(ids, labels=ids, use_cache=False).loss  # type: ignore[no-any-return]

    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), forward


def busy_ms(step: Callable[[], object]) -> float:
    """Milliseconds of a step's kernels, without copies."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if not event.key.startswith(("Memcpy", "Memset"))]
    return sum(event.self_device_time_total for event in events) / 1e3


def measured(model_name: str, run_name: str, device: str, small: bool) -> Iterator[dict[str, object]]:
    """A row for each batch."""
    model, run, on_gpu = MODELS[model_name], RUNS[model_name][run_name], device == "cuda"
    if on_gpu and run.limit_gib:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(run.limit_gib * GIB / total)
    if not run.prefetch:
        streaming.Prefetch = NoPrefetch  # type: ignore[misc]
    begin = time.perf_counter()
    built = build(model, torch.bfloat16 if run.techniques else torch.float32, small)
    if run.techniques:
        optimizer, forward = memkern_loss(built, memkern.Techniques(**run.techniques), device)
    else:
        optimizer, forward = torch_loss(built, run.checkpointing, device)
    row: dict[str, object] = {"model": model_name, "run": run_name}
    row |= {"parameters": sum(p.numel() for p in built.parameters()), "limit_gib": run.limit_gib}
    row["made_s"] = round(time.perf_counter() - begin, 1)
    generator = torch.Generator().manual_seed(0)
    vocabulary = built.config.vocab_size
    for sequences, tokens in SMALL_BATCHES if small else model.batches:
        ids = torch.randint(vocabulary, (sequences, tokens), generator=generator).to(device)

        def step(ids: Tensor = ids) -> float:
            loss = forward(ids)
            loss.backward()  # memkern's takes the steps
            optimizer.step()
            optimizer.zero_grad()
            return float(loss.detach())  # waits for the device

        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        losses, seconds = [], []
        for _ in range(STEPS):
            start = time.perf_counter()
            losses.append(round(step(), 4))
            seconds.append(time.perf_counter() - start)
        median = statistics.median(seconds[2:])
        new = row | {"sequences": sequences, "tokens": tokens, "step_s": round(median, 4), "losses": losses}
        new["tokens_per_s"] = round(sequences * tokens / median)
        if on_gpu:
            free, total = torch.cuda.mem_get_info()
            new["allocated_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 3)
            new["reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 3)
            new["device_gib"] = round((total - free) / GIB, 3)
            new["busy"] = round(busy_ms(step) / 1e3 / median, 3)
        yield new


def run(model: str, name: str, device: str, small: bool) -> int:
    """Prints a run's rows. Returns 1 if it failed."""
    try:
        for row in measured(model, name, device, small):
            print(json.dumps(row), flush=True)
    except RuntimeError as error:  # out of memory too
        text = str(error).partition(" See documentation")[0]
        print(json.dumps({"model": model, "run": name, "error": text}), flush=True)
        return 1
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--plan", action="store_true", help="prints what it would train")
    parser.add_argument("--small", action="store_true", help="small models on the CPU: a test of this script")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    runs = RUNS[args.model]
    if args.plan:
        print(f"would train {args.model} for {STEPS} steps: {'; '.join(runs)}")
        return 0
    if args.run or args.small:
        device = "cpu" if args.small else "cuda"
        codes = [run(args.model, name, device, args.small) for name in ([args.run] if args.run else runs)]
    else:
        command = [sys.executable, "-m", "lab.gpu.recipe", args.model, "--run"]
        codes = [subprocess.run([*command, name], check=False).returncode for name in runs]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
