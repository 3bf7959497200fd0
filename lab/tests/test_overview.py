"""The README and docs/benchmarks.md have the tables of the committed results, and the README's picture is there."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the benchmarks need the [bench] extra")

from benchmarks import machine, overview
from benchmarks.__main__ import PAGES, filled

RESULTS = overview.RESULTS


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_tables_of_the_results(page: str) -> None:
    path = machine.ROOT / page
    text = path.read_text()
    assert "<!-- table:" in text or "<!-- bench:" in text
    assert text == filled(path, RESULTS), "run python -m benchmarks table"


def test_the_table_has_times_where_memkern_is_slower_too() -> None:
    lines = [line.strip("| ").split(" | ") for line in overview.speed_table().splitlines() if "torch" in line]
    ratios = [float(cell) for line in lines for cell in line[3:] if cell]
    assert len(ratios) > len(overview.TIMES)
    assert min(ratios) < 1 < max(ratios)


def test_what_was_not_measured_has_no_figure() -> None:
    assert overview._ratio({}, "AdamW, one tensor", "memkern AdamW8bit", "torchao AdamW8bit") == ""
    table = overview._speed_columns("", [["ours", "theirs", "case", "", "1.00"]])
    assert "AMD EPYC" not in table
    assert "Intel Xeon" in table


def test_the_readme_states_the_errors_of_the_results() -> None:
    """The README's sentence on gradients has the figures of the tables in docs/choosing.md and docs/compiled.md."""
    text = " ".join((machine.ROOT / "README.md").read_text().split())
    rows = [line for line in overview.models_table().splitlines() if line.startswith("| `")]
    stated = re.findall(r"([\d.]+) % \(median\) to ([\d.]+) % \(worst model", text)
    cells = [row.strip("| ").split(" | ")[-2:] for row in rows]
    few_bits = max(median for median, _ in cells)[:-2], max((worst for _, worst in cells), key=_number).split()[0]
    errors: dict[str, list[float]] = {}
    for (precision, mode, _), row in overview._last("saved-compiled.csv", "precision", "mode", "model").items():
        if mode == "8":
            errors.setdefault(precision, []).append(100 * float(row["gradient_error"]))
    codes = max(map(statistics.median, errors.values())), max(map(max, errors.values()))
    assert stated == [tuple(f"{x:.1f}" for x in codes), few_bits]


def _number(cell: str) -> float:
    """The number that a cell begins with."""
    return float(cell.split()[0])


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert overview.draw(tmp_path / "saves.png").stat().st_size > 10_000
    assert overview.PICTURE.exists()
