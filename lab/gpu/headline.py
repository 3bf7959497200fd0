"""Times the main kernels beside torch's and installed peers': ``python -m lab.gpu.headline cuda|triton``.

AdamW8bit, Lion8bit, SGD8bit, LAMB8bit and LARS8bit over one tensor of 1e9 parameters and over GPT-2's 148 tensors, fp32
and bf16; 3-bit GELU; the gradients' norm; power codes of saved tensors; Muon over GPT-2's matrices. Prints a line of
JSON for each contender as soon as its case is measured (by benchmarks/harness.py); "copy_share" is the share of the
copy rate measured with it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch

import memkern
from benchmarks import bench_muon, harness
from benchmarks.bench_activation import contender as activation
from benchmarks.bench_activation import gelus
from benchmarks.bench_layerwise import CLASSIC_NORMS, NORMS, NOTHING, RECIPE
from benchmarks.bench_optim import GPT2, Shapes, flash_adamw, gpt2_shapes, optimizer_of, stepper
from memkern import _ops

LARGE = 10**9  # parameters in the cases of one tensor
ELEMENTS = 2**28  # elements of an activation
BYTES_PER_PARAMETER = 90  # bytes that all contenders of a case take together, in fp32
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CONTENDER_S = 0.6  # seconds of measuring a contender, beside the copies between calls
ROUNDS = 20

FUSED = ("torch AdamW fused", optimizer_of("torch.optim", "AdamW", fused=True), NOTHING)
FOREACH = ("torch AdamW foreach", optimizer_of("torch.optim", "AdamW", foreach=True), NOTHING)
SGD = ("torch SGD fused", optimizer_of("torch.optim", "SGD", lr=0.1, momentum=0.9, fused=True), NOTHING)
# Peers of each class of memkern: label, constructor, bytes read before the update. With bf16 weights torch's states are
# bf16, too: 4 bytes per parameter of AdamW.
PEERS: dict[str, list[tuple[str, Any, Any]]] = {
    "AdamW8bit": [
        FUSED,
        FOREACH,
        ("bitsandbytes AdamW8bit", optimizer_of("bitsandbytes.optim", "AdamW8bit"), NOTHING),
        ("torchao AdamW8bit", optimizer_of("torchao.optim", "AdamW8bit"), NOTHING),
        ("flashoptim AdamW", flash_adamw, NOTHING),
    ],
    "Lion8bit": [FUSED, ("bitsandbytes Lion8bit", optimizer_of("bitsandbytes.optim", "Lion8bit"), NOTHING)],
    "LAMB8bit": [FUSED],
    "SGD8bit": [SGD],
    "LARS8bit": [SGD],
}
BF16_PEERS: dict[str, list[tuple[str, Any, Any]]] = {
    "AdamW8bit": [
        ("memkern AdamW8bit, bf16+8", optimizer_of("memkern.optim", "AdamW8bit", master_weights="bf16+8"), NOTHING),
        ("flashoptim AdamW, plain weights", optimizer_of("flashoptim", "FlashAdamW", master_weight_bits=None), NOTHING),
    ],
}
"""More contenders with bf16 weights. flashoptim's default has 8 more bits of each weight, as memkern's bf16+8 has."""
# memkern's classes: options, bytes read before the update (for trust ratios' norms).
OURS: dict[str, tuple[dict[str, Any], Callable[[int, int], int]]] = {
    "AdamW8bit": ({}, NOTHING),
    "Lion8bit": ({}, NOTHING),
    "SGD8bit": ({"lr": 0.1, "momentum": 0.9}, NOTHING),
    "LAMB8bit": ({}, NORMS),
    "LARS8bit": (RECIPE, CLASSIC_NORMS),
}


def steps(name: str, shapes: Shapes, dtype: str, device: str) -> harness.Case:
    options, reads = OURS[name]
    contenders = [(f"memkern {name}", optimizer_of("memkern.optim", name, **options), reads), *PEERS[name]]
    contenders += BF16_PEERS.get(name, []) if dtype == "bf16" else []
    return harness.Case(
        f"{name}, {len(shapes)} tensors, {dtype}" if len(shapes) > 1 else f"{name}, one tensor, {dtype}",
        sum(map(math.prod, shapes)),
        [stepper(label, make, shapes, device, DTYPES[dtype], reads) for label, make, reads in contenders],
    )


def gradient_norm(shapes: Shapes, dtype: str, device: str) -> harness.Case:
    """The gradients' norm, by memkern's op, which reads them once, and by the function of torch's clip_grad_norm_."""

    def subject(ours: bool) -> Callable[[], harness.Subject]:
        def setup() -> harness.Subject:
            grads = [torch.randn(s, device=device).to(DTYPES[dtype]) for s in shapes]
            norm = torch.zeros((), dtype=torch.float64, device=device)
            call = (
                (lambda: _ops.grad_norm_(norm, grads, None))
                if ours
                else (lambda: torch.nn.utils.get_total_norm(grads, foreach=True))
            )
            return harness.Subject(call, lambda: sum(g.nbytes for g in grads))

        return setup

    contenders = [
        harness.Contender(name, subject(name.startswith("memkern")))
        for name in ("memkern grad norm", "torch get_total_norm")
    ]
    return harness.Case(f"grad norm, {len(shapes)} tensors, {dtype}", sum(map(math.prod, shapes)), contenders)


def gelu(elements: int, dtype: str, device: str) -> harness.Case:
    functions = {name: f for name, f in gelus("none").items() if name in ("memkern GELU, 3 bits", "torch GELU")}
    contenders = [activation(name, f, elements, device, DTYPES[dtype]) for name, f in functions.items()]
    return harness.Case(f"GELU, {dtype}", elements, contenders)


def power_codes(elements: int, dtype: str, device: str) -> harness.Case:
    """Power codes of saved tensors, and back; beside them, as a bound, torch's copy to 8-bit floats without scales."""

    def subject(call: Callable[[torch.Tensor], Callable[[], object]]) -> Callable[[], harness.Subject]:
        def setup() -> harness.Subject:
            x = torch.randn(elements, device=device).to(DTYPES[dtype])
            return harness.Subject(call(x), lambda: x.nbytes + elements)

        return setup

    def values(x: torch.Tensor) -> Callable[[], object]:
        codes, scale = _ops.quantize_blockwise(x, "power", True, 128, None)
        return lambda: _ops.dequantize_blockwise(codes, scale, "power", 128, x.dtype)

    calls: dict[str, Callable[[torch.Tensor], Callable[[], object]]] = {
        "memkern power codes": lambda x: lambda: _ops.quantize_blockwise(x, "power", True, 128, None),
        "memkern values of power codes": values,
        "torch float8_e4m3fn": lambda x: lambda: x.to(torch.float8_e4m3fn),
    }
    contenders = [harness.Contender(name, subject(call)) for name, call in calls.items()]
    return harness.Case(f"saved tensors, {dtype}", elements, contenders)


def cases(device: str, large: int, gpt2: int, elements: int) -> Iterator[harness.Case]:
    """All cases, the most important first, as time may run out."""
    one_tensor, many_tensors = [(max(1, large // 4096), 4096)], gpt2_shapes(gpt2)
    for dtype in ("bf16", "fp32"):
        yield steps("AdamW8bit", one_tensor, dtype, device)
        yield gelu(elements, dtype, device)
        yield steps("AdamW8bit", many_tensors, dtype, device)
        yield power_codes(elements, dtype, device)
    for dtype in ("bf16", "fp32"):
        for name in ("LAMB8bit", "Lion8bit", "LARS8bit", "SGD8bit"):
            yield steps(name, one_tensor, dtype, device)
        yield gradient_norm(one_tensor, dtype, device)
    for dtype in ("bf16", "fp32"):
        for name in ("LAMB8bit", "Lion8bit", "LARS8bit", "SGD8bit"):
            yield steps(name, many_tensors, dtype, device)
        yield gradient_norm(many_tensors, dtype, device)
    yield from bench_muon.cases(gpt2, device)


def parameters_that_fit(device: str) -> int:
    """Parameters of the one tensor: 1e9, or as many as fit."""
    if device == "cpu" or not torch.cuda.is_available():
        return LARGE
    return min(LARGE, torch.cuda.get_device_properties(0).total_memory // BYTES_PER_PARAMETER)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backend", choices=["cuda", "triton", "cpu"])
    parser.add_argument("--plan", action="store_true", help="prints what it would measure")
    parser.add_argument("--small", action="store_true", help="tensors of 65,536 elements: a test of this script")
    args = parser.parse_args(argv)
    device = "cpu" if args.backend == "cpu" else "cuda"
    sizes = (2**16, 2**16, 2**16) if args.small else (parameters_that_fit(device), GPT2, ELEMENTS)
    failed = False
    clock = None if args.plan else harness.Clock(device)
    for case in cases(device, *sizes):
        if clock is None:
            names = ", ".join(contender.name for contender in case.contenders)
            print(f"would measure {case.name}: {case.numel:,} elements: {names}")
            continue
        with memkern.use_backend(args.backend):
            rounds = {"rounds": 2, "seconds": 0.01} if args.small else {"rounds": ROUNDS, "seconds": CONTENDER_S}
            results = harness.measure(case, clock, **rounds)
        for result in results:
            row = {column: value for column, value in asdict(result).items() if value not in (None, "")}
            print(json.dumps(row), flush=True)
        failed |= results[0].ms_median is None  # memkern's
        if device == "cuda":
            torch.cuda.empty_cache()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
