"""The host's side of the Triton backend, with Triton's real launcher and a driver that only notes what is launched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memkern import backend
from tests.support.helpers import INTERPRETED

if INTERPRETED or (missing := backend.available()["triton"]):
    pytest.skip("in the interpreter" if INTERPRETED else str(missing), allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

import memkern.triton
from memkern.triton import adam, lion, tensor_table
from tests.gpu.triton_steps import MIXED, arguments


class NotingDriver:
    """Stands for the driver of a GPU of compute capability 9.0."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.utils = self

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *args: self.launched.append((metadata.name, args[0], *args[8:]))

    def load_binary(self, name: str, *_: Any) -> tuple[Any, ...]:
        return name, name, 32, 0, 1024

    def unload_module(self, *_: Any) -> None: ...

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[NotingDriver]:
    noting = NotingDriver()
    monkeypatch.setattr(driver, "_active", noting)

    def forget() -> None:  # what was compiled with one driver is of no use with another
        tensor_table._plans.clear()
        for kernel in (k for module in (adam, lion) for k in vars(module).values()):
            if isinstance(kernel, jit.JITFunction):
                kernel.device_caches.clear()

    forget()
    yield noting
    forget()


SQUARE = ("whole blocks", torch.float32, torch.float32)
SIZES = {
    "one": [(*SQUARE, "codes", 0)],
    "two": [(*SQUARE, "codes", 0), (*SQUARE, "fp32", 1)],
    "many": [(*SQUARE, ("codes", "fp32")[i % 2], i % 3 == 0) for i in range(100)],
}


@pytest.mark.parametrize(("tensors", "launches"), [("one", 2), ("two", 3), ("many", 3)])
def test_launches_do_not_grow_with_tensors(noted: NotingDriver, tensors: str, launches: int) -> None:
    memkern.triton.adam_step_(arguments("adam_step_", SIZES[tensors], codec=[0, 0]))
    assert len(noted.launched) == launches
    assert [name for name, *_ in noted.launched] == ["adam_prologue", *["adam_tiles"] * (launches - 1)]


def test_later_steps_launch_the_same(noted: NotingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments("lion_step_", MIXED[4:9])
    memkern.triton.lion_step_(args)
    first, noted.launched = noted.launched, []
    monkeypatch.setattr(jit.JITFunction, "run", None)  # Triton need not look for its kernels again
    args = args._replace(grads=[g.clone() for g in args.grads])
    args.lr[0].mul_(0.5)
    memkern.triton.lion_step_(args)
    assert len(first) > 2
    assert [[x for x in launch if not callable(x)] for launch in noted.launched] == [
        [x for x in launch if not callable(x)] for launch in first
    ]
