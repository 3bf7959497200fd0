"""``python -m memkern``: what it prints, writes and refuses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich", reason="the command line needs the [train] extra")

from memkern import backend
from memkern.__main__ import main
from memkern.train import checkpoint

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
        "Peak: ",
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
    assert written["summary"] in " ".join(shown.split())
    assert written["config"]["lr"] == 1e-3
    assert "8,100 bytes for training" in written["data"]["description"]
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


BAD = [
    (["--steps", "0"], "--steps", "0 given", "1 or more"),
    (["--seed", str(2**63)], "--seed", "9223372036854775808 given", "0 to 9223372036854775807"),
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
        "'text.txt' given as a checkpoint, which is none: python -m memkern train --save writes them",
    ),
    (["--resume", "torn.pt"], "--resume", "'torn.pt' given as a checkpoint, which is damaged or cut off"),
    (["--resume", "objects.pt"], "--resume", "'objects.pt' given as a checkpoint, which is damaged"),
    (["--resume", "other.pt"], "--resume", "'other.pt' is no checkpoint of this version"),
    (["--save", "absent/run.pt"], "--save", "absent/run.pt' given", "existing folder"),
    (["--save", "."], "--save", "in an existing folder"),
    (["--out", "text.txt"], "--out", "nothing can be written in 'text.txt'"),
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
    "changes",
    [
        {"step": "third"},
        {"step": 5},
        {"model": None},
        {"optimizer": {}},
        {"optimizer": {"state": {}, "param_groups": []}},
        {"scheduler": {}},
        {"config": {"model": 3}},
        {"config": {"steps": "four"}},
        {"config": {"lr": "high"}},
    ],
    ids=str,
)
def test_a_checkpoint_of_other_values_is_refused_in_a_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    path = tmp_path / "run.pt"
    main(["train", "--data", text, *SMALL, "--save", str(path)])
    state = checkpoint.load(path)
    changes = {name: state[name] | value if name == "config" else value for name, value in changes.items()}
    torch.save(state | changes, path)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["train", "--resume", str(path)])
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m memkern train: error: argument --")


@pytest.mark.parametrize(
    ("variables", "name", "piece"),
    [
        ({"RANK": "3"}, "RANK", "3 given in the environment; allowed: 0 to below WORLD_SIZE, 1"),
        ({"RANK": ""}, "RANK", "allowed: whole numbers"),
        ({"WORLD_SIZE": "two"}, "RANK", "allowed: whole numbers"),
        ({"WORLD_SIZE": "0"}, "RANK", "to below WORLD_SIZE, 0"),
        (
            {"WORLD_SIZE": "2", "RANK": "1"},
            "WORLD_SIZE",
            "2 given in the environment: Error initializing torch.distributed",
        ),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK", "to below WORLD_SIZE, 2"),
        ({"MEMKERN_BACKEND": "xx"}, "MEMKERN_BACKEND", "must be one of cpu, cuda"),
    ],
    ids=str,
)
def test_a_bad_environment_is_named(
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    name: str,
    piece: str,
) -> None:
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    backend.from_environment.cache_clear()
    try:
        with pytest.raises(SystemExit) as ended:
            main(["train", "--data", text, *SMALL])
    finally:
        monkeypatch.undo()
        backend.from_environment.cache_clear()
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"python -m memkern train: error: argument {name}: ")
    assert piece in line


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
