"""A run of ``python -m memkern train`` saves at a signal, and goes on where output or a disk fails."""

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from memkern.__main__ import main
from memkern.train import Trainer, checkpoint, report
from memkern.train.interrupt import Saver
from tests.support.helpers import first_full
from tests.support.ranks import TORCHRUN_TWO
from tests.support.train_helpers import error_of_command, small_run_flags

OPTIONS = small_run_flags(layers=1, batch_size=2, steps=4)


@pytest.fixture
def run(text: Path, tmp_path: Path) -> list[str]:
    return ["train", "--data", str(text), *OPTIONS, "--save", str(tmp_path / "run.pt")]


@pytest.fixture(autouse=True)
def sigint_is_not_ignored() -> Iterator[None]:
    """Sets Python's handler of Ctrl-C: shells let background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int, times: int = 1, number: int = signal.SIGINT) -> None:
    """Sends this process Ctrl-C or another signal, so many times, in the middle of a step."""
    forward = Trainer.loss

    def loss(trainer: Trainer, *batch: torch.Tensor) -> torch.Tensor:
        if trainer.steps_done + 1 == step and torch.is_grad_enabled():
            for _ in range(times):
                signal.raise_signal(number)
        return forward(trainer, *batch)

    monkeypatch.setattr(Trainer, "loss", loss)


def ends_with(status: int, *arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments])
    assert ended.value.code == status


def test_ctrl_c_saves_and_resume_goes_on_saving_there(
    run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.pt"
    leftover, leftover_of_another = tmp_path / ".run.pt.0123abcd.tmp", tmp_path / ".run.pt.x.0123abcd.tmp"
    for half_written in (leftover, leftover_of_another):
        half_written.touch()
    for arguments, step in ((run, 2), (["train", "--resume", str(path)], 3)):
        with monkeypatch.context() as patch:
            interrupt_at(patch, step)
            ends_with(130, *arguments)
        assert capsys.readouterr().err == f"Step {step} of 4 saved: go on with --resume {path}\n"
        assert checkpoint.load(path)["step"] == step
    main(["train", "--resume", str(path)])  # saves without --save
    assert checkpoint.load(path)["step"] == 4
    assert [*tmp_path.glob(".*.tmp")] == [leftover_of_another]


def test_what_a_killed_run_left_where_a_link_points_is_removed(tmp_path: Path) -> None:
    leftover, link = tmp_path / "folder" / ".target.0123abcd.tmp", tmp_path / "link"
    leftover.parent.mkdir()
    leftover.touch()
    link.symlink_to(tmp_path / "folder" / "target")
    Saver(link, [])
    assert not leftover.exists()


# name: signal, times it is sent, its handler before, whether torchrun began the run, step; exit status, step saved
BY_DEFAULT = signal.default_int_handler
SIGNALS: dict[str, tuple[int, int, Any, bool, int, int, int]] = {
    "a second Ctrl-C ends at once": (signal.SIGINT, 2, BY_DEFAULT, False, 2, 130, 0),
    "a launcher may send it again": (signal.SIGINT, 2, BY_DEFAULT, True, 2, 130, 2),
    "SIGTERM, however often": (signal.SIGTERM, 3, BY_DEFAULT, False, 2, 143, 2),
    "in the last step": (signal.SIGINT, 1, BY_DEFAULT, False, 4, 0, 4),
    "an ignored signal stays ignored": (signal.SIGTERM, 1, signal.SIG_IGN, False, 2, 0, 4),
}


@pytest.mark.parametrize("case", SIGNALS)
def test_signals_save_or_end_a_run(run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    number, times, handler, launched, step, status, saved = SIGNALS[case]
    if launched:
        monkeypatch.setenv("RANK", "0")
    interrupt_at(monkeypatch, step, times, number)
    before = signal.signal(number, handler)
    try:
        ends_with(status, *run) if status else main(run)
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
    path = tmp_path / "run.pt"
    assert (checkpoint.load(path)["step"] if path.exists() else 0) == saved


def closed_pipe(mode: str) -> IO[str]:
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, mode)


@pytest.mark.parametrize("output", [closed_pipe, Path("/dev/full").open, lambda mode: None])
def test_output_that_cannot_be_written_ends_no_run(
    run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: Callable[[str], IO[str] | None]
) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, output("w"))
    no_room_at(monkeypatch, 1)
    main([*run, "--save-every", "1"])
    assert checkpoint.load(tmp_path / "run.pt")["step"] == 4
    interrupt_at(monkeypatch, 2)
    ends_with(130, *run)
    assert checkpoint.load(tmp_path / "run.pt")["step"] == 2
    for stream in (sys.stdout, sys.stderr):
        if stream:
            stream.close()  # flushes, as Python does at exit


@pytest.mark.feature("torch", "`torchrun -m memkern train`")
@pytest.mark.full
@pytest.mark.parametrize("number", first_full([signal.SIGINT, signal.SIGTERM]))
def test_a_signal_to_the_process_group_saves(run: list[str], tmp_path: Path, number: int) -> None:
    """As a terminal's Ctrl-C does, which also ends the reader of a pipe (``| tee``), or a batch system's SIGTERM."""
    options = ["--steps", "4000", "--warmup", "1", "--eval-every", "4000", "--save-every", "4000"]
    process = subprocess.Popen(
        [*TORCHRUN_TWO, "-m", "memkern", *run, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout
    next(line for line in process.stdout if "200/4000" in line)
    process.stdout.close()
    os.killpg(process.pid, number)
    process.wait(60)
    state = checkpoint.load(tmp_path / "run.pt")
    assert 200 <= state["step"] < 4000
    assert state["config"]["batch_factor"] == 2  # constant batch per process


@contextlib.contextmanager
def no_room(limit: int = 20_000) -> Iterator[None]:
    """Files of more bytes cannot be written, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def no_room_at(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """The checkpoints of these steps cannot be written."""
    save = checkpoint.save

    def in_a_full_disk(path: Path, state: dict[str, Any]) -> None:
        with no_room() if state["step"] in steps else contextlib.nullcontext():
            save(path, state)

    monkeypatch.setattr(checkpoint, "save", in_a_full_disk)


def test_checkpoints_and_results_that_cannot_be_written_are_said(
    run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on, and what can be written is."""
    path = tmp_path / "run.pt"
    no_room_at(monkeypatch, 1, 3, 4)
    monkeypatch.setattr(report, "losses", lambda results: (tmp_path / "absent/x").touch())
    reason = f"[Errno 27] File too large. {path} is as it was"
    with pytest.raises(SystemExit, match=rf"could not be written: {re.escape(reason)}; results could not be .*No such"):
        main([*run, "--save-every", "1", "--out", str(tmp_path / "out")])
    shown = capsys.readouterr()
    assert shown.err == "".join(f"Step {step} of 4 not saved: {reason}\n" for step in (1, 3, 4))
    assert "validation loss" in shown.out
    assert os.listdir(tmp_path / "out") == ["results.json"]
    assert checkpoint.load(path)["step"] == 2
    assert not [*tmp_path.glob(".*.tmp")]
    interrupt_at(monkeypatch, 3)
    ends_with(130, *run)
    assert capsys.readouterr().err == f"Step 3 of 4 not saved: {reason}\n"
    assert checkpoint.load(path)["step"] == 2


@pytest.mark.parametrize("option", ["--out", "--save"])
def test_that_files_can_be_written_is_tried_before_training(
    run: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    with no_room(0):
        error = error_of_command(capsys, *run[1:-2], option, str(tmp_path / "new"))
    assert f"{option}: nothing can be written in '{tmp_path}" in error
