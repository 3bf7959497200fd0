"""Compares every op and dtype with the reference in half a minute: ``python -m lab.gpu.smoke cuda|triton|cpu``.

Needs torch alone. The reference runs on the CPU over copies of the same tensors; codes, states, parameters and
gradients are equal in every bit. A line of JSON for each group of cases.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

import memkern
from memkern import _ops, functional, optim
from memkern.fewbit.tables import LEVELS, TWO_BRANCHES
from memkern.schemas import MUON_STEP, STEP_OPS

from . import smoke_large
from .supervised import Journal, is_sticky, supervise

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "0-dim": lambda: values(()),
    "empty": lambda: values((0,)),
    "odd": lambda: values((37, 53)),
    "whole blocks": lambda: values((6, 128)),
    "one long row": lambda: values((1, 1500)),
    "short rows": lambda: values((150, 7)),
    "channels_last": lambda: values((4, 9, 5, 3)).contiguous(memory_format=torch.channels_last),
    "unaligned": lambda: values((33 * 131 + 1,))[1:].view(33, 131),
}
# Muon takes matrices alone, and has cases of its own.
OPTIMIZERS = tuple(
    name
    for name, cls in ((name, getattr(optim, name)) for name in optim.__all__)
    if getattr(cls, "op", None) in STEP_OPS.values() and not issubclass(cls, optim.Muon)
)
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"codec": "dynamic"}, {"block_size": 1024}, {"max_grad_norm": 1.0})
STEPS = 3

Case = tuple[
    str, str, Callable[[str, str], str]
]  # group, name, and a function of (backend, device) that compares and returns "equal" or "near"


class Differs(Exception):
    """The backend's result is not the reference's."""


def values(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """fp32 of many magnitudes, zeros among them."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(shape, generator=generator) * (2 * torch.randn(shape, generator=generator)).exp()
    return torch.where(torch.rand(shape, generator=generator) < 0.05, torch.zeros(()), x)


def at(x: Tensor, device: str) -> Tensor:
    """A copy on a device, with the strides and the offset into its storage that x has."""
    room = torch.empty(x.storage_offset() + x.numel(), dtype=x.dtype, device=device)
    return room.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(x)


def same(actual: Any, expected: Any, what: str) -> None:
    """Equal in every bit; any NaN equals any other."""
    a, b = actual.detach().cpu(), expected.detach().cpu()
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        raise Differs(f"{what}: {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}")
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    wrong = a.contiguous().view(bits) != b.contiguous().view(bits)
    if a.dtype.is_floating_point:
        wrong &= ~(a.isnan() & b.isnan())
    if wrong.any():
        i = tuple(wrong.nonzero()[0].tolist())
        raise Differs(f"{what}: {int(wrong.sum())} of {wrong.numel()}, at {i} {a[i].item()!r}, not {b[i].item()!r}")


# ---- the cases


def quantizers() -> Iterator[Case]:
    for dtype, codec, signed in itertools.product(FLOATS, ("power", "dynamic"), (True, False)):
        for layout in LAYOUTS:

            def compare(backend: str, device: str, dtype=dtype, codec=codec, signed=signed, layout=layout) -> str:
                x = LAYOUTS[layout]().to(dtype)
                for block_size, step in ((128, None), (24, 7)):
                    results = []
                    for b, d in ((backend, device), ("reference", "cpu")):
                        with memkern.use_backend(b):
                            codes, scale = _ops.quantize_blockwise(at(x, d), codec, signed, block_size, step)
                            back = _ops.dequantize_blockwise(codes, scale, codec, block_size, dtype)
                        results.append((codes, scale, back))
                    for what, a, e in zip(("codes", "scale", "values"), *results, strict=True):
                        same(a, e, f"block_size {block_size}: {what}")
                return "equal"

            yield f"quantize {codec} {dtype}", f"{layout}, signed {signed}", compare


def activations() -> Iterator[Case]:
    for dtype, bits, layout in itertools.product(FLOATS, (1, 2, 3, 4), LAYOUTS):

        def compare(backend: str, device: str, dtype=dtype, bits=bits, layout=layout) -> str:
            x, grad, table = LAYOUTS[layout]().to(dtype), LAYOUTS[layout]().to(dtype), LEVELS["gelu", bits]
            results = []
            for b, d in ((backend, device), ("reference", "cpu")):
                with memkern.use_backend(b):
                    codes = _ops.few_bit_encode(at(x, d), table)
                    found = [codes, _ops.few_bit_backward(at(grad, d), codes, table.levels)]
                    if bits == 1:
                        two_branch = TWO_BRANCHES["gelu"]
                        found.append(_ops.few_bit_backward_from_output(at(grad, d), at(x, d), codes, two_branch))
                results.append(found)
            for i, (a, e) in enumerate(zip(*results, strict=True)):
                same(a, e, ("codes", "gradient", "gradient from the output")[i])
            return "equal"

        yield f"few bits {dtype}", f"{layout}, {bits} bits", compare
    for dtype, name in itertools.product(FLOATS, ("gelu", "silu", "tanh", "sigmoid", "softplus", "mish", "hardswish")):

        def forward(backend: str, device: str, dtype=dtype, name=name) -> str:
            x = at(values((4096,)).to(dtype), device)
            with memkern.use_backend(backend):
                y = getattr(functional, name)(x.clone().requires_grad_()).detach()
            near(y, getattr(torch.nn.functional, name)(x), x)
            return "near"

        yield f"forward {dtype}", name, forward
    for approximate in ("none", "tanh"):

        def every_bf16(backend: str, device: str, approximate=approximate) -> str:
            x = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(torch.bfloat16).repeat(8)
            with memkern.use_backend(backend):
                y = functional.gelu(x.clone().requires_grad_(), approximate).detach()
            own = torch.nn.functional.gelu(x, approximate=approximate)
            near(y, own, x)
            middle = (x.abs() >= 2**-9) & (x.abs() < 6)
            if backend == "cuda":  # torch's op made its table
                same(y[middle], own[middle], "every bf16")
            return "equal" if bool((y[middle] == own[middle]).all()) else "near"

        yield f"forward {torch.bfloat16}", f"every value of gelu, approximate={approximate!r}", every_bf16


def near(y: Tensor, own: Tensor, x: Tensor) -> None:
    """Within a few units in the last place of torch's own; of x / 2 where that is larger, as GELU cancels."""
    y64, own64 = y.double(), own.double()
    ulp = torch.finfo(y.dtype).eps * torch.maximum(own64.abs(), x.double().abs() / 2)
    apart = (y64 - own64).abs() > 4 * ulp + torch.finfo(y.dtype).tiny
    if bool((apart & own64.isfinite()).any()):
        i = int(apart.nonzero()[0])
        raise Differs(f"f({x[i].item()!r}) = {y[i].item()!r}, torch's {own[i].item()!r}")


def optimizers() -> Iterator[Case]:
    for name, dtype, options in itertools.product(OPTIMIZERS, FLOATS, OPTIONS):
        if not name.endswith("8bit") and ({"codec", "block_size"} & {*options}):
            continue

        def compare(backend: str, device: str, name=name, dtype=dtype, options=options) -> str:
            runs = [stepped(name, dtype, options, b, d) for b, d in ((backend, device), ("reference", "cpu"))]
            try:
                for (what, a), (_, e) in zip(*runs, strict=True):
                    same(a, e, what)
            except Differs:
                # LAMB's and LARS's norms are sums, in another order than the reference's.
                if not name.startswith("LA") or not alike(*runs):
                    raise
                return "near"
            return "equal"

        yield f"{name} {dtype}", str(options or "defaults"), compare


def stepped(
    name: str, dtype: torch.dtype, options: dict[str, Any], backend: str, device: str
) -> list[tuple[str, Tensor]]:
    """Parameters and states after some steps, under a GradScaler's factor; the gradients of one step are not finite."""
    params = [torch.nn.Parameter(at(0.1 * make().to(dtype), device)) for make in LAYOUTS.values()]
    extra = {"min_8bit_size": 0} if name.endswith("8bit") else {}
    optimizer = getattr(optim, name)(params, lr=1e-2, weight_decay=0.1, **extra, **options)
    with memkern.use_backend(backend):
        for step in range(STEPS):
            for i, p in enumerate(params):
                g = values(tuple(p.shape), 100 * step + i)
                if step == 1 and g.numel() > 900 and "max_grad_norm" not in options:
                    g.view(-1)[[3, 500]] = torch.tensor([torch.nan, torch.inf])
                p.grad = at(torch.empty_like(p, device="cpu").copy_(g), device)
            optimizer.grad_scale = torch.full((), 4.0, device=device)
            optimizer.found_inf = torch.full((), float(step == 2), device=device)
            optimizer.step()
    states = [(f"{i}.{key}", x) for i, p in enumerate(params) for key, x in optimizer.state[p].items()]
    return [(str(i), p) for i, p in enumerate(params)] + states


def alike(run: list[tuple[str, Tensor]], other: list[tuple[str, Tensor]]) -> bool:
    """Whether codes differ by one at most and numbers by 1e-5, as the last bit of a norm can cause in a few steps."""
    for (_, a), (_, e) in zip(run, other, strict=True):
        codes = a.dtype in (torch.int8, torch.uint8)
        actual, expected = (x.detach().cpu().double().nan_to_num(0, 0, 0) for x in (a, e))
        limit = 1.0 if codes else 1e-5 * max(1.0, *expected.abs().flatten().tolist())
        if bool(((actual - expected).abs() > limit).any()):
            return False
    return True


MATRICES = {"tall": (130, 37), "wide": (24, 640), "row": (1, 1500), "batch": (3, 16, 136), "empty": (0, 5)}


def muon() -> Iterator[Case]:
    """Muon's two ops, and a step between which torch's products orthogonalize."""
    small = [
        (f"Muon {dtype}", MATRICES, dtype, options)
        for dtype, options in itertools.product(FLOATS, ({}, {"codec": "dynamic"}, {"state_bits": 32}))
    ]
    large = [(f"large Muon {dtype}", smoke_large.LARGE, dtype, {}) for dtype in FLOATS[:2]]
    for group, matrices, dtype, options in [*small, *large]:

        def compare(backend: str, device: str, matrices=matrices, dtype=dtype, options=options) -> str:
            pair = (backend, device), ("reference", "cpu")
            runs = [muon_stepped(matrices, dtype, options, *where) for where in pair]
            for (what, a), (_, e) in zip(*runs, strict=True):
                if what.startswith("sum"):
                    if not torch.allclose(a.cpu(), e, rtol=1e-7, atol=0):
                        raise Differs(f"{what}: {a.tolist()}, not {e.tolist()}")
                    continue
                same(a, e, what)
            return "equal"

        yield group, str(options or "defaults"), compare

    def step(backend: str, device: str) -> str:
        """A whole step: products round otherwise on another device, by a few of bf16's places."""
        weights = []
        for b, d in ((backend, device), ("reference", "cpu")):
            params = [torch.nn.Parameter(at(0.1 * values(s), d)) for s in MATRICES.values()]
            optimizer = optim.Muon8bit(params, lr=0.1, min_8bit_size=0)
            with memkern.use_backend(b):
                for k in range(STEPS):
                    for i, p in enumerate(params):
                        p.grad = at(values(tuple(p.shape), 100 * k + i), d)
                    optimizer.step()
            weights.append(params)
        for a, e in zip(*weights, strict=True):
            moved = 0.1 * STEPS * max(1.0, a.numel() ** 0.5)
            if float((a.detach().cpu() - e.detach()).norm()) > 0.05 * moved:
                raise Differs(f"shape {tuple(a.shape)}: other parameters after {STEPS} steps")
        return "near"

    yield "Muon steps", "Muon8bit", step


def muon_stepped(
    matrices: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    options: dict[str, Any],
    backend: str,
    device: str,
) -> list[tuple[str, Tensor]]:
    """What both ops leave; the updates are halved in place of being orthogonalized."""
    params = [torch.nn.Parameter(at(0.1 * values(shape).to(dtype), device)) for shape in matrices.values()]
    optimizer = optim.Muon8bit(params, lr=0.1, min_8bit_size=0, **options)
    seen: list[tuple[str, Tensor]] = []
    with memkern.use_backend(backend), torch.no_grad():
        for step in range(STEPS):
            for i, p in enumerate(params):
                p.grad = at(values(tuple(p.shape), 100 * step + i).to(dtype), device)
            (call,) = optimizer._plan(params, [0] * len(params)).calls
            args = call.args._replace(
                grads=[p.grad for p in params],
                lr=[torch.tensor(0.1, dtype=torch.float64)],
                hyperparameters=optimizer._hyperparameters(MUON_STEP),
            )
            updates = [torch.empty_like(p, dtype=torch.bfloat16) for p in params]
            sums = _ops.muon_momentum_(args, updates)
            seen += [(f"update {i} of step {step}", u.clone()) for i, u in enumerate(updates)]
            seen += [(f"sum {i} of step {step}", x) for i, x in enumerate(sums)]
            for u in updates:
                u.mul_(0.5)
            _ops.muon_apply_(args, updates, [0.2 + i for i in range(len(updates))])
    states = [(f"{i}.{key}", x) for i, p in enumerate(params) for key, x in optimizer.state[p].items()]
    return [*seen, *((str(i), p.detach()) for i, p in enumerate(params)), *states]


def norms() -> Iterator[Case]:
    for dtype in FLOATS:

        def compare(backend: str, device: str, dtype=dtype) -> str:
            grads = [make().to(dtype) for make in LAYOUTS.values()]
            grads += [smoke_large.values(shape, 1, dtype) for shape in smoke_large.LARGE.values()]
            norm = torch.zeros((), dtype=torch.float64, device=device)
            with memkern.use_backend(backend):
                _ops.grad_norm_(norm, [at(g, device) for g in grads], torch.full((), 4.0, device=device))
            truth = torch.cat([g.double().flatten() for g in grads]).norm() / 4
            if not torch.isclose(norm.cpu(), truth, rtol=1e-7, atol=0):
                raise Differs(f"{norm.item()!r}, not {truth.item()!r}")
            return "near"

        yield f"grad norm {dtype}", "all layouts", compare


def on_the_device() -> Iterator[Case]:
    """Cases that only a GPU has."""

    def graph(backend: str, device: str) -> str:
        """A captured step, replayed, gives what eager steps give."""
        runs = []
        for replay in (False, True):
            params = [torch.nn.Parameter(at(make(), device)) for make in LAYOUTS.values()]
            optimizer = optim.AdamW8bit(params, lr=1e-2, min_8bit_size=0, capturable=True)
            for p in params:
                p.grad = at(0.1 * p.detach(), device)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with memkern.use_backend(backend), torch.cuda.stream(stream):
                optimizer.step()
                if replay:
                    captured = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(captured, stream=stream):
                        optimizer.step()
                    captured.replay()
                    captured.replay()
                else:
                    optimizer.step()
                    optimizer.step()
            torch.cuda.synchronize()
            runs.append(params)
        for a, e in zip(*runs, strict=True):
            same(a, e, "parameter")
        return "equal"

    yield "graph", "AdamW8bit", graph


def cases(device: str) -> list[Case]:
    def large() -> Iterator[Case]:
        return smoke_large.cases(FLOATS, same, alike, at, Differs)

    makers = [
        quantizers,
        activations,
        optimizers,
        muon,
        norms,
        large,
        *([on_the_device] if device == "cuda" else []),
    ]
    return [case for maker in makers for case in maker()]


def compare_group(group: str, todo: list[Case], backend: str, device: str, journal: Journal) -> dict[str, object]:
    start, found, first = time.monotonic(), {"equal": 0, "near": 0, "failed": 0}, ""
    for _, name, compare in (case for case in todo if case[0] == group):
        if (full_name := f"{group}: {name}") in journal.over:
            continue
        journal.note("begin", full_name)
        try:
            found[compare(backend, device)] += 1
        except Exception as error:
            if is_sticky():
                journal.die(full_name, error)
            found["failed"] += 1
            first = first or f"{name}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
        journal.note("done", full_name)
    row: dict[str, object] = {"group": group, **found, "seconds": round(time.monotonic() - start, 2)}
    return row | ({"first": first} if first else {})


def in_processes(count: int, arguments: list[str]) -> int:
    """Each process takes every count-th group; their lines are printed as they come."""
    command = [sys.executable, "-m", "lab.gpu.smoke", *arguments, "--processes", "1"]
    shares = [[*command, "--share", str(i), str(count)] for i in range(count)]
    with ThreadPoolExecutor(count) as pool:
        return int(any(pool.map(supervise, shares)))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backend", choices=["cuda", "triton", "cpu"])
    parser.add_argument("--plan", action="store_true", help="says what it would do")
    parser.add_argument("--only", default="", help="groups whose name holds this")
    parser.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), help="which groups, and of how many processes")
    parser.add_argument("--journal", help="file of earlier processes' finished cases (supervised.py)")
    args = parser.parse_args(argv)
    device = "cpu" if args.backend == "cpu" else "cuda"
    todo = [case for case in cases(device) if args.only in case[0]]
    groups = [*dict.fromkeys(group for group, _, _ in todo)]
    if args.plan:
        print(f"would compare {len(todo)} cases with the reference: {', '.join(groups)}")
        return 0
    # The reference and Triton's compiler run on the CPU and take most of the time.
    if args.processes > 1 or (device == "cuda" and args.journal is None):
        return in_processes(args.processes, sys.argv[1:] if argv is None else argv)
    torch.set_num_threads(1)
    bad, journal = 0, Journal(args.journal)
    for group in groups[args.share[0] :: args.share[1]]:
        row = compare_group(group, todo, args.backend, device, journal)
        bad += bool(row["failed"])
        print(json.dumps(row), flush=True)
    journal.note("finished", "")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
