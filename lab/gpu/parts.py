"""The parts of `make gpu`, in the order in which they are wanted should the time run out."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from .runner import ROOT, Part
from .wide import DEVICE

PYTHON = sys.executable
CACHES = {
    "TRITON_CACHE_DIR": str(ROOT / "build" / "gpu" / "triton"),
    "TORCHINDUCTOR_CACHE_DIR": str(ROOT / "build" / "gpu" / "inductor"),
}
WHEELS = ROOT / "build" / "gpu" / "wheels"
SITE = ROOT / "build" / "gpu" / "site"
OF_MODELS = (
    ("models", "what whole models keep, and their time", 50),
    ("recipe", "GPT-2-XL on 12 GiB", 70),
    ("compiled", "what compiled models keep, and their time", 100),
    ("stream", "Llama-3.1-8B on 12 GiB, its weights on the host", 150),
)
"""With seconds, as of all parts on an H200 and 16 slow cores; from compiled on, and after the profile, guesses."""


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None or (SITE / module).exists()


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
    everywhere = {"PATH": path, "PYTHONPATH": os.pathsep.join([str(ROOT), str(SITE)]), **CACHES}
    cuda = {**everywhere, "MEMKERN_BACKEND": "cuda"}
    general = {**cuda, "MEMKERN_CUDA_FAST": "0"}
    triton = {**everywhere, "MEMKERN_BACKEND": "triton"}
    build = {
        **everywhere,
        "MEMKERN_BUILD": "cuda" if nvcc else "cpu",
        "TORCH_CUDA_ARCH_LIST": arch or "9.0",
    }

    def script(module: str, *arguments: str) -> list[str]:
        return [PYTHON, "-m", f"lab.gpu.{module}", *arguments]

    def part(name: str, what: str, module: list[str], expected: float, env: dict[str, str], why: str | None) -> Part:
        return Part(name, what, module, 2 * expected, env, why, [*module, "--plan"], expected=expected)

    no_triton = None if has("triton") else "Triton is not installed"
    no_pytest = None if has("pytest") else "pytest is not installed; `make gpu-wheels` brings it"
    no_models = no_nvcc if has("transformers") else "transformers is not installed"
    no_sanitizer, no_ncu = lacking("compute-sanitizer") or no_nvcc, lacking("ncu") or no_nvcc
    proofs = [
        part("smoke", "every op and dtype beside the reference", script("smoke", "cuda"), 60, cuda, no_nvcc),
        part("exact", "what the fast paths assume of the device", script("exact"), 3, everywhere, no_nvcc),
        part(
            "device",
            "graphs, streams, scalers, more than 2^31 elements",
            script("wide", DEVICE),
            45,
            everywhere,
            no_pytest,
        ),
        part(
            "sanitizers",
            "compute-sanitizer's four tools over small steps and codes",
            script("sanitize"),
            40,
            cuda,
            no_sanitizer,
        ),
        part("triton smoke", "the same for Triton", script("smoke", "triton"), 100, triton, no_triton),
    ]
    return [
        Part(
            "wheels",
            "installs what `make gpu-wheels` brought",
            script("wheels", "install"),
            60,
            everywhere,
            expected=5,
        ),
        Part(
            "build",
            "compiles the extension for this GPU",
            [PYTHON, "setup.py", "-q", "build_ext", "--inplace"],
            240,
            build,
            expected=110,
        ),
        *(replace(proof, beside=True, seconds=200) for proof in proofs),
        part("headline", "times beside torch's and others'", script("headline", "cuda"), 55, cuda, no_nvcc),
        *(part(name, what, script(name), s, everywhere, no_models) for name, what, s in OF_MODELS),
        part("profile", "ncu of the hot kernels", script("profile"), 220, cuda, no_ncu),
        part("triton headline", "times of Triton's", script("headline", "triton"), 60, triton, no_triton),
        part("general smoke", "the same without fast paths", script("smoke", "cuda"), 60, general, no_nvcc),
        part("general headline", "times without fast paths", script("headline", "cuda"), 150, general, no_nvcc),
        part(
            "wide",
            "the other tests that need a GPU, in parallel processes, as long as the time lasts",
            script("wide"),
            1800,
            everywhere,
            no_pytest,
        ),
        replace(
            part(
                "tune",
                "other sizes of tiles and thread blocks, and Triton's stages",
                script("tune", "--arch", arch or "9.0"),
                270,
                everywhere,
                no_nvcc and no_triton,
            ),
            by_name=True,
        ),
    ]


def turns(todo: list[Part]) -> Iterator[list[Part]]:
    """The parts in their order; neighbours that may run beside each other are one turn."""
    for beside, group in itertools.groupby(todo, key=lambda part: part.beside):
        neighbours = [*group]
        yield from [neighbours] if beside else ([part] for part in neighbours)


def forecast(todo: list[Part], seconds: float) -> list[str]:
    """Which parts are expected to fit the time, in their order; a line for each."""
    lines, before, end = [], 0.0, 0.0
    for turn in turns(todo):
        for part in turn:
            if part.missing:
                lines.append(f"{part.name:16} cannot run: {part.missing}")
                continue
            after = before + part.expected
            fits = "fits" if after <= seconds else "begins" if before < seconds else "comes too late"
            lines.append(f"{part.name:16} {before:4.0f} to {after:4.0f} s of {seconds:.0f}: {fits}")
            end = max(end, after)
        before = end
    return lines
