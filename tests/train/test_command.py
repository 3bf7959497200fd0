"""``python -m memkern train``: what it prints and writes, --compare, --resume, and what --fit asks of the planner."""

import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from memkern.__main__ import main
from memkern.train import TrainConfig, checkpoint
from memkern.train.fit import fit
from tests.support.train_helpers import SMALL, error_of_command, small_run_flags

OPTIONS = small_run_flags(layers=1, batch_size=2, steps=4)


def test_a_run_prints_and_writes_its_results(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, link = tmp_path / "deep" / "out", tmp_path / "link.pt"
    for _ in range(2):  # the second run replaces the files of the first
        main(["train", "--data", str(text), *OPTIONS, "--out", str(folder), "--save", str(link)])
        if not link.is_symlink():
            link.rename(folder / "run.pt")
            link.symlink_to(folder / "run.pt")
    assert link.is_symlink()
    assert sorted(os.listdir(folder)) == ["losses.png", "results.json", "run.pt"]
    shown = capsys.readouterr().out
    assert "squares.txt (1 files): 80,055 tokens for training, 8,894 for validation\n" in shown
    steps = [line.split()[3] for line in shown.splitlines() if line.startswith("adamw 8-bit ")]
    assert steps == ["1/4", "2/4", "3/4", "4/4"] * 2
    assert re.search(r"\nmedian step, seconds +\d\.\d{4}\n", shown)
    assert re.search(r"\nValidation loss \d\.\d{4}; optimizer state 2\.\d\d bytes per parameter\.\nPeak: ", shown)


def test_compare_prints_and_writes_both_runs(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--data", str(text), "--compare", "--activation-bits", "3", "--out", str(tmp_path), *OPTIONS])
    shown = capsys.readouterr().out
    results = json.loads((tmp_path / "results.json").read_text())
    baseline, ours = results["runs"]
    assert (baseline["optimizer"], ours["optimizer"]) == ("torch-adamw", "adamw 8-bit")
    for result in (baseline, ours):
        assert [step for step, _ in result["history"]["validation"]] == [2, 4]
        assert result["history"]["validation"][-1][1] == result["validation_loss"]
        assert f"{result['validation_loss']:.4f}" in shown
    loss, state, saved = (ours[n] / baseline[n] for n in ("validation_loss", "optimizer_bytes", "saved_bytes"))
    assert f" {state:.3f}\n" in shown
    assert f"{results['summary']}\n" in shown
    expected = f"{ours['validation_loss']:.4f}, {100 * loss - 100:+.2f} % against torch-adamw; optimizer state"
    expected += f" {100 * state:.1f} %, saved for the backward pass {100 * saved:.1f} % of its run's."
    assert results["summary"] == f"Validation loss {expected}"
    assert results["config"]["lr"] == 1e-3
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_resume_takes_the_options_it_is_not_given(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "run.pt")
    main(["train", "--data", str(text), *OPTIONS, "--lr", "5e-4", "--save", path, "--out", str(tmp_path / "first")])
    main(["train", "--data", str(text), "--resume", path, "--eval-every", "1", "--out", str(tmp_path / "again")])
    first, resumed = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("first", "again"))
    assert resumed["runs"] == first["runs"]
    assert resumed["config"] == first["config"] | {"eval_every": 1}
    capsys.readouterr()
    state = checkpoint.load(Path(path))
    torch.save(state | {"optimizer": {}}, path)
    assert f"--resume: '{path}' given, which cannot be continued: " in error_of_command(capsys, "--resume", path)


@pytest.mark.full
def test_weights_on_the_host_have_the_same_loss(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The process group that they need ends with the command; a complete run that is resumed prints its results."""

    def printed(*arguments: str) -> str:
        main(["train", *arguments])
        return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Validation loss"))

    of_bf16 = ["--precision", "bf16", "--master-weights", "bf16+8", "--clip", "0"]
    command, path = ["--data", str(text), *small_run_flags(3, 4, 4), *of_bf16], str(tmp_path / "run.pt")
    on_host = printed(*command, "--weights-on-host", "layers", "--save", path, "--out", str(tmp_path / "out"))
    assert on_host == printed(*command)
    assert not torch.distributed.is_initialized()
    assert printed("--resume", path, "--weights-on-host", "none")


def test_failures_end_with_a_line(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"the loss is nan at step .* try a lower --lr"):
        main(["train", "--data", str(text), *OPTIONS, "--lr", "1e30", "--clip", "0"])
    every_step = ["--eval-every", "1", "--save-every", "1", "--save", str(tmp_path / "run.pt")]
    with pytest.raises(SystemExit, match="the validation loss is nan at step 1; try a lower --lr"):
        main(["train", "--data", str(text), *OPTIONS, "--lr", "1e30", "--clip", "0", *every_step])
    assert not (tmp_path / "run.pt").exists()  # nor is an older checkpoint replaced
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"needs matplotlib, which the extra memkern\[train\] brings"):
        main(["train", "--data", str(text), *OPTIONS, "--out", str(tmp_path / "new")])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("device", "limit"), [("cuda", 8 << 30), ("cpu", None)])
def test_fit_plans_what_no_option_says(monkeypatch: pytest.MonkeyPatch, device: str, limit: int | None) -> None:
    asked: dict[str, Any] = {}

    def plan(**options: Any) -> Any:
        asked.update(options)
        raise InterruptedError

    monkeypatch.setattr(importlib.import_module("memkern.train.fit"), "plan", plan)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2 << 20}.__getitem__)  # 8 GiB
    config = SMALL.replace(precision="fp16-mixed", compile=True, saved_bits="exact", accumulation=2)
    cases: tuple[tuple[TrainConfig, tuple[str, ...], dict[str, Any]], ...] = (
        (config.replace(batch_factor=3, clip=0.5), (), {"micro_batch": 4, "accumulation": 6}),  # all of a step
        (config, ("micro_batch",), {"micro_batch": 4, "accumulation": 2}),
        (config, ("precision", "saved_bits", "steps"), {"precision": "fp16-mixed", "saved_bits": "exact"}),
    )
    for case, flags, techniques in cases:
        with pytest.raises(InterruptedError):
            fit(case, "2GiB", flags, device)
        assert asked["techniques"] == {"optimizer": "adamw", "compile": True} | techniques
    assert (asked["memory"], asked["host_memory"], asked["batch_size"], asked["clip"]) == (2 << 30, limit, 8, 0.0)


@pytest.mark.full
def test_fit_trains_by_a_plan_or_is_refused(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--data", str(text), *OPTIONS, "--batch-factor", "3", "--out", str(tmp_path)]
    main(["train", *options, "--fit", "2GiB", "--optimizer", "lion", "--precision", "bf16"])
    assert "2GiB fit " in capsys.readouterr().out
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["plan"]["peak"] < 2 * 2**30
    assert (results["plan"]["techniques"]["accumulation"], results["config"]["accumulation"]) == (3, 1)
    assert results["config"] | {"optimizer": "lion", "precision": "bf16"} == results["config"]
    assert error_of_command(capsys, *options, "--fit", "1MiB").startswith("--fit: 1MiB given; allowed: 0.")
