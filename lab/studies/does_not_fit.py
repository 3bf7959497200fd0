"""Measures HostOffload's step beside the step in memory, and time and peak of the loss in chunks beside torch's.

Rows have medians of interleaved runs on the CPU. The step is that of four GPT-2 blocks and an embedding, 36 M
parameters, in fp32, and in bf16 with the other bits of fp32 weights kept too. Rows with ``copies`` make the copies that
a device with its own memory needs. The loss has 512 tokens of width 384 and GPT-2's vocabulary; each run of its forward
and backward pass is a process of its own, and peak_mb is the growth of the resident set.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import machine, report
from lab.studies import study
from memkern import functional, optim
from memkern.optim.offload.transfers import Transfers

COLUMNS = (*report.PROVENANCE, "what", "dtype", "way", "ms", "ratio", "peak_mb")
ROWS, WIDTH, CLASSES = 512, 384, 50257  # tokens, width and vocabulary of the loss


class Copies(Transfers):
    """Copies also on a CPU, as if the device's memory were not the host's."""

    shares_memory = False


class CopyingHostOffload(optim.HostOffload):
    """HostOffload with the copies that a device with its own memory needs."""

    _transfers_of = staticmethod(lambda device: Copies())


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    block = [(2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (768,), *4 * [(768,)]]
    params = [nn.Parameter(torch.full(shape, 0.02, dtype=dtype)) for shape in [(10_000, 768), *4 * block]]
    for p in params:
        p.grad = torch.full_like(p, 1e-3)
    return params


def steps(runs: int) -> Iterator[dict[str, str]]:
    for build in (optim.AdamW, optim.AdamW8bit):
        for dtype in (torch.float32, torch.bfloat16):
            master: dict[str, Any] = {"master_weights": "bf16+16"} if dtype == torch.bfloat16 else {}
            plain = build(parameters(dtype), min_8bit_size=0, **master)
            ways: dict[str, Callable[[], Any]] = {"in memory": plain.step}
            for name, wrapper, options in (
                ("on the host", optim.HostOffload, {}),
                ("on the host, copies", CopyingHostOffload, {}),
                ("states on the host, copies", CopyingHostOffload, {"step_on": "device", **master}),
            ):
                ways[name] = wrapper(build, parameters(dtype), min_8bit_size=0, **options).step
            times: dict[str, list[float]] = {name: [] for name in ways}
            for run in range(runs + 2):  # the first two are not counted
                for name, step in ways.items():
                    start = time.perf_counter()
                    step()
                    if run >= 2:
                        times[name].append(time.perf_counter() - start)
            base = times["in memory"]
            for name, seconds in times.items():
                ratio = statistics.median(b / t for b, t in zip(base, seconds, strict=True))
                yield {
                    "what": build.__name__,
                    "dtype": str(dtype).removeprefix("torch."),
                    "way": name,
                    "ms": f"{1e3 * statistics.median(seconds):.1f}",
                    "ratio": f"{ratio:.3f}",
                    "peak_mb": "",
                }


def torch_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, weight).float(), target)


def torch_chunks(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return torch.nn.functional.linear_cross_entropy(x, weight, target, options=options)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "torch": torch_loss,
    "memkern, chunks of classes": functional.linear_cross_entropy,
}
if hasattr(torch.nn.functional, "linear_cross_entropy"):
    LOSSES["torch, chunks of rows"] = torch_chunks


def resident(key: str) -> int:
    """Bytes of the process's resident set: with the key VmRSS its size now, with VmHWM its peak."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{key}:")[1].split()[0]) * 1024


def measure_loss(way: str, dtype: torch.dtype) -> None:
    """Prints the seconds of a loss and its peak in bytes; for a process of its own."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
    weight = (torch.randn(CLASSES, WIDTH) * 0.02).to(dtype).requires_grad_()
    target = torch.randint(CLASSES, (ROWS,))
    seconds = []
    for _ in range(2):
        x.grad = weight.grad = None
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before, start = resident("VmRSS"), time.perf_counter()
        LOSSES[way](x, weight, target).backward()
        seconds.append(time.perf_counter() - start)
        peak = resident("VmHWM") - before
    print(seconds[-1], peak)


def losses(rounds: int) -> Iterator[dict[str, str]]:
    # malloc returns freed memory to the system at once.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    for dtype in ("float32", "bfloat16"):
        measured: dict[str, list[tuple[float, float]]] = {way: [] for way in LOSSES}  # seconds, peaks
        for _ in range(rounds):
            for way, runs in measured.items():
                command = [sys.executable, "-m", __spec__.name, "--loss", way, dtype]
                process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                seconds, peak = map(float, process.stdout.split())
                runs.append((seconds, peak))
        for way, runs in measured.items():
            pairs = zip(measured["torch"], runs, strict=True)
            yield {
                "what": "loss",
                "dtype": dtype,
                "way": way,
                "ms": f"{1e3 * statistics.median(s for s, _ in runs):.0f}",
                "ratio": f"{statistics.median(a / b for (a, _), (b, _) in pairs):.3f}",
                "peak_mb": f"{statistics.median(p for _, p in runs) / 1e6:.0f}",
            }


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("does_not_fit", __doc__)
    parser.add_argument("--runs", type=int, default=11, help="timed runs of each step (default: 11)")
    parser.add_argument("--rounds", type=int, default=3, help="processes for each loss (default: 3)")
    parser.add_argument("--loss", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.loss:
        measure_loss(args.loss[0], getattr(torch, args.loss[1]))
        return
    provenance = machine.provenance("cpu")
    for source in (steps(args.runs), losses(args.rounds)):
        for row in source:
            print(*(row[key] for key in COLUMNS[-6:]), flush=True)
            report.append(args.out / "does-not-fit.csv", [provenance | row], COLUMNS)


if __name__ == "__main__":
    main()
