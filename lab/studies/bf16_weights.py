"""python -m lab.studies.bf16_weights PART: what is lost and what is kept of bf16 weights, on a byte-level GPT.

Parts: ``storage`` (1,000 steps, three seeds), ``small-lr`` (5,000 steps at 1e-5, from weights trained before),
``accumulation`` (the error of bf16 sums of 64 micro-batches' gradients). The model computes in fp32 with the bf16
values of its weights, so that nothing differs but how they are stored; gradients come in bf16. No hardware is measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from benchmarks import machine, report
from lab.studies import study

SEQ_LEN, BATCH, WIDTH, LAYERS, HEADS = 64, 4, 64, 2, 2
EVAL_TOKENS = 32768
STORAGES: dict[str, dict[str, Any] | None] = {
    "fp32 weights": None,
    "bf16, nearest": {},
    "bf16, stochastic": {"stochastic_rounding": True},
    "bf16+8": {"master_weights": "bf16+8"},
    "bf16+16": {"master_weights": "bf16+16"},
}
SUMS = {"bf16, stochastic": "stochastic", "bf16+8": "bf16+8", "bf16+16": "bf16+16"}
COLUMNS = (*report.PROVENANCE, "part", "weights", "seed", "lr", "steps", "figure", "value")


class Run(NamedTuple):
    """A model in training: its parameters by name, in the dtype that they are stored in."""

    model: nn.Module
    params: Mapping[str, Tensor]

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        logits = functional_call(self.model, {name: p.float() for name, p in self.params.items()}, (inputs,))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def new_run(seed: int, dtype: torch.dtype, values: dict[str, Tensor] | None = None) -> Run:
    from memkern.train.model import GPT

    torch.manual_seed(seed)
    model = GPT(layers=LAYERS, heads=HEADS, width=WIDTH, seq_len=SEQ_LEN)
    given = values or {name: p.detach() for name, p in model.named_parameters()}
    return Run(model, {name: nn.Parameter(x.detach().to(dtype, copy=True)) for name, x in given.items()})


def corpus() -> Any:
    from memkern.train import load_corpus

    return load_corpus((), seq_len=SEQ_LEN)


def batches(text: Tensor, seed: int, first: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    from memkern.train.data import step_batches

    for step in range(first, first + steps):
        yield from step_batches(text, seed=seed, step=step, accumulation=1, micro_batch=BATCH, seq_len=SEQ_LEN)


@torch.no_grad()
def validation_loss(run: Run, text: Tensor) -> float:
    from memkern.train.data import validation_batches

    found = validation_batches(text, tokens=EVAL_TOKENS, micro_batch=64, seq_len=SEQ_LEN)
    return statistics.fmean(float(run.loss(batch)) for batch in found)


def schedule(lr: float, step: int, steps: int) -> float:
    """Linear over the first twentieth, then a cosine to a tenth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return lr * (step + 1) / warmup
    return lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))))


def train(
    run: Run,
    optimizer: torch.optim.Optimizer,
    text: Tensor,
    *,
    seed: int,
    steps: int,
    lr: Callable[[int], float],
    first: int = 0,
    after: Callable[[int], None] | None = None,
) -> None:
    for step, batch in enumerate(batches(text, seed, first, steps)):
        optimizer.param_groups[0]["lr"] = lr(step)
        optimizer.zero_grad()
        run.loss(batch).backward()
        optimizer.step()
        if after:
            after(step)


def adamw(run: Run, options: dict[str, Any] | None) -> torch.optim.Optimizer:
    from memkern.optim import AdamW8bit

    return AdamW8bit(run.params.values(), weight_decay=0.1, **(options or {}))


def dtype_of(options: dict[str, Any] | None) -> torch.dtype:
    return torch.float32 if options is None else torch.bfloat16


# ---- parts: each yields (weights, seed, lr, steps, figure, value)

Figure = tuple[str, int, float, int, str, float]


def storage(steps: int = 1000, seeds: Iterable[int] = range(3), lr: float = 3e-3) -> Iterator[Figure]:
    text = corpus()
    for seed in seeds:
        for name, options in STORAGES.items():
            run = new_run(seed, dtype_of(options))
            train(
                run,
                adamw(run, options),
                text.train,
                seed=seed,
                steps=steps,
                lr=lambda step: schedule(lr, step, steps),
            )
            yield name, seed, lr, steps, "validation loss", validation_loss(run, text.validation)


def small_lr(
    steps: int = 5000, before: int = 1000, lr: float = 1e-5, names: Iterable[str] = tuple(STORAGES)
) -> Iterator[Figure]:
    """From the bf16 values of weights that were trained at a constant 3e-3, so that a small rate has much to gain."""
    text = corpus()
    start = new_run(0, torch.float32)
    train(start, adamw(start, None), text.train, seed=0, steps=before, lr=lambda _: 3e-3)
    values = {name: p.detach().bfloat16() for name, p in start.params.items()}
    yield (
        "start",
        0,
        3e-3,
        before,
        "validation loss",
        validation_loss(new_run(0, torch.float32, values), text.validation),
    )
    for name in names:
        options = STORAGES[name]
        run = new_run(0, dtype_of(options), values)
        train(run, adamw(run, options), text.train, seed=0, steps=steps, first=before, lr=lambda _: lr)
        moved = torch.cat([(p.detach().float() != values[n].float()).flatten() for n, p in run.params.items()])
        yield name, 0, lr, steps, "validation loss", validation_loss(run, text.validation)
        yield name, 0, lr, steps, "share of weights whose stored value moved", moved.float().mean().item()


def accumulation(micro_batches: int = 64, seeds: int = 3) -> Iterator[Figure]:
    from memkern import optim

    text = corpus()
    for seed in range(seeds):
        run = new_run(seed, torch.bfloat16)
        train(run, adamw(run, {}), text.train, seed=seed, steps=100, lr=lambda _: 3e-3)
        sums: dict[str, list[Tensor]] = {}
        for name in ("fp32", "bf16, nearest", *SUMS):
            for p in run.params.values():
                p.grad = None
            exact = [torch.zeros_like(p, dtype=torch.float32) for p in run.params.values()]
            module = nn.ParameterList(run.params.values())
            handle = optim.accumulate(module, SUMS[name]) if name in SUMS else None
            for batch in batches(text.train, seed, 100, micro_batches):
                run.loss(batch).backward()
                if name == "fp32":
                    for total, p in zip(exact, run.params.values(), strict=True):
                        assert p.grad is not None
                        total += p.grad
                        p.grad = None
            if handle:
                handle.remove()
            sums[name] = (
                exact if name == "fp32" else [p.grad.float() for p in run.params.values() if p.grad is not None]
            )
        flat = {name: torch.cat([x.flatten() for x in found]) for name, found in sums.items()}
        for name in ("bf16, nearest", *SUMS):
            off = flat[name] - flat["fp32"]
            yield (
                name,
                seed,
                0.0,
                micro_batches,
                "relative L2 error",
                (off.norm() / flat["fp32"].norm()).item(),
            )
            small = flat["fp32"].abs() < flat["fp32"].abs().median()
            bias = (off * flat["fp32"].sign())[small].mean() / flat["fp32"][small].abs().mean()
            yield name, seed, 0.0, micro_batches, "bias of the smaller half towards 0", -bias.item()


PARTS: dict[str, Callable[[], Iterator[Figure]]] = {
    "storage": storage,
    "small-lr": small_lr,
    "accumulation": accumulation,
}


def run_part(
    module: str,
    description: str | None,
    parts: Mapping[str, Callable[[], Iterator[tuple[Any, ...]]]],
    columns: tuple[str, ...],
    argv: list[str] | None,
) -> Path:
    """The command of a module of parts: prints the figures of one, and appends them to the results of its name.

    Returns the path of the results.
    """
    parser = study.parser(module, description)
    parser.add_argument("part", choices=parts)
    args = parser.parse_args(argv)
    provenance, console = machine.provenance("cpu"), Console()
    path = args.out / f"{module.replace('_', '-')}.csv"
    for figure in parts[args.part]():
        text = [f"{x:.5g}" if isinstance(x, float) else str(x) for x in figure]
        row = provenance | dict(zip(columns[-7:], [args.part, *text], strict=True))
        report.append(path, [row], columns)
        console.print(args.part, *text, sep=" | ", highlight=False)
    return path


def main(argv: list[str] | None = None) -> None:
    run_part("bf16_weights", __doc__, PARTS, COLUMNS, argv)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the matrices are small
    main()
