"""lab/gpu/compiled.py runs on the CPU, its rows are recorded, and a memory budget does not raise Inductor's peak."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import report
from lab.gpu import compiled, record
from lab.studies import compiled_steps


@pytest.mark.long  # to be run before a GPU is leased
def test_small_models_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert compiled.main(["--small", "--seconds", "1000"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [row["mode"] for row in rows] == [mode for work in compiled.TINY for mode in work.modes]
    assert all(row["cosine"] > 0.999 for row in rows if row["mode"] != "torch")
    errors = {row["mode"]: row["fp32_error"] for row in rows if row["precision"] == "fp32"}
    assert errors["memkern.compile, exact"] < 1e-5 < errors["memkern.compile, 8 bits"]


def test_rows_are_recorded(tmp_path: Path) -> None:
    environment = {"gpu": "NVIDIA H200, 580.1, 143771 MiB", "commit": "abc", "python": "3.12.3", "torch": "2.11.0"}
    rows = [
        {"part": "environment", **environment},
        {"part": "compiled", "model": "GPT-2", "mode": "memkern.compile, exact", "first_s": 9.5, "ms": 2.0},
    ]
    results = tmp_path / "results.jsonl"
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    record.main([str(results), "--out", str(tmp_path)])
    [row] = report.read(tmp_path / "gpu-compiled.csv")
    assert (row["mode"], row["first_s"], row["ms"]) == ("memkern.compile, exact", "9.5", "2.0")


@pytest.mark.long
def test_a_budget_does_not_raise_inductors_peak() -> None:
    """memkern predicts the peak by the order of its graph, which Inductor changes: 1 % more was measured."""
    pytest.importorskip("transformers")
    with compiled_steps.compiling(empty=True):
        loose, tight = (compiled_steps.contender("Llama", "fp32", 512, "exact", budget, 2) for budget in (0.7, 0.4))
    assert tight.saved < 0.7 * loose.saved
    assert tight.peak < 1.02 * loose.peak
