"""tools/hub_kernel.py writes a project that kernel-builder takes; libraries built from it load beside memkern.

kernel-builder itself is not needed: the test compiles with its macros, and puts the files where it puts them. ``pip
install kernels`` brings the loader, and kernel-builder's parser of build.toml.
"""

import ast
import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

tomllib = pytest.importorskip("tomllib")  # of Python 3.11

ROOT = Path(__file__).parents[2]
# By folder or file of memkern: a package beside torch that it may import. torch itself depends on sympy.
MAY_IMPORT = {"triton": "triton", "nn/conv1d.py": "transformers", "compiled/nodes.py": "sympy"}
IDS = ("_memkern_cpu_1111111", "_memkern_cpu_2222222")  # names of two builds' libraries, as kernel-builder makes them

pytestmark = pytest.mark.long

# The text of kernel-builder's registration.h: a library is an empty Python module, whose import registers the ops.
REGISTRATION = """
#include <Python.h>
#define INIT_(name) PyInit_##name
#define INIT(name) INIT_(name)
#define NAME_(name) #name
#define NAME(name) NAME_(name)
#define REGISTER_EXTENSION(name)                                                            \\
  PyMODINIT_FUNC INIT(name)() {                                                             \\
    static PyModuleDef module = {PyModuleDef_HEAD_INIT, NAME(name), nullptr, 0, nullptr};  \\
    return PyModule_Create(&module);                                                        \\
  }
"""
OPS = "import torch\nfrom . import {id}\nops = torch.ops.{id}\n"

PROBE = """
import sys
from pathlib import Path
import kernels, memkern, torch

def trained(library, backend=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    report = library.compress(model)
    assert type(model[1]) is library.nn.GELU and str(report).startswith("memkern.compress: 1 module"), report
    optimizer = library.optim.AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=0)
    x = torch.randn(32, 64)
    with library.use_backend(backend or "cpu"):
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return model, optimizer

def bits(model, optimizer):
    states = [v for s in optimizer.state_dict()["state"].values() for v in s.values()]
    return [*model.state_dict().values(), *states]

loaded = [kernels.get_local_kernel(Path(path), backend="cpu") for path in sys.argv[1:]]
expected = bits(*trained(memkern, "reference"))
for library, path in zip(loaded, sys.argv[1:]):
    assert library.__name__ == Path(path).name and library is not memkern
    assert hasattr(getattr(torch.ops, library.__name__), "adam_step_")
    assert library.backend.select("cpu") == "cpu" and library.report()["build"]["library"].startswith(path)
    for found in (bits(*trained(library)), bits(*trained(library, "reference"))):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    # One library's state is the other's.
    model, optimizer = trained(memkern)
    other = library.optim.AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=0)
    other.load_state_dict(optimizer.state_dict())
    codes, scale = library.quantize_blockwise(torch.randn(1000))
    assert torch.equal(library.dequantize_blockwise(codes, scale), memkern.dequantize_blockwise(codes, scale))
    compiled = torch.compile(lambda x: library.functional.gelu(x).sum(), backend="eager", fullgraph=True)
    compiled(torch.randn(8, 8, requires_grad=True)).backward()
    assert all(name in dir(library) for name in library.__all__)
print("loaded", len(loaded))
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hub") / "project"
    runpy.run_path(str(ROOT / "tools" / "hub_kernel.py"))["write"](out, "someone/memkern")
    return out


def test_build_toml_names_every_source(project: Path) -> None:
    build = tomllib.loads((project / "build.toml").read_text())
    compiled = {*build["torch"]["src"], *build["kernel"]["memkern_cuda"]["src"]}
    assert all((project / name).is_file() for name in compiled)
    sources = {p.relative_to(project).as_posix() for p in (project / "csrc").rglob("*") if p.is_file()}
    assert sources <= compiled
    assert {"csrc/core/tables.h", "csrc/cuda/adam.cu", "torch-ext/torch_binding.cpp"} <= compiled
    # A second registration, in the namespace memkern, would clash with an installed memkern.
    assert not [name for name in compiled if name.endswith("library.cpp")]


def test_kernel_builders_parser_takes_build_toml(project: Path, tmp_path: Path) -> None:
    rust = pytest.importorskip("kernels._rust", reason="kernels is not installed")
    rust.Build.open(project)
    (tmp_path / "build.toml").write_text((project / "build.toml").read_text().replace("edition", "editoin"))
    with pytest.raises(ValueError, match="editoin"):
        rust.Build.open(tmp_path)


def test_the_python_side_imports_torch_and_itself_alone(project: Path) -> None:
    package = project / "torch-ext" / "memkern"
    for path in package.rglob("*.py"):
        # memkern/ is in package/; only __init__.py is beside it, and may import no other package.
        name = path.relative_to(package / "package").as_posix() if path.parent != package else ""
        imported: set[str] = set()
        for node in ast.parse(path.read_text()).body:  # imports of the module; functions may import other packages
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(str(node.module).partition(".")[0])
        others = imported - sys.stdlib_module_names - {"torch"}
        others -= {allowed for start, allowed in MAY_IMPORT.items() if name.startswith(start)}
        assert not others, (name, others)
        assert "memkern" not in imported


def compiled_like_kernel_builder(project: Path, folder: Path) -> dict[str, Path]:
    """Compiles a library for each of IDS. The ops' sources are compiled once, and the registration for each library."""
    build: dict[str, Any] = tomllib.loads((project / "build.toml").read_text())["torch"]
    (project / "torch-ext" / "registration.h").write_text(REGISTRATION)
    libraries = Path(torch.__file__).parent
    includes = [sysconfig.get_path("include"), libraries / "include", libraries / "include/torch/csrc/api/include"]
    includes += [project / name for name in build["include"]]
    # -O0 compiles faster. Without -fno-gnu-unique both libraries would share static variables of inline functions.
    flags = [flag for flag in build["cxx-flags"] if flag != "-O3"] + ["-O0", "-fPIC", "-fno-gnu-unique"]
    flags += [f"-I{path}" for path in includes]
    # What kernel-builder defines: torch 2.10's stable interface, Python 3.9's, and the backend.
    flags += ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DPy_LIMITED_API=0x03090000", "-DCPU_KERNEL"]

    def compile_one(source: str, name: str) -> Path:
        target = folder / f"{name}-{Path(source).stem}.o"
        define = f"-DTORCH_EXTENSION_NAME={name}"
        subprocess.run(["g++", *flags, define, "-c", str(project / source), "-o", str(target)], check=True)
        return target

    binding, *others = [name for name in build["src"] if name.endswith(".cpp")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        bindings = {name: pool.submit(compile_one, binding, name) for name in IDS}
        shared = [str(path) for path in pool.map(lambda source: compile_one(source, "shared"), others)]
    for name in IDS:
        link = [f"-L{libraries / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
        command = ["g++", "-shared", str(bindings[name].result()), *shared, *link]
        subprocess.run([*command, "-o", str(folder / f"{name}.abi3.so")], check=True)
    return {name: folder / f"{name}.abi3.so" for name in IDS}


def laid_out(project: Path, library: Path, folder: Path) -> Path:
    """Puts the files of one build where a repository of the Hub has them. Returns the repository's folder."""
    name = library.name.partition(".")[0]
    variant = f"torch-stable-abi210-cpu-{platform.machine()}-linux"
    target = folder / name / "build" / variant
    shutil.copytree(project / "torch-ext" / "memkern", target)
    shutil.copy(library, target)
    (target / "_ops.py").write_text(OPS.format(id=name))
    metadata = {"name": "memkern", "id": name, "version": 0, "license": "Apache-2.0", "python-depends": []}
    metadata["backend"] = {"type": "cpu"}
    (target / "metadata.json").write_text(json.dumps(metadata))
    return folder / name


def test_two_builds_load_beside_memkern(project: Path, tmp_path: Path) -> None:
    pytest.importorskip("kernels", reason="kernels is not installed")
    built = compiled_like_kernel_builder(project, tmp_path)
    repositories = [str(laid_out(project, library, tmp_path)) for library in built.values()]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", PROBE, *repositories], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.endswith("loaded 2\n")
