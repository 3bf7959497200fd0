"""`make gpu` where there is no GPU: its parts run, fail and end as they should, and its checks find what is wrong."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from memkern import _ops
from tests.gpu import exact, headline, hot, profile, rehearse, smoke, wide
from tests.gpu.__main__ import chosen
from tests.gpu.parts import parts
from tests.gpu.runner import Part, Results, run
from tests.support.helpers import needs_cpp
from tests.support.ptx_emulator import Memory, Module, launch, pack

PYTHON = sys.executable


def part(code: str, seconds: float = 60, **options: object) -> Part:
    return Part("a part", "does something", [PYTHON, "-c", code], seconds, **options)


# ---- parts


@pytest.mark.full
def test_lines_are_kept_as_they_come_whatever_happens(tmp_path: Path) -> None:
    said: list[str] = []
    results = Results(tmp_path / "folder")
    code = "import time; print('{\"row\": 1}'); print('words'); time.sleep(60)"
    slow = run(part(code), 8, results, said.append, gpu=True)
    assert slow.result == "timed out"
    assert said == ['    {"row": 1}', "    words"]
    failed = run(part("raise SystemExit(3)"), 60, results, said.append, gpu=True)
    assert (failed.result, failed.reason) == ("failed", "exit code 3")
    assert run(part("", missing="no nvcc"), 60, results, said.append, gpu=True).result == "skipped"
    assert run(part("print(1)"), 1, results, said.append, gpu=True).reason == "the time is up"
    planned = run(part("1 / 0", plan=[PYTHON, "-c", "print('would')"]), 60, results, said.append, gpu=False)
    assert (planned.result, said[-1]) == ("planned", "    would")
    rows = (tmp_path / "folder" / "results.jsonl").read_text().splitlines()
    assert [json.loads(row) for row in rows] == [{"part": "a part", "row": 1}]
    results.archive(tmp_path / "results.tar.gz")
    with tarfile.open(tmp_path / "results.tar.gz") as tar:
        assert tar.getnames() == ["gpu-results/a-part.log", "gpu-results/results.jsonl"]


def test_parts_can_be_chosen() -> None:
    everything = parts(None)
    names = [p.name for p in everything]
    assert names[:3] == ["wheels", "build", "smoke"]
    assert [p.name for p in chosen(everything, ["headline", "smoke"])] == ["smoke", "headline"]
    assert chosen(everything, None) == everything
    with pytest.raises(SystemExit, match=r"one of wheels, build, .*; got 'speed'"):
        chosen(everything, ["speed"])
    assert {p.environment["TORCH_CUDA_ARCH_LIST"] for p in parts("8.6") if p.name == "build"} == {"8.6"}


def test_every_part_that_needs_a_gpu_says_what_it_would_do() -> None:
    for p in parts(None):
        assert p.plan is not None or p.name in ("wheels", "build"), p.name


# ---- smoke


@needs_cpp
def test_smoke_passes_on_the_cpu_and_finds_a_wrong_bit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["cpu", "--processes", "1", "--only", "quantize power torch.float32"]
    assert smoke.main(command) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["failed"] == 0
    assert row["equal"] > 10
    real = _ops.quantize_blockwise

    def wrong(x: torch.Tensor, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scale = real(x, *args)
        if _ops.backend.select("cpu") == "cpu" and codes.numel() > 5:
            codes.view(-1)[5] ^= 1
        return codes, scale

    monkeypatch.setattr(_ops, "quantize_blockwise", wrong)
    assert smoke.main(command) == 1
    row = json.loads(capsys.readouterr().out)
    assert row["failed"] > 0
    assert "codes: 1 of" in row["first"]


def test_smoke_covers_every_op_and_dtype() -> None:
    groups = {group for group, _, _ in smoke.cases("cuda")}
    for dtype in smoke.FLOATS:
        for name in (
            *smoke.OPTIMIZERS,
            "quantize power",
            "quantize dynamic",
            "few bits",
            "forward",
            "grad norm",
        ):
            assert f"{name} {dtype}" in groups
    assert "graph" in groups


# ---- times


def test_headline_cases() -> None:
    names = [case.name for case in headline.cases("cpu", 2**16, 2**16, 2**16)]
    assert names[0] == "AdamW8bit, one tensor, bf16"
    for name in ("AdamW8bit", "Lion8bit", "LAMB8bit", "LARS8bit"):
        for dtype in ("fp32", "bf16"):
            assert {f"{name}, one tensor, {dtype}", f"{name}, 148 tensors, {dtype}"} <= {*names}
    assert {"GELU, fp32", "GELU, bf16"} <= {*names}
    assert len(names) == len({*names})


def test_the_hot_kernels_are_called() -> None:
    for call in hot.calls(2**13, "cpu"):
        call()


def test_ncus_table_is_read() -> None:
    stall = "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"
    lines = [
        "==PROF== Connected to process 1",
        f'"ID","Kernel Name","gpu__time_duration.sum","{stall}","launch__registers_per_thread"',
        '"","","us","inst",""',
        '"0","adam_tiles","1,234.5","3.25","96"',
    ]
    assert [*profile.rows(lines)] == [
        {"kernel": "adam_tiles", "time": "1234.5 us", "stalled long_scoreboard": 3.25, "registers": 96.0}
    ]
    assert [*profile.rows(["==ERROR== no permission"])] == []


# ---- the rest


def test_the_widest_tests_come_first() -> None:
    names = [str(path.relative_to(path.parents[1])) for path in wide.files()]
    assert names[0] == "gpu/test_gpu.py"


def test_where_the_loader_found_the_stream_function() -> None:
    line = (
        "  7:\tbinding file /x/memkern/libmemkern.so [0] to /t/lib/libtorch_cuda.so [0]: normal symbol `{}'"
    )
    assert rehearse.bound(line.format(rehearse.STREAM)) == "libtorch_cuda.so"
    assert rehearse.bound(line.format("another")) is None


@pytest.mark.full
@pytest.mark.skipif(exact.tool("nvcc") is None, reason="nvcc is not installed")
def test_exact_finds_nothing_wrong_in_the_emulator(tmp_path: Path) -> None:
    """Over few numbers: that the check itself is right. The device has all of them in a second."""
    exact.compile_for("compute_90", tmp_path / "exact.ptx", "-ptx")
    module = Module((tmp_path / "exact.ptx").read_text())
    for name, first, count in (
        ("5roots", 0x3F000000, 3000),
        ("5roots", 0x0D000000, 500),
        ("divisions", 0, 3000),
    ):
        found = np.zeros((256, 2), np.uint64)  # of each thread: a count, and two numbers' bits
        kernel = module.find(name)
        memory = Memory(found)
        launch(module, kernel, 2, 128, pack(kernel, first, count, found.ctypes.data), memory)
        assert not found[:, 0].any(), f"{name}: {found[found[:, 0] > 0][0]}"
