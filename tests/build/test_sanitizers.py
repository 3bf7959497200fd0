"""AddressSanitizer and UndefinedBehaviorSanitizer find no error in the C++ ops.

The library is built once more, instrumented, in a copy of the tree; tests/support/sanitized.py drives it in a process
of its own. The build is at -Og with the checks as calls, which compiles in a third of the time that -O1 takes: still 5
minutes of a processor.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tree import built_libraries, copy_of_tree

pytestmark = pytest.mark.long

SANITIZERS = "address,undefined,float-cast-overflow"
FLAGS = f"-Og -g1 -fno-omit-frame-pointer -fsanitize={SANITIZERS} -fno-sanitize-recover=all"
FLAGS += " --param=asan-instrumentation-with-call-threshold=0"
DRIVER = Path(__file__).parents[1] / "support" / "sanitized.py"


def file_of(name: str) -> str | None:
    """The path of one of the compiler's libraries."""
    path = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    return path if os.path.isabs(path) and os.path.exists(path) else None


@pytest.fixture(scope="module")
def runtime() -> str:
    """The libraries of LD_PRELOAD: ASan first, and libstdc++ so that ASan finds it when torch throws."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    libraries = [file_of(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    if None in libraries:
        pytest.skip("g++ has no libasan, libubsan or libstdc++ beside it")
    return " ".join(filter(None, libraries))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory, runtime: str) -> Path:
    """A copy of the tree with the instrumented library in place."""
    options = {"MEMKERN_BUILD": "cpu", "MEMKERN_CXX_FLAGS": FLAGS, "CXX": "g++"}
    copy = copy_of_tree(tmp_path_factory.mktemp("sanitized") / "memkern")
    for library in built_libraries("sanitized", options).iterdir():
        shutil.copy(library, copy / "memkern")
    return copy


def drive(tree: Path, runtime: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=99",  # Python and torch keep what they have until the end
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_WAIT_POLICY": "passive",  # on busy cores threads that spin take most of the time
    }
    return subprocess.run(
        [sys.executable, str(DRIVER), *arguments], cwd=tree.parent, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_the_library_is_instrumented(tree: Path) -> None:
    code = (tree / "memkern" / "libmemkern.so").read_bytes()
    assert b"__asan_load" in code
    assert b"__ubsan_handle" in code


@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512"])
def test_a_read_past_the_end_is_seen(tree: Path, runtime: str, isa: str) -> None:
    run = drive(tree, runtime, "overflow", isa)
    assert run.returncode == 99, run.stdout[-4000:]
    assert "heap-buffer-overflow" in run.stdout
    assert "libmemkern.so" in run.stdout or "csrc" in run.stdout


# "" runs a few of the sizes up to 4,096 and of 250 random stride patterns; the others are described in sanitized.py
@pytest.mark.parametrize("program", ["", "guards", "loops"])
def test_no_error_is_found(tree: Path, runtime: str, program: str) -> None:
    if program == "loops":
        pytest.importorskip("hypothesis")
    run = drive(tree, runtime, *filter(None, [program]))
    assert run.returncode == 0, run.stdout[-8000:]
    assert run.stdout.strip() == "nothing found"
