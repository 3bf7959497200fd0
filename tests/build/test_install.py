"""memkern installs in every way from a clean copy of the tree and without a network.

The environments see the packages of the running one (torch, setuptools, ...), and nothing of the tree.
Libraries are built at -O0, which takes a fraction of the time; `make test` itself installs with the default flags.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.support.tree import copy_of_tree

pytestmark = pytest.mark.long

STEP = """
import json, torch, memkern
p = torch.nn.Parameter(torch.ones(64, 128))
optimizer = memkern.optim.AdamW8bit([p], lr=0.5, weight_decay=0)
p.grad = torch.ones_like(p)
optimizer.step()
print(json.dumps({
    "backend": memkern.backend.select("cpu"),
    "reason": memkern.backend.available()["cpu"],
    "parameter": p.unique().tolist(),
    "file": memkern.__file__,
}))
"""


def environment(**changes: str) -> dict[str, str]:
    """The running environment without what would lead to the tree or change the build; no CUDA."""
    dropped = {"PYTHONPATH", "CXX", "CC", "MAX_JOBS"}
    inherited = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith(("MEMKERN_", "PIP_"))}
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    return {**inherited, "PATH": path, "PIP_CONFIG_FILE": os.devnull, "NVCC": "/nonexistent", **changes}


class Environment:
    """A virtual environment in which the running one's packages are visible."""

    def __init__(self, path: Path) -> None:
        venv.create(path, symlinks=True)
        self.python = path / "bin" / "python"
        (self.site_packages,) = path.glob("lib/python*/site-packages")
        packages = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
        (self.site_packages / "outer.pth").write_text("\n".join(packages))
        self.away = path / "away"  # not the tree, so that nothing there is imported
        self.away.mkdir()

    def run(self, *arguments: str) -> str:
        return subprocess.run(
            [self.python, *arguments],
            cwd=self.away, env=environment(), check=True, stdout=subprocess.PIPE, text=True,
        ).stdout  # fmt: skip

    def info(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.run("-m", "memkern", "info", "--json"))
        assert Path(report["executable"]) == self.python
        return report

    def step(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self.run("-c", STEP))
        assert result["parameter"] == [0.5]
        return result

    def install(self, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        command = [self.python, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index"]
        quiet = ["--ignore-installed", "--no-cache-dir", "--disable-pip-version-check"]
        return subprocess.run(
            [*command, *quiet, *arguments],
            cwd=self.away, env=environment(**changes), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def installed(self) -> set[str]:
        return {str(p.relative_to(self.site_packages)) for p in self.site_packages.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pip")
    return copy_of_tree(tmp_path_factory.mktemp("install") / "memkern")


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, made as `python -m build --sdist` makes it, of a tree that tests have run in."""
    (tree / "tests" / "__pycache__").mkdir()
    (tree / "tests" / "__pycache__" / "helpers.cpython-311.pyc").touch()
    folder = tmp_path_factory.mktemp("sdist")
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=tree, env=environment(), check=True, capture_output=True)
    (archive,) = folder.glob("memkern-*.tar.gz")
    return archive


def assert_cpu_is_available(env: Environment) -> None:
    report = env.info()
    assert report["backends"]["cpu"] == {"available": True, "reason": None}
    assert report["selected"]["cpu"] == "cpu"
    assert report["cpu"]["instruction_set"] in ("generic", "avx2", "avx512", "neon")
    assert report["build"]["compiler"]
    assert env.step()["backend"] == "cpu"


GENERATED = ("tables.h", "hyperparameters.h", "schemas.h")  # by csrc/generate.py


def test_the_sdist_has_all_sources_and_no_binaries(tree: Path, sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = [
        p.relative_to(tree).as_posix()
        for folder in ("csrc", "memkern", "tests", "benchmarks", "lab", "docs", "examples")
        for p in (tree / folder).rglob("*")
        if p.is_file() and p.suffix in (".py", ".cpp", ".h", ".cu", ".cuh", ".typed") and p.name not in GENERATED
    ]
    assert len(sources) > 50
    assert not {*sources, "setup.py", "pyproject.toml", "Makefile", "LICENSE"} - names
    assert not [n for n in names if n.endswith((".so", ".o", ".pyc", *GENERATED))]


def test_an_install_from_the_sdist_builds_the_library(sdist: Path, tmp_path: Path) -> None:
    env = Environment(tmp_path / "env")
    pip = env.install(str(sdist), MEMKERN_CXX_FLAGS="-O0")
    assert pip.returncode == 0, pip.stdout[-4000:]
    assert_cpu_is_available(env)
    files = env.installed()
    assert {"memkern/libmemkern.so", "memkern/py.typed", "memkern/train/cli.py"} <= files
    assert not [name for name in files if name.startswith(("csrc", "tests", "benchmarks", "lab", "memkern/csrc"))]


def test_an_editable_install_builds_the_library_in_the_tree(tree: Path, tmp_path: Path) -> None:
    env = Environment(tmp_path / "env")
    pip = env.install("-e", str(tree), MEMKERN_BUILD="cpu", MEMKERN_CXX_FLAGS="-O0")
    assert pip.returncode == 0, pip.stdout[-4000:]
    assert (tree / "memkern" / "libmemkern.so").exists()
    assert_cpu_is_available(env)
    assert Path(env.step()["file"]).is_relative_to(tree)
    # A path, which mypy and Pyright follow; they do not see packages that an import hook finds.
    (pth,) = env.site_packages.glob("__editable__*memkern*.pth")
    assert pth.read_text().split() == [str(tree)]


def test_one_wheel_serves_every_python(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:  # a tree in which nothing was built
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.glob("memkern-*")
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"
    changes = {"MEMKERN_WHEEL": "any", "MEMKERN_BUILD": "cpu", "MEMKERN_CXX_FLAGS": "-O0"}
    built = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env=environment(**changes), capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr[-4000:]
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-" in wheel.name
    env = Environment(tmp_path / "env")
    assert env.install(str(wheel)).returncode == 0
    assert [name for name in env.installed() if name.endswith(".so")] == ["memkern/libmemkern.so"]
    report = env.info()
    assert report["backends"]["cpu"] == {"available": True, "reason": None}
    assert set(report["build"]) == {"library"}
    assert env.step()["backend"] == "cpu"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MEMKERN_BUILD": "none"}, ""),
        ({"CXX": "/nonexistent"}, "no C++ compiler ('/nonexistent'): installing without compiled kernels"),
    ],
    ids=["none", "auto without a compiler"],
)
def test_a_pure_package_runs_the_reference(changes: dict[str, str], message: str, tree: Path, tmp_path: Path) -> None:
    (tree / "memkern" / "libmemkern.so").touch()  # as an earlier build leaves it; it must not be installed
    env = Environment(tmp_path / "env")
    pip = env.install("-v", str(tree), **changes)
    assert pip.returncode == 0, pip.stdout[-4000:]
    assert message in pip.stdout
    assert not [name for name in env.installed() if name.endswith(".so")]
    result, backends = env.step(), env.info()["backends"]
    assert result["backend"] == "reference"
    assert Path(result["file"]).is_relative_to(env.site_packages)
    assert "the C++ extension was not built" in result["reason"]
    assert "install a C++ compiler and reinstall" in result["reason"]
    assert backends["reference"]["available"]
    assert not backends["cpu"]["available"]
