"""python -m memkern plan and memkern.plan: output, exit status, and the arguments that they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memkern
from memkern.__main__ import main
from memkern.planner.planning import ROWS, parse_memory
from memkern.techniques.options import OptionError, Techniques
from tests.support.planned_models import WIDTH, Stack

MIB = 2**20


def run(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["plan", *arguments])
    out, err = capsys.readouterr()
    return exit_.value.code, out, err


@pytest.mark.full
def test_the_status_of_the_command_says_whether_a_plan_fits(folder: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ("--model", str(folder), "--seq-len", "64", "--device", "cpu")
    code, out, _ = run(capsys, *arguments, "--memory", "2GiB")
    assert code == 0
    assert "Fits as it is" in out
    assert "loss.backward()" in out
    code, out, _ = run(capsys, *arguments, "--memory", "100MiB", "--json")
    assert code == 1
    plan = json.loads(out)
    assert plan["fits"] is False
    rows = {name for name, changes in ROWS.items() if not changes.get("compile")}
    assert {*plan["alone"]} == {name for name in rows if "on the host" not in name}
    assert plan["together"]["peak"] > 100 * MIB


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--model": "gpt5"}, "--model: 'gpt5' given; allowed: a folder"),
        ({"--model": "/"}, "--model: '/' given; allowed: a folder with the config.json of a transformers model"),
        ({"--memory": "much"}, "--memory: 'much' given; allowed: bytes"),
        ({"--seq-len": "2048"}, "--seq-len: 2048 given; allowed: 1 to 1024"),
        ({"--seq-len": "0"}, "--seq-len: 0 given"),
        ({"--device": "tpu"}, "--device: 'tpu' given"),
        ({"--state-bits": "4"}, "--state-bits: '4' given; allowed: 32, 8"),
        ({"--clip": "-1"}, "--clip: -1.0 given"),
        ({"--devices": "0"}, "--devices: 0 given"),
        ({"--host-memory": "0"}, "--host-memory: '0' given"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture, changes: dict[str, str], message: str) -> None:
    arguments = {"--model": "gpt2", "--memory": "1GiB", "--seq-len": "8"} | changes
    code, out, err = run(capsys, *(word for pair in arguments.items() for word in pair))
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"techniques": Techniques(loss_chunk=128)}, "loss_chunk: 128 given; allowed: None for a model that is no"),
        ({"clip": 1.0, "techniques": {"step_in_backward": True}}, "step_in_backward: True given; allowed: False with"),
        ({"techniques": {"bits": 8}}, "techniques: 'bits' given; allowed: precision"),
        ({"inputs": None}, "inputs: None given"),
        (
            {"model": nn.Linear(WIDTH, WIDTH), "techniques": {"weights_on_host": "layers"}},
            "weights_on_host: 'layers' given; allowed: None for a model without",
        ),
    ],
    ids=["chunks of the loss", "clipping and a step in backward", "no technique", "no inputs", "no blocks"],
)
def test_arguments_that_a_model_or_others_rule_out_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        memkern.plan(**{"model": Stack(), "memory": "1GiB", "inputs": torch.zeros(2, WIDTH), "device": "cpu"} | changes)
    with pytest.raises(TypeError, match="model must be a name"):
        memkern.plan(3, memory="1GiB")


@pytest.mark.parametrize(
    ("text", "size"),
    [("12GiB", 12 * 2**30), ("12gb", 12 * 10**9), ("11.5 GiB", 11.5 * 2**30), (1024, 1024), (1e16, 10**16)],
)
def test_sizes_of_memory_are_read(text: Any, size: float) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("size", [0, 0.5, "0.4B", "0 GiB", -1, True, None, "12 apples", float("nan")])
def test_sizes_of_memory_that_are_refused(size: Any) -> None:
    with pytest.raises(OptionError, match=r"memory: .* given; allowed: bytes as a number"):
        parse_memory(size)
