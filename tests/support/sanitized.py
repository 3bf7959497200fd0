"""Drives every C++ op over awkward tensors; tests/build/test_sanitizers.py runs it with an instrumented build.

It exits with 0 where nothing is found.

- ``python sanitized.py``: every case of tests/support/kernels; its tensors are allocations of their own.
- ``python sanitized.py guards [OP ...]``: tensors of every size and stride pattern.
- ``python sanitized.py loops``: random training loops for MEMKERN_FUZZ_SECONDS.
- ``python sanitized.py overflow ISA``: reads past the end of a tensor on purpose; the sanitizer must stop it.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

import torch

from memkern import backend
from memkern.schemas import STEP_OPS
from tests.support import guarded
from tests.support.kernels.backends import BACKENDS, compare
from tests.support.kernels.cases import CASES
from tests.support.kernels.refused import FREED, REFUSED

ISAS = ("generic", "avx2", "avx512")


def check_cases() -> None:
    """Every case of tests/support/kernels, tensors of few sizes and stride patterns, and arguments that are refused."""
    torch.set_num_threads(2)
    for case in CASES.values():
        for isa in ISAS:
            compare(BACKENDS[isa], case)
    for isa in ISAS:
        os.environ["MEMKERN_CPU_ISA"] = isa
        guarded.check(STEP_OPS, max_size=64, draws=12)
    for bad in (*REFUSED.values(), *FREED.values()):
        try:
            BACKENDS[ISAS[0]].call(bad.op, *bad.args())
        except (RuntimeError, ValueError, TypeError):
            continue
        raise AssertionError("a bad argument was accepted")


def check_guards(names: list[str]) -> None:
    """Every size up to 4,096, and more of the patterns."""
    for isa in ISAS:
        os.environ["MEMKERN_CPU_ISA"] = isa
        guarded.check(names or STEP_OPS, max_size=4096, draws=250)


def check_loops() -> None:
    """Training loops of random steps and edits. Inductor would start a compiler with the sanitizers' libraries."""
    from tests.support.run_loops import run_for
    from tests.support.training_exports import ExportedLoop

    class Compiled(ExportedLoop):
        compilers = ("", "", "aot_eager")

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable()
    run_for(float(os.environ.get("MEMKERN_FUZZ_SECONDS", "1200")), Compiled)
    assert Compiled.compiled_calls > 0


def overflow(isa: str) -> None:
    os.environ["MEMKERN_CPU_ISA"] = isa
    x = torch.zeros(1024)
    x.untyped_storage().resize_(4 * 960)  # x still claims 1024 elements
    torch.ops.memkern.quantize_blockwise(x, 0, True, 128)


if __name__ == "__main__":
    reason = backend.load_library()
    assert reason is None, reason
    command, *arguments = sys.argv[1:] or [""]
    if command == "overflow":
        overflow(arguments[0])
    elif command == "guards":
        check_guards(arguments)
    elif command == "loops":
        check_loops()
    else:
        check_cases()
    print("nothing found")
