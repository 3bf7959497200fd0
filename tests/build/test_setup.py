"""setup.py decides what to build, or refuses to build, before it compiles anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAST = "ext_modules, cmdclass = extensions(what_to_build())"  # setup.py's functions are above this line


def run_setup(before: str, after: str = "print(what_to_build())", **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs ``before``, setup.py's functions and ``after`` in a process; ``after`` prints the target to build."""
    source = (ROOT / "setup.py").read_text()
    assert source.count(LAST) == 1
    functions = source.replace("from __future__ import annotations", "").partition(LAST)[0]
    code = f"__file__ = 'setup.py'\n{before}\n{functions}"
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MEMKERN_", "TORCH_"))}
    return subprocess.run(
        [sys.executable, "-c", f"{code}\n{after}"],
        cwd=ROOT, env={**inherited, **variables}, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(("version", "works"), [("65.5.0", False), ("76.1", False), ("77.0.3", True)])
def test_a_setuptools_that_is_too_old_is_named_with_the_cure(version: str, works: bool) -> None:
    run = run_setup(f"import setuptools; setuptools.__version__ = {version!r}", MEMKERN_BUILD="none")
    assert (run.returncode == 0) == works
    assert (run.stdout == "none\n") == works
    message = f"needs setuptools 77 or newer to build, found {version}: pip install 'setuptools>=77'"
    assert (message in run.stderr) != works
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(("cuda", "built"), [("None", "cpu"), ("'13.0'", "cuda")])
def test_an_isolated_build_is_for_the_torch_of_the_environment(tmp_path: Path, cuda: str, built: str) -> None:
    # The build's own torch has CUDA; what counts is the one beside which memkern is installed.
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(f"cuda = {cuda}")
    (tmp_path / "nvcc").write_text("#!/bin/sh\n")
    (tmp_path / "nvcc").chmod(0o755)
    before = f"""
import sys, sysconfig, types
sys.modules["torch"] = types.SimpleNamespace(version=types.SimpleNamespace(cuda="13.0"))
sysconfig.get_path = lambda name: {str(tmp_path)!r}
"""
    run = run_setup(before, NVCC=str(tmp_path / "nvcc"))
    assert run.stdout == f"{built}\n", run.stderr[-2000:]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MEMKERN_BUILD": "cpu", "CXX": "/nonexistent"}, "MEMKERN_BUILD=cpu needs a C++ compiler; '/nonexistent'"),
        ({"MEMKERN_BUILD": "cuda"}, "MEMKERN_BUILD=cuda needs nvcc"),
        ({"MEMKERN_BUILD": "bogus"}, "MEMKERN_BUILD must be auto, cpu, cuda or none, got 'bogus'"),
        ({"MEMKERN_WHEEL": "bogus"}, "MEMKERN_WHEEL must be python or any, got 'bogus'"),
    ],
)
def test_a_build_that_is_impossible_is_an_error(changes: dict[str, str], message: str) -> None:
    run = run_setup("", "what_to_build(), for_any_python()", NVCC="/nonexistent", **changes)
    assert run.returncode == 1
    assert run.stderr.startswith(message)


def test_the_build_requires_setuptools_and_torch_alone() -> None:
    # `python -m build --no-isolation` fails where a required package is missing, such as ninja, which is not needed.
    assert 'requires = ["setuptools>=77", "torch>=2.10"]' in (ROOT / "pyproject.toml").read_text()


def test_make_clean_leaves_other_environments_alone(tmp_path: Path) -> None:
    built, of_another = tmp_path / "memkern" / "libmemkern.so", tmp_path / "venv" / "lib" / "module.so"
    for library in (built, of_another):
        library.parent.mkdir(parents=True)
        library.touch()
    subprocess.run(["make", "-f", ROOT / "Makefile", "clean"], cwd=tmp_path, check=True)
    assert not built.exists()
    assert of_another.exists()
