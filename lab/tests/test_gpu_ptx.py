"""What nvcc and Triton compile for the GPU, run in the PTX emulator by the backends' own host side.

The SIMT shim and Triton's interpreter run the sources; this runs what the compilers made of them, so a contraction, a
flushed denormal or a root that is not correctly rounded would show.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from ctypes import CDLL
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import memkern
from lab.emulators import simt_ptx as ptx
from lab.emulators import triton_ptx
from lab.emulators.ptx_emulator import Module, contracted
from memkern import reference
from memkern.quant.codec import CODECS as NUMBERS
from memkern.schemas import StepArgs
from tests.support import cache, muon_helpers
from tests.support.activation_helpers import LAYOUTS as ACTIVATION_LAYOUTS
from tests.support.activation_kernels import (
    compare_bf16_gelu,
    compare_gelus,
    compare_gradients,
)
from tests.support.helpers import CODECS, FLOATS, LAYOUTS, assert_same, tensor
from tests.support.muon_helpers import compare_muon
from tests.support.simt import build, drive

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.full,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, which runs the kernels itself"),
]
DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)]
SOME_LAYOUTS = ("odd", "long rows", "short rows", "channels_last", "unaligned", "whole blocks")
MISSING = {"cuda": build.missing() or ptx.missing(), "triton": triton_ptx.missing()}
over_compiled = pytest.mark.parametrize(
    "compiled",
    [pytest.param(n, marks=pytest.mark.skipif(why is not None, reason=str(why))) for n, why in MISSING.items()],
    indirect=True,
)


class Compiled:
    """A backend's ops, run by the emulator; ``modules`` are what was launched, or could have been."""

    def __init__(self, ops: Any, emulated: AbstractContextManager[Any]) -> None:
        self.ops, self.emulated = ops, emulated
        self.modules: list[Module] = []
        self.launched: list[Module] = []

    def step(self, name: str, args: StepArgs) -> None:
        op = getattr(self.ops, name)
        op(*args) if isinstance(op, torch._ops.OpOverloadPacket) else op(args)


@pytest.fixture(scope="session")
def program() -> ptx.Program:
    return ptx.Program(cache.built("ptx", ptx.compile_all, ptx.FLAGS))


@pytest.fixture
def compiled(request: pytest.FixtureRequest) -> Iterator[Compiled]:
    if request.param == "triton":
        import memkern.triton

        made = Compiled(memkern.triton, triton_ptx.emulated())
    else:
        library, path = request.getfixturevalue("simt_library")
        made = Compiled(torch.ops.memkern_simt, ptx.emulated(request.getfixturevalue("program"), library, path))
        made.modules = request.getfixturevalue("program").modules
    with made.emulated as launched:
        made.launched = launched
        yield made
    assert launched  # nothing else ran
    if request.param == "triton":
        made.modules = launched
    assert made.modules
    assert not [text for module in made.modules for text in contracted(module)]


@over_compiled
@pytest.mark.parametrize(
    ("name", "param", "grad"),
    [
        *((name, *dtypes) for name in ("adam_step_", "lion_step_") for dtypes in DTYPES),
        ("lamb_step_", *DTYPES[0]),
        ("lars_step_", *DTYPES[1]),
    ],
)
def test_steps(compiled: Compiled, name: str, param: torch.dtype, grad: torch.dtype) -> None:
    args = drive.step_args(name, param, grad)._replace(**drive.scaler())
    expected = drive.cloned(args)
    for step in range(2):
        compiled.step(name, args)
        getattr(reference, name)(expected)
        assert_same([*args], [*expected], f"step {step}")
        grads = drive.gradients(args.params, step + 2, grad)
        args, expected = args._replace(grads=grads), expected._replace(grads=grads)


@over_compiled
@pytest.mark.parametrize(
    ("name", "weights"),
    [("adam_step_", (2, 3)), ("adam_step_", (1, 0)), ("lion_step_", (2, 1)), ("lion_step_", (3, 0))],
)
def test_bf16_weights(compiled: Compiled, name: str, weights: tuple[int, int]) -> None:
    args = drive.step_args(name, torch.bfloat16, torch.bfloat16, layouts=SOME_LAYOUTS, weights=weights)
    expected = drive.cloned(args)
    for step in range(2):
        compiled.step(name, args)
        getattr(reference, name)(expected)
        assert_same([*args], [*expected], f"step {step}")


@over_compiled
@pytest.mark.parametrize("block_size", [24, 1024])
def test_blocks_of_other_sizes(compiled: Compiled, block_size: int) -> None:
    args = drive.step_args("adam_step_", block_size=block_size, layouts=SOME_LAYOUTS[:3])
    expected = drive.cloned(args)
    compiled.step("adam_step_", args)
    reference.adam_step_(expected)
    assert_same([*args], [*expected])


@pytest.mark.parametrize("compiled", over_compiled.args[1][:1], indirect=True)
@pytest.mark.parametrize("name", ["adam_step_", "lamb_step_"])
def test_zeros_take_the_fast_path(compiled: Compiled, program: ptx.Program, name: str) -> None:
    """Rows of an embedding that no token touched: not one division or root by the slow way more than other rows."""
    slow = []
    for zeros in (False, True):
        args = drive.step_args(name, layouts=("whole blocks",))
        args = args._replace(grads=[torch.full_like(p, 0.01) for p in args.params])
        if zeros:
            args.grads[0][::2] = 0.0
            args.params[0].view(-1)[::3] = -0.0
        expected = drive.cloned(args)
        before = sum((k.executed for _, k in program.kernels.values()), Counter())
        for step in range(2):
            compiled.step(name, args)
            getattr(reference, name)(expected)
            assert_same([*args], [*expected], f"step {step}")
        executed = sum((k.executed for _, k in program.kernels.values()), Counter()) - before
        slow.append({op: executed[op] for op in ("div.rn.f32", "sqrt.rn.f32")})
        assert executed["rsqrt.approx.ftz.f32"] >= 2 * args.params[0].numel()
    assert slow[0] == slow[1]


@pytest.mark.parametrize("compiled", ["triton"], indirect=True)
@pytest.mark.skipif(MISSING["triton"] is not None, reason=str(MISSING["triton"]))
@pytest.mark.parametrize("name", ["adam_step_", "lion_step_"])
def test_stages(compiled: Compiled, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where lab/gpu/tune.py asks for them: three and five tiles of a program, of which one is on its way."""
    from memkern.triton import tensor_table

    monkeypatch.setattr(tensor_table, "STAGES", 3)
    args = drive.step_args(name, torch.bfloat16, torch.bfloat16, (0, 0), layouts=((40, 128), (17, 136), (24, 128)))
    expected = drive.cloned(args)
    compiled.step(name, args)
    getattr(reference, name)(expected)
    assert_same([*args], [*expected])
    waits = {i.text for made in compiled.launched for kernel in made.kernels.values() for i in kernel.code}
    assert any(re.fullmatch(r"cp\.async\.wait_group [1-9]\d*", text) for text in waits)


@over_compiled
@pytest.mark.parametrize("codec", CODECS)
def test_quantizers(compiled: Compiled, codec: str) -> None:
    for i, layout in enumerate(SOME_LAYOUTS):
        for signed in (True, False):
            x, step = drive.spoiled(tensor(layout, FLOATS[i % 3])), None if signed and i % 2 else 7
            args = x, NUMBERS[codec], signed, 128, step
            expected = reference.quantize_blockwise(*args)
            assert_same([*compiled.ops.quantize_blockwise(*args)], [*expected], layout)
            args = *expected, NUMBERS[codec], 128, FLOATS[i % 3]
            assert_same(compiled.ops.dequantize_blockwise(*args), reference.dequantize_blockwise(*args), layout)


@over_compiled
def test_norm(compiled: Compiled) -> None:
    grads = [tensor(layout, FLOATS[i % 3], scale=0.1) for i, layout in enumerate(LAYOUTS)]
    norm = torch.zeros((), dtype=torch.float64)
    compiled.ops.grad_norm_(norm, grads, torch.tensor(4.0))
    truth = torch.cat([g.double().flatten() for g in grads]).norm() / 4
    torch.testing.assert_close(norm, truth, rtol=1e-12, atol=0)


@pytest.mark.parametrize("compiled", ["triton"], indirect=True)
@pytest.mark.skipif(MISSING["triton"] is not None, reason=str(MISSING["triton"]))
def test_norm_with_slow_fp64(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    from memkern.triton import grad_norm

    monkeypatch.setattr(grad_norm, "slow_fp64", lambda _device: True)
    for scale in (1.0, 1e-25, 1e30):
        grads = [tensor(layout, scale=0.1) * scale for layout in LAYOUTS]
        norm = torch.zeros((), dtype=torch.float64)
        compiled.ops.grad_norm_(norm, grads)
        truth = torch.cat([g.double().flatten() for g in grads]).norm()
        torch.testing.assert_close(norm, truth, rtol=1.5 * 2**-24, atol=0)  # as in triton_squares.py


@over_compiled
@pytest.mark.parametrize(
    ("codec", "param", "grad", "weights"),
    [
        ("power", *DTYPES[0], 0),
        ("power", *DTYPES[1], 2),
        (None, *DTYPES[2], 0),
        ("dynamic", torch.bfloat16, torch.float32, 3),
    ],
)
def test_muon(compiled: Compiled, codec: str | None, param: torch.dtype, grad: torch.dtype, weights: int) -> None:
    of_module = SimpleNamespace(
        muon_momentum_=lambda *a: memkern.triton.muon_momentum_(*a[:2], StepArgs(*a[2:])),
        muon_apply_=lambda *a: memkern.triton.muon_apply_(*a[:2], StepArgs(*a[2:])),
    )
    ops = compiled.ops if compiled.ops is torch.ops.memkern_simt else of_module
    compare_muon(ops, muon_helpers.step_args(codec, param, grad, weights, 128), steps=2)


@over_compiled
def test_activations(compiled: Compiled) -> None:
    # Forward is for the shim and the interpreter: approximations of exp and erf are not in the emulator.
    for i, layout in enumerate(ACTIVATION_LAYOUTS):
        bits, dtype = i % 4 + 1, FLOATS[i % 3]
        compare_gradients(compiled.ops, layout, dtype, bits)


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


@pytest.mark.parametrize("compiled", ["triton"], indirect=True)
@pytest.mark.skipif(MISSING["triton"] is not None, reason=str(MISSING["triton"]))
def test_gelu_of_every_bf16(compiled: Compiled) -> None:
    assert compare_bf16_gelu(compiled.ops) in (
        0,
        11,
    )  # with the erf of CUDA 13 (Triton 3.9), of CUDA 12 (3.6)


@pytest.mark.parametrize("compiled", ["cuda"], indirect=True)
@pytest.mark.skipif(MISSING["cuda"] is not None, reason=str(MISSING["cuda"]))
def test_forward_of_gelu(compiled: Compiled) -> None:
    compare_gelus(compiled.ops, torch.float32, [("gelu", 3)])
    compare_gelus(compiled.ops, torch.float16, [("gelu", 4)])


def test_names_are_read_alike() -> None:
    assert ptx.readable(["_ZN7memkern10norm_tilesENS_9NormTableE"]) == ["memkern::norm_tiles"]
    assert Path(build.ROOT, "csrc", "cuda").exists()
