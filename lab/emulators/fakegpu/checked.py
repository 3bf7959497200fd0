"""Runs the cases with every access checked: ``python -m lab.emulators.fakegpu.checked FOLDER ORDER [CASE ...]``.

The checks are those of compute-sanitizer (lab/emulators/ptx_checks.py), and ops may access the bytes of their own
tensors alone. Prints a line of JSON for each case, then one with the kernels that no case ran. ORDER is that of warps,
or "planted": then the faults of PLANTED are put into the kernels, and each must be found.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.emulators.fakegpu import Machine
from lab.emulators.fakegpu.cases import all_cases

# Cases left out: in the first a kernel reads an earlier table in torch's memory, which no argument names; the second
# compares machine.ops with torch's, and here they are wrapped.
LEFT_OUT = ("a table where CUDA has no memory left", "a table larger than a launch carries")
# Names of cases.
ADAM, NORM, BITS = "adam_step_: few, bfloat16", "grad_norm_: few, scale 1024.0", "few_bit_encode: odd"
SAMPLE = ("adam_step_: few, float32", "lamb_step_: few, bfloat16", BITS, NORM)


def gelu_of_all_bits(machine: Machine) -> None:
    """Compares the codes of GELU in 1 to 4 bits; lab/tests/test_gpu_ptx.py compares its results."""
    import torch

    from memkern import reference
    from memkern.fewbit.tables import LEVELS
    from memkern.quant.codec import ACTIVATIONS
    from tests.support.activation_helpers import values
    from tests.support.activation_kernels import every_bf16
    from tests.support.helpers import assert_same

    for name in ("gelu", "gelu_tanh"):
        for bits in (1, 2, 3, 4):
            for x in (values("odd", torch.float32), values("odd", torch.float16), every_bf16(8)):
                table = LEVELS[name, bits][2:]
                _, codes = machine.ops.few_bit_forward(machine.to_device(x), ACTIVATIONS[name], 0.0, 0.0, bits, *table)
                assert_same(machine.to_host(codes), reference.few_bit_encode(x, bits, *table), f"{name}, {bits}")


class ExactOps:
    """The ops, each of which may access its arguments' bytes, its results and its table alone."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.real = machine, machine.ops

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.machine.restrict_to(args)
            try:
                return getattr(self.real, name)(*args)
            finally:
                self.machine.restrict_to(None)

        return call


def fault_of(machine: Machine, case: Callable[[Machine], None]) -> Exception | None:
    """Runs a case; returns the error of the checks, else the case's own, else None."""
    machine.launches.clear()
    machine.errors.clear()
    machine.runs = True
    machine.runtime.fakegpu_out_of_memory(0)
    machine.runtime.fakegpu_allocate_to_pool(0)
    for device in (0, 1):
        machine.use_stream(None, device)
    try:
        case(machine)
    except Exception as error:
        return machine.errors[0] if machine.errors else error
    return machine.errors[0] if machine.errors else None


# ---- planted faults


def edit_of(kernel: str, pattern: str, new: str, index: int | None = 0) -> Callable[[str], str]:
    """A change of PTX: replaces match number ``index``, or with None each, in the kernels of this name."""

    def edit(text: str) -> str:
        starts = [m.start() for m in re.finditer(r"\.entry\s", text)]
        parts = [text[: starts[0]], *(text[i:j] for i, j in itertools.pairwise([*starts, len(text)]))]
        return "".join(change(part) if re.match(rf"\.entry\s+\S*\d{kernel}", part) else part for part in parts)

    def change(part: str) -> str:
        if index is None:
            return re.sub(pattern, new, part)
        matches = [*re.finditer(pattern, part)]
        if not matches:
            return part
        m = matches[index]
        return part[: m.start()] + m.expand(new) + part[m.end() :]

    return edit


# PTX, and patterns of it. FEW has threads 0 to 6 do ACTION.
FEW = "{ .reg .pred %few; .reg .b32 %me; mov.u32 %me, %tid.x; setp.lt.u32 %few, %me, 7; @%few ACTION; }\n"
BARRIER = r"bar\.sync\s+0;"
SHUFFLE = r"shfl\.sync\.bfly"
WHOLE_VECTOR = r"(ld\.global\S*\.v4\S*\s+[^;]*\[%\w+)(\+\d+)?\]"
STORED = r"(st\.global\S*\s+\[%\w+)(\+\d+)?\]"
# Fault: a change of the PTX, or the kernel that is left out; the case that must find it; the error's class and words.
PLANTED: dict[str, tuple[Callable[[str], str] | str, str, str, str]] = {
    "race: no barrier before the sums of warps are read": (
        *(edit_of("norm_tiles", BARRIER, "", 1), NORM, "RaceError", ""),
    ),
    "race: no barrier before the sums are written again": (
        *(edit_of("norm_total", BARRIER, "", 1), NORM, "RaceError", ""),
    ),
    "race: all threads store one block's sum": (
        *(
            edit_of("norm_tiles", r"@%p\d+ bra\s+\S+;(?=[^@]*st\.global\.f64)", ""),
            NORM,
            "RaceError",
            "",
        ),
    ),
    "init: no table": ("write_table", ADAM, "InitError", "nobody wrote"),
    "init: no prologue": ("adam_prologue", ADAM, "InitError", "nobody wrote"),
    "init: no partial sums": ("norm_tiles", NORM, "InitError", "nobody wrote"),
    "sync: a barrier for seven threads": (
        *(edit_of("norm_tiles", BARRIER, FEW.replace("ACTION", "bar.sync 0") + r"\g<0>"), NORM),
        *("PtxError", "barrier"),
    ),
    "sync: seven threads return before a barrier": (
        *(edit_of("norm_tiles", BARRIER, FEW.replace("ACTION", "ret") + r"\g<0>"), NORM),
        *("PtxError", "barrier"),
    ),
    "sync: seven threads return before a shuffle": (
        *(edit_of("adam_tiles", SHUFFLE, FEW.replace("ACTION", "ret") + r"\g<0>", None), ADAM),
        *("PtxError", "lanes of a warp"),
    ),
    "memory: a gradient's load one vector on": (
        *(
            edit_of("norm_tiles", WHOLE_VECTOR, r"\1+32]", None),
            NORM,
            "PtxError",
            "outside of all buffers",
        ),
    ),
    "memory: a code's store one vector on": (
        *(edit_of("encode_vectors", STORED, r"\1+64]"), BITS, "PtxError", "outside of all buffers"),
    ),
    "memory: the norm in the next word": (
        *(edit_of("norm_total", STORED, r"\1+8]"), NORM, "PtxError", "outside of all buffers"),
    ),
    **{
        f"copy: {fault}": (
            *(edit_of("adam_tiles", rf"cp\.async\.{pattern};", new, None), ADAM),
            *("PtxError", "a copy is on its way to"),
        )
        for fault, pattern, new in (
            ("not waited for", r"wait_group\s+\d+", ""),
            ("not committed", "commit_group", ""),
            ("waited for one turn too late", r"wait_group\s+2", "cp.async.wait_group 3;"),
        )
    },
}


def find_planted(machine: Machine, folder: Path, name: str, case: Callable[[Machine], None]) -> str:
    """Plants a fault and runs a case; "" where the fault was found, else a message."""
    from lab.emulators.ptx_emulator import Module

    change, _, kind, words = PLANTED[name]
    assert machine.checks
    machine.checks.spoil = kind != "RaceError"  # else races of idle lanes (test_cuda_checks.py) raise first
    real_module, real_run = machine.module, machine.run
    if isinstance(change, str):
        machine.run = lambda launch: None if change in launch.kernel else real_run(launch)  # type: ignore[method-assign]
    else:
        machine.module = Module(change((folder / "ops.ptx").read_text()))
    try:
        error = fault_of(machine, case)
    finally:
        machine.module, machine.run = real_module, real_run  # type: ignore[method-assign]
    return "" if type(error).__name__ == kind and words in str(error) else f"not found: {error!r}"


def main() -> int:
    folder, order, chosen = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    machine = Machine(folder)
    from lab.emulators.ptx_checks import Checks  # and torch, which comes after the machine

    machine.checks = Checks(order if order != "planted" else "together", spoil=True)
    machine.ops = ExactOps(machine)
    cases, failed = {**all_cases(), "gelu of all bits": gelu_of_all_bits}, False
    watched = [name for name in cases if name not in LEFT_OUT]
    for name in chosen or (PLANTED if order == "planted" else watched):
        if order == "planted":
            error = find_planted(machine, folder, name, cases[PLANTED[name][1]])
        else:
            fault = fault_of(machine, cases[name])
            error = f"{type(fault).__name__}: {fault}" if fault else ""
        failed |= bool(error)
        print(json.dumps({"case": name, "error": error}), flush=True)
    not_run = sorted({*machine.module.kernels} - {*machine.noted})
    print(json.dumps({"not run": not_run, "raced": sorted(machine.checks.raced)}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
