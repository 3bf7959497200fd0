"""Trains Llama-3.1-8B with weights on the device, and streamed from the host in 12 GiB: ``python -m lab.gpu.stream``.

The loop is the planner's, on random tokens: two sequences of 8,192 a step, checkpoints in 8-bit codes. One layer's
weights are made on the host and copied to all layers. The streamed run's process has an allocator that is limited to
12 GiB. Prints a line of JSON for each run, with the allocator's peaks, the median seconds of a step, the share of them
in which kernels run (without copies), and the losses; then a line with the ratio of the two runs' tokens per second.
"""

from __future__ import annotations

import argparse
import copy
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
STEPS = 5  # the first two are not counted in the median
LIMIT_GIB = 12.0
RUNS = {"on the device": None, "on the host, 12 GiB": "layers"}  # values of weights_on_host


class Sizes(NamedTuple):
    """Sizes of the model and its batch; the defaults are Llama-3.1-8B's, and --layers changes the number of blocks."""

    hidden: int = 4096
    inner: int = 14336
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256
    sequences: int = 2
    tokens: int = 8192


SMALL = Sizes(64, 128, 4, 4, 2, 256, 2, 64)


def techniques(on_host: str | None, sizes: Sizes) -> memkern.Techniques:
    return memkern.Techniques(
        precision="bf16", master_weights="bf16+8", state_bits=8, checkpointing="blocks", checkpoint_bits=8,
        loss_chunk=4096, step_in_backward=True, weights_on_host=on_host, micro_batch=sizes.sequences,
    )  # fmt: skip


class WithLoss(nn.Module):
    """A language model with its loss in chunks of classes. The loss reads weights, so it is streamed with the model."""

    def __init__(self, model: Any, chunk: int | None) -> None:
        super().__init__()
        head = model.get_output_embeddings()
        self.model, self.loss = model, memkern.nn.LinearCrossEntropy.from_linear(head, chunk_size=chunk)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.model.base_model(ids, use_cache=False).last_hidden_state
        return self.loss(hidden[:, :-1], ids[:, 1:])


def llama(sizes: Sizes) -> Any:
    """A Llama in bf16 on the host, whose layers are copies of the first."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=sizes.hidden, intermediate_size=sizes.inner, num_hidden_layers=1,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads, vocab_size=sizes.vocabulary,
        max_position_embeddings=sizes.tokens,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model: Any = LlamaForCausalLM(config).train()
    torch.set_default_dtype(torch.float32)
    [first] = model.model.layers
    model.model.layers.extend(copy.deepcopy(first) for _ in range(sizes.layers - 1))
    config.num_hidden_layers = sizes.layers
    return model


def busy_ms(step: Callable[[], object]) -> float:
    """Milliseconds of a step's kernels, without copies."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if not event.key.startswith(("Memcpy", "Memset"))]
    return sum(event.self_device_time_total for event in events) / 1e3


def measured(name: str, device: str, sizes: Sizes) -> dict[str, object]:
    on_gpu, on_host = device == "cuda", RUNS[name]
    if on_gpu and on_host:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(LIMIT_GIB * GIB / total)
    begin = time.perf_counter()
    chosen = techniques(on_host, sizes)
    model = WithLoss(llama(sizes).to("cpu" if on_host else device), chosen.loss_chunk)
    memkern.apply(model, chosen, device=device)
    optimizer = memkern.make_optimizer(model.parameters(), chosen, lr=1e-4)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(sizes.vocabulary, (sizes.sequences, sizes.tokens), generator=generator).to(device)

    def step() -> float:
        loss = model(ids)
        loss.backward()  # takes the steps
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    row: dict[str, object] = {"run": name, "parameters": sum(p.numel() for p in model.parameters())}
    row |= {"layers": sizes.layers, "sequences": sizes.sequences, "tokens": sizes.tokens}
    row["made_s"] = round(time.perf_counter() - begin, 1)
    losses, seconds = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        losses.append(round(step(), 4))  # waits for the device
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[2:])
    row |= {"step_s": round(median, 4), "losses": losses}
    row["tokens_per_s"] = round(sizes.sequences * sizes.tokens / median)
    if on_gpu:
        row["limit_gib"] = LIMIT_GIB if on_host else None
        row["allocated_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 3)
        row["reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 3)
        row["busy"] = round(busy_ms(step) / 1e3 / median, 3)
    return row


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", action="store_true", help="prints what it would train")
    parser.add_argument("--small", action="store_true", help="four small layers on the CPU: a test of this script")
    parser.add_argument("--layers", type=int, default=Sizes().layers, help="blocks (default: 32, the whole model)")
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.plan:
        print(f"would train Llama-3.1-8B for {STEPS} steps of 2 x 8,192 tokens, weights {'; '.join(RUNS)}")
        return 0
    sizes = SMALL if args.small else Sizes(layers=args.layers)
    if args.run or args.small:
        failed = False
        for name in [args.run] if args.run else RUNS:
            try:
                row = measured(name, "cpu" if args.small else "cuda", sizes)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                row = {"run": name, "layers": sizes.layers, "error": str(error).partition(" See documentation")[0]}
                failed = True
            print(json.dumps(row), flush=True)
        return int(failed)
    # Each in a process of its own, as the allocator's limit holds for a process.
    command = [sys.executable, "-m", "lab.gpu.stream", "--layers", str(args.layers), "--run"]
    rows, code = {}, 0
    for name in RUNS:
        process = subprocess.run([*command, name], check=False, stdout=subprocess.PIPE, text=True)
        printed = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
        rows[name] = printed[-1] if printed else {"run": name, "error": "no result"}
        code = code or process.returncode
        print(json.dumps(rows[name]), flush=True)
    speeds = [row.get("tokens_per_s") for row in rows.values()]
    if all(speeds):
        ratio = round(speeds[1] / speeds[0], 3)
        print(json.dumps({"run": "speed on the host over that on the device", "ratio": ratio}))
    return code


if __name__ == "__main__":
    sys.exit(main())
