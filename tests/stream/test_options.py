"""The technique weights_on_host: its values, what it excludes, and its flag."""

from __future__ import annotations

from typing import Any

import pytest

from memkern import OptionError, Techniques


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights_on_host": "model"}, "weights_on_host: 'model' given; allowed: None, 'layers'"),
        ({"offload": "cpu"}, "offload: 'cpu' given; allowed: None with weights_on_host='layers'"),
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
