"""The parts of `make gpu`, in the order in which they are wanted should the time run out."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from .runner import ROOT, Part

PYTHON = sys.executable
SMALL = [PYTHON, "-m", "tests.gpu.small"]
TRITON_CACHE = ROOT / "build" / "gpu" / "triton"
WHEELS = ROOT / "build" / "gpu" / "wheels"
SITE = ROOT / "build" / "gpu" / "site"


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None or (SITE / module).exists()


def output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def capability() -> str | None:
    """Of the first GPU, such as "9.0"."""
    found = output("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    return found.splitlines()[0].strip() if found else None


def tool(name: str) -> str | None:
    """A program of the CUDA toolkit, whose folder may not be on the PATH."""
    if found := shutil.which(name):
        return found
    folders = [Path("/usr/local/cuda/bin"), *sorted(Path("/usr/local").glob("cuda-*/bin"), reverse=True)]
    return next((str(folder / name) for folder in folders if (folder / name).exists()), None)


def lacking(name: str) -> str | None:
    return None if tool(name) else f"{name} is not installed"


def parts(arch: str | None) -> list[Part]:
    """``arch``: of the GPU; None where there is none, and the parts say what they would do."""
    nvcc = tool("nvcc")
    no_nvcc = lacking("nvcc")
    folders = [str(Path(nvcc).parent)] if nvcc else []
    path = os.pathsep.join([*folders, os.environ.get("PATH", os.defpath), str(SITE / "bin")])
    everywhere = {"PATH": path, "PYTHONPATH": os.pathsep.join([str(ROOT), str(SITE)])}
    cuda = {**everywhere, "MEMKERN_BACKEND": "cuda"}
    triton = {**everywhere, "MEMKERN_BACKEND": "triton", "TRITON_CACHE_DIR": str(TRITON_CACHE)}
    build = {
        **everywhere,
        "MEMKERN_BUILD": "cuda" if nvcc else "cpu",
        "TORCH_CUDA_ARCH_LIST": arch or "9.0",
    }

    def script(module: str, *arguments: str) -> list[str]:
        return [PYTHON, "-m", f"tests.gpu.{module}", *arguments]

    def part(
        name: str, what: str, module: list[str], seconds: float, env: dict[str, str], why: str | None
    ) -> Part:
        return Part(name, what, module, seconds, env, why, [*module, "--plan"])

    def sanitize(name: str) -> Part:
        command = [str(tool("compute-sanitizer")), "--tool", name, "--error-exitcode", "9", *SMALL]
        plan = [PYTHON, "-c", f"print('would run: {' '.join(command)}')"]
        why = lacking("compute-sanitizer") or no_nvcc
        return Part(
            name, f"compute-sanitizer's {name} over small steps and codes", command, 60, cuda, why, plan
        )

    no_triton = None if has("triton") else "Triton is not installed"
    return [
        Part(
            "wheels", "installs what `make gpu-wheels` brought", script("wheels", "install"), 60, everywhere
        ),
        Part(
            "build",
            "compiles the extension for this GPU",
            [PYTHON, "setup.py", "-q", "build_ext", "--inplace"],
            240,
            build,
        ),
        part("smoke", "every op and dtype beside the reference", script("smoke", "cuda"), 60, cuda, no_nvcc),
        part("exact", "what the fast paths assume of the device", script("exact"), 60, everywhere, no_nvcc),
        part("headline", "times beside torch's and others'", script("headline", "cuda"), 150, cuda, no_nvcc),
        part(
            "profile",
            "ncu of the hot kernels",
            script("profile"),
            90,
            cuda,
            lacking("ncu") or no_nvcc,
        ),
        sanitize("memcheck"),
        sanitize("racecheck"),
        part("triton smoke", "the same for Triton", script("smoke", "triton"), 90, triton, no_triton),
        part("triton headline", "times of Triton's", script("headline", "triton"), 90, triton, no_triton),
        part(
            "wide",
            "the tests that need a GPU, in parallel processes, as long as the time lasts",
            script("wide"),
            3600,
            everywhere,
            None if has("pytest") else "pytest is not installed; `make gpu-wheels` brings it",
        ),
        replace(
            part(
                "tune",
                "other sizes of tiles and thread blocks, and Triton's stages",
                script("tune", "--arch", arch or "9.0"),
                540,
                {**everywhere, "TRITON_CACHE_DIR": str(TRITON_CACHE)},
                no_nvcc and no_triton,
            ),
            by_name=True,
        ),
    ]
