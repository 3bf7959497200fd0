"""The README and docs/benchmarks.md have the tables of the committed results, and the README's picture is there."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the benchmarks need the [bench] extra")

from benchmarks import machine, overview
from benchmarks.__main__ import PAGES, filled

RESULTS = Path(overview.__file__).parent / "results"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_tables_of_the_results(page: str) -> None:
    path = machine.ROOT / page
    text = path.read_text()
    assert "<!-- table:" in text or "<!-- bench:" in text
    assert text == filled(path, RESULTS), "run python -m benchmarks table"


def test_times_say_where_memkern_is_slower() -> None:
    ratios = [float(cell) for line in overview.speed_table().splitlines()[2:]
              for cell in line.strip("| ").split(" | ")[3:] if cell != "not run"]  # fmt: skip
    assert len(ratios) > len(overview.TIMES)
    assert min(ratios) < 1 < max(ratios)


def test_a_missing_peer_is_named() -> None:
    assert overview._ratio({}, "AdamW, one tensor", "memkern AdamW8bit", "torchao AdamW8bit") == "not run"


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert overview.draw(tmp_path / "saves.png").stat().st_size > 10_000
    assert overview.PICTURE.exists()
