"""A program that trains with weights on the host and prints how many bytes of host memory that takes.

``python -m tests.stream.host_bytes adamw`` prints the growth of the process's resident set: after training ("rest") and
at the optimizer's steps ("peak"). What libraries and threads take is there before it is measured.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memkern
from memkern.memory import return_freed_memory
from memkern.techniques.applying import optimizer_groups
from memkern.techniques.options import Techniques

WIDTH, BLOCKS = 512, 16


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.ReLU(), nn.Linear(3 * WIDTH, WIDTH, bias=False))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def run(name: str, blocks: int, steps: int) -> tuple[int, int, int]:
    """Parameters, and the resident set after the last step and at its peak in the steps after the first."""
    techniques = Techniques(
        precision="bf16", optimizer=name, state_bits=8, master_weights="bf16+8", weights_on_host="layers",
        checkpointing="blocks", step_in_backward=True,
    )  # fmt: skip
    model = nn.Sequential(*(block() for _ in range(blocks))).bfloat16()
    memkern.apply(model, techniques, device="cpu")
    groups = optimizer_groups(model, techniques, lr=1e-3, weight_decay=0.1)
    optimizer: Any = memkern.make_optimizer(groups, techniques, lr=1e-3)
    x, peak = torch.randn(4, WIDTH, dtype=torch.bfloat16), 0
    step_some = optimizer._step_some

    def measured_step(params: Any) -> None:
        nonlocal peak
        step_some(params)
        peak = max(peak, resident())

    optimizer._step_some = measured_step
    for step in range(steps):
        peak = 0 if step < 1 else peak
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return_freed_memory()
    return sum(p.numel() for p in model.parameters()), resident(), peak


def main(name: str) -> None:
    torch.set_num_threads(1)
    return_freed_memory()
    run(name, 2, 3)  # warm-up: libraries, threads and buffers
    return_freed_memory()
    before = resident()
    params, after, peak = run(name, BLOCKS, 3)
    block_bytes = 2 * 6 * WIDTH**2  # bytes of a block's weights in bf16
    print(json.dumps({"params": params, "rest": after - before, "peak": peak - before, "block": block_bytes}))


if __name__ == "__main__":
    main(sys.argv[1])
