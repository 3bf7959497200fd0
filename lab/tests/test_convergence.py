"""docs/evidence.md has its study's results, whose statistics and order of runs are right; every contender can train."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich", reason="the benchmarks need the [bench] extra")

from benchmarks import machine, overview
from lab.studies.convergence import page, results, tasks
from lab.studies.convergence.__main__ import main
from lab.studies.convergence.contenders import ALL, CONTENDERS
from lab.studies.convergence.runs import MOVES, Run, Study, key, run
from lab.studies.convergence.tasks import TASKS, LargeBatch

OURS = [c for c in ALL if c.package in ("torch", "memkern")]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def row(task: str, contender: str, lr: float, seed: int, loss: float | str) -> dict[str, str]:
    values = {"task": task, "contender": contender, "lr": f"{lr:.5g}", "seed": str(seed), "loss": str(loss)}
    return dict.fromkeys(results.COLUMNS, "") | values


def grid(contender: str, best: float, losses: list[float], task: str = "gpt") -> list[dict[str, str]]:
    """Rows of a grid whose second rate is the best, and of the seeds 1, 2, ... at that rate."""
    rates = [best * factor for factor in (0.5, 1, 2, 4)]
    tuning = [row(task, contender, lr, 0, abs(math.log(lr / best)) + 1) for lr in rates]
    return [*tuning, *(row(task, contender, best, seed, loss) for seed, loss in enumerate(losses, 1))]


def test_differences_are_paired_by_seed() -> None:
    rows = [
        *grid("torch AdamW", 1e-3, [1.0, 2.0, 3.0]),
        *(row("gpt", "torch AdamW", 2e-3, seed, seed + 1.0) for seed in (1, 2, 3)),
        *(row("gpt", "torch AdamW", 4e-3, seed, 0.0) for seed in (1, 2)),  # a rate without all seeds is not compared
        *grid("memkern AdamW8bit", 2e-3, [1.1, 2.1, 3.1]),  # 0.1 worse with each seed: the difference has no noise
        *grid("memkern AdamW", 1e-3, [1.1, 1.9, 3.0]),
        *grid("bitsandbytes AdamW8bit", 1e-3, [math.inf, 2.0, 3.0]),
        *grid("torchao AdamW8bit", 1e-3, [1.0, 2.0]),  # a seed is missing
        row("gpt", "flashoptim FlashAdamW", 1e-3, 0, "") | {"note": "no device"},
    ]
    compared = {name: one for (task, name), one in results.compare(rows).items() if task == "gpt"}
    ours = compared["memkern AdamW8bit"]
    assert ours.tuned == pytest.approx((0.1, 0), abs=1e-9)  # at their best rates
    assert ours.difference == pytest.approx((-0.9, 0), abs=1e-9)  # at its rate, 2e-3
    assert (ours.lr, ours.verdict, ours.at_edge) == ("0.002", "better", False)
    close = compared["memkern AdamW"]
    assert close.difference == close.tuned == pytest.approx((0, 0.1 / math.sqrt(3)))
    assert close.verdict == "as good"
    assert compared["torch AdamW"].verdict == "original"
    assert compared["bitsandbytes AdamW8bit"].verdict == "diverged"
    assert compared["torchao AdamW8bit"].why == "not run yet"
    assert compared["flashoptim FlashAdamW"].why == "no device"


@pytest.mark.parametrize("power", [-9, -1, 2, 4, 9])
def test_the_grid_follows_the_best_rate(power: int) -> None:
    task, contender = TASKS["gpt"], CONTENDERS["memkern AdamW8bit"]
    first, study, planned = task.first["adamw"], Study({}), []
    for _, lr, seed in study.plan(task, contender):
        planned.append((lr, seed))
        study.losses[key(task, contender, lr, seed)] = abs(math.log2(lr / first) - power)  # best: first * 2^power
    tried = sorted(round(math.log2(lr / first)) for lr, seed in planned if seed == 0)
    assert tried == [*range(max(-MOVES, min(0, power - 1)), min(3 + MOVES, max(3, power + 1)) + 1)]
    best = min(max(power, -MOVES), 3 + MOVES)
    assert planned[-3:] == [(first * 2.0**best, seed) for seed in (1, 2, 3)]
    assert not [*study.plan(task, contender)]  # nothing is missing


def test_contender_and_original_run_at_each_others_rates() -> None:
    task, ours, original = TASKS["gpt"], CONTENDERS["memkern AdamW8bit"], CONTENDERS["torch AdamW"]
    study = Study(results.losses(grid(original.name, 4e-3, [2.0, 2.0, 2.0])))
    for contender, lr, seed in study.plan(task, ours):
        study.losses[key(task, contender, lr, seed)] = abs(lr - 2e-3)
    planned = []
    for contender, lr, seed in study.at_each_others(task, ours, original):
        planned.append((contender.name, lr, seed))
        study.losses[key(task, contender, lr, seed)] = 3.0  # the original stays best at its own rate
    assert planned == [
        *((original.name, 2e-3, seed) for seed in (1, 2, 3)),
        *((ours.name, 4e-3, seed) for seed in (1, 2, 3)),
    ]
    assert not [*study.at_each_others(task, ours, original)]


def test_large_batches_scale_the_rate_of_the_small_one() -> None:
    large, small = TASKS["batch-x8"], TASKS["batch-x1"]
    assert isinstance(large, LargeBatch)
    for name, factor in (("torch SGD", 8), ("timm Lamb", math.sqrt(8))):
        contender = CONTENDERS[name]
        with pytest.raises(LookupError, match="batch-x1"):
            next(Study({}).plan(large, contender))
        study = Study({})
        for _, lr, seed in study.plan(small, contender):
            study.losses[key(small, contender, lr, seed)] = abs(lr - 2 * small.first[contender.family])
        planned = next(study.plan(large, contender))
        assert planned == (contender, pytest.approx(2 * small.first[contender.family] * factor, rel=1e-4), 1)


def test_every_contender_has_a_row_or_a_reason() -> None:
    compared = page.compared()
    assert {*compared} == {(task, c.name) for task in TASKS for c in ALL}
    assert all(one.losses or one.why not in ("", results.NOT_YET) for one in compared.values())
    assert all(c.original in CONTENDERS for c in ALL)


@pytest.mark.full
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", TASKS)
def test_an_original_runs_wherever_its_contenders_do(name: str) -> None:
    model = TASKS[name].model(0)
    run_here = [c for c in ALL if not c.reason_against(TASKS[name], model)]
    assert len(run_here) > 10
    assert {c.original for c in run_here} <= {c.name for c in run_here}


def test_bf16_weights_lose_what_the_page_says() -> None:
    differences = {name: one.difference for (task, name), one in page.compared().items() if task == "fine-tune"}
    nearest = differences["torch AdamW, bf16 weights"]  # rounded to the nearest: the full loss
    assert nearest is not None
    for name, low, high in (  # share of that loss
        ("memkern AdamW8bit", 0.95, 1.05),
        ("bitsandbytes AdamW8bit", 0.95, 1.05),
        ("memkern AdamW8bit stochastic", -0.05, 0.05),
        ("memkern AdamW8bit bf16+8", -0.05, 0.05),
    ):
        difference = differences[name]
        assert difference is not None
        assert low <= difference.mean / nearest.mean <= high, name


def test_rows_have_their_provenance_and_one_run_each() -> None:
    rows = results.read(page.PATH)
    assert rows
    runs = [(r["task"], r["contender"], r["lr"], r["seed"]) for r in rows if r["loss"]]
    assert len(runs) == len({*runs})
    for r in rows:
        assert tuple(r) == results.COLUMNS
        assert (r["dirty"], len(r["commit"])) == ("no", 12), r
        assert r["version"], r
        assert r["loss"] or r["note"], r


def test_the_page_says_how_a_row_is_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (machine.ROOT / "docs" / "evidence.md").read_text()
    assert 'python -m lab.studies.convergence --task outliers --contender "memkern AdamW8bit"' in text
    options = [*("--task", "outliers", "--contender", "memkern AdamW8bit", "--lr", "1e-3"), "--out", str(tmp_path)]
    for arguments, message in ((options, "one run needs"), (["--steps", "2"], "needs --out")):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives tasks two steps, a batch to validate with, and random images in place of scikit-learn's."""
    random = torch.Generator().manual_seed(0)
    images = torch.randn(40, 1, 8, 8, generator=random), torch.randint(10, (40,), generator=random)
    monkeypatch.setattr(tasks, "digits", lambda: (images, images))
    for task in TASKS.values():
        monkeypatch.setattr(task, "steps", 2)
        validation = task.batch(5, 0)
        monkeypatch.setattr(task, "validation", lambda batch=validation: batch)
    trained = TASKS["gpt"].model(0).state_dict()
    monkeypatch.setattr(TASKS["fine-tune"], "_trained", lambda: trained)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "batch-x8" else pytest.mark.long)
        for name in TASKS
        if name not in ("batch-x1", "batch-x64")
    ],
)
def test_each_contender_trains_and_repeats(name: str) -> None:
    task = TASKS[name]
    for contender in OURS:
        if contender.reason_against(task, task.model(0)):
            continue
        lr = task.first[contender.family]
        outcome = run(task, contender, lr, 1)
        assert 0 < outcome.loss < 20, contender.name
        is_coded = "8bit" in contender.name or contender.name == "memkern all together"
        assert (outcome.coded_share > 0.9) == is_coded, contender.name
        assert outcome[:4] == run(task, contender, lr, 1)[:4], contender.name  # all but times: the same bits


@pytest.mark.full
@pytest.mark.usefixtures("short")
def test_stored_weights_are_those_that_train() -> None:
    """bf16 weights are copied into the model before each step, and its gradients to them."""
    training = Run(TASKS["gpt"], CONTENDERS["memkern AdamW8bit bf16+8"], 1e-2, 1)
    training.train()
    assert {p.dtype for p in training.stored.parameters()} == {torch.bfloat16}
    for p, stored in zip(training.model.parameters(), training.stored.parameters(), strict=True):
        assert torch.equal(p, stored.float())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("short")
def test_runs_that_are_there_are_not_repeated(tmp_path: Path) -> None:
    options = ["--task", "outliers", "--contender", "memkern AdamW8bit", "--out", str(tmp_path)]
    main(options)
    rows = results.read(tmp_path / "convergence.csv")
    ours, originals = ([r for r in rows if r["contender"] == name] for name in ("memkern AdamW8bit", "torch AdamW"))
    assert [r["seed"] for r in ours[-5:]] == [r["seed"] for r in originals] == ["1", "2", "3", "4", "5"]
    assert {r["lr"] for r in originals} == {r["lr"] for r in ours[-5:]}
    assert 4 <= len(ours) - 5 <= 4 + MOVES
    main(options)
    assert len(results.read(tmp_path / "convergence.csv")) == len(rows)
    main([*options, "--lr", ours[-1]["lr"], "--seed", "5"])  # one run, by itself
    again = results.read(tmp_path / "convergence.csv")[-1]
    assert again["loss"] == ours[-1]["loss"]


@pytest.mark.long
def test_two_rows_repeat_in_every_bit(tmp_path: Path) -> None:
    """Random rows, by the page's command, have the same loss on the same processor, Python and torch."""
    here = machine.provenance("cpu")
    same = ("hardware", "python", "torch")
    rows = [r for r in results.read(page.PATH) if r["loss"] and r["package"] in ("torch", "memkern")]
    rows = [r for r in rows if r["task"] in ("outliers", "rows") and all(r[x] == here[x] for x in same)]
    if not rows:
        pytest.skip(f"recorded on another processor than {here['hardware']}, or with another Python or torch")
    for r in random.sample(rows, 2):
        options = ["--task", r["task"], "--contender", r["contender"], "--lr", r["lr"], "--seed", r["seed"]]
        main([*options, "--out", str(tmp_path)])
        assert results.read(tmp_path / "convergence.csv")[-1]["loss"] == r["loss"], r


def test_the_page_has_the_tables_of_the_results() -> None:
    text = page.PAGE.read_text()
    assert "<!-- table:evidence_summary" in text
    assert text == overview.fill(text, page.TABLES), "run python -m lab.studies.convergence table"
