"""Trains GPT-2-XL with memkern on 12 GiB of a GPU, and with torch on the whole GPU: ``python -m lab.gpu.recipe``.

First the loop that `python -m memkern plan --model gpt2-xl --memory 12GiB --batch-size 8 --step-in-backward` prints, on
random tokens, in a process whose allocator is limited to 12 GiB; then fp32 weights, bf16 autocast and torch's fused
AdamW, with and without checkpoints. A line of JSON for each: the allocator's peaks, the median step, the losses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import memkern

GIB = 2**30
STEPS = 8  # the first two are not counted in the median


class Run(NamedTuple):
    """How a run stores weights; limit_gib: the most that torch's allocator may take, None for all of the card."""

    precision: torch.dtype
    limit_gib: float | None = None
    checkpointing: bool = False


RUNS = {
    "memkern, 12 GiB": Run(torch.bfloat16, 12.0),
    "torch": Run(torch.float32),
    "torch, checkpointing": Run(torch.float32, None, True),
}


class Sizes(NamedTuple):
    n_embd: int = 1600
    n_layer: int = 48
    n_head: int = 25
    sequences: int = 8
    tokens: int = 1024
    vocab_size: int = 50257


SMALL = Sizes(64, 2, 4, 2, 64, 1000)


def gpt2(sizes: Sizes, dtype: torch.dtype, device: str) -> Any:
    from transformers import AutoModelForCausalLM, GPT2Config

    no_dropout = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)
    model = {"n_embd": sizes.n_embd, "n_layer": sizes.n_layer, "n_head": sizes.n_head}
    config = GPT2Config(vocab_size=sizes.vocab_size, **model, **no_dropout)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def memkern_step(model: Any) -> Callable[[Tensor], Tensor]:
    memkern.compress(model, 3)
    memkern.checkpoint_blocks(model)
    loss_fn = memkern.nn.LinearCrossEntropy.from_linear(model.get_output_embeddings(), chunk_size=4096)
    options: dict[str, Any] = {"state_bits": 8, "master_weights": "bf16+8"}
    optimizer = memkern.optim.StepInBackward(memkern.optim.AdamW, model.parameters(), lr=1e-4, **options)

    def step(ids: Tensor) -> Tensor:
        hidden = model.base_model(ids, use_cache=False).last_hidden_state
        loss = loss_fn(hidden[:, :-1], ids[:, 1:])
        loss.backward()  # takes the steps
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def torch_step(model: nn.Module, device: str) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(ids: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def measured(name: str, device: str, sizes: Sizes) -> dict[str, object]:
    run, on_gpu = RUNS[name], device == "cuda"
    if on_gpu and run.limit_gib:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(run.limit_gib * GIB / total)
    model = gpt2(sizes, run.precision, device)
    if run.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    step = memkern_step(model) if name.startswith("memkern") else torch_step(model, device)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, (sizes.sequences, sizes.tokens), generator=generator).to(device)
    losses, seconds = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        losses.append(round(float(step(ids)), 4))
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[2:])
    row: dict[str, object] = {
        "run": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "sequences": sizes.sequences,
        "tokens": sizes.tokens,
        "step_s": round(median, 4),
        "tokens_per_s": round(sizes.sequences * sizes.tokens / median),
        "losses": losses,
    }
    if on_gpu:
        row["limit_gib"] = run.limit_gib
        row["allocated_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 3)
        row["reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 3)
    return row


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", action="store_true", help="prints what it would train")
    parser.add_argument("--small", action="store_true", help="two small layers on the CPU: a test of this script")
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.plan:
        print(f"would train GPT-2-XL for {STEPS} steps: {'; '.join(RUNS)}")
        return 0
    if args.run or args.small:
        failed = False
        for name in [args.run] if args.run else RUNS:
            try:
                row = measured(name, "cpu" if args.small else "cuda", SMALL if args.small else Sizes())
            except torch.OutOfMemoryError as error:
                row, failed = {"run": name, "error": str(error).partition(" See documentation")[0]}, True
            print(json.dumps(row), flush=True)
        return int(failed)
    # Each in a process of its own, as the allocator's limit holds for a process.
    command = [sys.executable, "-m", "lab.gpu.recipe", "--run"]
    codes = [subprocess.run([*command, name], check=False).returncode for name in RUNS]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
