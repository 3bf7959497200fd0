"""The random programs of tests/saved/programs.py, compiled: torch's graphs without Inductor's code generation."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from tests.saved.programs import Program, gradients, in_codes, off
from tests.support.partitioned import backend

ROUNDING = 1e-5
"""Of Inductor's decompositions: its compiled graphs are off from eager torch by so much without memkern, too."""


class CompiledProgram(Program):
    """Runs that are not compiled note which results are scaled, for those that are."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
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


def outcome(seed: int) -> str:
    """What is wrong; "" for nothing. As of tests/saved/programs.py, beside torch's own compiled graph."""
    program = CompiledProgram(seed)
    torch.manual_seed(seed)
    plain = gradients(program, None)
    if not plain.isfinite().all():
        return ""
    expected, exact, coded = (gradients(program, bits) for bits in ("torch", "exact", 8))
    wrong = []
    if (by := off(exact, expected)) > max(ROUNDING, 8 * off(expected, plain)):
        wrong.append(f"exact off by {by:.1e}")
    wrong += in_codes(program, coded, expected, plain)
    return ", ".join(wrong)


def main(programs: int, first: int = 0) -> None:
    torch.set_num_threads(1)
    bad = 0
    for seed in range(first, first + programs):
        if wrong := outcome(seed):
            bad += 1
            print(seed, wrong, CompiledProgram(seed).names, flush=True)
        if seed % 50 == 49:
            print("until", seed, "wrong", bad, flush=True)
    print(f"{programs} programs from {first}: {bad} wrong")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
