"""Every script of examples/ trains with tiny shapes, and its loss falls."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import timm_factory
from tests.support.ranks import Ranks

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TINY: dict[str, Any] = {"steps": 12, "width": 32, "layers": 2, "length": 32}
LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
# example: the package that it needs beside transformers, and its arguments
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain_loop": ("transformers", TINY),
    "trainer": ("accelerate", TINY),
    "accelerate_loop": ("accelerate", TINY),
    "lightning_module": ("lightning", TINY),
    "peft_lora": ("peft", TINY),
    "gpt2_xl": ("transformers", {"steps": 9, "sizes": {"n_embd": 64, "n_layer": 3, "n_head": 2, "n_positions": 64}}),
    "llama_8b_12gb": ("transformers", {"steps": 12, "length": 64, "sizes": {**LLAMA, "vocab_size": 256}}),
}


def run(name: str, **arguments: Any) -> list[float]:
    """The losses that the example's main returns."""
    spec = importlib.util.spec_from_file_location(f"examples_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles look their module up
    spec.loader.exec_module(module)
    losses: list[float] = module.main(**arguments)
    return losses


def assert_falls(losses: list[float]) -> None:
    third = len(losses) // 3
    assert sum(losses[-third:]) < sum(losses[:third])


def test_examples_are_short_and_listed() -> None:
    listed = (ROOT / "examples" / "README.md").read_text()
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) < 60, path.name
        assert f"[{path.name}]({path.name})" in listed


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("no_process_group")
@pytest.mark.filterwarnings("ignore")  # the frameworks' advice about workers and loggers
def test_an_example_trains(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, arguments = CASES[name]
    for each in ("transformers", package):
        pytest.importorskip(each)
    monkeypatch.chdir(tmp_path)
    assert_falls(run(name, **arguments))


@pytest.mark.full
def test_the_example_of_timms_factory_trains() -> None:
    timm_factory.load()
    pytest.importorskip("timm.optim")
    torch.manual_seed(0)
    layers = torch.nn.Flatten(), torch.nn.Linear(192, 64), torch.nn.GELU(), torch.nn.Linear(64, 10)
    assert_falls(run("timm_factory", model=torch.nn.Sequential(*layers), steps=6, size=8))


def train_fsdp2() -> tuple[list[float], str]:
    """What a rank of examples/fsdp2.py has: its losses, and what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        losses = run("fsdp2", **TINY)
    return losses, printed.getvalue()


@pytest.mark.full
def test_fsdp2_in_two_processes(ranks: Ranks) -> None:
    pytest.importorskip("transformers")
    (first_losses, first_printed), (second_losses, second_printed) = ranks(2, train_fsdp2)
    assert_falls(first_losses)
    assert_falls(second_losses)
    assert "parameters have states" in first_printed
    assert not second_printed
