"""``python -m memkern``: what it prints, writes and refuses."""

import contextlib
import json
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

pytest.importorskip("rich", reason="the command line needs the [train] extra")

from memkern import backend
from memkern.__main__ import main
from memkern.train import History, RunResult, Trainer, checkpoint, report
from memkern.train.report import size, summary
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


# info


def test_info_shows_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    main(["info", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(json.dumps(backend.report()))
    main(["info"])
    shown = capsys.readouterr().out
    for name, state in report["backends"].items():
        text = "yes" if state["available"] else f"no: {state['reason']}"
        assert re.search(rf"^  {name} +{re.escape(text)}$", shown, re.MULTILINE), name


def test_info_needs_no_extra() -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(['rich', 'matplotlib', 'numpy']))"
    code = f"{blocked}; from memkern.__main__ import main; main(['info'])"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert torch.__version__ in shown


# train


def test_train_prints_lines_and_a_table(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--data", text, *SMALL])
    shown = capsys.readouterr().out
    assert "text.txt (1 files): 8,100 bytes for training, 900 for validation" in shown
    assert [line.split()[3] for line in shown.splitlines() if line.startswith("adamw 8-bit ")] == [
        "1/4", "2/4", "3/4", "4/4",
    ]  # fmt: skip
    for row in (
        "validation loss",
        "optimizer state",
        "peak tensor bytes",
        "median step",
        "tokens per second",
    ):
        assert row in shown
    assert "ratio" not in shown
    assert not list(Path(text).parent.glob("*.pt"))


def test_train_shows_bars_on_a_terminal(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(["train", "--data", text, *SMALL])
    shown = capsys.readouterr().out
    assert "4/4" in shown
    assert "tokens/s" in shown
    assert "step 4/4" not in shown


def test_compare_writes_json_and_a_picture(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "out"
    main(["train", "--data", text, "--compare", "--out", str(out), *SMALL])
    shown = capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["losses.png", "results.json"]
    written = json.loads((out / "results.json").read_text())
    baseline, ours = written["runs"]
    assert (baseline["optimizer"], ours["optimizer"]) == ("torch-adamw", "adamw 8-bit")
    assert baseline["history"]["train_loss"][0] == ours["history"]["train_loss"][0]
    for result in (baseline, ours):
        assert [step for step, _ in result["history"]["validation"]] == [2, 4]
        assert result["history"]["validation"][-1][1] == result["validation_loss"]
        assert len(result["history"]["train_loss"]) == 4
        assert f"{result['validation_loss']:.4f}" in shown
    assert f"{ours['optimizer_bytes'] / baseline['optimizer_bytes']:.3f}" in shown  # the ratio column
    assert written["summary"] in shown.replace("\n", " ")
    assert written["config"]["lr"] == 1e-3
    assert written["data"]["train_bytes"] == 8100
    assert written["environment"]["backends"] == json.loads(json.dumps(backend.report()))["backends"]
    picture = (out / "losses.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n")
    assert len(picture) > 20_000


def test_resume_takes_the_options_it_is_not_given(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "run.pt")
    main(["train", "--data", text, *SMALL, "--lr", "5e-4", "--save", path, "--out", str(tmp_path / "first")])
    main(["train", "--resume", path, "--eval-every", "1", "--out", str(tmp_path / "again")])
    capsys.readouterr()
    first, again = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("first", "again"))
    assert again["runs"] == first["runs"]
    assert again["config"] == first["config"] | {"eval_every": 1}
    with pytest.raises(SystemExit) as ended:
        main(["train", "--resume", path, "--lr", "2e-3"])
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert "argument --lr: 0.002 given; allowed: 0.0005, with which the resumed run began, or a new run" in shown


def test_a_default_may_be_given_on_resume_and_another_value_may_not(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "run.pt")
    main(["train", "--data", text, *SMALL, "--save", path])
    main(["train", "--resume", path, "--lr", "1e-3", "--weight-decay", "0.1", "--clip", "1"])
    capsys.readouterr()
    for option, value, used in (("--lr", "2e-3", "0.001"), ("--clip", "0.0", "1.0"), ("--warmup", "2", "0")):
        with pytest.raises(SystemExit):
            main(["train", "--resume", path, option, value])
        assert f"allowed: {used}, with which" in capsys.readouterr().err


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


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("output", [closed_pipe, full_disk, lambda: None])
def test_output_that_cannot_be_written_ends_no_run(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: Callable[[], IO[str] | None], terminal: bool
) -> None:
    path = tmp_path / "run.pt"
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, output())
        if terminal and (stream := getattr(sys, name)):
            monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
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
    options = [*SMALL, "--steps", "1000000", "--eval-every", "1", "--save-every", "1000000", "--workers", "2"]
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
    monkeypatch.setattr(report, "write_json", lambda path, content: path.with_name("absent").joinpath("x").touch())
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
    assert f"argument {option}: nothing can be written in '{tmp_path}': File too large" in capsys.readouterr().err


def test_ctrl_c_in_the_last_step_ends_the_run_as_always(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(monkeypatch, 4)
    main(["train", "--data", text, *SMALL, "--save", str(tmp_path / "run.pt")])
    assert "validation loss" in capsys.readouterr().out
    assert checkpoint.load(tmp_path / "run.pt")["step"] == 4


BAD = [
    (["--steps", "0"], "--steps", "0 given", "1 or more"),
    (["--steps", "many"], "--steps", "invalid int value: 'many'"),
    (["--batch-size", "-3"], "--batch-size", "-3 given", "1 or more"),
    (["--lr", "nan"], "--lr", "nan given", "finite"),
    (["--lr", "0"], "--lr", "0 given", "above 0"),
    (["--weight-decay", "-1"], "--weight-decay", "-1.0 given", "0 or more"),
    (["--clip", "inf"], "--clip", "inf given", "finite"),
    (["--activation-bits", "5"], "--activation-bits", "'5' given", "none, 1, 2, 3, 4"),
    (["--linear-share", "0"], "--linear-share", "0.0 given", "above 0, at most 1"),
    (["--linear-share", "nan"], "--linear-share", "nan given", "above 0, at most 1"),
    (["--warmup", "4"], "--warmup", "4 given", "fewer than the 4 steps"),
    (["--heads", "3"], "--heads", "3 given", "divisors of the width, 64"),
    (["--width", "63"], "--heads", "2 given", "divisors of the width, 63"),
    (["--bytes"], "--bytes", "given with --model byte-tiny", "models of transformers"),
    (["--model", "gpt2"], "--layers", "given with --model gpt2", "byte-tiny"),
    (["--epochs", "2"], "--epochs", "given with --steps", "one of the two"),
    (["--warmup-epochs", "9"], "--warmup-epochs", "9 given", "fewer than the 4 steps"),
    (["--dropout", "1"], "--dropout", "1.0 given", "below 1"),
    (["--checkpointing", "some"], "--checkpointing", "'some'", "blocks"),
    (["--master-weights", "bf16+8"], "--master-weights", "'bf16+8' given", "precision is 'bf16'"),
    (
        ["--master-weights", "bf16+16", "--precision", "bf16", "--optimizer", "torch-adamw"],
        "--master-weights",
        "'bf16+16' given; allowed: None with torch-adamw",
    ),
    (["--state-bits", "8", "--optimizer", "torch-adamw"], "--state-bits", "8 given", "32 with torch-adamw"),
    (["--batch-size", "6", "--micro-batch", "4"], "--batch-size", "6 given", "multiples of 4"),
    (["--micro-batch", "0"], "--micro-batch", "0 given", "1 or more"),
    (["--step-in-backward", "--clip", "1"], "--clip", "given with --step-in-backward", "0"),
    (["--step-in-backward", "--accumulation", "2"], "--step-in-backward", "True given", "accumulation=2"),
    (["--step-in-backward", "--precision", "fp16-mixed"], "--precision", "given", "without step_in_backward"),
    (["--saved-bits", "8"], "--saved-bits", "8 given", "None without compile"),
    (["--offload", "--precision", "fp16-mixed"], "--precision", "'fp16-mixed' given", "without offload"),
    (["--loss-chunk", "0"], "--loss-chunk", "0 given", "1 or more"),
    (["--export", "new2"], "--export", "given with --model byte-tiny", "models of transformers"),
    (["--data", "binary"], "--data", "'binary' given, a binary file", "text"),
    (["--optimizer", "adagrad"], "--optimizer", "'adagrad' given", "adamw, adam"),
    (["--precision", "fp8"], "--precision", "'fp8' given", "bf16-mixed"),
    (["--device", "toaster"], "--device", "'toaster' given", "cpu, cuda"),
    (["--device", "meta"], "--device", "'meta' given", "cpu, cuda"),
    (["--device", "cuda:99"], "--device", "'cuda:99' given", "cpu"),
    (["--seq-len", "900"], "--seq-len", "900 given", "900 for validation", "1 to 899"),
    (["--data", "missing"], "--data", "'missing' given", "neither a file nor a folder"),
    (["--compare", "--optimizer", "lion", "--state-bits", "32"], "--compare", "lion", "with 8-bit states"),
    (["--compare", "--save", "run.pt"], "--compare", "--save", "without"),
    (["--resume", "missing.pt"], "--resume", "'missing.pt' cannot be read"),
    (
        ["--resume", "text.txt"],
        "--resume",
        "'text.txt' is no checkpoint: python -m memkern train --save writes them",
    ),
    (["--resume", "torn.pt"], "--resume", "'torn.pt' is cut off: 300 bytes", "use another one"),
    (["--resume", "objects.pt"], "--resume", "'objects.pt' is damaged, or holds other objects"),
    (["--resume", "other.pt"], "--resume", "'other.pt' is no checkpoint of this version"),
    (["--save", "absent/run.pt"], "--save", "'absent/run.pt' given", "existing folder"),
    (["--save", "."], "--save", "a folder"),
    (["--out", "text.txt"], "--out", "'text.txt' given", "a folder that exists or can be made"),
]


@pytest.mark.parametrize(("arguments", "name", "pieces"), [(a, n, p) for a, n, *p in BAD])
def test_bad_input_is_named_and_nothing_is_written(
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    name: str,
    pieces: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weights": torch.zeros(3)}, "other.pt")
    Path("binary").write_bytes(bytes(9000))
    Path("torn.pt").write_bytes(Path("other.pt").read_bytes()[:300])
    torch.save({"optimizer": Path()}, "objects.pt")
    before = sorted(os.listdir())
    data = [] if "--data" in arguments else ["--data", "text.txt"]
    output = [] if {"--out", "--save"} & {*arguments} else ["--out", "new"]
    with pytest.raises(SystemExit) as ended:
        main(["train", *data, *SMALL, *output, *arguments])
    assert ended.value.code == 2
    (last,) = capsys.readouterr().err.splitlines()  # and no page of usage before it
    assert last.startswith(f"python -m memkern train: error: argument {name}: ")
    assert all(piece in last for piece in pieces), last
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    ("content", "pieces"), [(b"", ["--data", "no text"]), (b"ten bytes.", ["--seq-len", "32 given"])]
)
def test_too_little_text(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, pieces: list[str]) -> None:
    (tmp_path / "short").write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--data", str(tmp_path), *SMALL])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert all(piece in error for piece in pieces), error


def test_what_may_not_be_read_or_written(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    (locked / "text.txt").write_text("text " * 1000)
    locked.chmod(0)
    if os.access(locked, os.R_OK):
        pytest.skip("this user reads and writes everything")
    for option in ("--data", "--save", "--out"):
        data = [] if option == "--data" else ["--data", text]
        with pytest.raises(SystemExit) as ended:
            main(["train", *data, *SMALL, option, str(locked / "text.txt" if option == "--save" else locked)])
        assert ended.value.code == 2
        assert f"argument {option}: " in capsys.readouterr().err


@pytest.mark.parametrize(("absent", "arguments"), [("rich", []), ("matplotlib", ["--out", "new"])])
def test_an_absent_extra_is_named_with_its_cure(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(SystemExit, match=rf"needs {absent}, which the extra memkern\[train\] brings"):
        main(["train", "--data", text, *SMALL, *arguments])
    assert not Path("new").exists()


def test_divergence_ends_with_a_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"the loss is nan at step .* try a lower --lr"):
        main(["train", "--data", text, *SMALL, "--lr", "1e30", "--clip", "0"])


# The sentence


def result(optimizer: str, loss: float, held: int, saved: int = 500, activations: str = "GELU") -> RunResult:
    return RunResult(
        optimizer=optimizer,
        activations=activations,
        parameters=1000,
        optimizer_bytes=held,
        bytes_per_parameter=held / 1000,
        validation_loss=loss,
        peak_bytes=10_000,
        saved_bytes=saved,
        median_step_seconds=0.1,
        tokens_per_second=1.0,
        history=History(),
    )


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (2.0, "Same validation loss within 0.1 %; optimizer state 25.9 % of torch-adamw's."),
        (2.0051, "Same validation loss within 0.3 %; optimizer state 25.9 % of torch-adamw's."),
        (1.9949, "Same validation loss within 0.3 %; optimizer state 25.9 % of torch-adamw's."),
        (
            2.1,
            "Validation loss 5.0 % higher (2.1000 against 2.0000); optimizer state 25.9 % of torch-adamw's.",
        ),
        (
            1.9,
            "Validation loss 5.0 % lower (1.9000 against 2.0000); optimizer state 25.9 % of torch-adamw's.",
        ),
    ],
)
def test_the_sentence_says_what_the_losses_are(ours: float, expected: str) -> None:
    assert summary([result("torch-adamw", 2.0, 8000), result("adamw 8-bit", ours, 2072)]) == expected


def test_the_sentence_says_what_activations_keep() -> None:
    runs = [result("torch-adamw", 2.0, 8000), result("adamw 8-bit", 2.0, 2072, 320, "3-bit GELU")]
    assert summary(runs) == (
        "Same validation loss within 0.1 %; optimizer state 25.9 % of torch-adamw's, "
        "activations saved for the backward pass 64.0 % of GELU's."
    )


def test_the_sentence_of_one_run() -> None:
    assert summary([result("adamw 8-bit", 2.0, 2072)]) == (
        "Validation loss 2.0000; optimizer state 2.07 bytes per parameter."
    )


def test_sizes_are_decimal() -> None:
    assert [size(n) for n in (999, 1000, 26_063_056, 3_100_000_000)] == [
        "999 bytes",
        "1.00 kB",
        "26.06 MB",
        "3.10 GB",
    ]
