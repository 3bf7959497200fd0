"""What nvcc and Triton compile for the GPU, run in the PTX emulator by the backends' own host side.

The SIMT shim and Triton's interpreter run the sources; this runs what the compilers made of them, so a contraction, a
flushed denormal or a root that is not correctly rounded would show.
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
    """A backend's ops, run by the emulator; ``modules`` are what was launched, or could have been."""

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
        made = Compiled(Kernels("triton", torch.ops.memkern_triton), triton_ptx.emulated())
    else:
        library, path = request.getfixturevalue("simt_library")
        made = Compiled(BACKENDS["simt-fwd"], ptx.emulated(request.getfixturevalue("program"), library, path))
        made.modules = request.getfixturevalue("program").modules
    with made.emulated as launched:
        made.launched = launched
        yield made
    assert launched  # nothing else ran
    if request.param == "triton":
        made.modules = launched
    assert made.modules
    assert not [text for module in made.modules for text in contracted(module)]


@on_triton
@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.emulated])
def test_cases(compiled: Compiled, case: str) -> None:
    """Without an exponential, whose approximation is not in the emulator. test_cuda_host.py runs CUDA's."""
    compare(compiled.kernels, CASES[case])


@on_cuda
@pytest.mark.parametrize("name", ["adam_step_", "lamb_step_"])
def test_zeros_take_the_fast_path(compiled: Compiled, program: ptx.Program, name: str) -> None:
    """Rows of an embedding that no token touched: not one division or root by the slow way more than other rows."""
    slow = []
    for zeros in (False, True):
        args = step_args(name, ("whole blocks",))
        args = args._replace(grads=[torch.full_like(p, 0.01) for p in args.params])
        if zeros:
            args.grads[0][::2] = 0.0
            args.params[0].view(-1)[::3] = -0.0
        expected = cloned(args)
        before = sum((k.executed for _, k in program.kernels.values()), Counter())
        for step in range(2):
            compiled.kernels.call(name, *args)
            getattr(reference, name)(expected)
            assert_same([*args], [*expected], f"step {step}")
        executed = sum((k.executed for _, k in program.kernels.values()), Counter()) - before
        slow.append({op: executed[op] for op in ("div.rn.f32", "sqrt.rn.f32")})
        assert executed["rsqrt.approx.ftz.f32"] >= 2 * args.params[0].numel()
    assert slow[0] == slow[1]


@on_triton
def test_norm_with_slow_fp64(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
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
    # In a process of its own: the library notes once a process that a device has torch's results, and those that the
    # shim's tests have computed are not in the emulator's memory.
    code = (
        "import sys; from pathlib import Path; import torch; "
        "from tests.support import cache; from tests.support.activation_kernels import compare_bf16_table; "
        "from tests.support.simt import build; from lab.emulators import simt_ptx as ptx; path = Path(sys.argv[1]); "
        "program = ptx.Program(cache.built('ptx', ptx.compile_all, ptx.FLAGS))\n"
        # Table and formula with the same approximations of exp; how near erf is, the shim shows.
        "with ptx.emulated(program, build.load(path), path) as launched:\n"
        "    compare_bf16_table(torch.ops.memkern_simt, [('gelu', 3)])\n"
        "print(*launched)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(simt_library[1])],
        cwd=build.ROOT, env={**os.environ, "PYTHONPATH": str(build.ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    assert "forward_by_table" in run.stdout


@on_triton
def test_gelu_of_every_bf16(compiled: Compiled) -> None:
    assert compare_bf16_gelu(compiled.kernels.ops) in (
        0,
        11,
    )  # with the erf of CUDA 13 (Triton 3.9), of CUDA 12 (3.6)


@on_cuda
def test_forward_of_gelu(compiled: Compiled) -> None:
    compare_gelus(compiled.kernels.ops, F32, [("gelu", 3)])
    compare_gelus(compiled.kernels.ops, F16, [("gelu", 4)])


def test_names_are_read_alike() -> None:
    assert ptx.readable(["_ZN7memkern10norm_tilesENS_9NormTableE"]) == ["memkern::norm_tiles"]
    assert Path(build.ROOT, "csrc", "cuda").exists()
