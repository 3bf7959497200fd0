"""Plans that are kept in the user's cache folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memkern
from memkern.planner import planning
from memkern.planner.outcome import Plan

transformers = pytest.importorskip("transformers")
ARGUMENTS: dict[str, Any] = {"seq_len": 16, "device": "cpu"}


def config(**changes: Any) -> Any:
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 100, "n_positions": 32}
    return transformers.GPT2Config(**sizes | changes, architectures=["GPT2LMHeadModel"])


@pytest.fixture(scope="module")
def plan() -> Plan:
    return memkern.plan(config(), memory="4GiB", cache=False, **ARGUMENTS)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> list[Plan]:
    """The plans that were not read from a file: all the same one, as to make one takes seconds."""
    found: list[Plan] = []

    def remembered(**arguments: Any) -> Plan:
        found.append(plan)
        return plan

    monkeypatch.setattr(planning, "_plan_in_session", remembered)
    return found


@pytest.mark.parametrize("memory", ["4GiB", pytest.param(1, marks=pytest.mark.full)], ids=["fits", "does not fit"])
def test_a_plan_is_read_as_it_was(plans: Path, memory: Any) -> None:
    techniques = {"optimizer": "adamw", "state_bits": 8}
    first, second = (memkern.plan(config(), memory=memory, techniques=techniques, **ARGUMENTS) for _ in range(2))
    assert len([*plans.iterdir()]) == 1
    assert second is not first
    assert second == first
    assert str(second) == str(first)


def test_a_plan_is_made_once(made: list[Plan], plans: Path) -> None:
    for _ in range(2):
        memkern.plan(config(), memory="4GiB", **ARGUMENTS)
    assert len(made) == len([*plans.iterdir()]) == 1


def test_other_arguments_are_another_plan(made: list[Plan]) -> None:
    for changes in ({}, {"n_embd": 64}, {"activation_function": "relu"}):
        memkern.plan(config(**changes), memory="4GiB", **ARGUMENTS)
    for arguments in (
        {"memory": "5GiB"},
        {"memory": "4GiB", "batch_size": 2},
        {"memory": "4GiB", "clip": 1.0},
    ):
        memkern.plan(config(), **arguments, **ARGUMENTS)
    assert len(made) == 6


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"key": "other", "plan": {}}', None])
def test_a_file_that_is_no_plan_is_written_anew(made: list[Plan], plans: Path, text: str | None) -> None:
    memkern.plan(config(), memory="4GiB", **ARGUMENTS)
    [path] = plans.iterdir()
    good = path.read_text()
    path.write_text(json.dumps({**json.loads(good), "plan": {}}) if text is None else text)
    assert memkern.plan(config(), memory="4GiB", **ARGUMENTS) == made[0]
    assert len(made) == 2
    assert path.read_text() == good
    assert [*plans.iterdir()] == [path]


def test_without_the_cache(made: list[Plan], plans: Path) -> None:
    for _ in range(2):
        memkern.plan(config(), memory="4GiB", cache=False, **ARGUMENTS)
    assert len(made) == 2
    assert not plans.exists()


def test_a_module_has_no_file(made: list[Plan], plans: Path) -> None:
    memkern.plan(nn.Linear(8, 8), inputs=torch.ones(2, 8), memory="1GiB", device="cpu")
    assert not plans.exists()


def test_a_folder_that_cannot_be_written(made: list[Plan], plans: Path) -> None:
    plans.parent.mkdir(parents=True)
    plans.write_text("a file")
    memkern.plan(config(), memory="4GiB", **ARGUMENTS)
    assert len(made) == 1
