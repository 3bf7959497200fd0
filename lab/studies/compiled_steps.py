"""Measures steps of compiled models on a CPU: peak, time and compile time, by what is saved and by memory_budget.

Models of zoo.py are compiled by Inductor and take steps of one sequence, beside the same model under torch.compile.
Columns "saved" have memkern.memory.saved_bytes. "peak" is the peak of torch's CPU allocator in a forward and backward
pass, gradients included. "time" is processor time, the lowest of interleaved rounds. "first" is the processor time of
this process in the first step; C++ compilers are other processes and not counted. Before that, each mode compiles a
small model, so that no first step includes loading the compiler.
--blocks: blocks compiled by themselves (memkern.apply with compile=True), beside the whole model.
--ways: all ways of saving less, eager ones too.
--empty-kernels: Inductor's C++ kernels are not compiled and do nothing; allocations and peaks stay the same.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

import memkern
from benchmarks import RESULTS, report
from benchmarks.harness import largest_temporary
from lab.gpu import models as gpu_models
from lab.studies import study
from memkern.compiled.torch_internals import functorch_config, inductor_config
from memkern.memory import saved_bytes
from tests.support import zoo

from .saved_compiled import PRECISIONS

BUDGETS = tuple(tenths / 10 for tenths in range(10, 1, -1))
FIGURES = ("saved_per_token", "saved_share", "peak_per_token", "peak_share", "time_ratio", "first_ratio")
COLUMNS = (
    *report.PROVENANCE,
    "transformers",
    "model",
    "precision",
    "tokens",
    "kernels",
    "mode",
    "budget",
    *FIGURES,
)


class Contender(NamedTuple):
    """A model prepared in a mode, and its figures."""

    mode: str
    budget: float | None  # memory_budget; None for none
    step: Callable[[], Any]
    saved: int  # bytes saved for the backward pass
    peak: int  # bytes
    first: float  # seconds of processor time in the first step


BITS: dict[str, Any] = {"torch": None, "exact": "exact", "8": 8}
EAGER = {"eager" if mode == "torch" else mode: change for mode, change in gpu_models.MODES.items()}
"""Modes without a compiler, which change a model in place. "eager" is plain torch; "torch" is torch.compile."""
WAYS: list[tuple[str, float | None]] = [  # mode, memory budget
    *((mode, None) for mode in EAGER),
    ("torch", 0.5),
    ("exact", None),
    ("8", None),
    *((f"blocks, {bits}", None) for bits in BITS),
]


def _compiled(model: Any, mode: str, budget: float | None) -> Any:
    if mode in EAGER:
        EAGER[mode](model)
        return model
    if mode.startswith("blocks, "):
        bits = BITS[mode.removeprefix("blocks, ")]
        memkern.apply(model, memkern.Techniques(compile=True, saved_bits=bits, memory_budget=budget))
        return model
    if mode == "torch":
        return torch.compile(model)
    return memkern.compile(model, saved_bits=BITS[mode], memory_budget=budget, blocks=False)


DEPTHS = {"GPT-2": "n_layer"}
"""By model: the name that its configuration has for the number of layers, if not num_hidden_layers."""


def contender(name: str, precision: str, tokens: int, mode: str, budget: float | None, layers: int | None) -> Contender:
    torch._dynamo.reset()
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    changes = {} if layers is None else {DEPTHS.get(name, "num_hidden_layers"): layers}
    model, batch = zoo.build(name, tokens, **changes).to(dtype), zoo.batch(name, tokens, dtype)
    compiled = _compiled(model, mode, budget)

    def forward() -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16 autocast"):
            return compiled(**batch).loss

    def step() -> None:
        model.zero_grad()
        forward().backward()

    torch_budget = budget if mode == "torch" and budget is not None else 1.0
    start = time.process_time()
    with functorch_config.patch(activation_memory_budget=torch_budget):
        step()
    first = time.process_time() - start
    count = saved_bytes(forward, model, *zoo.tensors(batch))
    step()
    model.zero_grad()
    return Contender(mode, budget, step, count, largest_temporary(step, "cpu"), first)


def _nothing(*tensors: object) -> None:
    """Does nothing, in place of a kernel."""


@contextlib.contextmanager
def compiling(empty: bool) -> Iterator[None]:
    """Disables the caches of graphs, but not of compiled kernels. ``empty``: kernels do nothing."""
    from torch._inductor.async_compile import AsyncCompile

    with contextlib.ExitStack() as stack:
        stack.enter_context(inductor_config.patch(fx_graph_cache=False))
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        if empty:
            stack.enter_context(mock.patch.object(AsyncCompile, "cpp_pybinding", return_value=_nothing))
        yield


def _warm_up(modes: Iterable[tuple[str, float | None]]) -> None:
    """Has each mode compile a small model, which loads and initializes what every model needs."""
    for mode, budget in modes:
        if mode not in EAGER and not mode.startswith("blocks, "):
            torch._dynamo.reset()
            model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.LayerNorm(128), torch.nn.GELU())
            _compiled(model, mode, budget)(torch.randn(32, 64)).square().mean().backward()


def rows(
    name: str,
    precision: str,
    tokens: int,
    modes: list[tuple[str, float | None]],
    rounds: int,
    empty: bool,
    layers: int | None = None,
) -> Iterator[dict[str, str]]:
    provenance = study.provenance_with_transformers()
    contenders = []
    with compiling(empty):
        _warm_up({"torch": None, **dict(modes)}.items())
        for mode, budget in [("torch", None), *modes]:
            contenders.append(contender(name, precision, tokens, mode, budget, layers))
    times: list[list[float]] = [[] for _ in contenders]
    for _ in range(rounds):
        for seconds, one in zip(times, contenders, strict=True):
            start = time.process_time()
            one.step()
            seconds.append(time.process_time() - start)
    plain = contenders[0]
    for one, seconds in zip(contenders, times, strict=True):
        values = (
            name if layers is None else f"{name}, {layers} layers",
            precision,
            str(tokens),
            "empty" if empty else "compiled",
            one.mode,
            str(one.budget or ""),
            str(one.saved // tokens),
            f"{one.saved / plain.saved:.3f}",
            str(one.peak // tokens),
            f"{one.peak / plain.peak:.4f}",
            f"{min(seconds) / min(times[0]):.3f}" if rounds else "",
            f"{one.first / plain.first:.2f}",
        )
        yield study.row(provenance, COLUMNS, values)


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("compiled_steps", __doc__, RESULTS)
    parser.add_argument("--models", nargs="+", choices=zoo.MODELS, default=["GPT-2", "BERT", "ViT", "Llama"])
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budgets", action="store_true", help="memory budgets of .2 to 1, in both modes")
    parser.add_argument("--blocks", action="store_true", help="blocks compiled by themselves, beside the whole model")
    parser.add_argument("--ways", action="store_true", help="all ways of saving less, eager ones too")
    parser.add_argument("--layers", type=int, metavar="N", help="default: the model's in zoo.py")
    parser.add_argument("--empty-kernels", action="store_true", help="measures peaks alone")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    modes: list[tuple[str, float | None]] = [("eager", None), ("exact", None), ("8", None)]
    if args.budgets:
        modes = [(mode, budget) for mode in ("exact", "8") for budget in BUDGETS]
    if args.blocks:
        modes = [(mode, None) for mode in ("eager", "exact", "8", *(f"blocks, {bits}" for bits in BITS))]
    if args.ways:
        modes = WAYS
    for name in args.models:
        rounds = 0 if args.empty_kernels else args.rounds
        measured = rows(name, args.precision, args.tokens, modes, rounds, args.empty_kernels, args.layers)
        study.write(args.out / "compiled-steps.csv", measured, COLUMNS, shown=12)


if __name__ == "__main__":
    main()
