"""`make gpu` where there is no GPU: its parts run, fail and end as they should, and its checks find what is wrong."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lab.emulators import cuda_kernels
from lab.emulators.ptx_emulator import Memory, Module, launch, pack
from lab.gpu import __main__ as make_gpu
from lab.gpu import (
    exact,
    headline,
    hot,
    models,
    profile,
    recipe,
    record,
    rehearse,
    sanitize,
    small,
    smoke,
    smoke_large,
    tune,
    wide,
)
from lab.gpu.__main__ import chosen
from lab.gpu.gpu import Gpu
from lab.gpu.parts import forecast, parts, turns
from lab.gpu.runner import ROOT, Part, Results, run
from memkern import _ops, backend
from tests.support.helpers import first_full, needs_cpp

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
    results.archive(tmp_path / "out" / "results.tar.gz")
    with tarfile.open(tmp_path / "out" / "results.tar.gz") as tar:
        assert tar.getnames() == ["gpu-results/a-part.log", "gpu-results/results.jsonl"]


def test_parts_can_be_chosen() -> None:
    everything = parts(None)
    names = [p.name for p in everything]
    assert names[:3] == ["wheels", "build", "smoke"]
    assert names.index("device") < names.index("headline") < names.index("profile") < names.index("wide")
    assert [p.name for p in chosen(everything, ["headline", "smoke"])] == ["smoke", "headline"]
    assert [p.name for p in everything if p not in chosen(everything, None)] == ["tune"]
    assert [p.name for p in chosen(everything, ["tune"])] == ["tune"]
    with pytest.raises(SystemExit, match=r"one of wheels, build, .*; got 'speed'"):
        chosen(everything, ["speed"])
    assert {p.environment["TORCH_CUDA_ARCH_LIST"] for p in parts("8.6") if p.name == "build"} == {"8.6"}


def test_every_part_that_needs_a_gpu_says_what_it_would_do() -> None:
    for p in parts(None):
        assert p.plan is not None or p.name in ("wheels", "build"), p.name


def test_parts_fit_the_time() -> None:
    """The most valuable come first, and nine minutes are enough up to compiled models."""
    todo = chosen([replace(p, missing=None) for p in parts("9.0")], None)
    lines = forecast(todo, 540)
    fits = [line.split("  ")[0].strip() for line in lines if line.endswith("fits")]
    assert fits == [p.name for p in todo][: len(fits)]
    assert fits[-1] == "compiled"
    assert [line.rpartition(": ")[2] for line in lines[len(fits) :]] == ["begins", *["comes too late"] * 5]
    assert all(p.seconds >= p.expected > 0 for p in todo)
    missing = [replace(p, missing="no nvcc") for p in todo]
    assert all("cannot run: no nvcc" in line for line in forecast(missing, 540))


def test_what_measures_no_time_runs_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    meet = tmp_path / "meet"
    wait = (
        f"import pathlib, time; pathlib.Path({str(meet)!r} + NAME).touch()\n"
        f"while not all(pathlib.Path({str(meet)!r} + n).exists() for n in 'ab'): time.sleep(0.01)\n"
        "print('{\"row\": 1}')"
    )
    todo = [replace(part(f"NAME = {name!r}\n{wait}", 20), name=name, beside=True, expected=5) for name in ("a", "b")]
    todo.append(replace(part("print('alone')"), name="c", expected=5))
    assert [[p.name for p in turn] for turn in turns(todo)] == [["a", "b"], ["c"]]
    assert [line.split("s of")[0].split() for line in forecast(todo, 9)] == [
        ["a", "0", "to", "5"],
        ["b", "0", "to", "5"],
        ["c", "5", "to", "10"],
    ]
    monkeypatch.setattr(make_gpu, "parts", lambda arch: todo)
    monkeypatch.setattr(make_gpu, "find_gpu", lambda: Gpu("9.0", "A GPU", "a test"))
    monkeypatch.setenv("OUT", str(tmp_path))
    assert make_gpu.main(["--folder", str(tmp_path / "folder")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert {'a:    {"row": 1}', 'b:    {"row": 1}', "    alone"} <= {*said}
    rows = [json.loads(line) for line in (tmp_path / "folder" / "results.jsonl").read_text().splitlines()]
    assert sorted(row["part"] for row in rows if row.get("row")) == ["a", "b"]
    assert [row["result"] for row in rows if "result" in row] == ["passed"] * 3


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
    for name in smoke_large.OPTIMIZERS:
        assert f"large {name} {torch.bfloat16}" in groups
    assert f"large Muon {torch.bfloat16}" in groups


@pytest.mark.full
@needs_cpp
@pytest.mark.parametrize(
    "group", first_full(["large AdamW8bit torch.bfloat16", "large codes torch.float32", "large Muon torch.bfloat16"])
)
def test_smoke_of_large_tensors(
    group: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoke_large, "LARGE", {k: (v[0] // 32 or 1, v[1]) for k, v in smoke_large.LARGE.items()})
    assert smoke.main(["cpu", "--processes", "1", "--only", group]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["equal"] == {"AdamW8bit": 2, "codes": 3, "Muon": 1}[group.split()[1]]


def test_large_tensors_and_all_alignments() -> None:
    """Each thread block of an H200, 1,320 of them, has several turns of 512 elements, and one a shorter end."""
    rows, block = smoke_large.LARGE["whole blocks, a short last tile"]
    assert block == 128
    assert (rows * block) // 1320 > 4 * 512
    assert (rows * block) % 16384
    for offset in smoke_large.OFFSETS:
        x = smoke.at(smoke_large.values((3, 640), 0, torch.bfloat16, offset), "cpu")
        assert x.data_ptr() % 16 == 2 * offset % 16


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
    names = [call.__name__ for call in hot.calls(2**13, "cpu", "steps bf16")]
    assert len(names) == len(hot.STEPS) + 4  # rows of GPT-2-XL, Muon's two ops
    assert {"AdamW8bit", "LAMB8bit"} <= {name for name, _ in hot.STEPS}


@pytest.mark.full
def test_whole_models_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """On the CPU: small ones. Exact ones give torch's gradients, others nearly those."""
    pytest.importorskip("transformers")
    assert models.main(["--small"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["mode"] for row in rows] == 2 * ["torch", "checkpointing", "exact", "8"]
    assert [row["gradient_error"] for row in rows if row["mode"] in ("checkpointing", "exact")] == [0.0] * 4
    assert all(row["cosine"] > 0.999 for row in rows if row["mode"] == "8")
    assert {work.model for work in models.WORKLOADS} == {"GPT-2", "Llama"}


@pytest.mark.full
def test_the_recipe_trains(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert recipe.main(["--small"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [row["run"] for row in rows] == [*recipe.RUNS]
    for row in rows:
        assert row["losses"][0] - 0.1 > row["losses"][-1] > row["losses"][0] - 0.5


@pytest.mark.full
def test_what_the_sanitizers_watch_runs_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    small.main("cpu")
    assert capsys.readouterr().out == "done\n"


def test_commands_of_nvidias_tools() -> None:
    ncu = " ".join(profile.command("steps bf16"))
    for words in (
        "--clock-control none",
        "ComputeWorkloadAnalysis",
        "MemoryWorkloadAnalysis_Tables",
        "hot steps bf16",
    ):
        assert words in ncu
    assert {*sanitize.TOOLS} == {"memcheck", "racecheck", "initcheck", "synccheck"}
    assert sanitize.ALONE == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    assert next(p for p in parts(None) if p.name == "sanitizers").beside


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


# ---- the sweep


def test_what_the_sweep_varies_is_there() -> None:
    macros = set(re.findall(r"#ifndef MEMKERN_(\w+)", (ROOT / "csrc/cuda/tile.cuh").read_text()))
    varied = {name for setting in tune.SETTINGS if setting.kind in tune.SOURCES for name in setting.values}
    assert varied == macros
    assert len({(s.kind, s.name) for s in tune.SETTINGS}) == len(tune.SETTINGS)
    for kind in ("steps", "gelu", "triton"):
        assert next(s for s in tune.SETTINGS if s.kind == kind).name == tune.DEFAULT


def test_the_sweep_says_what_it_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    tune.plan([s for s in tune.SETTINGS if s.name in (tune.DEFAULT, "128 threads")])
    said = capsys.readouterr().out
    for words in (
        "steps, 128 threads THREADS=128",
        "triton, default",
        "LAMB8bit, fp32, 2^22",
        "GELU backward",
    ):
        assert words in said


@needs_cpp
@pytest.mark.parametrize("kind", ["steps", "codes", "gelu"])
def test_the_cases_of_the_sweep_run(kind: str) -> None:
    for case in tune.cases(kind, "cpu", (13,)):
        subject = case.contenders[0].setup()
        subject.step()
        assert subject.moved_bytes() >= 3 * case.numel


@pytest.mark.long  # before a lease
@needs_cpp
@pytest.mark.parametrize("kind", ["steps", "codes", "gelu"])
def test_the_sweep_times_a_library(kind: str, tmp_path: Path) -> None:
    """The process of a setting, with the CPU's library in place of one that nvcc made."""
    (tmp_path / "libmemkern.so").symlink_to(backend.LIBRARY)
    code = f"""
from pathlib import Path
from lab.gpu import tune
tune.folder_of = lambda setting: Path({str(tmp_path)!r})
tune.BACKENDS.update(steps="cpu", codes="cpu")
tune.DTYPES = ("bf16",)
setting = next(s for s in tune.SETTINGS if s.kind == {kind!r})
tune.measure(setting, "cpu", (13,), warm=True)
tune.measure(setting, "cpu", (13,), warm=False)
"""
    done = subprocess.run([PYTHON, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == (4 if kind == "steps" else 2)
    assert all(row["setting"] == "default" and row["copy_share"] > 0 for row in rows)


@pytest.mark.long  # before a lease
def test_triton_takes_the_settings_constants() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    code = """
import memkern.triton
from memkern.triton import activation, launch, launch_step, tensor_table
from lab.gpu.tune import set_triton
set_triton({"TILE": 2048, "TILES": 4, "STAGES": 3, "num_warps": 8})
assert (activation.TILE, launch.rows_of(128), launch_step.TILES, tensor_table.STAGES) == (2048, 16, 4, 3)
assert launch.options_of(128) == {"num_warps": 8, "enable_fp_fusion": False}
"""
    subprocess.run([PYTHON, "-c", code], cwd=ROOT, check=True)


def test_the_best_setting_of_a_case() -> None:
    def row(setting: str, share: float) -> dict[str, object]:
        return {"kind": "steps", "case": "a case", "setting": setting, "copy_share": share}

    rows = [row("default", 0.79), row("default", 0.81), row("other", 0.88), row("worse", 0.5)]
    failed = {"kind": "steps", "case": "a case", "setting": "fails", "note": "absent: RuntimeError"}
    found = tune.verdicts([*rows, failed])
    assert found == [
        {
            **{"kind": "steps", "case": "a case", "best": "other", "best_share": 0.88},
            **{"default_share": 0.8, "default_loses_percent": 10.0, "noise_percent": 2.5},
        }
    ]
    assert "10.0 %" in [*tune.table(found)][1]
    assert tune.verdicts(rows[2:]) == []


def test_the_sweep_goes_on_where_a_build_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def build(setting: tune.Setting, arch: str, seconds: float) -> dict[str, object]:
        row = {"kind": setting.kind, "setting": setting.name}
        return row | ({"failed": "an error"} if setting.name == "128 threads" else {"registers": {}})

    calls: list[str] = []

    def timed(setting: tune.Setting, seconds: float, *more: str) -> list[dict[str, object]]:
        calls.append(setting.name)
        share = 0.9 if setting.name == "tiles of one size" else 0.8
        return [{"kind": setting.kind, "setting": setting.name, "case": "a case", "copy_share": share}]

    monkeypatch.setattr(tune, "FOLDER", tmp_path)
    monkeypatch.setattr(tune, "build", build)
    monkeypatch.setattr(tune, "timed", timed)
    names = ("default", "128 threads", "tiles of one size")
    settings = [s for s in tune.SETTINGS if s.kind == "steps" and s.name in names]
    assert tune.sweep(settings, "9.0", 500, []) == 1
    assert calls == ["default", "tiles of one size", "default"]
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [row["setting"] for row in rows if "failed" in row] == ["128 threads"]
    assert rows[-1]["best"] == "tiles of one size"
    assert tune.sweep(settings[:1], "9.0", 1, []) == 1
    assert "the time is up" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.skipif(exact.tool("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize(("kind", "op"), [("steps", "lamb_step_"), ("gelu", "few_bit_backward")])
@pytest.mark.parametrize("name", ["128 threads"])
def test_a_setting_builds_a_library_that_loads(
    name: str, kind: str, op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "FOLDER", tmp_path)
    cuda_kernels.write_headers(tmp_path)
    setting = next(s for s in tune.SETTINGS if (s.kind, s.name) == (kind, name))
    row = tune.build(setting, "9.0", 3600)
    assert "failed" not in row
    assert row["registers"], "none of the kernels that are timed"
    assert not {*row["registers"]} & {*row.get("spilled", ())}
    code = f"""
import torch
torch.ops.load_library({str(tune.folder_of(setting) / "libmemkern.so")!r})
assert torch._C._dispatch_has_kernel_for_dispatch_key("memkern::{op}", "CUDA")
"""
    subprocess.run([PYTHON, "-c", code], check=True)


# ---- the rest


def test_the_widest_tests_come_first() -> None:
    names = [str(path.relative_to(ROOT / "tests")) for path in wide.files([])]
    assert names[0] == "gpu/test_activation.py"
    assert wide.DEVICE not in names
    assert [path.name for path in wide.files([wide.DEVICE])] == ["test_gpu.py"]
    device = next(p for p in parts(None) if p.name == "device")
    assert device.command[-1] == wide.DEVICE


def test_where_the_loader_found_the_stream_function() -> None:
    line = "  7:\tbinding file /x/memkern/libmemkern.so [0] to /t/lib/libtorch_cuda.so [0]: normal symbol `{}'"
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


def test_results_are_recorded(tmp_path: Path) -> None:
    rows = [
        {
            **{"part": "environment", "gpu": "NVIDIA H200, 580.1, 143771 MiB", "commit": "abc"},
            **{"python": "3.12.3", "torch": "2.11.0+cu130"},
        },
        {"part": "smoke", "group": "codes", "equal": 3, "near": 1, "failed": 0},
        {"part": "smoke", "group": "steps", "equal": 2, "near": 0, "failed": 1, "first": "a case"},
        {"part": "smoke", "result": "failed", "seconds": 1.25, "reason": "exit code 1"},
        {"part": "headline", "case": "GELU", "contender": "memkern GELU", "numel": 8, "ms_median": 1.5},
        {"part": "headline", "died": "a case", "exit code": 1},
        {"part": "models", "model": "GPT-2", "mode": "8", "ms": 2.0},
        {"part": "recipe", "run": "torch", "losses": [3.0, 2.5], "limit_gib": None},
        {"part": "profile", "kernel": "adam_tiles", "stalled wait": 1.0, "stalled barrier": 2.5},
        {"part": "tune", "setting": "64 threads", "case": "GELU", "copy_share": 0.5},
        {"part": "tune", "kind": "steps", "case": "GELU", "best": "64 threads"},
    ]
    results = tmp_path / "results.jsonl"
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for _ in range(2):  # the second time it adds
        record.main([str(results), "--out", str(tmp_path)])
    found = {}
    for path in tmp_path.glob("*.csv"):
        with path.open(newline="") as file:
            found[path.stem] = [*csv.DictReader(file)]
    assert {name: len(of) for name, of in found.items()} == dict.fromkeys(
        ("headline_nvidia-h200", "gpu-models", "gpu-recipe", "gpu-profile", "gpu-tune", "gpu-parts"), 2
    )
    [part, _] = found["gpu-parts"]
    assert (part["hardware"], part["commit"], part["dirty"]) == ("NVIDIA H200, driver 580.1", "abc", "no")
    assert (part["equal"], part["near"], part["failed"], part["seconds"]) == ("5", "1", "1", "1.2")
    assert found["gpu-recipe"][0]["losses"] == "3.0 2.5"
    assert found["gpu-recipe"][0]["limit_gib"] == ""
    assert found["gpu-profile"][0]["stalls"] == "barrier 2.5; wait 1.0"
    assert found["headline_nvidia-h200"][0]["ms_median"] == "1.5"


@pytest.mark.parametrize(
    ("about", "why"),
    [({"commit": "abc", "dirty": True}, "uncommitted changes"), ({"commit": None}, "which commit")],
)
def test_results_of_no_commit_are_refused(
    about: dict[str, object], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {
        "part": "environment",
        "gpu": "NVIDIA H200, 580.1, 143771 MiB",
        "python": "3",
        "torch": "2",
    }
    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps(environment | about) + "\n")
    with pytest.raises(SystemExit):
        record.main([str(results), "--out", str(tmp_path)])
    assert why in capsys.readouterr().err
    assert not list(tmp_path.glob("*.csv"))
