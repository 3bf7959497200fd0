"""python -m lab.studies.convergence: measures losses, bytes and times of optimizers at equal steps and tuned rates.

Without arguments it makes all runs that lab/results/convergence.csv lacks, which takes hours on one core. --task and
--contender choose some of them; --lr and --seed make a single run, recorded in out/convergence. `table` writes
docs/evidence.md and the picture; with --task it prints all figures of that task. One thread: the same seed gives the
same bits.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import machine, report
from lab import RESULTS
from lab.studies import study

from . import results
from .contenders import CONTENDERS, ONE_MODULE, Contender, version
from .runs import Key, Outcome, Study, key, run
from .tasks import TASKS, LargeBatch, Task

SINGLE_RUNS = Path("out/convergence")  # not mixed with the results


def row(
    provenance: dict[str, str], run_key: Key, contender: Contender, outcome: Outcome | None, note: str
) -> dict[str, str]:
    figures = (
        [""] * len(Outcome._fields) if outcome is None else [repr(outcome.loss), *(f"{x:.5g}" for x in outcome[1:])]
    )
    values = [*run_key, *figures, contender.package, version(contender.package), note]
    return study.row(provenance, results.COLUMNS, values)


def attempt(task: Task, contender: Contender, lr: float, seed: int) -> tuple[Outcome | None, str]:
    """The outcome of a run and a note, which without an outcome says why."""
    try:
        return run(task, contender, lr, seed), contender.note
    except Exception as error:  # a peer's error becomes a row
        if contender.package in ("torch", "memkern"):
            raise
        return None, f"{type(error).__name__}: {error}".splitlines()[0][:160]


def complete(task: Task, contender: Contender, path: Path) -> None:
    """Makes the runs of a contender in a task that the file lacks."""
    if contender.package in ONE_MODULE and version(contender.package) == "absent":
        return  # the other package of this module is installed
    rows = results.read(path)
    mine = [r for r in rows if (r["task"], r["contender"]) == (task.name, contender.name)]
    if any(not r["loss"] for r in mine):
        return  # it cannot run, and a row has the reason
    provenance = machine.provenance("cpu")
    # A contender that could not run with the small batch has no rate for a large one.
    failed = [r for r in rows if (r["task"], r["contender"]) == ("batch-x1", contender.name) and not r["loss"]]
    reason = contender.reason_against(task, task.model(0))
    if isinstance(task, LargeBatch) and failed:
        reason = failed[0]["note"]
    if reason:
        refusal = row(provenance, (task.name, contender.name, "", ""), contender, None, reason)
        report.append(path, [refusal], results.COLUMNS)
        return
    study = Study(results.losses(rows))
    original = CONTENDERS[contender.original]
    try:
        if _run_all(task, study, study.plan(task, contender), path) and original is not contender:
            _run_all(task, study, study.at_each_others(task, contender, original), path)
    except LookupError as error:  # a large batch before the small one
        print(error)


def _run_all(task: Task, study: Study, todo: Iterator[tuple[Contender, float, int]], path: Path) -> bool:
    """Makes runs and adds their rows; False as soon as one has failed."""
    provenance = machine.provenance("cpu")
    for contender, lr, seed in todo:
        run_key = key(task, contender, lr, seed)
        outcome, note = attempt(task, contender, lr, seed)
        report.append(path, [row(provenance, run_key, contender, outcome, note)], results.COLUMNS)
        print(*run_key, outcome.loss if outcome else note, sep=" | ", flush=True)
        if outcome is None:
            return False
        study.losses[run_key] = outcome.loss
    return True


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lab.studies.convergence", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("action", nargs="?", choices=("run", "table"), default="run")
    parser.add_argument("--task", choices=[*TASKS], help="one task (default: all)")
    parser.add_argument("--contender", choices=[*CONTENDERS], help="one contender (default: all)", metavar="NAME")
    parser.add_argument("--lr", type=float, help="with --seed: one run of the task and contender")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--steps", type=int, help="fewer steps, for a trial; needs --out")
    parser.add_argument("--out", type=Path, help="folder (default: lab/results; for a single run out/convergence)")
    return parser


def main(argv: list[str] | None = None) -> None:
    options = parser()
    args = options.parse_args(argv)
    single = args.lr is not None or args.seed is not None
    if single and not (args.lr and args.seed is not None and args.task and args.contender):
        options.error("one run needs --task, --contender, --lr (above 0) and --seed")
    if args.steps is not None and (args.out is None or args.steps < 1):
        options.error("--steps must be 1 or more, and needs --out: results of fewer steps are not compared with others")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch|torchao|bitsandbytes")
    path = (args.out or (SINGLE_RUNS if single else RESULTS)) / "convergence.csv"
    if args.action == "table":
        from . import page

        if args.task:
            print(page.task_table(args.task))
        else:
            page.write()
        return
    tasks = [TASKS[args.task]] if args.task else [*TASKS.values()]
    if args.steps:
        for task in tasks:
            task.steps = args.steps
    for task in tasks:
        for contender in [CONTENDERS[args.contender]] if args.contender else CONTENDERS.values():
            if not single:
                complete(task, contender, path)
                continue
            outcome, note = attempt(task, contender, args.lr, args.seed)
            run_key = key(task, contender, args.lr, args.seed)
            report.append(path, [row(machine.provenance("cpu"), run_key, contender, outcome, note)], results.COLUMNS)
            print(*run_key, *(outcome if outcome else [note]), sep=" | ")
    print(path)


if __name__ == "__main__":
    main()
