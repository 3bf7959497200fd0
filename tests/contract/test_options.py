"""An option has one name, one set of values and one error in the command plan, the command train and Python."""

import argparse
import ast
import dataclasses
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memkern
from memkern.__main__ import Parser
from memkern.planner import cli as plan_cli
from memkern.techniques import options
from memkern.techniques.flags import add_flags, flag
from memkern.techniques.options import OptionError, Range, Techniques
from memkern.train import TrainConfig
from memkern.train import cli as train_cli
from memkern.train.cli import given_options
from tests.support.train_helpers import flag_with_value

PACKAGE = Path(memkern.__file__).parent
NAMES = [field.name for field in dataclasses.fields(Techniques)]
ON_HOST, TORCH_ADAM = {"weights_on_host": "layers"}, {"optimizer": "torch-adam"}


def parser_of(command: Any) -> argparse.ArgumentParser:
    parser = Parser()
    command.add_arguments(parser)
    return parser


def flags_of(parser: argparse.ArgumentParser) -> dict[str, tuple[Any, ...]]:
    """For each flag: what it takes, and what --help says without the default."""
    return {
        a.dest: (a.option_strings, a.metavar, a.nargs, (a.help or "").split(" (default")[0]) for a in parser._actions
    }


def test_plan_and_train_have_the_same_flags_for_the_techniques() -> None:
    plan, train = (flags_of(parser_of(command)) for command in (plan_cli, train_cli))
    assert {*NAMES} < plan.keys() & train.keys()
    for name in NAMES:
        assert plan[name] == train[name]
        assert plan[name][0][0] == flag(name)
    for name in ("batch_size", "clip"):
        assert plan[name][:2] == train[name][:2]
    shown = [" ".join(parser_of(command).format_help().split()) for command in (plan_cli, train_cli)]
    for text in ("--precision {fp32,bf16-mixed,fp16-mixed,bf16}", "--saved-bits {none,exact,8}", "--linear-share X"):
        assert all(text in each for each in shown)


@pytest.mark.parametrize(
    ("typed_flags", "options"),
    [
        ("", {}),
        ("--batch-size 8", {"micro_batch": 8, "accumulation": 1}),
        ("--batch-size 8 --accumulation 4", {"micro_batch": 2, "accumulation": 4}),
        ("--batch-size 8 --micro-batch 2", {"micro_batch": 2, "accumulation": 4}),
        ("--micro-batch 2 --accumulation 3", {"micro_batch": 2, "accumulation": 3}),
        ("--optimizer torch-sgd", {"optimizer": "torch-sgd", "state_bits": 32}),
    ],
)
def test_flags_become_options_of_train(typed_flags: str, options: dict[str, Any]) -> None:
    assert given_options(parser_of(train_cli).parse_args(typed_flags.split())) == options


@pytest.mark.parametrize(
    ("typed_flags", "message"),
    [
        ("--batch-size 6 --micro-batch 4", "6 given; allowed: --micro-batch times --accumulation, such as 4 times 1"),
        ("--batch-size 2 --accumulation 4", "2 given; allowed: .* such as 1 times 4"),
        ("--batch-size 9 --micro-batch 2 --accumulation 4", "9 given; allowed: .* such as 2 times 4"),
        ("--batch-size 0", "0 given; allowed: a whole number, 1 or more"),
    ],
)
def test_a_batch_that_is_no_product_of_its_micro_batches_is_refused(typed_flags: str, message: str) -> None:
    with pytest.raises(OptionError, match=f"^batch_size: {message}$"):
        given_options(parser_of(train_cli).parse_args(typed_flags.split()))


def test_every_field_of_train_config_is_a_flag() -> None:
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    assert fields | {*NAMES} <= flags_of(parser_of(train_cli)).keys()


def test_every_choice_can_be_typed() -> None:
    parser = Parser()
    add_flags(parser, Techniques, dataclasses.fields(Techniques))
    assert vars(parser.parse_args([])) == {}  # what is not given is absent
    for field in dataclasses.fields(Techniques):
        allowed = field.metadata["allowed"]
        numbers = (3, None) if field.default is None else (3,)
        for value in numbers if isinstance(allowed, Range) else allowed:
            parsed = vars(parser.parse_args(flag_with_value(field.name, value).split()))
            assert parsed == {field.name: value}
            assert type(parsed[field.name]) in (type(value), float)


def literals(tree: ast.AST) -> Iterator[frozenset[Any]]:
    """The tuples, lists and sets of constants in a module."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            try:
                yield frozenset(ast.literal_eval(node))
            except (ValueError, TypeError):  # not of constants, or of lists
                continue


def test_no_list_of_choices_is_written_twice() -> None:
    choices = {
        name: frozenset(value)
        for name, value in vars(options).items()
        if name.isupper() and isinstance(value, tuple) and len(value) > 1
    }
    assert choices.keys() >= {"OPTIMIZERS", "PRECISIONS", "MASTER_WEIGHTS", "SAVED_BITS", "CHECKPOINTING"}
    empty = {None, "none", "off"}
    names = {values - empty: name for name, values in choices.items()}
    places_by_name: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for values in literals(ast.parse(path.read_text())):
            name = names.get(values - empty)
            if name:
                places_by_name.setdefault(name, []).append(path.relative_to(PACKAGE).as_posix())
    assert {name: places for name, places in places_by_name.items() if places != ["techniques/options.py"]} == {}


def test_the_error_has_its_parts_and_can_be_pickled() -> None:
    with pytest.raises(ValueError, match="saved_bits: 4 given; allowed: None, 'exact', 8") as raised:
        Techniques(saved_bits=4)
    error = pickle.loads(pickle.dumps(raised.value))
    assert isinstance(error, OptionError)
    assert (error.name, error.message) == ("saved_bits", "4 given; allowed: None, 'exact', 8")
    assert str(error) == str(raised.value)


def test_a_copy_of_a_run_takes_techniques_by_name() -> None:
    config = TrainConfig().replace(steps=7, state_bits=32, checkpointing="blocks")
    assert (config.steps, config.state_bits, config.checkpointing) == (7, 32, "blocks")
    assert TrainConfig(**dataclasses.asdict(config)) == config
    with pytest.raises(TypeError, match="bits"):
        config.replace(bits=8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "fp16"}, "precision: 'fp16' given; allowed: 'fp32', 'bf16-mixed', 'fp16-mixed', 'bf16'"),
        ({"state_bits": 8.0}, "state_bits: 8.0 given"),
        ({"state_bits": (8, 4)}, "state_bits: (8, 4) given; allowed: 32, 8"),
        ({"master_weights": "bf16+8"}, "master_weights: 'bf16+8' given; allowed: None, unless precision is 'bf16'"),
        ({"optimizer": "torch-adamw", "state_bits": 8}, "state_bits: 8 given; allowed: 32 with torch-adamw"),
        ({"step_in_backward": True, "accumulation": 2}, "step_in_backward: True given"),
        ({"micro_batch": 0}, "micro_batch: 0 given; allowed: a whole number, 1 or more"),
        ({"linear_share": 1.5}, "linear_share: 1.5 given; allowed: None or a number above 0, at most 1"),
        ({"linear_share": True}, "linear_share: True given"),
        ({"precision": "fp16-mixed", "offload": "cpu"}, "precision: 'fp16-mixed' given"),
        ({"offload": True}, "offload: True given; allowed: None, 'device', 'cpu'"),
        ({"offload": "device", **TORCH_ADAM}, "offload: 'device' given; allowed: None and 'cpu' with torch-adam"),
        ({"precision": "bf16", "master_weights": "bf16+16", **TORCH_ADAM}, "allowed: None with torch-adam"),
        ({"memory_budget": 0.5}, "memory_budget: 0.5 given; allowed: None without compile"),
        ({"compile": True, "memory_budget": 1.5}, "memory_budget: 1.5 given; allowed: None or a number above 0"),
        ({"saved_bits": 8}, "saved_bits: 8 given; allowed: None without compile"),
        ({"compile": "blocks"}, "compile: 'blocks' given; allowed: False, True"),
        ({"checkpoint_bits": 8}, "checkpoint_bits: 8 given; allowed: None without checkpointing"),
        ({"checkpoint_every": 2}, "checkpoint_every: 2 given; allowed: 1 without checkpointing"),
        ({"weights_on_host": "model"}, "weights_on_host: 'model' given; allowed: None, 'layers'"),
        ({"offload": "cpu", **ON_HOST}, "offload: 'cpu' given; allowed: None with weights_on_host='layers'"),
        ({"precision": "bf16-mixed", **ON_HOST}, "precision: 'bf16-mixed' given; allowed: 'fp32' and 'bf16' with"),
        ({"precision": "fp16-mixed", **ON_HOST}, "precision: 'fp16-mixed' given"),
    ],
    ids=str,
)
def test_bad_techniques_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as error:
        Techniques(**changes)
    assert message in str(error.value)
