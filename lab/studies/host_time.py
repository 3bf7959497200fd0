"""Processor time of models so small that nearly all of it is Python's and the dispatcher's.

On a GPU this is the time for which it may have to wait for the processor. Layers of width 64 at 32 tokens (ViT: 36
patches), one thread, forward and backward pass, all modes in one process and interleaved; the ratio is the median over
rounds of a mode's time over torch's in the same round. "with the collector": means over many steps, as a full garbage
collection comes once in tens of steps, and the same after gc.freeze(). GELU: one call on 64 elements, torch's and the
compressed one. The modes that end in "in Python": the hooks of saved tensors in Python, where those in C++ are there
(memkern/saved/extension.py). Optimizers: one step of 148 or 1,000 tensors of 64 elements, over torch's fused=True.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import memkern
from benchmarks import report
from lab.studies import study
from memkern.saved import extension
from tests.support import zoo

from .saved_models import MODES
from .saved_time import step

TOKENS, LAYERS = 32, 8
_DECODER = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 176,
}
_ENCODER = {name: size for name, size in _DECODER.items() if name != "num_key_value_heads"}
MODELS = {
    "Llama": _DECODER,
    "GPT-2": {"n_embd": 64, "n_head": 4, "n_layer": LAYERS},
    "Mixtral": _DECODER,
    "ViT": _ENCODER | {"intermediate_size": 256},
}
IN_PYTHON, OFFLOADED, AROUND = " in Python", " with offload", " with hooks around"
CALLS, STEPS = 200, 10
"""Of GELU and of an optimizer in a round."""
MANY = 50
"""Steps of a model, over which a mean holds full collections."""
TENSORS = (148, 1000)
"""Of an optimizer: as many as GPT-2 has, and as a model of 100 layers."""
COLUMNS = (*report.PROVENANCE, "transformers", "model", "mode", "rounds", "us", "ratio")


def _timed(function: Callable[[nn.Module], object], layer: nn.Module) -> float:
    start = time.process_time()
    for _ in range(CALLS):
        function(layer)
    return (time.process_time() - start) / CALLS


@contextlib.contextmanager
def _hooks(in_python: bool) -> Iterator[None]:
    """Inside, the hooks of saved tensors are Python's, if so asked."""
    chosen = extension.missing
    if in_python:
        extension.missing = lambda: "for comparison"  # type: ignore[assignment]
    try:
        yield
    finally:
        extension.missing = chosen


def _around() -> contextlib.AbstractContextManager[object]:
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


def models(name: str, rounds: int) -> dict[str, list[float]]:
    """Seconds per layer of every round by mode, after two that are not counted."""
    batch = zoo.batch(name, TOKENS)
    modes = [*MODES, *(f"{mode}{IN_PYTHON}" for mode in ("exact", "8"))] if extension.missing() is None else [*MODES]
    modes += [f"8{OFFLOADED}", f"torch{AROUND}", f"8{AROUND}"]
    built = {mode: zoo.build(name, TOKENS, **MODELS[name]) for mode in modes}
    for mode, model in built.items():
        if mode.endswith(OFFLOADED):
            memkern.compress(model, saved_bits=8, offload=True)
        else:
            MODES[mode.removesuffix(IN_PYTHON).removesuffix(AROUND)](model)
    found: dict[str, list[float]] = {mode: [] for mode in modes}
    for i in range(rounds + 2):
        for mode, model in built.items():
            with _hooks(mode.endswith(IN_PYTHON)), _around() if mode.endswith(AROUND) else contextlib.nullcontext():
                seconds = step(model, batch, "fp32") / LAYERS
            if i > 1:
                found[mode].append(seconds)
    return found


def with_collector(name: str, rounds: int) -> dict[str, list[float]]:
    """Seconds per layer as in :func:`models`, each a mean over MANY steps."""
    batch = zoo.batch(name, TOKENS)
    found: dict[str, list[float]] = {}
    for mode in ("torch", "exact", "8"):
        model = zoo.build(name, TOKENS, **MODELS[name])
        MODES[mode](model)
        for frozen in (False, True):
            if frozen:
                gc.collect()
                gc.freeze()
            found[f"{mode}, gc.freeze()" if frozen else mode] = [
                statistics.mean(step(model, batch, "fp32") / LAYERS for _ in range(MANY)) for _ in range(rounds // 4)
            ]
            gc.unfreeze()
    return found


def _backward(layer: nn.Module, x: Tensor, grad: Tensor) -> None:
    layer(x).backward(grad)


def _without_gradient(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return layer(x)


def calls(rounds: int) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """What is called, and seconds per call of every round by mode."""
    x, grad = torch.randn(64, requires_grad=True), torch.ones(64)
    layers = {"torch": nn.GELU(), "compress": memkern.nn.GELU()}
    kinds: dict[str, Callable[[nn.Module], object]] = {
        "no gradient": lambda layer: _without_gradient(layer, x),
        "forward": lambda layer: layer(x),
        "forward and backward": lambda layer: _backward(layer, x, grad),
    }
    for kind, function in kinds.items():
        found: dict[str, list[float]] = {mode: [] for mode in layers}
        for _ in range(rounds):
            for mode, layer in layers.items():
                found[mode].append(_timed(function, layer))
        yield f"GELU, {kind}", found


def _trained(tensors: int) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.randn(64)) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = torch.randn(64)
    return parameters


def optimizers(rounds: int) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """What steps, and seconds per step of every round by mode, after two that are not counted."""
    kinds: dict[str, dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]] = {
        "AdamW": {
            "torch": lambda given: torch.optim.AdamW(given, fused=True),
            "torch foreach": lambda given: torch.optim.AdamW(given, foreach=True),
            "memkern": memkern.optim.AdamW,
            "memkern 8 bits": lambda given: memkern.optim.AdamW8bit(given, min_8bit_size=0),
        },
        "SGD with momentum": {
            "torch": lambda given: torch.optim.SGD(given, momentum=0.9, fused=True),
            "torch foreach": lambda given: torch.optim.SGD(given, momentum=0.9, foreach=True),
            "memkern": lambda given: memkern.optim.SGD(given, momentum=0.9),
            "memkern 8 bits": lambda given: memkern.optim.SGD8bit(given, momentum=0.9, min_8bit_size=0),
        },
    }
    for kind, modes in kinds.items():
        for tensors in TENSORS:
            built = {mode: make(_trained(tensors)) for mode, make in modes.items()}
            found: dict[str, list[float]] = {mode: [] for mode in modes}
            for i in range(rounds + 2):
                for mode, optimizer in built.items():
                    start = time.process_time()
                    for _ in range(STEPS):
                        optimizer.step()
                    if i > 1:
                        found[mode].append((time.process_time() - start) / STEPS)
            yield f"{kind}, {tensors} tensors", found


def rows(names: list[str], rounds: int, only_models: bool) -> Iterator[dict[str, str]]:
    provenance = study.provenance_with_transformers()
    measured = [(name, models(name, rounds)) for name in names]
    if not only_models:
        measured += [(f"{name} with the collector", with_collector(name, rounds)) for name in names[:1]]
        measured += [*calls(rounds), *optimizers(rounds)]
    for name, found in measured:
        for mode, seconds in found.items():
            ratio = statistics.median(a / b for a, b in zip(seconds, found["torch"], strict=True))
            values = (
                name,
                mode,
                str(len(seconds)),
                f"{1e6 * statistics.median(seconds):.0f}",
                f"{ratio:.2f}",
            )
            yield study.row(provenance, COLUMNS, values)


def main(argv: list[str] | None = None) -> None:
    parser = study.parser("host_time", __doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only-models", action="store_true", help="neither calls nor optimizers")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    path = args.out / "host-time.csv"
    study.write(path, rows(args.models, args.rounds, args.only_models), COLUMNS, shown=5)


if __name__ == "__main__":
    main()
