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

from lab.emulators.fakegpu import Machine, cases, more_cases

CASES = {**cases.CASES, **more_cases.CASES}
# Left out: a table that is torch's and was there before, as no argument tells that it is one; and a case that compares
# the ops themselves, which are others here.
LEFT_OUT = ("a table where CUDA has no memory left", "a table larger than a launch carries")
WATCHED = [name for name in CASES if name not in LEFT_OUT]
SAMPLE = ("adam_step_ fp32, both codecs", "lamb_step_ bf16", "few bits", "grad norm")


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
        *(edited("norm_tiles", BARRIER, "", 1), "grad norm", "RaceError", ""),
    ),
    "race: no barrier before the sums are written again": (
        *(edited("norm_total", BARRIER, "", 1), "grad norm", "RaceError", ""),
    ),
    "race: all threads store one block's sum": (
        *(
            edited("norm_tiles", r"@%p\d+ bra\s+\S+;(?=[^@]*st\.global\.f64)", ""),
            "grad norm",
            "RaceError",
            "",
        ),
    ),
    "init: no table": ("write_table", "adam_step_ bf16", "InitError", "nobody wrote"),
    "init: no prologue": ("adam_prologue", "adam_step_ bf16", "InitError", "nobody wrote"),
    "init: no partial sums": ("norm_tiles", "grad norm", "InitError", "nobody wrote"),
    "sync: a barrier for seven threads": (
        *(edited("norm_tiles", BARRIER, FEW.replace("ACTION", "bar.sync 0") + r"\g<0>"), "grad norm"),
        *("PtxError", "barrier"),
    ),
    "sync: seven threads return before a barrier": (
        *(edited("norm_tiles", BARRIER, FEW.replace("ACTION", "ret") + r"\g<0>"), "grad norm"),
        *("PtxError", "barrier"),
    ),
    "sync: seven threads return before a shuffle": (
        *(edited("adam_tiles", SHUFFLE, FEW.replace("ACTION", "ret") + r"\g<0>", None), "adam_step_ bf16"),
        *("PtxError", "lanes of a warp"),
    ),
    "memory: a gradient's load one vector on": (
        *(
            edited("norm_tiles", WHOLE_VECTOR, r"\1+32]", None),
            "grad norm",
            "PtxError",
            "outside of all buffers",
        ),
    ),
    "memory: a code's store one vector on": (
        *(edited("encode_vectors", STORED, r"\1+64]"), "few bits", "PtxError", "outside of all buffers"),
    ),
    "memory: the norm in the next word": (
        *(edited("norm_total", STORED, r"\1+8]"), "grad norm", "PtxError", "outside of all buffers"),
    ),
    **{
        f"copy: {what}": (
            *(edited("adam_tiles", rf"cp\.async\.{pattern};", new, None), "adam_step_ bf16"),
            *("PtxError", "a copy is on its way to"),
        )
        for what, pattern, new in (
            ("not waited for", r"wait_group\s+\d+", ""),
            ("not committed", "commit_group", ""),
            ("waited for one turn too late", r"wait_group\s+2", "cp.async.wait_group 3;"),
        )
    },
}


def find_planted(machine: Machine, folder: Path, name: str) -> str:
    """Nothing where the fault was found, else what happened."""
    from lab.emulators.ptx_emulator import Module

    change, case, kind, words = PLANTED[name]
    assert machine.checks
    machine.checks.spoil = kind != "RaceError"  # else lanes without work (test_cuda_checks.py) are found first
    real_module, real_run = machine.module, machine.run
    if isinstance(change, str):
        machine.run = lambda launch: None if change in launch.kernel else real_run(launch)  # type: ignore[method-assign]
    else:
        machine.module = Module(change((folder / "ops.ptx").read_text()))
    try:
        error = fault_of(machine, CASES[case])
    finally:
        machine.module, machine.run = real_module, real_run  # type: ignore[method-assign]
    return "" if type(error).__name__ == kind and words in str(error) else f"not found: {error!r}"


def main() -> int:
    folder, order, chosen = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    machine = Machine(folder)
    from lab.emulators.ptx_checks import Checks  # and torch, which comes after the machine

    machine.checks = Checks(order if order != "planted" else "together", spoil=True)
    machine.ops = ExactOps(machine)
    bad = 0
    for name in chosen or (PLANTED if order == "planted" else WATCHED):
        if order == "planted":
            error = find_planted(machine, folder, name)
        else:
            found = fault_of(machine, CASES[name])
            error = f"{type(found).__name__}: {found}" if found else ""
        bad += bool(error)
        print(json.dumps({"case": name, "error": error}), flush=True)
    left = sorted({*machine.module.kernels} - {*machine.noted})
    print(json.dumps({"not run": left, "raced": sorted(machine.checks.raced)}), flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
