"""lab.studies.long_sequences, and the figures of it that the documentation shows."""

from __future__ import annotations

import csv
from types import SimpleNamespace

import pytest

from lab import RESULTS
from lab.studies import long_sequences as study
from memkern.planner.prediction import BAND

PATH = RESULTS / "long-sequences.csv"


def rows() -> list[dict[str, str]]:
    with PATH.open(newline="") as file:
        return [*csv.DictReader(file)]


def test_the_page_has_the_tables() -> None:
    page = (RESULTS.parents[1] / "docs/what-does-not-fit.md").read_text()
    assert study.bytes_table(PATH) in page
    assert study.longest_table(PATH) in page
    assert study.errors(PATH) in page
    assert all(row["dirty"] == "no" for row in rows())


def test_what_checkpoints_leave_on_the_device() -> None:
    """What is there beside the inputs of the checkpoints does not depend on how they are stored."""
    found = study.last(PATH, "bytes")
    for model in study.MODELS:
        for tokens in map(str, study.TOKENS):
            plain, codes, host = (
                found[model, way, tokens]
                for way in ("checkpoints", "checkpoints in codes", "checkpoints in codes on the host")
            )
            rest = [int(row["saved_per_token"]) - int(row["formula_per_token"]) for row in (plain, codes)]
            assert rest[1] == pytest.approx(rest[0], rel=0.15)
            # A block's codes stay, and what the last layers and the loss store.
            block = int(codes["formula_per_token"]) / 32
            assert int(host["saved_per_token"]) < 1.15 * rest[0] + 2 * block
            assert int(host["host_per_token"]) < 1.05 * int(codes["formula_per_token"])
            assert float(host["step_gib"]) < float(codes["step_gib"]) < float(plain["step_gib"])


def test_errors_of_checkpoints_in_codes() -> None:
    """Blocks compute with decoded inputs in both passes: the roundings of the blocks add up in the forward pass."""
    assert all(float(row["error"]) < 0.03 for row in study.last(PATH, "error").values())


def test_host_time_of_a_tensor_that_leaves() -> None:
    [row] = study.last(PATH, "host").values()
    page = (RESULTS.parents[1] / "docs/saved-tensors.md").read_text()
    assert f"A tensor that leaves costs the host {float(row['host_us']):.0f} us of Python" in page


@pytest.mark.parametrize("longest", [8, 9, 31, 32, 33, 500, 3000])
def test_the_longest_that_fits(longest: int) -> None:
    memory = 10_000
    per_block = memory / (longest + 0.5) / (1 + BAND["cuda"][0])
    found = study._largest(lambda blocks: SimpleNamespace(peak=per_block * blocks), memory)
    assert found is not None
    assert found[0] == longest
    assert study._largest(lambda blocks: SimpleNamespace(peak=memory * blocks), memory) is None
