"""`make gpu-rehearse`: how far `make gpu` gets without a GPU, in bare virtual environments with CUDA builds of torch.

For each version of torch: a virtual environment with torch and nothing else (several GB from the package index, kept in
build/gpu/), a copy of the working tree, and in it `make gpu`, which builds for sm_90 and says of every other part what
it would do. Then the library is loaded, and the loader is asked where it found torch's stream function: a library that
loads with that symbol unbound cannot run a CUDA op. The outcome goes to lab/results/gpu-rehearsal.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

from .gpu import output
from .runner import ROOT

VERSIONS = ("2.11.0", "newest")
ABSENT = ("pybind11", "pytest", "hypothesis", "rich", "matplotlib", "numpy")
RECORD = ROOT / "benchmarks" / "results" / "gpu-rehearsal.json"
STREAM = "aoti_torch_get_current_cuda_stream"
LIBRARY = "libmemkern.so"

# In the copy, in the bare environment: what is registered and what is missing there.
PROBE = """
import importlib.util, json, platform, torch, memkern
from memkern import _ops, backend
names = {s.name.removeprefix("memkern::") for s in torch._C._jit_get_all_schemas() if s.name.startswith("memkern::")}
registered = torch._C._dispatch_has_kernel_for_dispatch_key
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
    "packages absent": [m for m in %r if importlib.util.find_spec(m) is None],
    "library": backend.load_library() or "loads",
    "ops with a CUDA kernel": sorted(n for n in names if registered("memkern::" + n, "CUDA")),
    "ops without one": sorted(n for n in names if not registered("memkern::" + n, "CUDA")),
    "cuda backend": backend.available()["cuda"],
}))
"""


def environment(version: str, folder: Path) -> Path:
    """The Python of a virtual environment with a version of torch and what it depends on."""
    home = folder / f"torch-{version}"
    python = home / "bin" / "python"
    if not (home / ".installed").exists():
        venv.create(home, clear=True, with_pip=True)
        requirement = "torch" if version == "newest" else f"torch=={version}"
        command = [str(python), "-m", "pip", "install", "-q", "--no-cache-dir", requirement, "setuptools>=77"]
        subprocess.run(command, check=True)
        (home / ".installed").touch()
    return python


def copy_of_the_tree(folder: Path) -> None:
    """Files that git knows or would add: what would be carried to a machine with a GPU."""
    names = output("git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard") or ""
    for name in names.splitlines():
        target = folder / name
        if (ROOT / name).is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)


def bound(trace: str) -> str | None:
    """The library in which the loader found torch's stream function, from LD_DEBUG=bindings."""
    for line in trace.splitlines():
        if f"{LIBRARY} " in line and f"`{STREAM}'" in line and " to " in line:
            return Path(line.split(" to ")[1].split(" ")[0]).name
    return None


def rehearse(python: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        copy_of_the_tree(tree)
        out, traces = tree / "results", tree / "traces"
        out.mkdir()
        traces.mkdir()
        bare = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        bare["MAX_JOBS"] = "4"  # with which setup.py compiles each .cu by itself, as on a machine with a GPU
        command = [
            str(python),
            "-W",
            "ignore",
            "-m",
            "lab.gpu",
            "--plan",
            "--minutes",
            "60",
            "--patience",
            "10",
        ]
        subprocess.run(command, cwd=tree, env=bare | {"OUT": str(out)}, check=False)
        lines = (tree / "out" / "gpu" / "results.jsonl").read_text().splitlines()
        parts = {row["part"]: row for row in map(json.loads, lines) if "result" in row}
        trace = {"LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(traces / "ld")}
        probe = subprocess.run(
            [str(python), "-W", "ignore", "-c", PROBE % (ABSENT,)],
            cwd=tree,
            env=bare | trace,
            capture_output=True,
            text=True,
            check=False,
        )
        found = json.loads(probe.stdout) if probe.returncode == 0 else {"error": probe.stderr[-2000:]}
        text = "".join(file.read_text(errors="replace") for file in traces.iterdir())
        return {
            **found,
            "CUDA objects": sorted(path.name for path in tree.glob("build/temp.*/cuda/*.o")),
            "stream function": {"symbol": STREAM, "bound to": bound(text)},
            "parts": {name: f"{row['result']} {row['reason']}".strip() for name, row in parts.items()},
            "archive": (out / "gpu-results.tar.gz").exists(),
        }


def passed(found: dict[str, Any]) -> bool:
    return (
        found.get("library") == "loads"
        and found["stream function"]["bound to"] is not None
        and bool(found["ops with a CUDA kernel"])
        and not found["ops without one"]
        and found["parts"].get("build") == "passed"
        and len(found["CUDA objects"]) > 1
        and all(result.startswith(("passed", "planned", "skipped")) for result in found["parts"].values())
        and found["archive"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="make gpu-rehearse", description=__doc__.splitlines()[0])
    parser.add_argument("--torch", action="append", help=f"a version; default: {', '.join(VERSIONS)}")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "gpu", help="for the environments")
    args = parser.parse_args()
    if not shutil.which("nvcc"):
        raise SystemExit("make gpu-rehearse: nvcc is not installed")
    record: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"),
        "nvcc": (output("nvcc", "--version") or "").rpartition("release ")[2].split(",")[0],
        "architecture": "sm_90",
        "runs": [],
    }
    for version in args.torch or VERSIONS:
        found = rehearse(environment(version, args.folder))
        record["runs"].append({"passed": passed(found), **found})
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(record["runs"][-1], indent=1), flush=True)
    return int(not all(run["passed"] for run in record["runs"]))


if __name__ == "__main__":
    sys.exit(main())
