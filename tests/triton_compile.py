"""Compiles Triton kernels ahead of time, without a GPU, and reads what the machine code needs."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_kernels import KERNELS, TYPES

from memkern.triton.launch import OPTIONS

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)")


class Compiled(NamedTuple):
    registers: int
    scratch: int  # bytes of local or stack memory, spills included
    instructions: int
    widest: int  # bits of the widest access to global memory


def compiled(name: str, target: str) -> Any:
    """The kernel as Triton's compiler leaves it."""
    variant = KERNELS[name]
    types = {
        p.name: "constexpr" if p.is_constexpr else {**TYPES, **variant.types}.get(p.name, "i32")
        for p in variant.kernel.params
    }
    if target.startswith("gfx"):
        gpu = GPUTarget("hip", target, 64)
    else:
        gpu = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    source = ASTSource(fn=variant.kernel, signature=types, constexprs=variant.constants)
    return triton.compile(source, target=gpu, options=OPTIONS)


def facts(name: str, target: str) -> Compiled:
    assert os.environ.get("TRITON_INTERPRET") != "1"
    asm = compiled(name, target).asm
    return _amd(asm["amdgcn"]) if target.startswith("gfx") else _nvidia(asm["cubin"], asm["ptx"])


def _tool(name: str, *args: str) -> str:
    path = f"{TOOLS}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run([TOOLS / name, *args], capture_output=True, text=True, env={**os.environ, "PATH": path})
    assert run.returncode == 0, run.stderr
    return run.stdout + run.stderr


def _nvidia(cubin: bytes, ptx: str) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        usage = _tool("cuobjdump", "-res-usage", str(file))
        sass = _tool("cuobjdump", "-sass", str(file))
    number = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    operations = [x for x in INSTRUCTION.findall(sass) if x != "NOP"]
    vectors = re.findall(r"(?:ld|st)\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)", ptx)
    widest = max(int(n or 1) * int(bits) for n, bits in vectors)
    return Compiled(number["REG"], number["STACK"] + number["LOCAL"], len(operations), widest)


def _amd(text: str) -> Compiled:
    def number(key: str) -> int:
        return int(re.search(rf"\.{key}:\s+(\d+)", text)[1])

    scratch = number("private_segment_fixed_size") + number("vgpr_spill_count") + number("sgpr_spill_count")
    body = text[: text.index("s_endpgm")]
    operations = re.findall(r"^\s+(?:v|s|ds|global|buffer|flat)_\w+", body, re.M)
    widths = re.findall(r"(?:global|buffer)_(?:load|store)_(?:dwordx(\d)|(dword)|(\w+))", body)
    widest = max(32 * int(n) if n else 32 if dword else 16 for n, dword, _ in widths)
    return Compiled(number("vgpr_count"), scratch, len(operations), widest)
