"""A pytest plugin: with TRITON_INTERPRET=1 only tests marked ``interpreted`` run, with the values that the mark names.

``@interpreted(layout=("odd",))``: the test also runs on Triton's interpreter, with these values of ``layout`` and all
values of other parameters. The interpreter takes a millisecond for what a GPU does in a microsecond.
"""

from __future__ import annotations

import os
from collections.abc import Container
from typing import Any

import pytest

ON_TRITON = {"backend": "triton", "namespace": "memkern_triton"}


def interpreted(**values: Container[Any]) -> pytest.MarkDecorator:
    return pytest.mark.interpreted(values)


def _runs_on_the_interpreter(item: pytest.Function) -> bool:
    mark = item.get_closest_marker("interpreted")
    if mark is None:
        return False
    params: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    on_triton = all(params.get(name, value) == value for name, value in ON_TRITON.items())
    return on_triton and all(params[name] in values for name, values in mark.args[0].items())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        left_out = [item for item in items if not _runs_on_the_interpreter(item)]
        items[:] = [item for item in items if _runs_on_the_interpreter(item)]
        config.hook.pytest_deselected(items=left_out)
