"""The plan's roofline line: operations per byte of the passes, and what the device has."""

import pytest

from memkern.options import Techniques
from memkern.planner.hardware import DEFAULTS, intensity, passes_of, rate_of
from memkern.planner.outcome import _roofline
from memkern.planner.prediction import Prediction

SIZES = {"parameters": 1000, "tokens": 64, "weight_bytes": 4000, "saved": 8000, "attention": 500.0}


def test_operations_over_the_least_bytes() -> None:
    # 3 passes of 64 tokens with 2 * 1000 + 500 operations; weights read 3 times, gradients written, 2 * saved.
    assert intensity(Techniques(), **SIZES) == 3 * 64 * 2500 / (4 * 4000 + 2 * 8000)
    checkpoints = Techniques(checkpointing="blocks")
    assert passes_of(checkpoints) == 4
    assert intensity(checkpoints, **SIZES | {"saved": 0}) == 4 * 64 * 2500 / (5 * 4000)
    assert passes_of(Techniques(linear_share=0.2)) == pytest.approx(2.2)
    twice = intensity(Techniques(micro_batch=2), **SIZES | {"saved": 16000})
    assert twice == 2 * 3 * 64 * 2500 / (4 * 4000 + 2 * 16000)


@pytest.mark.parametrize(("found", "limit"), [(500.0, "arithmetic limits them"), (2.0, "memory limits them")])
def test_the_line_names_what_limits(found: float, limit: str) -> None:
    hardware = DEFAULTS["cuda"]
    balance = rate_of(hardware, Techniques(precision="bf16")) / hardware.bandwidth
    p = Prediction(Techniques(), {}, {}, 0, 1.0, intensity=found, balance=balance)
    line = _roofline(p)
    assert f"have {found:,.0f} operations" in line
    assert "this device 69 for each" in line
    assert limit in line
