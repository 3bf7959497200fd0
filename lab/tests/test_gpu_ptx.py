"""The PTX that nvcc and Triton compile, run in the PTX emulator by the backends' host code, has the reference's bits.

The SIMT shim and Triton's interpreter run the sources; this runs the compilers' results, so that a contraction, a
flushed denormal or a root that is not correctly rounded fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.emulators import simt_ptx as ptx
from lab.emulators import triton_ptx
from lab.emulators.ptx_emulator import Module, contracted
from memkern import reference
from tests.support import cache
from tests.support.activation_kernels import compare_bf16_gelu, compare_gelus
from tests.support.helpers import assert_same, tensor
from tests.support.kernels.arguments import F16, F32, SMALL, cloned, step_args
from tests.support.kernels.backends import BACKENDS, Kernels, compare
from tests.support.kernels.cases import CASES
from tests.support.simt import build

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.full,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, which runs the kernels itself"),
]
MISSING = {"cuda": build.missing() or ptx.missing(), "triton": triton_ptx.missing()}


def on(backend: str) -> pytest.MarkDecorator:
    missing = pytest.mark.skipif(MISSING[backend] is not None, reason=str(MISSING[backend]))
    return pytest.mark.parametrize("compiled", [pytest.param(backend, marks=missing)], indirect=True)


on_cuda, on_triton = on("cuda"), on("triton")


class Compiled:
    """A backend's ops, run by the emulator. ``modules``: PTX of all kernels (CUDA) or of those launched (Triton)."""

    def __init__(self, kernels: Kernels, emulated: AbstractContextManager[Any]) -> None:
        self.kernels, self.emulated = kernels, emulated
        self.modules: list[Module] = []
        self.launched: list[Module] = []


@pytest.fixture(scope="session")
def program() -> ptx.Program:
    return ptx.Program(cache.built("ptx", ptx.compile_all, ptx.FLAGS))


@pytest.fixture
def compiled(request: pytest.FixtureRequest) -> Iterator[Compiled]:
    if request.param == "triton":
        backend = Compiled(Kernels("triton", torch.ops.memkern_triton), triton_ptx.emulated())
    else:
        library, path = request.getfixturevalue("simt_library")
        backend = Compiled(BACKENDS["simt-fwd"], ptx.emulated(request.getfixturevalue("program"), library, path))
        backend.modules = request.getfixturevalue("program").modules
    with backend.emulated as launched:
        backend.launched = launched
        yield backend
    assert launched  # the emulator ran the kernels
    if request.param == "triton":
        backend.modules = launched
    assert backend.modules
    assert not [text for module in backend.modules for text in contracted(module)]


@on_triton
@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.emulated])
def test_a_case_has_the_bits_of_the_reference(compiled: Compiled, case: str) -> None:
    """Cases without an exponential, whose approximation is not in the emulator. test_cuda_host.py runs CUDA's."""
    compare(compiled.kernels, CASES[case])


@on_cuda
@pytest.mark.parametrize("name", ["adam_step_", "lamb_step_"])
def test_zeros_take_the_fast_path(compiled: Compiled, program: ptx.Program, name: str) -> None:
    """Rows of an embedding that no token touched take no more slow divisions and roots than other rows."""
    slow_ops = []
    for zeros in (False, True):
        args = step_args(name, ("whole blocks",))
        args = args._replace(grads=[torch.full_like(p, 0.01) for p in args.params])
        if zeros:
            args.grads[0][::2] = 0.0
            args.params[0].view(-1)[::3] = -0.0
        expected = cloned(args)
        executed_before = sum((k.executed for _, k in program.kernels.values()), Counter())
        for step in range(2):
            compiled.kernels.call(name, *args)
            getattr(reference, name)(expected)
            assert_same([*args], [*expected], f"step {step}")
        executed = sum((k.executed for _, k in program.kernels.values()), Counter()) - executed_before
        slow_ops.append({op: executed[op] for op in ("div.rn.f32", "sqrt.rn.f32")})
        assert executed["rsqrt.approx.ftz.f32"] >= 2 * args.params[0].numel()
    assert slow_ops[0] == slow_ops[1]


@on_triton
def test_a_norm_is_accurate_where_fp64_is_slow(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    from memkern.triton import grad_norm

    monkeypatch.setattr(grad_norm, "slow_fp64", lambda _device: True)
    for scale in (1.0, 1e-25, 1e30):
        grads = [tensor(layout, scale=0.1) * scale for layout in SMALL]
        norm = torch.zeros((), dtype=torch.float64)
        compiled.kernels.call("grad_norm_", norm, grads, None)
        truth = torch.cat([g.double().flatten() for g in grads]).norm()
        torch.testing.assert_close(norm, truth, rtol=1.5 * 2**-24, atol=0)  # as in triton_squares.py


@pytest.mark.skipif(MISSING["cuda"] is not None, reason=str(MISSING["cuda"]))
def test_forward_of_every_bf16(simt_library: tuple[CDLL, Path]) -> None:
    # In a process of its own: the library computes a table of torch's results once per process and device, and that of
    # the shim's tests would not be in the emulator's memory.
    code = (
        "import sys; from pathlib import Path; import torch; "
        "from tests.support import cache; from tests.support.activation_kernels import compare_bf16_table; "
        "from tests.support.simt import build; from lab.emulators import simt_ptx as ptx; path = Path(sys.argv[1]); "
        "program = ptx.Program(cache.built('ptx', ptx.compile_all, ptx.FLAGS))\n"
        # gelu only: its table and formula have the same approximation of exp. The shim's tests compare erf.
        "with ptx.emulated(program, build.load(path), path) as launched:\n"
        "    compare_bf16_table(torch.ops.memkern_simt, [('gelu', 3)])\n"
        "print(*launched)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, str(simt_library[1])],
        cwd=build.ROOT, env={**os.environ, "PYTHONPATH": str(build.ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-4000:]
    assert "forward_by_table" in process.stdout


@on_triton
def test_gelu_of_every_bf16(compiled: Compiled) -> None:
    different = compare_bf16_gelu(compiled.kernels.ops)
    assert different in (0, 11)  # with the erf of CUDA 13 (Triton 3.9), of CUDA 12 (Triton 3.6)


@on_cuda
def test_forward_of_gelu(compiled: Compiled) -> None:
    compare_gelus(compiled.kernels.ops, F32, [("gelu", 3)])
    compare_gelus(compiled.kernels.ops, F16, [("gelu", 4)])


def test_a_mangled_name_becomes_readable() -> None:
    assert ptx.readable(["_ZN7memkern10norm_tilesENS_9NormTableE"]) == ["memkern::norm_tiles"]
    assert Path(build.ROOT, "csrc", "cuda").exists()
