"""python -m lab.studies.rate_rules: how the learning rate follows the batch, as in Goyal et al., table 2a.

The digits of lab.studies.convergence (a convolutional net with BatchNorm) in batches of 16, at the best of some rates,
then the same examples in batches that are 8 and 32 times as large: at the same rate, at one scaled by the square root
of the factor, and at one scaled by the factor. SGD with momentum, torch's and memkern's with 8 bits; a warm-up over a
twentieth of the steps, then a cosine. The error is that of the validation images. Needs scikit-learn. No hardware is
measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import torch

from benchmarks import machine, report
from lab.studies import study
from lab.studies.convergence import results as convergence
from lab.studies.convergence.contenders import CONTENDERS
from lab.studies.convergence.runs import Run
from lab.studies.convergence.tasks import LargeBatch

COLUMNS = (*report.PROVENANCE, "contender", "factor", "rule", "lr", "seed", "steps", "loss", "error_percent")
OPTIMIZERS = ("torch SGD", "memkern SGD8bit")
RULES = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}  # the exponent of the factor
RATES = (0.08, 0.16, 0.32, 0.64)


def one(contender: str, factor: int, lr: float, seed: int, steps: int) -> tuple[int, float, float]:
    """Steps, the validation loss and the share of validation images that are taken for another digit, in percent."""
    task = LargeBatch(factor)
    task.steps = steps // factor
    run = Run(task, CONTENDERS[contender], lr, seed)
    loss = run.train().loss
    images, labels = task.validation()
    run.model.eval()
    with torch.no_grad():
        wrong = run.model(images).argmax(1) != labels
    return task.steps, loss, 100 * float(wrong.double().mean())


def results(
    steps: int = 2560, factors: Sequence[int] = (8, 32), seeds: Sequence[int] = (1, 2, 3)
) -> Iterator[dict[str, str]]:
    """A row for each run: the rates of the small batch with seed 0, then the rules with the other seeds."""
    provenance = machine.provenance("cpu")

    def row(contender: str, factor: int, rule: str, lr: float, seed: int) -> dict[str, str]:
        taken, loss, error = one(contender, factor, lr, seed, steps)
        values = (contender, factor, rule, f"{lr:.5g}", seed, taken, f"{loss:.5f}", f"{error:.3f}")
        return study.row(provenance, COLUMNS, [*map(str, values)])

    tuned = [row(OPTIMIZERS[0], 1, "tuning", lr, 0) for lr in RATES]
    yield from tuned
    best = float(min(tuned, key=lambda r: float(r["loss"]))["lr"])
    for contender in OPTIMIZERS:
        for seed in seeds:
            yield row(contender, 1, "base", best, seed)
            for factor in factors:
                for rule, exponent in RULES.items():
                    yield row(contender, factor, rule, best * factor**exponent, seed)


def errors(rows: Sequence[dict[str, str]]) -> dict[tuple[str, int, str], tuple[float, float]]:
    """By contender, factor and rule: the mean error over the seeds, and its standard deviation."""
    found: dict[tuple[str, int, str], list[float]] = {}
    for row in rows:
        if row["rule"] != "tuning":
            key = row["contender"], int(row["factor"]), row["rule"]
            found.setdefault(key, []).append(float(row["error_percent"]))
    return {key: (statistics.mean(x), statistics.stdev(x) if len(x) > 1 else 0.0) for key, x in found.items()}


def main(argv: list[str] | None = None) -> None:
    args = study.parser("rate_rules", __doc__).parse_args(argv)
    path = args.out / "rate-rules.csv"
    study.write(path, results(), COLUMNS, 8)
    for (contender, factor, rule), (mean, deviation) in errors(convergence.read(path)).items():
        print(f"{contender:16} x{factor:<3} {rule:7} {mean:6.2f} % +- {deviation:.2f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
