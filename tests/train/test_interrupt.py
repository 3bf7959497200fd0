"""Signals, output and disks that fail in the middle of a run of ``python -m memkern train``."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch

pytest.importorskip("rich", reason="the command line needs the [train] extra")

from memkern.__main__ import main
from memkern.train import Trainer, checkpoint, report
from tests.support.ranks import TORCHRUN_TWO

SMALL = [
    *("--layers", "1", "--heads", "2", "--width", "64", "--seq-len", "32", "--batch-size", "2"),
    *("--steps", "4", "--eval-every", "2", "--eval-tokens", "128", "--device", "cpu"),
]


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    return str(path)


@pytest.fixture(autouse=True)
def sigint_is_not_ignored() -> Iterator[None]:
    """As it is in a shell's background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int, times: int = 1, number: int = signal.SIGINT) -> None:
    """Ctrl-C or another signal, so many times, in the middle of a step."""
    forward = Trainer.loss

    def loss(trainer: Trainer, *batch: torch.Tensor) -> torch.Tensor:
        if trainer.steps_done + 1 == step:
            for _ in range(times):
                signal.raise_signal(number)
        return forward(trainer, *batch)

    monkeypatch.setattr(Trainer, "loss", loss)


def test_ctrl_c_saves_and_resume_goes_on_saving_there(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, straight = tmp_path / "run.pt", tmp_path / "straight.pt"
    main(["train", "--data", text, *SMALL, "--save", str(straight)])
    handler = signal.getsignal(signal.SIGINT)
    for arguments, step in ((["--data", text, *SMALL, "--save", str(path)], 2), (["--resume", str(path)], 3)):
        with monkeypatch.context() as patch:
            interrupt_at(patch, step)
            with pytest.raises(SystemExit) as ended:
                main(["train", *arguments])
        assert ended.value.code == 130
        shown = capsys.readouterr().err
        assert shown.endswith(f"Saved after step {step} of 4: go on with --resume {path}\n")
        assert checkpoint.load(path)["step"] == step
    main(["train", "--resume", str(path)])  # saves without --save
    done, expected = checkpoint.load(path), checkpoint.load(straight)
    assert done["step"] == 4
    assert done["history"]["train_loss"] == expected["history"]["train_loss"]
    for name, weight in expected["model"].items():
        assert torch.equal(done["model"][name], weight), name
    assert signal.getsignal(signal.SIGINT) is handler
    assert not [*tmp_path.glob(".*.tmp")]


@pytest.mark.parametrize("save", [True, False])
def test_ctrl_c_ends_at_once(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: bool) -> None:
    """The second time, and the first where there is no file to save to."""
    interrupt_at(monkeypatch, 2, times=2 if save else 1)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--data", text, *SMALL, *(["--save", str(tmp_path / "run.pt")] if save else [])])
    assert ended.value.code == 130
    assert not (tmp_path / "run.pt").exists()


def test_sigterm_saves_as_ctrl_c_does(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it comes: to the process group, and by a launcher."""
    before = signal.signal(signal.SIGTERM, lambda *args: pytest.fail("SIGTERM came through"))
    try:
        interrupt_at(monkeypatch, 2, times=3, number=signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            main(["train", "--data", text, *SMALL, "--save", str(tmp_path / "run.pt")])
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM
    assert checkpoint.load(tmp_path / "run.pt")["step"] == 2


def test_a_launcher_may_send_ctrl_c_again(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    interrupt_at(monkeypatch, 2, times=2)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--data", text, *SMALL, "--save", str(tmp_path / "run.pt")])
    assert ended.value.code == 130
    assert checkpoint.load(tmp_path / "run.pt")["step"] == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_ignored_signal_stays_ignored(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        interrupt_at(monkeypatch, 2, number=number)
        main(["train", "--data", text, *SMALL, "--save", str(tmp_path / "run.pt")])
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert checkpoint.load(tmp_path / "run.pt")["step"] == 4


def closed_pipe() -> IO[str]:
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


def full_disk() -> IO[str]:
    return open("/dev/full", "w")


@pytest.mark.parametrize("output", [closed_pipe, full_disk, lambda: None])
def test_output_that_cannot_be_written_ends_no_run(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: Callable[[], IO[str] | None]
) -> None:
    path = tmp_path / "run.pt"
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, output())
    no_room_at(monkeypatch, 1)
    main(["train", "--data", text, *SMALL, "--save", str(path), "--save-every", "1"])
    assert checkpoint.load(path)["step"] == 4
    interrupt_at(monkeypatch, 2)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--data", text, *SMALL, "--save", str(path)])
    assert ended.value.code == 130
    assert checkpoint.load(path)["step"] == 2
    for stream in (sys.stdout, sys.stderr):
        if stream:
            stream.close()  # flushes, as Python does at exit


@pytest.mark.full
@pytest.mark.parametrize("launcher", [[], [*TORCHRUN_TWO]], ids=["python", "torchrun"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_process_group_saves(text: str, tmp_path: Path, number: int, launcher: list[str]) -> None:
    """As a terminal's Ctrl-C, with ``| tee`` that it ends, too, or a batch system's SIGTERM."""
    path = tmp_path / "run.pt"
    options = [*SMALL, "--steps", "1000000", "--eval-every", "1", "--save-every", "1000000"]
    command = [*(launcher or [sys.executable]), "-m", "memkern", "train", "--data", text, *options, "--save", str(path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout
    for line in process.stdout:
        if "3/1000000" in line:
            break
    process.stdout.close()
    os.killpg(process.pid, number)
    status = process.wait(60)
    assert checkpoint.load(path)["step"] >= 3
    if not launcher:
        assert status == 128 + number


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """Files of more than 20 kB cannot be written, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def no_room_at(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    save = checkpoint.save

    def in_a_full_disk(path: Path, state: dict[str, Any]) -> None:
        with no_room() if state["step"] in steps else contextlib.nullcontext():
            save(path, state)

    monkeypatch.setattr(checkpoint, "save", in_a_full_disk)


def test_training_goes_on_where_a_checkpoint_cannot_be_written(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.pt"
    no_room_at(monkeypatch, 1, 3)
    main(["train", "--data", text, *SMALL, "--save", str(path), "--save-every", "1"])
    shown = capsys.readouterr().err
    assert f"No checkpoint after step 1: [Errno 27] File too large. {path} is not there; training goes on" in shown
    assert f"No checkpoint after step 3: [Errno 27] File too large. {path} has that of step 2;" in shown
    assert checkpoint.load(path)["step"] == 4
    assert not [*tmp_path.glob(".*.tmp")]


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_last_checkpoint_that_cannot_be_written_is_said_at_the_end(
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    interrupted: bool,
) -> None:
    path = tmp_path / "run.pt"
    no_room_at(monkeypatch, 3, 4)
    if interrupted:
        interrupt_at(monkeypatch, 3)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--data", text, *SMALL, "--save", str(path), "--save-every", "2", "--eval-every", "4"])
    shown = capsys.readouterr()
    reason = f"[Errno 27] File too large. {path} has that of step 2"
    if interrupted:
        assert ended.value.code == 130
        assert f"Stopped after step 3 of 4 and not saved: {reason}" in shown.err
    else:
        assert ended.value.code == f"memkern train: the last checkpoint could not be written: {reason}"
        assert "validation loss" in shown.out  # the results are there all the same
    assert checkpoint.load(path)["step"] == 2


def test_results_that_cannot_be_written_end_with_a_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "write", lambda folder, *unused: folder.joinpath("absent", "x").touch())
    with pytest.raises(SystemExit, match=r"memkern train: results could not be written: .*No such file"):
        main(["train", "--data", text, *SMALL, "--out", str(tmp_path / "out")])
    assert "validation loss" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--out", "--save"])
def test_that_files_can_be_written_is_tried_before_training(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(SystemExit) as ended:
            main(["train", "--data", text, *SMALL, option, str(tmp_path / "new")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ended.value.code == 2
    assert f"argument {option}: nothing can be written in '{tmp_path}" in capsys.readouterr().err


def test_ctrl_c_in_the_last_step_ends_the_run_as_always(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(monkeypatch, 4)
    main(["train", "--data", text, *SMALL, "--save", str(tmp_path / "run.pt")])
    assert "validation loss" in capsys.readouterr().out
    assert checkpoint.load(tmp_path / "run.pt")["step"] == 4
