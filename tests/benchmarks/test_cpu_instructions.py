"""docs/benchmarks.md prints the instructions per element that benchmarks/results/cpu-instructions.csv has."""

import csv

import pytest

from benchmarks import RESULTS
from benchmarks.studies.cpu_instructions import KERNELS, TOOLS


@pytest.mark.parametrize("isa", TOOLS)
def test_the_table_is_of_the_results(isa: str) -> None:
    with (RESULTS / "cpu-instructions.csv").open(newline="") as file:
        rows = {(row["instruction_set"], row["kernel"]): row["instructions"] for row in csv.DictReader(file)}
    line = " | ".join(rows[isa, kernel] for kernel in KERNELS)
    assert f"| {isa} | {line} |" in (RESULTS.parents[1] / "docs/benchmarks.md").read_text()


def test_neon_takes_at_most_twice_avx2_s() -> None:
    with (RESULTS / "cpu-instructions.csv").open(newline="") as file:
        rows = {
            (row["instruction_set"], row["kernel"]): float(row["instructions"])
            for row in csv.DictReader(file)
        }
    for kernel in KERNELS:
        assert rows["neon", kernel] <= 2 * rows["avx2", kernel], kernel
