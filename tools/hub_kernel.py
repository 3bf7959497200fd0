"""python tools/hub_kernel.py OUT: writes memkern as a project of Hugging Face's kernel-builder, from this tree.

OUT/build.toml names csrc/ (copied), with setup.py's flags, and OUT/torch-ext/memkern/ has the Python side: package/ is
memkern/ without what needs other packages than torch (train, planner, integrations), and __init__.py exports what is
public. kernel-builder writes _ops.py beside it and compiles one library for each backend; its ops are in a namespace of
torch.ops that no other build has, which package/library.py and torch_binding.cpp take from it.

Then, where kernel-builder is installed: kernel-builder build OUT. Or without Nix: kernel-builder create-pyproject OUT;
cd OUT; python setup.py build_kernel.
"""

from __future__ import annotations

import argparse
import ast
import json
import runpy
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LEFT_OUT = ("train", "planner", "integrations", "__main__.py", "flags.py")  # of memkern/
VERSION = 0  # of the interface, as the Hub counts; 0 says that it may still change
TORCH = "2.10"  # the oldest whose stable interface setup.py targets

INIT = '''"""memkern: optimizers with 8-bit states and activations that save few bits per element, for PyTorch."""

from .package import backend, functional, memory, nn, optim
from .package._version import __version__
from .package.backend import report, use_backend
from .package.quant.blockwise import dequantize_blockwise, quantize_blockwise
from .package.swap.compress import compress, restore

__all__ = [
    "__version__",
    "backend",
    "compress",
    "dequantize_blockwise",
    "functional",
    "memory",
    "nn",
    "optim",
    "quantize_blockwise",
    "report",
    "restore",
    "use_backend",
]
'''

# Replaces FILE and NAMESPACE of memkern/library.py.
LIBRARY = """from .._ops import ops

NAMESPACE = ops.name
FILE = next(Path(__file__).parents[1].glob(f"{NAMESPACE}.*"))
"""

BINDING = """// Written by tools/hub_kernel.py: csrc/library.cpp in the namespace that kernel-builder gives this build.
#include "registration.h"
#define MEMKERN_NAMESPACE TORCH_EXTENSION_NAME
{library}
REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
"""

FLAKE = """{
  description = "memkern";
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
"""

CARD = """---
library_name: kernels
license: apache-2.0
---

Optimizers whose states are 8 bits and activations that save 1 to 4 bits per element for the backward pass.

```python
from kernels import get_kernel

memkern = get_kernel("{repo}", version={version})
optimizer = memkern.optim.AdamW8bit(model.parameters(), lr=1e-3)
memkern.compress(model)
```
"""

TEST = '''"""A step and an activation give the bits of the reference."""

import kernels
import pytest
import torch

memkern = kernels.get_kernel("{repo}", version={version}, trust_remote_code=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def stepped(backend):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(64, 512, device=DEVICE))
    optimizer = memkern.optim.AdamW8bit([p], lr=1e-2)
    with memkern.use_backend(backend):
        for _ in range(3):
            p.grad = torch.randn_like(p)
            optimizer.step()
    return p.detach()


@pytest.mark.kernels_ci
def test_a_step_has_the_bits_of_the_reference():
    assert torch.equal(stepped(DEVICE), stepped("reference"))


@pytest.mark.kernels_ci
def test_gelu_saves_three_bits():
    x = torch.randn(64, 512, device=DEVICE, requires_grad=True)
    saved = memkern.memory.saved_bytes(lambda: memkern.functional.gelu(x * 1))
    assert saved <= x.numel() * 3 / 8 + 256
'''


def constants_of_setup() -> dict[str, Any]:
    """The flags and architectures that setup.py compiles with, read from its text: importing it would run a build."""
    wanted = ("CUDA_ARCHS", "CXX_FLAGS", "NVCC_FLAGS")
    constants = {}
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in wanted:
                constants[name] = eval(compile(ast.Expression(node.value), "setup.py", "eval"), {})
    assert constants.keys() == {*wanted}
    return constants


def sources(folder: Path, *patterns: str) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for pattern in patterns for p in folder.glob(pattern))


def build_toml(out: Path, repo: str) -> str:
    """The text of build.toml. TOML's strings and lists are written as JSON's."""
    setup = constants_of_setup()
    headers = sources(out, "csrc/**/*.h")
    compiled = ["torch-ext/torch_binding.cpp", *sources(out, "csrc/**/*.cpp")]
    archs = [arch.removesuffix("+PTX") for arch in setup["CUDA_ARCHS"].split(";")]
    sections = {
        "general": {
            **{"name": "memkern", "version": VERSION, "edition": 5, "license": "Apache-2.0"},
            "backends": ["cpu", "cuda"],
        },
        "general.hub": {"repo-id": repo},
        "torch": {
            **{"src": [*compiled, *headers], "include": ["csrc"]},
            # kernel-builder asks for C++17 where torch does.
            "cxx-flags": [*setup["CXX_FLAGS"], "-std=c++20"],
        },
        "torch.stable-abi": {"cpu": TORCH, "cuda": TORCH},
        "kernel.memkern_cuda": {
            **{"backend": "cuda", "depends": ["torch"], "include": ["csrc"]},
            **{"cuda-capabilities": archs, "cuda-flags": setup["NVCC_FLAGS"]},
            "src": sources(out, "csrc/cuda/*.cu", "csrc/cuda/*.cuh"),
        },
    }
    return "\n".join(
        f"[{section}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in entries.items())
        for section, entries in sections.items()
    )


def write_library(path: Path) -> None:
    """memkern/library.py with the file and the namespace of the build."""
    parts = path.read_text().split("\n\n")
    (file_part,) = [i for i, part in enumerate(parts) if part.startswith("FILE = ")]
    parts[file_part] = LIBRARY.rstrip()
    path.write_text("\n\n".join(parts))


def write(out: Path, repo: str) -> None:
    runpy.run_path(str(ROOT / "csrc" / "generate.py"))["write_headers"]()
    skipped = shutil.ignore_patterns("__pycache__", "*.so", "*.py", "library.cpp", "host.cpp")
    shutil.copytree(ROOT / "csrc", out / "csrc", ignore=skipped)
    package = out / "torch-ext" / "memkern" / "package"
    skipped = shutil.ignore_patterns("__pycache__", "*.so", "py.typed", *LEFT_OUT)
    shutil.copytree(ROOT / "memkern", package, ignore=skipped)
    write_library(package / "library.py")
    (out / "tests").mkdir()
    placeholders = {"{repo}": repo, "{version}": str(VERSION)}
    library = (ROOT / "csrc" / "library.cpp").read_text()
    for name, text in {
        "torch-ext/memkern/__init__.py": INIT,
        "torch-ext/torch_binding.cpp": BINDING.replace("{library}", library),
        "flake.nix": FLAKE,
        "CARD.md": CARD,
        "tests/__init__.py": "",
        "tests/test_memkern.py": TEST,
    }.items():
        for key, value in placeholders.items():
            text = text.replace(key, value)
        (out / name).write_text(text)
    (out / "build.toml").write_text(build_toml(out, repo))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="a folder that is not there yet")
    parser.add_argument("--repo-id", default="memkern/memkern", help="of the Hub (default: memkern/memkern)")
    args = parser.parse_args(argv)
    if args.out.exists():
        raise SystemExit(f"OUT must be a folder that is not there yet, got {args.out}")
    write(args.out, args.repo_id)
    print(args.out)


if __name__ == "__main__":
    main()
