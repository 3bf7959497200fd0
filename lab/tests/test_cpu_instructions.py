"""docs/benchmarks.md has the instructions of lab/results/cpu-instructions.csv, and qemu's log is counted rightly."""

from pathlib import Path

import pytest

from benchmarks import report
from lab import RESULTS
from lab.studies.cpu_instructions import KERNELS, TOOLS, _executed

PATH = RESULTS / "cpu-instructions.csv"


@pytest.mark.parametrize("isa", TOOLS)
def test_the_page_has_the_results(isa: str) -> None:
    rows = {(row["instruction_set"], row["kernel"]): row["instructions"] for row in report.read(PATH)}
    line = " | ".join(rows[isa, kernel] for kernel in KERNELS)
    assert f"| {isa} | {line} |" in (RESULTS.parents[1] / "docs/benchmarks.md").read_text()


def test_neon_takes_at_most_twice_the_instructions_of_avx2() -> None:
    rows = {(row["instruction_set"], row["kernel"]): float(row["instructions"]) for row in report.read(PATH)}
    for kernel in KERNELS:
        assert rows["neon", kernel] <= 2 * rows["avx2", kernel], kernel


# A log of qemu: a block of two instructions runs twice, a block of one once.
LOG = """\
IN: adam
0x00542ee8:  48 c7 84 04 18 03 00 00  movq     $0, 0x318(%rsp, %rax)
0x00542ef0:  00 00 00 00
0x00542ef4:  49 01 de                 addq     %rbx, %r14

Trace 0: 0x7f1 [00000000/0000000000542ee8/0040c0b3/ff000000] adam
Trace 0: 0x7f1 [00000000/0000000000542ee8/0040c0b3/ff000000] adam
IN: adam
0x004691d0:  12001c42  and      w2, w2, #0xff

Trace 0: 0x7f2 [00000000/00000000004691d0/0040c0b3/ff000000] adam
"""


def test_an_instruction_of_more_than_eight_bytes_counts_once(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(LOG)
    assert _executed(tmp_path / "log") == 2 * 2 + 1
