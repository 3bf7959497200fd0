"""docs/frameworks.md has the table of the committed results, and the tests' outcomes become its cells."""

from __future__ import annotations

from importlib import metadata

from benchmarks import frameworks, report


def test_the_page_has_the_table_of_the_results() -> None:
    rows, page = report.read(frameworks.CSV), frameworks.PAGE.read_text()
    assert page == frameworks.filled(page, rows), "run python -m benchmarks.frameworks"
    assert len({row["framework"] for row in rows}) > 4
    cells = [line.split(" | ") for line in frameworks.table(rows).splitlines()]
    failed = {header for line in cells for header, cell in zip(cells[0], line, strict=False) if "failed" in cell}
    assert all(f"With {torch} failed: " in page for torch in failed)  # the page says what failed


def result(framework: str, torch: str, *outcomes: str) -> dict[str, str]:
    return {"torch": torch, **frameworks.row(framework, "works", outcomes)}


def test_outcomes_become_cells() -> None:
    assert frameworks.row("torch", "x", ["passed", "skipped", "failed"])["outcome"] == "failed"
    assert frameworks.row("torch", "x", ["passed", "skipped"])["outcome"] == "skipped"
    assert frameworks.row("no-such-package", "x", ["passed"])["version"] == "absent"
    version = metadata.version("pytest")
    rows = [
        result("pytest", "2.13.0+cpu", "failed"),
        result("pytest", "2.13.0+cpu", "passed", "passed"),  # a later run
        result("torch", "2.9.1", "passed"),
    ]
    assert frameworks.table(rows).splitlines() == [
        "| framework | feature | torch 2.9.1 | torch 2.13.0 |",
        "|---|---|---|---|",
        "| torch | works | passed | not run |",
        f"| pytest | works | not run | passed (pytest {version}) |",
    ]
