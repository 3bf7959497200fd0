"""The backends that run cases: C++ for each instruction set, CUDA's sources by g++, Triton's interpreter, a GPU."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import memkern._ops  # noqa: F401  (registers the ops)
from memkern.schemas import StepArgs
from tests.support import helpers
from tests.support.helpers import GPU, ISAS, assert_same
from tests.support.kernels.arguments import LAYERWISE, gradients, with_gradients
from tests.support.kernels.cases import CASES, Case
from tests.support.simt import build


def map_tensors(x: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """x with ``function`` of each tensor, in nested lists and tuples too; other values stay."""
    if isinstance(x, (list, tuple)):
        return [map_tensors(value, function) for value in x]
    return function(x) if isinstance(x, Tensor) else x


class Kernels:
    """The ops of a namespace. ``marks``: why they do not run here, and when tests run them."""

    sums = 1e-12
    """The relative error that sums of squares may have, as each backend adds in an order of its own."""

    def __init__(self, name: str, ops: Any, marks: Sequence[Any] = (), **environment: str) -> None:
        self.name, self.ops, self.marks, self.environment = name, ops, marks, environment

    def takes(self, case: Case) -> bool:
        return True

    def to(self, x: Any) -> Any:
        """Arguments on the device."""
        return x

    def back(self, x: Any) -> Any:
        """Arguments or results on the CPU."""
        return x

    def call(self, op: str, *args: Any) -> Any:
        with mock.patch.dict("os.environ", self.environment) if self.environment else contextlib.nullcontext():
            return getattr(self.ops, op)(*args)


class Simt(Kernels):
    """csrc/cuda as a CPU program, whose threads run in one of three orders."""

    def __init__(self, order: str) -> None:
        missing = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
        super().__init__(f"simt-{order}", torch.ops.memkern_simt, [missing, pytest.mark.emulated], SIMT_ORDER=order)

    def takes(self, case: Case) -> bool:
        return case.orders or self.name == "simt-fwd"


class Gpu(Kernels):
    """The ops of a GPU; Triton's in its interpreter too."""

    def __init__(self, name: str) -> None:
        namespace = torch.ops.memkern if name == "cuda" else torch.ops.memkern_triton
        super().__init__(name, namespace, helpers.param(name).marks)
        self.device = helpers.device_of(name)
        if helpers.why_not(name) is None and helpers.slow_fp64(name):
            self.sums = 2e-7

    def takes(self, case: Case) -> bool:
        if self.device == "cpu":
            return case.interpreted or case.emulated
        if case.near:  # tests/gpu/test_activation.py compares with torch's own on the same GPU
            return False
        return self.sums == Kernels.sums or case.op not in LAYERWISE  # their bits follow from norms

    def to(self, x: Any) -> Any:
        return map_tensors(x, self._to) if self.device == "cuda" else x

    def _to(self, x: Tensor) -> Tensor:
        """A copy of x with all of its storage, at the same offset."""
        room = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(self.device)
        return room.as_strided(x.shape, x.stride(), x.storage_offset())

    def back(self, x: Any) -> Any:
        return map_tensors(x, Tensor.cpu) if self.device == "cuda" else x


REFERENCE = Kernels("reference", torch.ops.memkern_reference)
ISA = [Kernels(name, torch.ops.memkern, helpers.param(name).marks, MEMKERN_CPU_ISA=name) for name in ISAS]
BACKENDS = {kernels.name: kernels for kernels in (REFERENCE, *ISA, *map(Simt, ("fwd", "rev", "rand")), *map(Gpu, GPU))}


def run_calls(kernels: Kernels, case: Case) -> Iterator[list[Any]]:
    """Runs the case's calls and yields, of each, [what it returned, all its arguments as they are after it]."""
    for args in case.calls():
        device_args = kernels.to(args)
        for step in range(1, case.steps + 1):
            if step > 1:
                step_args = StepArgs(*args[-len(StepArgs._fields) :])
                new = gradients(step_args.params, step, [g.dtype for g in step_args.grads], case.gradient)
                device_args = with_gradients(device_args, kernels.to(new))
            yield kernels.back([kernels.call(case.op, *device_args), device_args])


@lru_cache(maxsize=2)
def reference_results(name: str) -> list[list[Any]]:
    """What :func:`run_calls` yields of a case with the reference."""
    return [copy.deepcopy(result) for result in run_calls(REFERENCE, CASES[name])]


def compare(kernels: Kernels, case: Case) -> None:
    """Asserts the reference's bits, but for sums of squares, and for results that the case compares itself."""
    for i, (actual, expected) in enumerate(zip(run_calls(kernels, case), reference_results(case.name), strict=True)):
        if case.near:
            case.near(actual[0], expected[0], actual[1])
        else:
            assert_same_but_sums(actual, expected, f"{case.name}, call {i}", kernels.sums)


def assert_same_but_sums(actual: Any, expected: Any, what: str, sums: float) -> None:
    """Equal in every bit, but for fp64 tensors, which are sums of squares: relative errors of up to ``sums``."""
    if isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for i, (x, y) in enumerate(zip(actual, expected, strict=True)):
            assert_same_but_sums(x, y, f"{what}[{i}]", sums)
    elif isinstance(expected, Tensor) and expected.dtype == torch.float64:
        torch.testing.assert_close(actual, expected, rtol=sums, atol=0, equal_nan=True, msg=lambda m: f"{what}: {m}")
    else:
        assert_same(actual, expected, what)
