"""Without a GPU, `make gpu` says what it would run, its scripts run on the CPU, and its rows are recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks import report
from lab.gpu import __main__ as make_gpu
from lab.gpu import headline, host, models, recipe, record, sanitize, small
from memkern.stream import streaming
from tests.support.helpers import needs_cpp


def test_it_says_what_it_would_run_and_that_nothing_was_proved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_gpu.main(["--plan"]) == 0
    plan = capsys.readouterr().out
    assert all(name in plan for name in make_gpu.PARTS)
    monkeypatch.setattr(make_gpu, "environment", lambda: {"gpu": None})
    assert make_gpu.main([]) == 1
    assert "nothing was proved" in capsys.readouterr().out


def test_parts_that_fail_or_take_too_long_do_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def python(code: str) -> list[str]:
        return [sys.executable, "-c", code]

    monkeypatch.setattr(
        make_gpu,
        "PARTS",
        {
            "slow": (2, python("import time; print('{\"row\": 1}', flush=True); time.sleep(60)")),
            "fails": (20, python("raise SystemExit(3)")),
            "passes": (20, python("print('{\"row\": 2}')")),
        },
    )
    monkeypatch.setattr(make_gpu, "environment", lambda: {"gpu": "made up"})
    monkeypatch.setenv("OUT", str(tmp_path))
    assert make_gpu.main([]) == 1
    rows = [json.loads(line) for line in (tmp_path / "gpu" / "results.jsonl").read_text().splitlines()]
    assert [(row["part"], row["result"]) for row in rows if "result" in row] == [
        ("slow", "timed out"),
        ("fails", "failed"),
        ("passes", "passed"),
    ]
    assert [row["row"] for row in rows if "row" in row] == [1, 2]


@pytest.mark.full
@needs_cpp
def test_headline_measures_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    headline.main(["cpu", "--small"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    ours = [row for row in rows if row["contender"].startswith("memkern")]
    assert {"AdamW8bit, one tensor, bf16", "GELU, fp32"} <= {row["case"] for row in ours}
    assert all(row["ms_median"] > 0 for row in ours)


@pytest.mark.full
def test_models_are_measured_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert models.main(["--small"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [row["mode"] for row in rows] == 2 * [*models.MODES]
    assert [row["gradient_error"] for row in rows if "checkpoint" in row["mode"]] == [0.0] * 4
    assert all(row["cosine"] > 0.99 for row in rows if row["mode"] == "compress")


@pytest.mark.full
@pytest.mark.parametrize("model", recipe.MODELS)
def test_the_recipe_trains(model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(streaming, "Prefetch", streaming.Prefetch)  # a run changes it
    try:
        assert recipe.main([model, "--small"]) == 0
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    runs = [*recipe.RUNS[model]]
    assert [row["run"] for row in rows] == [name for name in runs for _ in recipe.SMALL_BATCHES]
    for row in rows:
        assert row["losses"][0] - 0.01 > row["losses"][-1] > row["losses"][0] - 0.5  # falls, by a plausible amount
    for number in range(len(recipe.SMALL_BATCHES)):  # one model, whatever trains it
        for row in rows[number :: len(recipe.SMALL_BATCHES)]:
            assert row["losses"] == pytest.approx(rows[number]["losses"], abs=2e-2)
    assert {*rows[0]} <= {*record.RECIPE}


@pytest.mark.full
def test_what_the_sanitizers_watch_runs_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    small.main("cpu")
    assert capsys.readouterr().out == "done\n"


def test_steps_with_states_on_the_host_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert host.main(["--small"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["way"] for row in rows} >= {*host.WAYS, "pinned copy to the host", "pinned copy both ways at once"}
    assert all(row["ms"] > 0 for row in rows)
    assert {*rows[0], *rows[1], "device_bytes_beside", "error"} == {*record.HOST}


def test_the_sanitizers_see_each_tensor_by_itself() -> None:
    assert {*sanitize.TOOLS} == {"memcheck", "racecheck", "initcheck", "synccheck"}
    assert sanitize.NO_CACHE == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def test_results_are_recorded(tmp_path: Path) -> None:
    rows = [
        {
            **{"part": "environment", "gpu": "NVIDIA H200, 580.1, 143771 MiB", "commit": "abc"},
            **{"python": "3.12.3", "torch": "2.11.0+cu130"},
        },
        {"part": "tests", "result": "failed", "seconds": 1.2},
        {"part": "headline", "case": "GELU", "contender": "memkern GELU", "numel": 8, "ms_median": 1.5},
        {"part": "models", "model": "GPT-2", "mode": "torch", "ms": 2.0},
        {"part": "recipe", "run": "torch", "losses": [3.0, 2.5], "limit_gib": None},
    ]
    (tmp_path / "gpu-parts.csv").write_text("part,equal\nsmoke,373\n")  # of columns that are not written any more
    results = tmp_path / "results.jsonl"
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for _ in range(2):  # the second time it adds
        record.main([str(results), "--out", str(tmp_path)])
    tables = {path.stem: report.read(path) for path in tmp_path.glob("*.csv")}
    assert tables["gpu-parts"].pop(0)["equal"] == "373"
    assert {name: len(table) for name, table in tables.items()} == dict.fromkeys(
        ("headline_nvidia-h200", "gpu-models", "gpu-recipe", "gpu-parts"), 2
    )
    [part, _] = tables["gpu-parts"]
    assert (part["hardware"], part["commit"], part["dirty"]) == ("NVIDIA H200, driver 580.1", "abc", "no")
    assert (part["result"], part["seconds"]) == ("failed", "1.2")
    assert tables["gpu-recipe"][0]["losses"] == "3.0 2.5"
    assert tables["gpu-recipe"][0]["limit_gib"] == ""
    assert tables["headline_nvidia-h200"][0]["ms_median"] == "1.5"


@pytest.mark.parametrize(
    ("columns", "reason"),
    [({"commit": "abc", "dirty": True}, "uncommitted changes"), ({"commit": None}, "which commit")],
)
def test_results_of_no_commit_are_refused(
    columns: dict[str, object], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = "NVIDIA H200, 580.1, 143771 MiB"
    environment = {"part": "environment", "gpu": gpu, "python": "3", "torch": "2"}
    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps(environment | columns) + "\n")
    with pytest.raises(SystemExit):
        record.main([str(results), "--out", str(tmp_path)])
    assert reason in capsys.readouterr().err
    assert not list(tmp_path.glob("*.csv"))
