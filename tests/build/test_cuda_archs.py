"""setup.py chooses CUDA architectures by a list, by nvcc or by the GPUs, and compiles .cu files in parallel."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import setuptools

from tests.support.tree import ROOT

CU_FILES = len([*(ROOT / "csrc" / "cuda").glob("*.cu")])
# nvcc's version: the architectures that it knows, in tenths (50 is 5.0)
NVCC = {
    "12.4": "50 52 60 70 75 80 86 87 89 90",
    "12.8": "50 70 75 80 86 87 89 90 100 101 120",
    "13.0": "75 80 86 87 88 89 90 100 103 110 120 121",
}
# TORCH_CUDA_ARCH_LIST in NVIDIA's containers (with spaces), and in the images that build PyTorch's wheels.
NGC = "7.5 8.0 8.6 9.0 10.0 12.0+PTX"
CUDA_12 = "7.0;7.5;8.0;8.6;9.0;10.0;12.0+PTX"


@pytest.fixture
def setup_py(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Loads setup.py's functions, with a stand-in for nvcc that lists the architectures of a version of it."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setenv("MEMKERN_BUILD", "none")
    for name in ("TORCH_CUDA_ARCH_LIST", "MEMKERN_CUDA_ARCHS"):
        monkeypatch.delenv(name, raising=False)

    def load(version: str, listed: str | None = None) -> dict[str, Any]:
        fake = tmp_path / "nvcc"
        lines = "\n".join(f"echo compute_{n}" for n in NVCC.get(version, "").split())
        fake.write_text(f"#!/bin/sh\n{lines or 'exit 1'}\n")
        fake.chmod(0o755)
        monkeypatch.setenv("NVCC", str(fake))
        if listed is not None:
            monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
        return runpy.run_path(str(ROOT / "setup.py"))

    return load


@pytest.mark.parametrize(
    ("version", "listed", "expected"),  # nvcc's version, TORCH_CUDA_ARCH_LIST, the architectures that are compiled for
    [
        ("13.0", NGC, "8.0 8.6 9.0 10.0 12.0+PTX"),
        ("12.4", NGC, "8.0 8.6 9.0+PTX"),
        ("12.8", CUDA_12, "8.0 8.6 9.0 10.0 12.0+PTX"),
        ("12.4", CUDA_12, "8.0 8.6 9.0+PTX"),
        ("13.0", "9.0a;10.0f+PTX", "9.0a 10.0f+PTX"),
        ("13.0", "9.0", "9.0"),
        ("12.4", "9.0;10.0", "9.0"),  # nothing asked for PTX
        ("too old to say", NGC, "8.0 8.6 9.0 10.0 12.0+PTX"),
    ],
)
def test_listed_archs_that_nvcc_knows_are_kept(
    setup_py: Any, capsys: pytest.CaptureFixture[str], version: str, listed: str, expected: str
) -> None:
    assert setup_py(version, listed)["cuda_archs"]() == expected.split()
    dropped = [
        name for name in re.findall(r"[^; ]+", listed) if not {name, f"{name}+PTX"}.intersection(expected.split())
    ]
    printed = capsys.readouterr().out
    assert all(repr(name) in printed for name in dropped)
    assert bool(printed) == bool(dropped)


@pytest.mark.parametrize(
    ("gpus", "expected"), [([], "8.0+PTX"), ([(9, 0)], "9.0+PTX"), ([(8, 0), (7, 5), (8, 9), (8, 0)], "8.0 8.9+PTX")]
)
def test_without_a_list_the_gpus_decide(
    setup_py: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gpus: list[Any], expected: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(gpus))
    monkeypatch.setattr("torch.cuda.get_device_capability", gpus.__getitem__)
    assert setup_py("13.0")["cuda_archs"]() == expected.split()
    printed = capsys.readouterr().out
    assert f"compiles CUDA kernels for {expected} (" in printed
    assert "MEMKERN_CUDA_ARCHS=all" in printed
    assert ("first call" in printed) == (not gpus)


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("12.4", "8.0 8.6 8.9 9.0+PTX"),
        ("12.8", "8.0 8.6 8.9 9.0 10.0 12.0+PTX"),
        ("13.0", "8.0 8.6 8.9 9.0 10.0 10.3 12.0+PTX"),
    ],
)
def test_the_list_of_wheels_is_what_nvcc_knows(setup_py: Any, version: str, expected: str) -> None:
    functions = setup_py(version)
    assert functions["possible_archs"](functions["CUDA_ARCHS"].split(";")) == expected.split()


@pytest.mark.parametrize(
    ("version", "listed", "words"),
    [
        ("13.0", "7.0;7.5+PTX", "no CUDA architecture is left of 7.0;7.5.PTX: the kernels need 8.0 or newer"),
        ("12.4", "10.0;12.0", r"left of 10.0;12.0: .*this nvcc's newest is 9.0; set TORCH_CUDA_ARCH_LIST"),
        ("13.0", "9.0;Hopper", "must be architectures such as 8.0;9.0.PTX, got 'Hopper'"),
    ],
)
def test_a_list_of_which_nothing_is_left_is_an_error(setup_py: Any, version: str, listed: str, words: str) -> None:
    with pytest.raises(SystemExit, match=words):
        setup_py(version, listed)["cuda_archs"]()


@pytest.mark.full  # imports Triton
def test_each_gpu_gets_code_for_its_rate_of_fp64(setup_py: Any) -> None:
    """A GPU runs the code of the newest architecture in wheels that has its major version and is not newer than it."""
    squares = pytest.importorskip("memkern.triton.squares", reason="Triton is not installed")
    macro = (ROOT / "csrc/cuda/device.cuh").read_text()
    fast = {divmod(int(n) // 10, 10) for n in re.findall(r"__CUDA_ARCH__ != (\d+)", macro)}  # at fp64
    assert (10, 0) in fast
    wheels = [name.removesuffix("+PTX") for name in setup_py("13.0")["CUDA_ARCHS"].split(";")]
    compiled = [tuple(map(int, name.split("."))) for name in wheels]
    for gpu in ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)):
        code = max(c for c in compiled if c[0] == gpu[0] and c[1] <= gpu[1])
        assert (code not in fast) == squares.is_slow(*gpu), f"{gpu} runs the code for {code}"


@pytest.mark.full
# archs: number of architectures; jobs: MAX_JOBS; units: number of objects that nvcc is called for
@pytest.mark.parametrize(("archs", "jobs", "units"), [(1, 16, CU_FILES), (1, 4, CU_FILES), (1, 2, 1), (7, 16, 1)])
def test_files_are_compiled_in_parallel(
    setup_py: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, archs: int, jobs: int, units: int
) -> None:
    """Each by its own nvcc where there are processors for it, the longest first; the link waits for all."""
    functions = setup_py("13.0", ";".join(["8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "12.0"][:archs]))
    monkeypatch.setenv("MAX_JOBS", str(jobs))
    log = tmp_path / "log"
    with (tmp_path / "nvcc").open("a") as fake:
        # nvcc FLAGS -c SOURCE -o TARGET
        fake.write(f'while [ "$1" != -c ]; do shift; done; echo "start $2" >> {log}; sleep 0.2\n')
        fake.write(f'touch "$4"; echo "end $2" >> {log}\n')
    objects, wait = functions["compile_cuda"]([], tmp_path / "objects")
    wait()
    assert len(objects) == len({*objects}) == units
    assert all(Path(name).exists() for name in objects)
    lines = log.read_text().splitlines()
    first_end = next(i for i, line in enumerate(lines) if line.startswith("end"))
    assert first_end >= min(units, jobs) - 1
    if units > jobs:
        assert {Path(line).name for line in lines[:4]} == {*functions["LONG_UNITS"]}
        assert {*functions["LONG_UNITS"]} < {path.name for path in (ROOT / "csrc/cuda").glob("*.cu")}


def test_a_file_that_does_not_compile_is_an_error(setup_py: Any, tmp_path: Path) -> None:
    functions = setup_py("13.0", "9.0")
    with (tmp_path / "nvcc").open("a") as fake:
        fake.write('[ "$1" = --list-gpu-arch ] || exit 2\n')
    _, wait = functions["compile_cuda"]([], tmp_path / "objects")
    with pytest.raises(subprocess.CalledProcessError):
        wait()
