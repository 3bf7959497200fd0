"""The two optional extensions; everything else is in pyproject.toml.

``memkern/libmemkern.so``  every op, against LibTorch's stable ABI: no Python.h, one binary for torch >= 2.10.
``memkern/_host``          pybind11: build facts, CPU features, tables.

MEMKERN_BUILD   auto (default): what this machine can build; cpu; cuda; none. cpu and cuda fail where they cannot.
MAX_JOBS        parallel compilations; by default as many as cores and free memory allow.
TORCH_CUDA_ARCH_LIST   overrides the list of CUDA architectures.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).parent
CSRC = Path("csrc")
CUDA_ARCHS = "8.0;8.6;8.9;9.0;10.0;12.0+PTX"
GIB_PER_JOB = 2  # what one compilation may take
# -fno-tree-vectorize: the kernels are vectors already, and g++ 12 at -O3 was seen to broadcast a scalar into one lane
# only (dynamic codec with maximize, AVX-512: tests/test_optim_numerics.py fails without).
CXX_FLAGS = [
    "-O3",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-tree-vectorize",
    "-Wall",
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",
]


def what_to_build() -> str:
    """'none', 'cpu' or 'cuda'."""
    mode = os.environ.get("MEMKERN_BUILD", "auto")
    if mode not in ("auto", "cpu", "cuda", "none"):
        raise SystemExit(f"MEMKERN_BUILD must be auto, cpu, cuda or none, got {mode!r}")
    if mode == "none":
        return mode
    compiler = os.environ.get("CXX", "c++").split()[0]
    has_cxx = shutil.which(compiler) is not None
    has_nvcc = shutil.which(os.environ.get("NVCC", "nvcc")) is not None
    if mode in ("cpu", "cuda") and not has_cxx:
        raise SystemExit(f"MEMKERN_BUILD={mode} needs a C++ compiler; {compiler!r} was not found")
    if mode == "cuda" and not has_nvcc:
        raise SystemExit("MEMKERN_BUILD=cuda needs nvcc, which was not found")
    if not has_cxx:
        print(f"memkern: no C++ compiler ({compiler!r}): installing without compiled kernels")
        return "none"
    return "cuda" if has_nvcc and cuda_sources() and mode != "cpu" else "cpu"


def cuda_sources() -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / CSRC / "cuda").glob("*.cu"))


def limit_jobs() -> None:
    if "MAX_JOBS" in os.environ:
        return
    jobs = os.cpu_count() or 1
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        jobs = min(jobs, int(free // GIB_PER_JOB))
    os.environ["MAX_JOBS"] = str(max(1, jobs))


def extensions(kind: str) -> tuple[list[Extension], dict[str, type]]:
    if kind == "none":
        return [], {}
    import torch
    from torch.utils import cpp_extension

    limit_jobs()
    codec = runpy.run_path(str(ROOT / "memkern" / "codec.py"))
    header = ROOT / CSRC / "core" / "tables.h"
    text = codec["c_header"]()
    if not header.exists() or header.read_text() != text:
        header.write_text(text)

    torch_dir = Path(torch.__file__).parent
    extra = os.environ.get("MEMKERN_CXX_FLAGS", "").split()
    link = [f for f in extra if f.startswith("-fsanitize")]
    ops = Extension(
        "memkern._ops",
        sorted(
            ["csrc/library.cpp", *(str(p.relative_to(ROOT)) for p in (ROOT / CSRC / "cpu").glob("*.cpp"))]
        ),
        include_dirs=[str(torch_dir / "include"), str(torch_dir / "include/torch/csrc/api/include")],
        library_dirs=[str(torch_dir / "lib")],
        libraries=["torch_cpu", "c10"],
        define_macros=[("TORCH_TARGET_VERSION", "0x020a000000000000")],
        extra_compile_args={"cxx": CXX_FLAGS + extra},
        extra_link_args=link,
        depends=[str(p) for p in CSRC.rglob("*.h")],
        language="c++",
    )
    found = [ops]
    if (Path(sysconfig.get_path("include")) / "Python.h").exists():
        import pybind11

        found.append(
            Extension(
                "memkern._host",
                ["csrc/host.cpp"],
                include_dirs=[pybind11.get_include()],
                define_macros=[("MEMKERN_TORCH_VERSION", f'"{torch.__version__}"')],
                extra_compile_args={"cxx": [*CXX_FLAGS, "-std=c++17", *extra]},
                extra_link_args=link,
                language="c++",
            )
        )

    class BuildExtension(cpp_extension.BuildExtension):
        def get_ext_filename(self, ext_name: str) -> str:
            # No Python module: one name for every Python, and not _ops.so, which would hide _ops.py.
            if ext_name.endswith("_ops"):
                return os.path.join(*ext_name.split(".")[:-1], "libmemkern.so")
            return super().get_ext_filename(ext_name)

    return found, {"build_ext": BuildExtension}


ext_modules, cmdclass = extensions(what_to_build())
setup(ext_modules=ext_modules, cmdclass=cmdclass)
