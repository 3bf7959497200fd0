"""Times optimizer steps with states on the host, taken on the device and on the CPU: ``python -m lab.gpu.host``.

The model has a billion bf16 parameters in matrices of 16 M; the loss is their sum. Prints a line of JSON for each way
to step: the median milliseconds of a backward pass and a step until the device is done, the bytes of states that are
copied to the device (and as many back) with GB/s in one direction, and the peak of the device's memory beside weights
and gradients. torchao and DeepSpeed are measured where they are installed. The last lines are copies of pinned memory:
to the device, to the host, and both at once, with GB/s of all bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memkern import memory, optim

RUNS = 12  # steps that are timed; the first two are not counted


def parameters(count: int, width: int, device: str) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((width, width), 0.02, dtype=torch.bfloat16, device=device)) for _ in range(count)]


def torchao(params: Any) -> Any:
    from torchao.optim import CPUOffloadOptimizer

    return CPUOffloadOptimizer(params, torch.optim.AdamW, fused=True)


def deepspeed(params: Any) -> Any:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    params[:] = [nn.Parameter(p.detach().float().cpu()) for p in params]  # DeepSpeed steps parameters on the host
    return DeepSpeedCPUAdam(params)


def host(params: Any, **options: Any) -> Any:
    return optim.HostOffload(optim.AdamW8bit, params, **options)


WAYS: dict[str, Callable[[Any], Any]] = {
    "AdamW8bit on the device": lambda params: optim.AdamW8bit(params, master_weights="bf16+16"),
    "step_on=device": lambda params: host(params, step_on="device", master_weights="bf16+16"),
    "step_on=device, no errors": lambda params: host(params, step_on="device"),
    "step_on=device, in backward": lambda params: host(
        params, step_on="device", step_in_backward=True, master_weights="bf16+16"
    ),
    "step_on=cpu": host,
    "step_on=cpu, gradients too": lambda params: host(params, offload_gradients=True),
}
PEERS = {  # package: label, constructor
    "torchao": ("torchao CPUOffloadOptimizer", torchao),
    "deepspeed": ("DeepSpeedCPUAdam, no transfers", deepspeed),
}


def measured(name: str, make: Callable[[Any], Any], count: int, width: int, device: str) -> dict[str, object]:
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    params = parameters(count, width, device)
    weights_and_gradients = sum(2 * p.nbytes for p in params)
    optimizer = make(params)
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        torch.stack([p.sum() for p in params]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times[2:])
    row: dict[str, object] = {"way": name, "parameters": sum(p.numel() for p in params), "ms": round(1e3 * seconds, 2)}
    if name.startswith("step_on=device"):
        states = memory.optimizer_bytes(optimizer)
        row |= {"states": states, "gb_per_s": round(states / seconds / 1e9, 2)}
    if device == "cuda":
        row["device_bytes_beside"] = torch.cuda.max_memory_allocated() - weights_and_gradients
        torch.cuda.reset_peak_memory_stats()
    return row


def links(nbytes: int, device: str) -> list[dict[str, object]]:
    """Copies of pinned memory. On a CPU the memory is not pinned, and the copies come one after the other."""
    on_gpu = device == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    streams = [torch.cuda.Stream() if on_gpu else None for _ in range(2)]
    on_host = [torch.ones(nbytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
    on_device = [torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    pairs = [(on_device[0], on_host[0]), (on_host[1], on_device[1])]
    rows: list[dict[str, object]] = []
    for name, chosen in (("to the device", pairs[:1]), ("to the host", pairs[1:]), ("both ways at once", pairs)):
        times = []
        for _ in range(RUNS):
            synchronize()
            start = time.perf_counter()
            for (to, source), stream in zip(chosen, streams, strict=False):
                with torch.cuda.stream(stream):
                    to.copy_(source, non_blocking=True)
            synchronize()
            times.append(time.perf_counter() - start)
        seconds = statistics.median(times[2:])
        rate = round(len(chosen) * nbytes / seconds / 1e9, 2)
        rows.append({"way": f"pinned copy {name}", "ms": round(1e3 * seconds, 2), "gb_per_s": rate})
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", action="store_true", help="prints what it would measure")
    parser.add_argument("--small", action="store_true", help="four small matrices on the CPU: a test of this script")
    args = parser.parse_args(argv)
    ways = WAYS | dict(way for module, way in PEERS.items() if importlib.util.find_spec(module))
    if args.plan:
        print(f"would step a billion parameters {RUNS} times: {'; '.join(ways)}")
        return 0
    count, width, device = (4, 128, "cpu") if args.small else (60, 4096, "cuda")
    failed = False
    for name, make in ways.items():
        try:
            row = measured(name, make, count, width, device)
        except Exception as error:  # peers' classes may raise anything
            row, failed = {"way": name, "error": f"{type(error).__name__}: {str(error)[:200]}"}, name in WAYS
        print(json.dumps(row), flush=True)
    for row in links(2**20 if args.small else 2**30, device):
        print(json.dumps(row), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
