"""The technique weights_on_host: its values, what it excludes, and its flag."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from memkern import OptionError, Techniques
from memkern.train.arguments import add_arguments, given_options
from memkern.train.cli import weights_of_evaluation


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights_on_host": "model"}, "weights_on_host: 'model' given; allowed: None, 'layers'"),
        ({"offload": True}, "offload: True given; allowed: False with weights_on_host='layers'"),
        ({"precision": "bf16-mixed"}, "precision: 'bf16-mixed' given; allowed: 'fp32' and 'bf16' with"),
        ({"precision": "fp16-mixed"}, "precision: 'fp16-mixed' given"),
    ],
    ids=str,
)
def test_what_excludes_it(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as error:
        Techniques(**{"weights_on_host": "layers", **changes})
    assert message in str(error.value)


def test_it_is_named_among_the_techniques() -> None:
    assert "weights and optimizer on the host" in str(Techniques(weights_on_host="layers"))
    assert "host" not in str(Techniques())


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def test_the_flag_is_the_technique_of_a_run_and_the_place_of_an_evaluation() -> None:
    args = parsed("--weights-on-host", "layers")
    assert weights_of_evaluation(args) is None
    assert given_options(args) == {"weights_on_host": "layers"}
    for place in ("layers", "model"):
        args = parsed("--weights-on-host", place, "--evaluate")
        assert weights_of_evaluation(args) == place
        assert given_options(args) == {}  # the model is built as it is
    with pytest.raises(OptionError, match="'model' given; allowed: none, layers, and with --evaluate model"):
        weights_of_evaluation(parsed("--weights-on-host", "model"))
    with pytest.raises(SystemExit):
        parsed("--weights-on-host", "disk")
