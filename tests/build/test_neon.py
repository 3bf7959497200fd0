"""The CPU kernels for 64-bit ARM: cross-compiled, run by an emulator, and the same bits as x86's.

Debian: apt-get install g++-aarch64-linux-gnu qemu-user
"""

import os
import platform
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.cpu_driver import CROSS, EMULATOR, ROOT, compile_driver

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with the kernels of x86"),
    pytest.mark.skipif(
        not (shutil.which(CROSS) and shutil.which(EMULATOR)), reason=f"{CROSS} or {EMULATOR} is not installed"
    ),
]


def hashes(*command: str) -> dict[str, dict[str, str]]:
    """By instruction set and case."""
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, dict[str, str]] = {}
    for line in printed.splitlines():
        isa, rest = line.split(" ", 1)
        case, digest = rest.rsplit(" ", 1)
        found.setdefault(isa, {})[case] = digest
    return found


class Drivers(NamedTuple):
    """Of tests/support/cpu_kernels.cpp: for this processor, and for ARM."""

    here: Path
    there: Path


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Drivers:
    folder = tmp_path_factory.mktemp("neon")
    runpy.run_path(str(ROOT / "csrc/generate.py"))["write_headers"]()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        here = compile_driver("g++", ("generic", "avx2"), folder, pool)
        return Drivers(here, compile_driver(CROSS, ("generic", "neon"), folder, pool))


def test_every_kernel_gives_the_bits_of_x86(drivers: Drivers) -> None:
    with ThreadPoolExecutor(2) as pool:
        emulated = pool.submit(hashes, EMULATOR, str(drivers.there))
        x86, arm = hashes(str(drivers.here)), emulated.result()
    cases = x86["generic"]
    assert len(cases) > 9000
    assert arm["neon"].keys() == arm["generic"].keys() == cases.keys()
    different = [case for case in cases if arm["generic"][case] != cases[case]]
    different += [
        # Sums of squares are added up lane by lane: NEON's order is AVX2's.
        case
        for case in cases
        if arm["neon"][case] != (x86["avx2"] if case.startswith("sum:") else cases)[case]
    ]
    assert not different


# ---- hypothesis: any data, any block size, any alignment

SIZES = {0: 4, 1: 2, 2: 2}  # bytes of fp32, bf16, fp16
GUARD = 64  # bytes behind each array, which the driver sends too


class Server:
    """A driver that quantizes what it is sent."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, head: tuple[int, ...], values: np.ndarray) -> list[np.ndarray]:
        """Codes, scales and values, each with what lies before and behind it; every NaN is the same one."""
        _, dtype, _, _, block, count, offset = head
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(np.array(head, np.int32).tobytes() + values.astype(np.float32).tobytes())
        self.process.stdin.flush()
        blocks = -(-count // block)
        found = []
        for size, length in ((1, offset + count), (4, blocks), (SIZES[dtype], offset + count)):
            read = self.process.stdout.read(length * size + GUARD)
            assert len(read) == length * size + GUARD, "the driver has ended"
            found.append(np.frombuffer(read, np.dtype(f"u{size}")))
        infinity = {0: 0x7F800000, 1: 0x7F80, 2: 0x7C00}[dtype]
        magnitude = found[2] & (2 ** (8 * SIZES[dtype] - 1) - 1)
        found[2] = np.where(magnitude > infinity, infinity + 1, found[2])
        return found


@pytest.fixture(scope="module")
def servers(drivers: Drivers) -> Iterator[tuple[Server, Server]]:
    both = (
        Server(str(drivers.here), "serve", "generic"),
        Server(EMULATOR, str(drivers.there), "serve", "neon"),
    )
    yield both
    for server in both:
        server.process.kill()
        server.process.wait()


# Any bits, and what lies at the edges: NaN of any payload, subnormal numbers, zeros of both signs, what overflows.
BITS = st.one_of(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1 << 31, 1, 0x807FFFFF, 0x00800000, 0x7F7FFFFF]),
    st.sampled_from([0x7F800000, 0xFF800000, 0x7FA00001, 0xFFFFFFFF]),
    st.integers(0x3E000000, 0x41000000),  # near 1
)


@settings(max_examples=1000, deadline=None, database=None, suppress_health_check=[*HealthCheck])
@given(
    kind=st.sampled_from([1, 2]),  # power, dynamic (StateKind)
    dtype=st.sampled_from([*SIZES]),
    is_signed=st.booleans(),
    step=st.integers(-1, 2**20),
    block=st.sampled_from([8, 16, 64, 100, 128, 256, 1000]),
    offset=st.integers(0, 15),
    bits=st.lists(BITS, min_size=1, max_size=400),
    scale=st.sampled_from([1.0, 2.0**-120, 2.0**100]),
)
def test_codes_of_any_data_are_those_of_x86(
    servers: tuple[Server, Server],
    *,
    kind: int,
    dtype: int,
    is_signed: bool,
    step: int,
    block: int,
    offset: int,
    bits: list[int],
    scale: float,
) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        values = (values if is_signed else np.abs(values)) * np.float32(scale)
    head = (kind, dtype, int(is_signed), step, block, len(bits), offset)
    for x86, arm in zip(*(server.ask(head, values) for server in servers), strict=True):
        np.testing.assert_array_equal(x86, arm)
