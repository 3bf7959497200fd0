"""Builds the two optional extensions; everything else is in pyproject.toml.

``memkern/libmemkern.so``  every op, against LibTorch's stable ABI: no Python.h, one binary for torch >= 2.10.
``memkern/_host``          pybind11: build facts and CPU features.

A build needs torch, setuptools and a C++ compiler; pybind11's headers come with torch. With ninja installed, a build in
place compiles again only what has changed.

MEMKERN_BUILD          auto (default): C++ where there is a compiler, and CUDA where the torch of the environment has
                       CUDA and nvcc is found; cpu; cuda (beside a CPU-only torch too); none. cpu and cuda fail
                       where they cannot be built.
MEMKERN_CUDA_ARCHS     auto (default): the architectures of the GPUs that torch sees here, and PTX for later ones;
                       where it sees none, 8.0 and its PTX, which later GPUs compile at a kernel's first call. all:
                       every architecture that is tested, for wheels (10 minutes on two cores).
TORCH_CUDA_ARCH_LIST   architectures, such as "8.0;9.0+PTX", instead of MEMKERN_CUDA_ARCHS. Those older than 8.0 and
                       those that nvcc does not know are left out, with a message.
MEMKERN_WHEEL          python (default): a wheel for the Python that builds it; any: one for every Python, without
                       ``_host``, so that `python -m memkern info` has no build facts and nothing else changes.
MAX_JOBS               parallel compilations; by default as many as cores and free memory allow.
MEMKERN_CXX_FLAGS      more flags for the C++ compiler; -fsanitize=... also reaches the linker.
"""

from __future__ import annotations

import functools
import os
import re
import runpy
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import setuptools
from setuptools import Extension, setup

if int(setuptools.__version__.split(".")[0]) < 77:  # older ones do not know pyproject.toml's license
    raise SystemExit(
        f"memkern needs setuptools 77 or newer to build, found {setuptools.__version__}: pip install 'setuptools>=77'"
    )

from setuptools.command.bdist_wheel import bdist_wheel

ROOT = Path(__file__).parent
CSRC = Path("csrc")
# Every architecture that is tested. A B300 (10.3) could run the code of 10.0 but gets its own, with less fp64: its rate
# in fp64 is a 64th of fp32's, a B200's half (device.cuh).
CUDA_ARCHS = "8.0;8.6;8.9;9.0;10.0;10.3;12.0+PTX"
LONG_UNITS = ("lamb.cu", "adam.cu", "lars.cu", "activation.cu")  # the ones that take longest to compile
LEAST_ARCH = (8, 0)  # of the kernels: bf16 arithmetic, __reduce_max_sync
GIB_PER_JOB = 2  # memory that one compilation may take
TARGET_TORCH = ("TORCH_TARGET_VERSION", "0x020a000000000000")  # 2.10
# -fno-tree-vectorize: the kernels are vectors already, and g++ 12 at -O3 without it was seen to broadcast a scalar
# into one lane only (dynamic codec with maximize, AVX-512: tests/optim/test_numerics.py fails).
CXX_FLAGS = [
    *("-O3", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-fno-tree-vectorize", "-g0"),
    *("-Wall", "-Wno-psabi", "-Wno-maybe-uninitialized"),
]
NVCC_FLAGS = ["-O3", "-std=c++20", "-fmad=false", "-Xcompiler=-fPIC,-fvisibility=hidden"]


def what_to_build() -> str:
    """The kernels to build, by MEMKERN_BUILD and what is found here: 'none', 'cpu' or 'cuda'."""
    mode = os.environ.get("MEMKERN_BUILD", "auto")
    if mode not in ("auto", "cpu", "cuda", "none"):
        raise SystemExit(f"MEMKERN_BUILD must be auto, cpu, cuda or none, got {mode!r}")
    if mode == "none":
        return mode
    compiler = os.environ.get("CXX", "c++").split()[0]
    has_cxx = shutil.which(compiler) is not None
    if mode in ("cpu", "cuda") and not has_cxx:
        raise SystemExit(f"MEMKERN_BUILD={mode} needs a C++ compiler; {compiler!r} was not found")
    if mode == "cuda" and not nvcc():
        raise SystemExit("MEMKERN_BUILD=cuda needs nvcc, which was not found")
    if mode != "auto":
        return mode
    if not has_cxx:
        print(f"memkern: no C++ compiler ({compiler!r}): installing without compiled kernels")
        return "none"
    return "cuda" if nvcc() and cuda_of_torch() else "cpu"


def cuda_of_torch() -> str | None:
    """The CUDA version of the torch that memkern will run with, None for a torch without CUDA.

    With build isolation pip compiles against a torch that it has fetched for the build, beside the one of the
    environment that it installs into.
    """
    version = Path(sysconfig.get_path("platlib"), "torch", "version.py")
    if version.exists():
        return runpy.run_path(str(version))["cuda"]
    import torch

    return torch.version.cuda


def for_any_python() -> bool:
    choice = os.environ.get("MEMKERN_WHEEL", "python")
    if choice not in ("python", "any"):
        raise SystemExit(f"MEMKERN_WHEEL must be python or any, got {choice!r}")
    return choice == "any"


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if for_any_python() else (python, abi, platform)


def nvcc() -> str | None:
    return shutil.which(os.environ.get("NVCC", "nvcc"))


def cuda_sources() -> list[str]:
    return sources("cuda/*.cu")


def sources(pattern: str) -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for p in (ROOT / CSRC).glob(pattern))


@functools.cache
def cuda_archs() -> list[str]:
    """The architectures to compile for, such as "8.0" or "12.0+PTX": those chosen that the kernels and nvcc support."""
    asked_for = os.environ.get("MEMKERN_CUDA_ARCHS", "auto")
    if asked_for not in ("auto", "all"):
        raise SystemExit(
            f"MEMKERN_CUDA_ARCHS must be auto or all, got {asked_for!r}; TORCH_CUDA_ARCH_LIST names others"
        )
    if listed := re.findall(r"[^;,\s]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "")):
        return possible_archs(listed)
    if asked_for == "all":
        return possible_archs(CUDA_ARCHS.split(";"))
    here = archs_here()
    archs = here or ["{}.{}".format(*LEAST_ARCH)]
    possible = possible_archs([*archs[:-1], f"{archs[-1]}+PTX"])
    why = "the GPUs here" if here else "newer GPUs compile its PTX at a kernel's first call, as torch sees none here"
    print(
        f"memkern: compiles CUDA kernels for {' '.join(possible)} ({why}); MEMKERN_CUDA_ARCHS=all, or "
        'TORCH_CUDA_ARCH_LIST="9.0;10.0+PTX", compiles for others',
        flush=True,
    )
    return possible


def possible_archs(listed: list[str]) -> list[str]:
    """The listed architectures without those older than LEAST_ARCH or unknown to nvcc, which a message names.

    Where that drops the only +PTX, the newest of the others gets it, so that still newer GPUs can compile that PTX.
    """
    known, archs, left_out = nvcc_archs(), {}, []
    for name in listed:
        match = re.fullmatch(r"(\d+)\.(\d)[af]?(?:\+PTX)?", name)
        if not match:
            raise SystemExit(f"TORCH_CUDA_ARCH_LIST must be architectures such as 8.0;9.0+PTX, got {name!r}")
        version = int(match[1]), int(match[2])
        if version >= LEAST_ARCH and (not known or version in known):
            archs[name] = version
        else:
            left_out.append(name)
    if not archs:
        newest = "; this nvcc's newest is {}.{}".format(*max(known)) if known else ""
        raise SystemExit(
            f"no CUDA architecture is left of {';'.join(listed)}: the kernels need {LEAST_ARCH[0]}.{LEAST_ARCH[1]} or "
            f"newer{newest}; set TORCH_CUDA_ARCH_LIST, or MEMKERN_BUILD=cpu"
        )
    if left_out:
        print(f"memkern: leaves out CUDA architectures that the kernels or nvcc cannot be compiled for: {left_out}")
        newest = max(archs, key=lambda name: archs[name])
        if "+PTX" in "".join(left_out) and "+PTX" not in "".join(archs):
            return [*(name for name in archs if name != newest), f"{newest}+PTX"]
    return [*archs]


def nvcc_archs() -> set[tuple[int, int]]:
    """The (major, minor) of architectures that nvcc knows; none where it cannot say."""
    listing = subprocess.run([str(nvcc()), "--list-gpu-arch"], capture_output=True, text=True)
    return {(int(number) // 10, int(number) % 10) for number in re.findall(r"compute_(\d+)", listing.stdout)}


def archs_here() -> list[str]:
    """The architectures of the GPUs that torch sees and that are new enough for the kernels."""
    import torch

    capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return [f"{major}.{minor}" for major, minor in sorted(capabilities) if major >= 8]


def gencode(arch: str) -> list[str]:
    """nvcc's flags for an architecture: machine code, and PTX where the name ends in +PTX."""
    number = arch.removesuffix("+PTX").replace(".", "")
    kinds = ["sm", "compute"] if arch.endswith("+PTX") else ["sm"]
    return [f"-gencode=arch=compute_{number},code={kind}_{number}" for kind in kinds]


def limit_jobs() -> int:
    if "MAX_JOBS" not in os.environ:
        jobs = os.cpu_count() or 1
        meminfo = Path("/proc/meminfo")
        if meminfo.exists():
            kib = int(meminfo.read_text().split("MemAvailable:")[1].split()[0])
            jobs = min(jobs, kib // (GIB_PER_JOB << 20))
        os.environ["MAX_JOBS"] = str(max(1, jobs))
    return int(os.environ["MAX_JOBS"])


def cuda_units(folder: Path, archs: int, jobs: int) -> list[Path]:
    """The files that nvcc gets: each .cu by itself where there are processors for that, else all in one.

    torch's headers are read for each file and architecture, 8 s of the 9 to 37 s that a file takes: for sm_90 the files
    take 177 s one after the other, 110 s in one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if jobs >= 4 * archs:
        return [ROOT.resolve() / source for source in cuda_sources()]
    unit = folder / "memkern.cu"
    unit.write_text("".join(f'#include "{ROOT.resolve() / source}"\n' for source in cuda_sources()))
    return [unit]


def compile_cuda(includes: list[str], folder: Path) -> tuple[list[str], Callable[[], None]]:
    """Starts nvcc without torch's CUDAExtension, which beside a CPU-only torch would ask for torch's CUDA.

    Returns the object files, and a function that waits for them: C++ is compiled in the meantime.
    """
    archs, jobs = cuda_archs(), limit_jobs()
    units = cuda_units(folder, len(archs), jobs)
    flags = [*NVCC_FLAGS, *(flag for arch in archs for flag in gencode(arch))]
    flags += [f"-D{'='.join(TARGET_TORCH)}", "-DUSE_CUDA", *(f"-I{path}" for path in includes)]
    command = [str(nvcc()), *flags, "--threads", str(-(-jobs // len(units)))]
    targets = [folder / f"{unit.name}.o" for unit in units]
    pool = ThreadPoolExecutor(jobs)
    # The files that take longest go first, to save time.
    order = sorted(zip(units, targets, strict=True), key=lambda pair: pair[0].name not in LONG_UNITS)
    running = [
        pool.submit(subprocess.run, [*command, "-c", str(unit), "-o", str(target)], cwd=ROOT, check=True)
        for unit, target in order
    ]

    def wait() -> None:
        for compilation in running:
            compilation.result()
        pool.shutdown()

    return [*map(str, targets)], wait


def compile_in_parallel(compiler: Any) -> None:
    """Without ninja, setuptools compiles one file after another; here ``limit_jobs()`` at a time."""
    os.environ["TORCH_NO_COMPILER_WRAPPER"] = "1"  # torch would exchange the compiler around each file

    def compile(
        sources: list[str], output_dir: str | None = None, macros: Any = None, include_dirs: Any = None,
        debug: bool = False, extra_preargs: Any = None, extra_postargs: Any = None, depends: Any = None,
    ) -> list[str]:  # fmt: skip
        _, objects, postargs, flags, build = compiler._setup_compile(
            output_dir, macros, include_dirs, sources, depends, extra_postargs
        )
        cc_args = compiler._get_cc_args(flags, debug, extra_preargs)
        with ThreadPoolExecutor(limit_jobs()) as pool:
            jobs = [pool.submit(compiler._compile, o, *build[o], cc_args, postargs, flags) for o in objects]
            for job in jobs:
                job.result()
        return objects

    compiler.compile = compile


def extensions(kind: str) -> tuple[list[Extension], dict[str, type]]:
    if kind == "none":
        return [], {}
    import torch
    from torch.utils import cpp_extension

    # Finds a virtual environment's ninja where the environment is not activated, too.
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    limit_jobs()
    runpy.run_path(str(ROOT / CSRC / "generate.py"))["write_headers"]()

    torch_dir = Path(torch.__file__).parent
    includes = [
        str(ROOT.resolve() / CSRC),
        str(torch_dir / "include"),
        str(torch_dir / "include/torch/csrc/api/include"),
    ]
    extra = os.environ.get("MEMKERN_CXX_FLAGS", "").split()
    link = [flag for flag in extra if flag.startswith("-fsanitize")]
    archs = ";".join(cuda_archs()) if kind == "cuda" else ""
    torch_link = []
    if archs:
        # torch loads libtorch_cuda, which has aoti_torch_get_current_cuda_stream, for itself alone. That function is a
        # weak symbol here and binds only where this library depends on libtorch_cuda, as libtorch does in a torch with
        # CUDA; nothing else of libtorch is used, so that the linker would leave it out.
        torch_link.append("-Wl,--push-state,--no-as-needed,-ltorch,--pop-state")
    cuda = {"define_macros": [("USE_CUDA", None)], "libraries": ["cudart_static", "rt", "dl"]} if archs else {}
    ops = Extension(
        "memkern._ops",
        [*sources("cpu/**/*.cpp"), *sources("library.cpp")],
        include_dirs=includes,
        library_dirs=[str(torch_dir / "lib"), *cuda_libraries(archs)],
        libraries=["torch_cpu", "c10", *cuda.get("libraries", [])],
        define_macros=[TARGET_TORCH, *cuda.get("define_macros", [])],
        extra_compile_args={"cxx": CXX_FLAGS + extra},
        extra_link_args=link + torch_link,
        depends=[str(p) for pattern in ("*.h", "*.cuh", "*.cu") for p in CSRC.rglob(pattern)],
        language="c++",
    )
    modules = [ops]
    if not for_any_python() and (Path(sysconfig.get_path("include")) / "Python.h").exists():
        facts = [("MEMKERN_TORCH_VERSION", f'"{torch.__version__}"'), ("MEMKERN_CUDA_ARCHS", f'"{archs}"')]
        modules.append(
            Extension(
                "memkern._host",
                ["csrc/host.cpp"],
                include_dirs=includes[:2],  # csrc, and torch's pybind11
                define_macros=facts,
                extra_compile_args={"cxx": [*CXX_FLAGS, "-std=c++17", *extra]},
                extra_link_args=link,
                language="c++",
            )
        )

    with_ninja = cpp_extension.BuildExtension.with_options(use_ninja=cpp_extension.is_ninja_available())

    class BuildExtension(with_ninja):  # type: ignore[misc, valid-type]
        def get_ext_filename(self, ext_name: str) -> str:
            # No Python module: one name for every Python, and not _ops.so, which would hide _ops.py.
            if ext_name.endswith("_ops"):
                return os.path.join(*ext_name.split(".")[:-1], "libmemkern.so")
            return super().get_ext_filename(ext_name)

        def build_extensions(self) -> None:
            if archs:
                folder = Path(self.build_temp).resolve() / "cuda"
                ops.extra_objects, wait = compile_cuda(includes, folder)
                link = self.compiler.link_shared_object

                def link_when_compiled(*args: Any, **options: Any) -> None:
                    wait()
                    link(*args, **options)

                self.compiler.link_shared_object = link_when_compiled
            if not self.use_ninja:
                compile_in_parallel(self.compiler)
            super().build_extensions()

    return modules, {"build_ext": BuildExtension}


def cuda_libraries(archs: str) -> list[str]:
    """Where nvcc's toolkit keeps the CUDA runtime; nvcc itself may be a link or a script somewhere else."""
    if not archs:
        return []
    dry = [str(nvcc()), "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]
    lines = subprocess.run(dry, capture_output=True, text=True).stderr.splitlines()
    top = next((line.split("TOP=", 1)[1].strip() for line in lines if "TOP=" in line), "")
    return [str(Path(top, name).resolve()) for name in ("lib64", "lib") if Path(top, name).exists()]


ext_modules, cmdclass = extensions(what_to_build())
setup(ext_modules=ext_modules, cmdclass={**cmdclass, "bdist_wheel": Wheel})
