"""The recipe on several processes: gloo on the CPU."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from memkern import OptionError
from memkern.__main__ import main
from memkern.train import Corpus, Trainer
from memkern.train import checkpoint as checkpoints
from memkern.train.distributed import Processes
from memkern.train.loop import warmup_cosine
from tests.support.helpers import first_full
from tests.support.ranks import TORCHRUN_TWO
from tests.support.train_helpers import SMALL, small_run, train_by_two

OPTIONS = [*small_run(layers=2, batch_size=2, steps=5), "--save-every", "3"]


def assert_runs_agree(a: Path, b: Path) -> dict[str, Any]:
    """Two checkpoints of equal runs. Their gradients are sums in another order: weights agree within 1e-4 of their
    norm, as a code of nearly equal moments may differ by one; losses within 1e-5. And 1e-5 for
    the bias of attention's keys, whose gradient is nothing but rounding errors, which Adam scales up to its rate."""
    one, two = checkpoints.load(a), checkpoints.load(b)
    assert one["step"] == two["step"] == 5
    for name in ("train_loss", "validation"):
        losses = (torch.tensor(state["history"][name]) for state in (one, two))
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    for name, weight in one["model"].items():
        assert (weight - two["model"][name]).norm() <= 1e-4 * weight.norm() + 1e-5, name
    return two


@pytest.mark.feature("torch", "`memkern train` on 1 and 2 processes at equal global batch, DDP and `fully_shard`")
@pytest.mark.full
@pytest.mark.parametrize("parallel", first_full(["fsdp", "ddp"]))
def test_one_and_two_processes_agree_at_equal_global_batch(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], parallel: str
) -> None:
    arguments = ["--data", str(text), *OPTIONS, "--optimizer", "lamb", "--lr-rule", "linear"]
    arguments += ["--warmup-from", "base", "--warmup", "2"]
    main(["train", *arguments, "--batch-factor", "4", "--save", str(tmp_path / "1.pt")])
    more = ["--batch-factor", "4", "--save", str(tmp_path / "2.pt"), "--out", str(tmp_path / "out")]
    first, second = train_by_two(*arguments, *more, "--parallel", parallel)
    assert_runs_agree(tmp_path / "1.pt", tmp_path / "2.pt")
    assert "validation loss" in first
    assert "validation loss" in capsys.readouterr().out
    assert not second  # it prints nothing
    assert (tmp_path / "out" / "losses.png").is_file()
    if parallel == "fsdp":  # whole tensors, which load into shards and into one process
        assert (
            checkpoints.load(tmp_path / "2.pt")["model"].keys() == checkpoints.load(tmp_path / "1.pt")["model"].keys()
        )
        again, _ = train_by_two("--resume", str(tmp_path / "2.pt"))
        main(["train", "--resume", str(tmp_path / "2.pt"), "--parallel", "ddp"])
        sentence = next(line for line in first.splitlines() if line.startswith("Validation loss"))
        assert sentence.split(";")[0] in again
        assert sentence.split(";")[0] in capsys.readouterr().out


@pytest.mark.feature("torch", "`torchrun -m memkern train`")
@pytest.mark.full
def test_torchrun(text: Path, tmp_path: Path) -> None:
    arguments = ["train", "--data", str(text), *OPTIONS, "--save", str(tmp_path / "run.pt")]
    subprocess.run([*TORCHRUN_TWO, "-m", "memkern", *arguments], check=True, capture_output=True, timeout=240)
    assert checkpoints.load(tmp_path / "run.pt")["config"]["batch_factor"] == 2  # constant batch per process


def test_micro_batches_must_be_divisible(corpus: Corpus) -> None:
    with pytest.raises(OptionError, match=r"batch_factor: 3 given .* in 2 processes; .* multiple of 2, such as 2"):
        Trainer(SMALL.replace(batch_factor=3), corpus, Processes(0, 2))


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
def test_warm_up_from_the_base_rate(corpus: Corpus, rule: str) -> None:
    """From eta to k eta, a little at each iteration."""
    steps = SMALL.replace(batch_factor=16, lr_rule=rule, lr=1e-3, warmup=20, warmup_from="base", steps=100)
    peak = {"linear": 16e-3, "sqrt": 4e-3}[rule]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=steps.peak_lr)
    start = steps.base_lr / steps.peak_lr
    scheduler = warmup_cosine(optimizer, warmup=steps.warmup_steps, steps=steps.steps, start=start)
    for step in range(steps.warmup_steps + 1):
        expected = 1e-3 + (peak - 1e-3) * step / steps.warmup_steps
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] < peak


def test_a_trainer_begins_at_the_base_rate(corpus: Corpus) -> None:
    config = SMALL.replace(batch_factor=4, lr_rule="linear", lr=1e-3, warmup=3, warmup_from="base")
    trainer = Trainer(config, corpus)
    rates = []
    for _ in range(4):
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        trainer.step()
    assert rates == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3])
