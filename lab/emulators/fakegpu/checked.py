"""The cases of the made-up devices with every access watched: ``python -m lab.emulators.fakegpu.checked FOLDER ORDER``.

What compute-sanitizer does on a GPU (lab/emulators/ptx_checks.py): ops get the memory of their own tensors alone, to
the byte. A line of JSON for each case, then one with the kernels that no case ran. ``CASE ...``: these alone. With
"planted" in place of ORDER: the faults below, each of which must be found.
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

# Left out: a table that is torch's and was there before, as no argument tells that it is one; and a case that compares
# the ops themselves, which are others here.
LEFT_OUT = ("a table where CUDA has no memory left", "a table larger than a launch carries")
ADAM, NORM, BITS = "adam_step_: few, bfloat16", "grad_norm_: few, scale 1024.0", "few_bit_encode: odd"
SAMPLE = ("adam_step_: few, float32", "lamb_step_: few, bfloat16", BITS, NORM)


def gelu_of_all_bits(machine: Machine) -> None:
    """The codes; lab/tests/test_gpu_ptx.py compares the results."""
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
    """The ops, each of which may touch its arguments' bytes, its results and its table."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.real = machine, machine.ops

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.machine.only(args)
            try:
                return getattr(self.real, name)(*args)
            finally:
                self.machine.only(None)

        return call


def fault_of(machine: Machine, case: Callable[[Machine], None]) -> Exception | None:
    """What the checks found, else what the case itself says."""
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


def edited(kernel: str, pattern: str, new: str, which: int | None = 0) -> Callable[[str], str]:
    """Replaces what matches for the (which + 1)-th time, or each match, in each kernel whose name holds this."""

    def edit(text: str) -> str:
        starts = [m.start() for m in re.finditer(r"\.entry\s", text)]
        parts = [text[: starts[0]], *(text[i:j] for i, j in itertools.pairwise([*starts, len(text)]))]
        return "".join(change(part) if re.match(rf"\.entry\s+\S*\d{kernel}", part) else part for part in parts)

    def change(part: str) -> str:
        if which is None:
            return re.sub(pattern, new, part)
        found = [*re.finditer(pattern, part)]
        if not found:
            return part
        m = found[which]
        return part[: m.start()] + m.expand(new) + part[m.end() :]

    return edit


FEW = "{ .reg .pred %few; .reg .b32 %me; mov.u32 %me, %tid.x; setp.lt.u32 %few, %me, 7; @%few ACTION; }\n"
BARRIER = r"bar\.sync\s+0;"
SHUFFLE = r"shfl\.sync\.bfly"
WHOLE_VECTOR = r"(ld\.global\S*\.v4\S*\s+[^;]*\[%\w+)(\+\d+)?\]"
STORED = r"(st\.global\S*\s+\[%\w+)(\+\d+)?\]"
# What is left out, or changed in the PTX; a case in which it must be found; as what.
PLANTED: dict[str, tuple[Callable[[str], str] | str, str, str, str]] = {
    "race: no barrier before the sums of warps are read": (
        *(edited("norm_tiles", BARRIER, "", 1), NORM, "RaceError", ""),
    ),
    "race: no barrier before the sums are written again": (
        *(edited("norm_total", BARRIER, "", 1), NORM, "RaceError", ""),
    ),
    "race: all threads store one block's sum": (
        *(
            edited("norm_tiles", r"@%p\d+ bra\s+\S+;(?=[^@]*st\.global\.f64)", ""),
            NORM,
            "RaceError",
            "",
        ),
    ),
    "init: no table": ("write_table", ADAM, "InitError", "nobody wrote"),
    "init: no prologue": ("adam_prologue", ADAM, "InitError", "nobody wrote"),
    "init: no partial sums": ("norm_tiles", NORM, "InitError", "nobody wrote"),
    "sync: a barrier for seven threads": (
        *(edited("norm_tiles", BARRIER, FEW.replace("ACTION", "bar.sync 0") + r"\g<0>"), NORM),
        *("PtxError", "barrier"),
    ),
    "sync: seven threads return before a barrier": (
        *(edited("norm_tiles", BARRIER, FEW.replace("ACTION", "ret") + r"\g<0>"), NORM),
        *("PtxError", "barrier"),
    ),
    "sync: seven threads return before a shuffle": (
        *(edited("adam_tiles", SHUFFLE, FEW.replace("ACTION", "ret") + r"\g<0>", None), ADAM),
        *("PtxError", "lanes of a warp"),
    ),
    "memory: a gradient's load one vector on": (
        *(
            edited("norm_tiles", WHOLE_VECTOR, r"\1+32]", None),
            NORM,
            "PtxError",
            "outside of all buffers",
        ),
    ),
    "memory: a code's store one vector on": (
        *(edited("encode_vectors", STORED, r"\1+64]"), BITS, "PtxError", "outside of all buffers"),
    ),
    "memory: the norm in the next word": (
        *(edited("norm_total", STORED, r"\1+8]"), NORM, "PtxError", "outside of all buffers"),
    ),
    **{
        f"copy: {what}": (
            *(edited("adam_tiles", rf"cp\.async\.{pattern};", new, None), ADAM),
            *("PtxError", "a copy is on its way to"),
        )
        for what, pattern, new in (
            ("not waited for", r"wait_group\s+\d+", ""),
            ("not committed", "commit_group", ""),
            ("waited for one turn too late", r"wait_group\s+2", "cp.async.wait_group 3;"),
        )
    },
}


def find_planted(machine: Machine, folder: Path, name: str, case: Callable[[Machine], None]) -> str:
    """Nothing where the fault was found, else what happened."""
    from lab.emulators.ptx_emulator import Module

    change, _, kind, words = PLANTED[name]
    assert machine.checks
    machine.checks.spoil = kind != "RaceError"  # else lanes without work (test_cuda_checks.py) are found first
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
    cases, bad = {**all_cases(), "gelu of all bits": gelu_of_all_bits}, 0
    watched = [name for name in cases if name not in LEFT_OUT]
    for name in chosen or (PLANTED if order == "planted" else watched):
        if order == "planted":
            error = find_planted(machine, folder, name, cases[PLANTED[name][1]])
        else:
            found = fault_of(machine, cases[name])
            error = f"{type(found).__name__}: {found}" if found else ""
        bad += bool(error)
        print(json.dumps({"case": name, "error": error}), flush=True)
    left = sorted({*machine.module.kernels} - {*machine.noted})
    print(json.dumps({"not run": left, "raced": sorted(machine.checks.raced)}), flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
