"""What runs kernels: C++ for each instruction set, CUDA's sources compiled by g++, Triton's interpreter, a GPU."""

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


def each(x: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same of all tensors in lists and tuples."""
    if isinstance(x, (list, tuple)):
        return [each(value, function) for value in x]
    return function(x) if isinstance(x, Tensor) else x


class Kernels:
    """The ops of a namespace. ``marks``: why they do not run here, and when tests run them."""

    sums = 1e-12
    """How far sums of squares may be off, whose order is free."""

    def __init__(self, name: str, ops: Any, marks: Sequence[Any] = (), **environment: str) -> None:
        self.name, self.ops, self.marks, self.environment = name, ops, marks, environment

    def takes(self, case: Case) -> bool:
        return True

    def to(self, x: Any) -> Any:
        """Arguments on the device."""
        return x

    def back(self, x: Any) -> Any:
        """The same on the CPU."""
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
        return self.sums == Kernels.sums or case.op not in LAYERWISE  # whose bits follow from norms

    def to(self, x: Any) -> Any:
        return each(x, self._to) if self.device == "cuda" else x

    def _to(self, x: Tensor) -> Tensor:
        """With all of its memory, at the same offset."""
        room = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(self.device)
        return room.as_strided(x.shape, x.stride(), x.storage_offset())

    def back(self, x: Any) -> Any:
        return each(x, Tensor.cpu) if self.device == "cuda" else x


REFERENCE = Kernels("reference", torch.ops.memkern_reference)
ISA = [Kernels(name, torch.ops.memkern, helpers.param(name).marks, MEMKERN_CPU_ISA=name) for name in ISAS]
BACKENDS = {each.name: each for each in (REFERENCE, *ISA, *map(Simt, ("fwd", "rev", "rand")), *map(Gpu, GPU))}


def outcomes(kernels: Kernels, case: Case) -> Iterator[list[Any]]:
    """Of each call: what it returns, and all its arguments after it."""
    for args in case.calls():
        there = kernels.to(args)
        for step in range(1, case.steps + 1):
            if step > 1:
                own = StepArgs(*args[-len(StepArgs._fields) :])
                new = gradients(own.params, step, [g.dtype for g in own.grads], case.gradient)
                there = with_gradients(there, kernels.to(new))
            yield kernels.back([kernels.call(case.op, *there), there])


@lru_cache(maxsize=2)
def expected(name: str) -> list[list[Any]]:
    """By the reference."""
    return [copy.deepcopy(found) for found in outcomes(REFERENCE, CASES[name])]


def compare(kernels: Kernels, case: Case) -> None:
    """Equal in every bit, but for sums of squares in fp64, and for what the case compares itself."""
    for i, (found, truth) in enumerate(zip(outcomes(kernels, case), expected(case.name), strict=True)):
        if case.near:
            case.near(found[0], truth[0], found[1])
        else:
            same(found, truth, f"{case.name}, call {i}", kernels.sums)


def same(found: Any, truth: Any, what: str, sums: float) -> None:
    if isinstance(truth, (list, tuple)):
        assert len(found) == len(truth)
        for i, (x, y) in enumerate(zip(found, truth, strict=True)):
            same(x, y, f"{what}[{i}]", sums)
    elif isinstance(truth, Tensor) and truth.dtype == torch.float64:
        torch.testing.assert_close(found, truth, rtol=sums, atol=0, equal_nan=True, msg=lambda m: f"{what}: {m}")
    else:
        assert_same(found, truth, what)
