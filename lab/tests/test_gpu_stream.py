"""The parts `stream` and `host` of `make gpu` run small on the CPU, and their rows are recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks import report
from lab.gpu import host, record, stream


@pytest.mark.full
def test_weights_on_the_host_give_the_losses_of_those_on_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    try:
        assert stream.main(["--small"]) == 0
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [row["run"] for row in rows] == [*stream.RUNS]
    on_device, on_host = (row["losses"] for row in rows)
    assert on_host == pytest.approx(on_device, abs=2e-3)  # on the host more of what is saved is exact
    assert on_host[-1] < on_host[0]
    assert rows[0]["layers"] == stream.SMALL.layers


def test_steps_with_states_on_the_host_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert host.main(["--small"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["way"] for row in rows} >= {*host.WAYS}
    assert all(row["ms"] > 0 for row in rows)
    assert {*rows[0], *rows[1], "device_bytes_beside", "error"} == {*record.HOST}


def test_layers_are_copies_of_the_first() -> None:
    pytest.importorskip("transformers")
    model = stream.llama(stream.SMALL)
    first, *others = (dict(layer.named_parameters()) for layer in model.model.layers)
    assert len(others) == stream.SMALL.layers - 1
    for other in others:
        assert all(first[name].equal(p) and first[name] is not p for name, p in other.items())


def test_rows_are_recorded(tmp_path: Path) -> None:
    versions = {"commit": "abc", "python": "3.12.3", "torch": "2.11.0+cu130"}
    rows = [
        {"part": "environment", "gpu": "NVIDIA H200, 580.1, 143771 MiB", **versions},
        {"part": "stream", "run": "on the host, 12 GiB", "losses": [3.0, 2.5], "busy": 0.9},
        {"part": "stream", "run": "speed, host over device", "ratio": 0.9},
        {"part": "stream", "result": "passed", "seconds": 60.0, "reason": ""},
    ]
    results = tmp_path / "results.jsonl"
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    record.main([str(results), "--out", str(tmp_path)])
    recorded = report.read(tmp_path / "gpu-stream.csv")
    assert [(row["losses"], row["busy"], row["ratio"]) for row in recorded] == [("3.0 2.5", "0.9", ""), ("", "", "0.9")]
