"""`make gpu` where something is missing or breaks: no nvidia-smi, and CUDA errors that end a process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lab.gpu import gpu, supervised, wide
from lab.gpu.runner import ROOT, Part, Results, run
from tests.support.helpers import needs_cpp

PYTHON = sys.executable


# ---- which GPU

DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return FAILS; }
int cuDeviceGet(int* device, int ordinal) { *device = 7; return ordinal != 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = device != 7 ? -1 : attribute == 75 ? 9 : attribute == 76 ? 0 : -1;
  return 0;
}
int cuDeviceGetName(char* name, int room, int device) { strncpy(name, "A GPU", room); return 0; }
"""


def test_a_gpu_is_found_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, str | None] = {"of_nvidia_smi": None, "of_torch": None, "of_driver": None}
    for name in said:
        monkeypatch.setattr(gpu, name, lambda name=name: said[name])
    assert gpu.find_gpu() is None
    said["of_driver"] = "9.0, A GPU"
    assert gpu.find_gpu() == gpu.Gpu("9.0", "A GPU", "driver")
    said["of_torch"] = "10.0, NVIDIA B200"
    assert gpu.find_gpu() == gpu.Gpu("10.0", "NVIDIA B200", "torch")
    said["of_nvidia_smi"] = "8.0, NVIDIA A100, 580.1, 81920 MiB\n8.0, another"
    assert gpu.find_gpu() == gpu.Gpu("8.0", "NVIDIA A100, 580.1, 81920 MiB", "nvidia-smi")


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_the_driver_is_asked(tmp_path: Path) -> None:
    for fails in (0, 100):
        library = tmp_path / f"driver{fails}.so"
        command = ["g++", "-x", "c", "-shared", "-fPIC", f"-DFAILS={fails}", "-", "-o", str(library)]
        subprocess.run(command, input=DRIVER, text=True, check=True)
        assert gpu.of_driver(str(library)) == (None if fails else "9.0, A GPU")
    assert gpu.of_driver("/nowhere/libcuda.so.1") is None


@pytest.mark.long  # before a lease
def test_without_a_gpu_it_is_no_success(tmp_path: Path) -> None:
    """The plan alone is not what was asked for: a GPU that is there but not seen would look like a success."""
    if gpu.find_gpu():
        pytest.skip("a GPU is here, which runs the kernels itself")
    command = [PYTHON, "-m", "lab.gpu", "--part", "profile", "--folder", str(tmp_path / "folder")]
    environment = {**os.environ, "OUT": str(tmp_path)}
    runs = [
        subprocess.run([*command, *more], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        for more in ([], ["--plan"])
    ]
    assert [run.returncode for run in runs] == [1, 0]
    assert "no GPU was found by nvidia-smi, by torch or by CUDA's driver" in runs[0].stdout
    assert "profile" in runs[1].stdout


@pytest.mark.long  # before a lease
def test_what_ncu_said_is_there_when_the_time_is_up(tmp_path: Path) -> None:
    """Rows are written as ncu's processes end, one for each group of kernels."""
    fake = tmp_path / "ncu"
    fake.write_text("""#!/bin/sh
for last; do :; done
[ "$last" = "steps fp32" ] && echo "==PROF== Profiling" && sleep 60
printf '"Kernel Name","gpu__time_duration.sum"\\n"",""\\n"adam_tiles","5"\\n'
""")
    fake.chmod(0o755)
    said: list[str] = []
    code = "import sys; from lab.gpu import profile; "
    code += f"profile.tool = lambda _: {str(fake)!r}; sys.exit(profile.main())"
    part = Part("profile", "", [PYTHON, "-c", code], 60, {"PYTHONPATH": str(ROOT)})
    slow = run(part, 10, Results(tmp_path), said.append, gpu=True)
    assert slow.result == "timed out"
    assert [line.strip() for line in said] == [
        '{"group": "steps bf16", "kernel": "adam_tiles", "time": 5.0}',
        "==PROF== Profiling",
    ]


# ---- errors that leave CUDA unusable

WORKER = """
import json, os, signal, sys
from lab.gpu import supervised
journal = supervised.Journal(sys.argv[sys.argv.index("--journal") + 1])
bad = 0
for name in ("one", "dies", "killed", "raises", "five"):
    if name in journal.over:
        continue
    journal.note("begin", name)
    if name == "dies":
        journal.die(name, "CUDA error: an illegal memory access was encountered\\nmore")
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "raises":
        raise SystemExit(1)
    print(json.dumps({"ran": name}), flush=True)
    journal.note("done", name)
journal.note("finished", "")
"""


def test_a_process_that_dies_is_named_and_the_next_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    assert supervised.supervise([PYTHON, "-c", WORKER]) == 1
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert rows == [
        {"ran": "one"},
        {"died": "dies", "error": "CUDA error: an illegal memory access was encountered"},
        {"died": "killed", "exit code": -9},
        {"died": "raises", "exit code": 1},
        {"ran": "five"},
    ]
    assert supervised.supervise([PYTHON, "-c", "raise SystemExit(3)"]) == 1
    assert json.loads(capfd.readouterr().out) == {"died": "before its first case", "exit code": 3}
    code = "import sys; open(sys.argv[-1], 'a').write('finished \\n')"
    assert supervised.supervise([PYTHON, "-c", code]) == 0


# Ends as a process does in which an illegal access has happened: every call of CUDA raises from then on.
STICKY = """
import sys, torch
from lab.gpu import headline, smoke, supervised
from memkern import _ops
supervised.is_sticky.__globals__["dead"] = False
broken = {{"is_sticky": lambda: supervised.dead}}
smoke.is_sticky = headline.is_sticky = broken["is_sticky"]
supervised.dead = False

def illegal(*args, **kwargs):
    supervised.dead = True
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def guarded(real, bad):
    def call(*args, **kwargs):
        return illegal() if supervised.dead or bad(*args, **kwargs) else real(*args, **kwargs)
    return call
{rest}
"""
SMOKE = STICKY.format(
    rest="""
_ops.quantize_blockwise = guarded(_ops.quantize_blockwise, lambda x, *_: x.shape == (37, 53))
sys.exit(smoke.main(["cpu", "--processes", "1", "--only", "quantize power torch.float32", *sys.argv[1:]]))
"""
)
HEADLINE = STICKY.format(
    rest="""
from benchmarks import bench_optim
real = headline.steps
class Broken(torch.optim.SGD):
    step = illegal
def steps(name, shapes, dtype, device):
    case = real(name, shapes, dtype, device)
    bad = bench_optim.stepper("a peer", lambda params: Broken(params), shapes, device, torch.float32, lambda a, b: 8)
    good = case.contenders[0]
    return headline.replace(case, contenders=[good, bad, headline.replace(good, name="memkern again")])
headline.steps = steps
names = "Lion8bit", "SGD8bit"
headline.cases = lambda *_: iter([steps(name, [(64, 128)], "fp32", "cpu") for name in names])
headline.OURS["SGD8bit"], headline.OTHERS["SGD8bit"] = ({"lr": 0.1, "momentum": 0.9}, lambda a, b: 8), []
sys.exit(headline.main(["cpu", "--small", *sys.argv[1:]]))
"""
)


@pytest.mark.full
@needs_cpp
def test_smoke_goes_on_after_a_sticky_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert supervised.supervise([PYTHON, "-c", SMOKE]) == 1
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    died = [row["died"] for row in rows if "died" in row]
    assert died == [f"quantize power torch.float32: odd, signed {signed}" for signed in (True, False)]
    assert rows[-1]["group"] == "quantize power torch.float32"
    assert (rows[-1]["failed"], rows[-1]["equal"] > 3) == (0, True)


@pytest.mark.long  # before a lease
@needs_cpp
def test_headline_goes_on_without_the_contender_that_died(capfd: pytest.CaptureFixture[str]) -> None:
    assert supervised.supervise([PYTHON, "-c", HEADLINE]) == 1
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    assert [row["died"].rpartition(": ")[2] for row in rows if "died" in row] == ["a peer"] * 2
    measured = [row for row in rows if "contender" in row]
    assert len(measured) == 6
    for row in measured:
        assert ("ms_median" in row) == (row["contender"] != "a peer"), row
    assert all("ended its process" in row["note"] for row in measured if row["contender"] == "a peer")


@pytest.mark.full
def test_pytest_goes_on_after_a_sticky_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    test = tmp_path / "test_file.py"
    test.write_text("""
import pytest
from lab.gpu import supervised
dead = False
supervised.is_sticky = lambda: dead
pytestmark = pytest.mark.gpu
@pytest.mark.parametrize("n", range(6))
def test_each(n):
    global dead
    if n == 2: dead = True
    assert not dead, "CUDA error: an illegal memory access was encountered"
def test_that_fails():
    assert False, "only this"
""")
    monkeypatch.setattr(wide, "OPTIONS", ["-p", "lab.gpu.sticky", "--rootdir", str(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(wide, "ROOT", tmp_path)
    found = wide.run(test)
    said = capsys.readouterr().out
    assert found == {"PASSED": 5, "FAILED": 2}
    assert "test_file.py::test_each[2] died: CUDA cannot be used any more" in said
    assert "an illegal memory access was encountered" in said
