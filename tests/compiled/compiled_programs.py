"""The random programs of tests/support/programs.py, compiled without Inductor's code generation, for test_compile.py.

A program runs uncompiled first, ``gradients(program, None)``: it records there which results are too large and are
scaled down. Its compiled runs scale down the same ones, as they cannot look at values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.partitioned import Traced, backend
from tests.support.programs import STEPS, Program, faults_in_codes, gradients, relative_error_allowing_zero

ROUNDING = 1e-5
"""The relative error that Inductor's decompositions make in a compiled graph without memkern, too."""


class CompiledProgram(Program):
    """A program that torch.compile takes. Its first run must be uncompiled, and fills ``scaled``."""

    def __init__(self, seed: int, steps: int = STEPS) -> None:
        super().__init__(seed)
        self.names, self.numbers, self.picks = self.names[:steps], self.numbers[:steps], self.picks[:steps]
        self.scaled: dict[int, bool] = {}
        self.compiled = False

    def in_range(self, y: Tensor, step: int) -> Tensor:
        if not self.compiled:
            self.scaled[step] = float(y.detach().abs().mean()) >= 1e3
        return y * 1e-3 if self.scaled[step] else y

    def run(self, bits: Any) -> Tensor:
        self.compiled = bits is not None
        if bits is None:
            return self.loss()
        torch._dynamo.reset()
        return torch.compile(self.loss, backend=backend(None if bits == "torch" else bits))()

    def traced(self) -> Traced:
        """The graph of the loss as a function of the program's tensors."""

        def loss(*tensors: Tensor) -> Tensor:
            attributes = self.__dict__.copy()
            remaining = iter(tensors)
            try:
                self.__dict__.update({name: next(remaining) for name in (*LEAVES, *CONSTANTS)}, compiled=True)
                self.weights, self.last = [next(remaining) for _ in self.weights], [next(remaining) for _ in self.last]
                return self.loss()
            finally:
                self.__dict__.update(attributes)

        leaves = [getattr(self, name).clone().requires_grad_() for name in LEAVES]
        constants = [getattr(self, name) for name in CONSTANTS]
        weights = [w.clone().requires_grad_() for w in self.weights]
        return Traced(loss, [*leaves, *constants, *weights, *self.last])


# Names of a program's tensors: those with a gradient, beside its weights, and those without.
LEAVES, CONSTANTS = ("x", "table", "scale", "shift"), ("index", "wide", "mask")


def traced_gradients(program: CompiledProgram) -> list[Tensor]:
    """The gradients by torch's own cut, by "exact" and by 8 bits, of one graph that is traced once."""
    traced = program.traced()
    gradients_by_cut = []
    for bits in (None, "exact", 8):
        pairs = zip(traced.inputs, traced.gradients(bits), strict=True)
        parts = [(torch.zeros_like(x) if g is None else g) for x, g in pairs if x.requires_grad]
        gradients_by_cut.append(torch.cat([g.flatten().double() for g in parts]))
    return gradients_by_cut


def compiled_gradients(program: CompiledProgram) -> list[Tensor]:
    """The gradients of :func:`traced_gradients` by torch.compile, which traces a graph for each of the three."""
    return [gradients(program, bits) for bits in ("torch", "exact", 8)]


def faults_of(seed: int, steps: int = STEPS) -> str:
    """The faults of a random program's gradients, compared with those of torch's own cut; "" for none.

    The error that torch's own cut makes beside the uncompiled run is allowed 8 times.
    """
    program = CompiledProgram(seed, steps)
    torch.manual_seed(seed)
    plain = gradients(program, None)
    if not plain.isfinite().all():
        return ""
    expected, exact, coded = traced_gradients(program)
    faults = []
    error = relative_error_allowing_zero(exact, expected)
    if error > max(ROUNDING, 8 * relative_error_allowing_zero(expected, plain)):
        faults.append(f"exact off by {error:.1e}")
    faults += faults_in_codes(program, coded, expected, plain)
    return ", ".join(faults)
