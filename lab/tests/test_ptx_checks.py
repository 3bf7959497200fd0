"""The PTX emulator finds planted faults in small kernels: races, unwritten bytes, partial barriers, bad addresses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lab.emulators.ptx_checks import ORDERS, Checks, InitError, RaceError
from lab.emulators.ptx_emulator import Memory, Module, PtxError, launch, pack

pytestmark = pytest.mark.full
THREADS, BLOCKS = 64, 2
# %r3 is the thread's number i in the grid, %r1 that in its block, %r4 4 %r1; %rd3 and %rd4 point to x[i] and y[i].
# %r6 is the address of the thread's word of shared memory, %r8 that of its neighbour's. %p1 is true in 7 threads of a
# block, %p2 in its first warp, %p3 in its first thread, %p6 in the grid's first thread, %p7 in the second block.
KERNEL = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry kernel(.param .u64 kernel_x, .param .u64 kernel_y)
{
  .reg .pred %p<9>; .reg .b32 %r<20>; .reg .b64 %rd<9>; .shared .align 16 .b8 room[256];
  ld.param.u64 %rd1, [kernel_x]; ld.param.u64 %rd2, [kernel_y];
  mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.s32 %r3, %r2, 64, %r1;
  mul.wide.s32 %rd5, %r3, 4; add.s64 %rd3, %rd1, %rd5; add.s64 %rd4, %rd2, %rd5; shl.b32 %r4, %r1, 2;
  mov.u32 %r5, room; add.s32 %r6, %r5, %r4; xor.b32 %r7, %r4, 4; add.s32 %r8, %r5, %r7;
  setp.lt.u32 %p1, %r1, 7; setp.lt.u32 %p2, %r1, 32; setp.eq.u32 %p3, %r1, 0; setp.eq.u32 %p6, %r3, 0;
  setp.ge.u32 %p7, %r3, 64;
  BODY
  ret;
}
"""
STORE_OWN = "st.shared.u32 [%r6], %r1; "  # the thread's own word
LOAD_OTHER = "ld.shared.u32 %r9, [%r8]; "  # its neighbour's word
BARRIER = "bar.sync 0; "
VECTOR = "and.b32 %r9, %r3, 3; setp.eq.u32 %p5, %r9, 0; @%p5 ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd3+16]; "
# All lanes of a warp read a word; then one of them writes it.
ALL_READ = "@%p3 st.shared.u32 [room], %r1; bar.sync 0; @!%p2 bra END; ld.shared.u32 %r9, [room]; "
ONE_WRITES = "@%p3 st.shared.u32 [room], %r9;\nEND:\n"
FINE = {  # bodies without a fault
    "a barrier between": STORE_OWN + BARRIER + LOAD_OTHER + BARRIER + STORE_OWN,
    "a barrier of the warp between": STORE_OWN + "bar.warp.sync -1; " + LOAD_OTHER + "bar.warp.sync -1; " + STORE_OWN,
    "each its own": STORE_OWN + "ld.shared.u32 %r9, [%r6]; st.global.u32 [%rd4], %r9; ld.global.u32 %r9, [%rd4];",
    "all read the same": "ld.global.u32 %r9, [%rd1]; st.global.u32 [%rd4], %r9;",
    "one writes what all have exchanged": ALL_READ + "shfl.sync.bfly.b32 %r9, %r9, 1, 31, -1; " + ONE_WRITES,
    "one writes, all read later": "@%p3 st.shared.u32 [room], %r1; " + BARRIER + "ld.shared.u32 %r9, [room];",
}
RACES = {
    "a neighbour's word without a barrier": STORE_OWN + LOAD_OTHER,
    "written again without a barrier": STORE_OWN + BARRIER + LOAD_OTHER + STORE_OWN,
    "one writes what all read": ALL_READ + ONE_WRITES,
    "all write one word": "st.shared.u32 [room], %r1;",
    "a shuffle is no barrier for what was written": STORE_OWN + "shfl.sync.bfly.b32 %r9, %r1, 1, 31, -1; " + LOAD_OTHER,
    "two blocks write one word": "@%p3 st.global.u32 [%rd2], %r1; ",
    "another block's word is read": "@%p3 st.global.u32 [%rd4], %r1; bar.sync 0; ld.global.u32 %r9, [%rd2];",
}
NOT_WRITTEN = {
    "shared memory": LOAD_OTHER,
    "one word of shared memory": "@!%p3 st.shared.u32 [%r6], %r1; " + BARRIER + LOAD_OTHER,
    "a result": "ld.global.u32 %r9, [%rd4];",
    "one of four bytes": "st.global.u8 [%rd4], %r1; st.global.u16 [%rd4+2], %r1; ld.global.u32 %r9, [%rd4];",
}
OUTSIDE = {
    "a word past the end": "ld.global.u32 %r9, [%rd3+4];",
    "a word before the start": "st.global.u32 [%rd4+-4], %r1;",
    "a vector over the end": VECTOR,
}
SEVEN = "@%p1 ret; shfl.sync.bfly.b32 %r9, %r1, 1, 31, -1;"
OTHER_FAULTS = {  # body, part of the error
    "a barrier for seven threads": ("@%p1 bar.sync 0;", "wait at a barrier for others"),
    "two barriers": (
        "@%p2 bra LOW; bar.sync 0; bra.uni END;\nLOW:\n bar.sync 0;\nEND:\n",
        "different barriers",
    ),
    "a shuffle without seven threads": (SEVEN, "some lanes of a warp are elsewhere"),
    "a vote in a branch": ("@%p1 vote.sync.any.pred %p5, %p2, -1;", "lanes of a warp are elsewhere"),
    "a word before shared memory": (STORE_OWN + BARRIER + "ld.shared.u32 %r9, [%r6+-4];", "outside of shared memory"),
    "a word past shared memory": (STORE_OWN + BARRIER + "ld.shared.u32 %r9, [%r6+4];", "outside of shared memory"),
}
FAULTS: dict[str, tuple[str, type[PtxError], str]] = {  # body, error, part of its text
    **{f"race: {name}": (body, RaceError, "") for name, body in RACES.items()},
    **{f"init: {name}": (body, InitError, "nobody wrote") for name, body in NOT_WRITTEN.items()},
    **{f"memory: {name}": (body, PtxError, "outside of all buffers") for name, body in OUTSIDE.items()},
    **{name: (body, PtxError, words) for name, (body, words) in OTHER_FAULTS.items()},
}


def run(body: str, order: str, spoil: bool = False) -> Any:
    """Runs the kernel with a body; returns the checks and y."""
    module = Module(KERNEL.replace("BODY", body))
    kernel = module.find("kernel")
    # Guard zones of 4 KB around x and y, so that a wrong address is in no buffer.
    room = np.zeros(3 * 4096 // 4, np.uint32)
    start = -room.ctypes.data % 16 // 4
    x, y = room[start : start + 128], room[start + 1100 : start + 1228]
    memory, checks = Memory(x, y), Checks(order, spoil=spoil)
    checks.unwritten[y.ctypes.data] = np.zeros(y.nbytes, bool)
    launch(module, kernel, BLOCKS, THREADS, pack(kernel, x.ctypes.data, y.ctypes.data), memory, 0, checks)
    return checks, y


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", FINE)
def test_nothing_is_found_where_nothing_is_wrong(name: str, order: str) -> None:
    run(FINE[name], order)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, order: str) -> None:
    body, kind, words = FAULTS[name]
    with pytest.raises(kind) as error:
        run(body, order)
    assert words in str(error.value), error.value


def test_a_read_that_races_is_spoiled() -> None:
    """With ``spoil`` it gets bits of ones, so that results show whether anything depends on it."""
    body = "@%p6 st.global.u32 [%rd2], %r1; @%p7 bra END; ld.global.u32 %r9, [%rd2]; "
    body += "@!%p6 st.global.u32 [%rd4], %r9;\nEND:\n"
    checks, y = run(body, "together", spoil=True)
    assert len(checks.raced) == 1
    assert [*y[:3]] == [0, 0xFFFFFFFF, 0xFFFFFFFF]
