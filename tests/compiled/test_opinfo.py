"""Every operation of torch on its OpInfo samples, compiled: "exact" has its gradients, and 8 bits are near them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compiled import opinfo

QUICK = (
    "mm", "baddbmm", "softmax", "log_softmax", "sigmoid", "tanh", "mul", "div.no_rounding_mode", "pow", "cat",
    "index_select",
    "nn.functional.conv2d", "nn.functional.layer_norm", "nn.functional.group_norm", "nn.functional.silu",
    "nn.functional.hardswish", "nn.functional.mish", "nn.functional.max_pool2d", "nn.functional.cross_entropy",
    "nn.functional.scaled_dot_product_attention",
)  # fmt: skip
PARTS = 24  # of all operations; a test takes every 24th one


@pytest.fixture(autouse=True)
def _all_coded() -> Iterator[None]:
    first, second = opinfo.all_coded()
    with first, second:
        yield


@pytest.mark.parametrize("name", QUICK)
def test_the_first_sample_has_no_faults(name: str) -> None:
    assert [*opinfo.failures(name)] == []


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=pytest.mark.long if part else pytest.mark.full) for part in range(PARTS)]
)
@pytest.mark.filterwarnings("ignore")
def test_the_first_samples_of_all_operations_have_no_faults(part: int) -> None:
    names = sorted(opinfo.infos())[part::PARTS]
    assert [wrong for name in names for wrong in opinfo.failures(name)] == []
