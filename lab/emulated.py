"""python -m lab.emulated: tests the kernels on emulated GPUs, and records the hash of the sources that passed.

The tests marked ``emulated`` take up to 40 minutes and depend on few files, so they run when one of these changed.
lab/tests/test_emulated.py fails while the recorded hash is not that of the sources. Compilers are not part of the
hash, so another one does not make the test fail; the record says which were used.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

from benchmarks import ROOT
from lab import RESULTS

RECORD = RESULTS / "emulated.json"
COMMAND = "make emulate"
TESTS = [
    "cuda_checks",
    "cuda_host",
    "cuda_kernels",
    "gpu_ptx",
    "triton_checks",
    "triton_compiled",
    "triton_fast_path",
]
FILES = (
    *(f"lab/tests/test_{name}.py" for name in TESTS),
    "tests/gpu/test_cuda_simt.py",
    "tests/gpu/test_triton.py",
    "tests/kernels/test_cases.py",
)
SOURCES = (
    *("csrc/*.py", "csrc/*.cpp", "csrc/core/*", "csrc/common/*", "csrc/cuda/*"),
    *("memkern/triton/*.py", "memkern/reference/*.py", "memkern/quant/codec.py", "memkern/schemas.py"),
    *("lab/emulators/**/*", "tests/support/simt/**/*", "tests/support/kernels/*.py", "tests/gpu/triton_*.py"),
    *FILES,
)
# csrc/generate.py writes them from files that are hashed.
GENERATED = {"csrc/core/tables.h", "csrc/core/hyperparameters.h", "csrc/common/schemas.h"}
SUFFIXES = {".py", ".cpp", ".h", ".cu", ".cuh", ".csv"}


def code(path: Path) -> bytes:
    """A source's bytes without comments, blank lines and C++'s indentation, which change no kernel."""
    lines = (text := path.read_text()).splitlines()
    if path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column]
        return "\n".join(line for line in map(str.rstrip, lines) if line).encode()
    if path.suffix != ".csv":  # C++'s literals have no "//" in them
        lines = re.sub(r"//[^\n]*", "", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)).splitlines()
    return "\n".join(line for line in map(str.strip, lines) if line).encode()


def digest() -> str:
    """SHA-256 of the names and the code of the sources."""
    names = {
        path.relative_to(ROOT).as_posix()
        for pattern in SOURCES
        for path in ROOT.glob(pattern)
        if path.suffix in SUFFIXES
    }
    sha256 = hashlib.sha256()
    for name in sorted(names - GENERATED):
        sha256.update(f"{name}\0".encode() + code(ROOT / name) + b"\0")
    return sha256.hexdigest()


def recorded() -> str | None:
    """The hash of the sources that passed last."""
    return json.loads(RECORD.read_text())["sources"] if RECORD.exists() else None


def _versions() -> dict[str, str]:
    import torch

    versions = {"python": sys.version.split()[0], "torch": torch.__version__}
    try:
        import triton

        versions["triton"] = triton.__version__
    except ModuleNotFoundError:
        pass
    for compiler in ("nvcc", "g++"):
        if shutil.which(compiler):
            output = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
            versions[compiler] = re.findall(r"\d+\.\d+[.\d]*", output)[-1 if compiler == "nvcc" else 0]
    return versions


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.emulated", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    args = parser.parse_args()
    before = digest()
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(args.jobs), "--dist", "worksteal"]
    command += ["-m", "emulated and not long and not gpu", "--durations", "20"]
    # Tests that are skipped because a compiler is missing have not passed.
    environment = {**os.environ, "MEMKERN_STRICT_SKIPS": "1"}
    output = []
    with subprocess.Popen([*command, *FILES], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        for line in tests.stdout:
            print(line, end="", flush=True)
            output.append(line)
    if tests.returncode:
        return tests.returncode
    if digest() != before:
        print("the sources changed during the run: run it again", file=sys.stderr)
        return 1
    passed = re.search(r"(\d+) passed", output[-1])
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    record = {
        "sources": before,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit.stdout.strip(),
        "passed": int(passed[1]) if passed else 0,
        "versions": _versions(),
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(RECORD)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
