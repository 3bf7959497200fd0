"""python -m memkern plan: what it prints and what it refuses."""

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import memkern
from memkern.__main__ import main
from memkern.options import OptionError, Techniques
from memkern.planner import waiting
from memkern.planner.planning import ALONE, parse_memory
from tests.support.planned_models import WIDTH, Stack

MIB = 2**20


def run(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["plan", *arguments])
    out, err = capsys.readouterr()
    return exit_.value.code, out, err


def test_a_line_tells_of_a_long_wait(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "SECONDS", 0.05)
    with waiting.waiting():
        time.sleep(0.3)
    assert capsys.readouterr().err == waiting.TEXT + "\n"
    monkeypatch.setattr(waiting, "SECONDS", 60.0)
    with waiting.waiting():
        pass
    assert capsys.readouterr() == ("", "")


def test_a_terminal_has_a_spinner(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with waiting.waiting():
        time.sleep(0.3)
    assert waiting.TEXT[:20] in terminal.getvalue()


@pytest.mark.full
def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    given = ("--model", str(folder), "--seq-len", "64", "--device", "cpu")
    png = tmp_path / "plan.png"
    code, out, _ = run(capsys, *given, "--memory", "2GiB", "--png", str(png))
    assert code == 0
    assert "Fits as it is" in out
    assert "loss.backward()" in out
    assert png.stat().st_size > 1000
    code, out, _ = run(capsys, *given, "--memory", "100MiB", "--json")
    assert code == 1
    found = json.loads(out)
    assert found["fits"] is False
    assert set(found["alone"]) == set(ALONE) - {"offload", "8 bits, on the host", "weights on the host"}
    assert found["together"]["peak"] > 100 * MIB


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--model", "gpt5", "--memory", "1GiB", "--seq-len", "8"),
            "--model: 'gpt5' given; allowed: a folder",
        ),
        (("--model", "gpt2", "--memory", "much", "--seq-len", "8"), "--memory: 'much' given; allowed: bytes"),
        (
            ("--model", "gpt2", "--memory", "1GiB", "--seq-len", "2048"),
            "--seq-len: 2048 given; allowed: 1 to 1024",
        ),
        (("--model", "gpt2", "--memory", "1GiB", "--seq-len", "0"), "--seq-len: 0 given"),
        (
            ("--model", "gpt2", "--memory", "1GiB", "--seq-len", "8", "--device", "tpu"),
            "--device: 'tpu' given",
        ),
        (
            ("--model", "gpt2", "--memory", "1GiB", "--seq-len", "8", "--state-bits", "4"),
            "--state-bits: '4' given; allowed: 32, 8",
        ),
        (("--model", "gpt2", "--memory", "1GiB", "--seq-len", "8", "--clip", "-1"), "--clip: -1.0 given"),
        (
            ("--model", "gpt2", "--memory", "1GiB", "--seq-len", "8", "--png", "/no/such/a.png"),
            "--png: '/no/such/a.png'",
        ),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_folder_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    code, _, err = run(capsys, "--model", str(tmp_path), "--memory", "1GiB", "--seq-len", "8")
    assert code == 2
    assert "a folder with the config.json of a transformers model" in err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"precision": "fp16"},
            "precision: 'fp16' given; allowed: 'fp32', 'bf16-mixed', 'fp16-mixed', 'bf16'",
        ),
        ({"state_bits": 8.0}, "state_bits: 8.0 given"),
        (
            {"master_weights": "bf16+8"},
            "master_weights: 'bf16+8' given; allowed: None, unless precision is 'bf16'",
        ),
        ({"optimizer": "torch-adamw", "state_bits": 8}, "state_bits: 8 given; allowed: 32 with torch-adamw"),
        ({"state_bits": 4}, "state_bits: 4 given; allowed: 32, 8"),
        ({"state_bits": (8, 4)}, "state_bits: (8, 4) given; allowed: 32, 8"),
        ({"step_in_backward": True, "accumulation": 2}, "step_in_backward: True given"),
        ({"micro_batch": 0}, "micro_batch: 0 given; allowed: a whole number, 1 or more"),
        ({"linear_share": 1.5}, "linear_share: 1.5 given; allowed: None or a number above 0, at most 1"),
        ({"linear_share": True}, "linear_share: True given"),
        ({"precision": "fp16-mixed", "offload": True}, "precision: 'fp16-mixed' given"),
        (
            {"optimizer": "torch-adam", "precision": "bf16", "master_weights": "bf16+16"},
            "master_weights: 'bf16+16' given; allowed: None with torch-adam",
        ),
    ],
    ids=str,
)
def test_bad_techniques(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as error:
        Techniques(**changes)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"techniques": Techniques(loss_chunk=128)},
            "loss_chunk: 128 given; allowed: None for a model that is no language",
        ),
        (
            {"clip": 1.0, "techniques": {"step_in_backward": True}},
            "step_in_backward: True given; allowed: False with clip=1,",
        ),
    ],
    ids=["chunks of the loss need a language model", "clipping and a step in backward"],
)
def test_techniques_that_the_model_or_an_argument_rules_out(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        memkern.plan(Stack(), memory="1GiB", inputs=torch.zeros(2, WIDTH), device="cpu", **given)


def test_bad_models() -> None:
    with pytest.raises(TypeError, match="model must be a name"):
        memkern.plan(3, memory="1GiB")
    with pytest.raises(OptionError, match="inputs: None given"):
        memkern.plan(Stack(), memory="1GiB")
    with pytest.raises(OptionError, match="techniques: 'bits' given; allowed: precision"):
        memkern.plan(Stack(), memory="1GiB", inputs=torch.zeros(2, WIDTH), techniques={"bits": 8})


@pytest.mark.parametrize(
    ("text", "size"),
    [("12GiB", 12 * 2**30), ("12gb", 12 * 10**9), ("11.5 GiB", 11.5 * 2**30), (1024, 1024), (1e16, 10**16)],
)
def test_memory(text: Any, size: float) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("given", [0, 0.5, "0.4B", "0 GiB", -1, True, None, "12 apples", float("nan")])
def test_no_memory(given: Any) -> None:
    with pytest.raises(OptionError, match=r"memory: .* given; allowed: bytes as a number"):
        parse_memory(given)
