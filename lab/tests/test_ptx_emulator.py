"""The PTX emulator computes small kernels as a GPU would, and refuses what it does not know."""

from typing import Any

import numpy as np
import pytest
import torch

from lab.emulators.ptx_emulator import Memory, Module, PtxError, contracted, launch, pack, unit_off

HEAD = ".version 8.0\n.target sm_90\n.address_size 64\n"
# y[i] = body(x[i]) for thread i; %f1 is x[i], %f2 what is stored, %r1 the thread's number.
EACH = """
.visible .entry each(.param .u64 each_x, .param .u64 each_y, .param .u32 each_n)
.maxntid 256, 1, 1
{{
  .reg .pred %p<4>; .reg .b32 %r<9>; .reg .f32 %f<9>; .reg .b64 %rd<9>;
  ld.param.u64 %rd1, [each_x]; ld.param.u64 %rd2, [each_y]; ld.param.u32 %r4, [each_n];
  mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x;
  mad.lo.s32 %r1, %r2, %r3, %r1;
  setp.ge.s32 %p1, %r1, %r4;
  @%p1 bra DONE;
  mul.wide.s32 %rd3, %r1, 4;
  add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
  ld.global.f32 %f1, [%rd4];
  {body}
  st.global.f32 [%rd5+{offset}], %f2;
DONE:
  ret;
}}
"""


def each(body: str, x: torch.Tensor, n: int | None = None, offset: int = 0) -> torch.Tensor:
    """Runs the body for the first n elements of x; stores to y are ``offset`` bytes off."""
    module = Module(HEAD + EACH.format(body=body, offset=offset))
    kernel, y = module.find("each"), torch.full_like(x, -1.0)
    params = pack(kernel, x, y, len(x) if n is None else n)
    launch(module, kernel, -(-len(x) // 64), 64, params, Memory(x, y))
    return y


X = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 3
BODIES: dict[str, tuple[str, Any]] = {  # body, the function that it computes
    "a product and a sum": (
        "mul.rn.f32 %f3, %f1, 0f40400000; add.rn.f32 %f2, %f3, %f1;",
        lambda x: x * 3 + x,
    ),
    "a loop of as many turns as the thread's number": (
        "mov.f32 %f2, 0f00000000; mov.u32 %r5, 0;\nLOOP:\n setp.ge.u32 %p2, %r5, %r1; @%p2 bra OUT;"
        "add.rn.f32 %f2, %f2, 0f3F800000; add.s32 %r5, %r5, 1; bra.uni LOOP;\nOUT:\n",
        lambda x: torch.arange(len(x)).float(),
    ),
    "two branches that meet": (
        "setp.gt.f32 %p2, %f1, 0f00000000; @%p2 bra UP; neg.f32 %f2, %f1; bra.uni MEET;\nUP:\n mov.f32 %f2, %f1;\n"
        "MEET:\n mul.rn.f32 %f2, %f2, %f2;",
        lambda x: x * x,
    ),
    "a comparison of pairs of bf16": (  # the first is greater than 1, the second is 2
        "mov.b32 %r5, %f1; prmt.b32 %r5, %r5, 0x40000000, 0x7632; mov.b32 %r6, 0x3F803F80;"
        "setp.gt.bf16x2 %p2|%p3, %r5, %r6; selp.b32 %r5, 0x3F800000, 0, %p2; selp.b32 %r6, 0x40000000, 0, %p3;"
        "mov.b32 %f1, %r5; mov.b32 %f2, %r6; add.rn.f32 %f2, %f1, %f2;",
        lambda x: (x >= 1.0078125) + 2.0,
    ),
    "bytes": (
        "mov.b32 %r5, %f1; prmt.b32 %r6, %r5, 0, 0x0123; prmt.b32 %r6, %r6, 0, 0x0123; mov.b32 %f2, %r6;",
        lambda x: x,
    ),
    "the largest of the warp": (
        "mov.b32 %r5, %f1;"
        + "".join(
            f"shfl.sync.bfly.b32 %r6, %r5, {d}, 31, -1; mov.b32 %f3, %r5; mov.b32 %f4, %r6; max.f32 %f2, %f3, %f4;"
            "mov.b32 %r5, %f2;"
            for d in (16, 8, 4, 2, 1)
        ),
        lambda x: torch.cat([c.max().expand(len(c)) for c in x.split(32)]),
    ),
    "rounding to a whole number": ("cvt.rni.f32.f32 %f2, %f1;", torch.round),
    "bf16": (
        "{ .reg .b16 %h<3>; cvt.rn.bf16.f32 %h1, %f1; mov.b32 %r5, {%h2, %h1}; and.b32 %r5, %r5, -65536; "
        "mov.b32 %f2, %r5; }",
        lambda x: x.bfloat16().float(),
    ),
    "a fused product and sum": (
        "fma.rn.f32 %f2, %f1, %f1, 0fBF800000;",
        lambda x: (x.double() * x.double() - 1).float(),
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_computes_its_function(name: str) -> None:
    body, expected = BODIES[name]
    x = X[:992]  # whole warps
    assert torch.equal(each(body, x), expected(x))


REFUSED = {  # body, options of each(), part of the error
    "a store behind the end": ("mov.f32 %f2, %f1;", {"offset": 4}, "outside of all buffers"),
    "a store at an odd place": ("mov.f32 %f2, %f1;", {"offset": 2}, "not a multiple of 4"),
    "an unknown instruction": ("sin.approx.f32 %f2, %f1;", {}, "unknown instruction"),
    "a division of unknown rounding": ("div.approx.f32 %f2, %f1, %f1;", {}, "correctly rounded"),
    "a shuffle without some lanes": (
        "setp.gt.f32 %p2, %f1, 0f00000000; @%p2 bra SKIP; mov.b32 %r5, %f1; shfl.sync.bfly.b32 %r6, %r5, 1, 31, -1;\n"
        "SKIP:\n mov.f32 %f2, %f1;",
        {},
        "some lanes of a warp are elsewhere",
    ),
    "a barrier that some do not reach": ("bar.sync 0; mov.f32 %f2, %f1;", {"n": 100}, "that have exited"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_faulty_body_raises(name: str) -> None:
    body, options, message = REFUSED[name]
    with pytest.raises(PtxError, match=message):
        each(body, X[:128], **options)


def test_products_that_ptxas_may_fuse_are_found() -> None:
    body = "mul.f32 %f3, %f1, %f1; add.rn.f32 %f2, %f3, %f1;"
    assert contracted(Module(HEAD + EACH.format(body=body, offset=0))) == ["mul.f32 %f3, %f1, %f1"]


def test_approximations_are_off_by_up_to_one_unit() -> None:
    x = np.abs(X.numpy()) + np.float32(1)
    steps = unit_off(x).view(np.int32) - x.view(np.int32)
    assert {*steps.tolist()} == {-1, 0, 1}
