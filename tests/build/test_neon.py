"""The CPU kernels for 64-bit ARM, cross-compiled and run by an emulator, give the bits of x86's.

Debian: apt-get install g++-aarch64-linux-gnu qemu-user
"""

import os
import platform
import runpy
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.cpu_driver import CROSS, DRIVER, EMULATOR, FLAGS, ROOT, compile_driver


def hashes(*command: str) -> dict[str, dict[str, str]]:
    """What a driver prints: the hash of each case's results, by instruction set and case."""
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    by_isa: dict[str, dict[str, str]] = {}
    for line in printed.splitlines():
        isa, entry = line.split(" ", 1)
        case, digest = entry.rsplit(" ", 1)
        by_isa.setdefault(isa, {})[case] = digest
    return by_isa


@pytest.fixture
def generated() -> None:
    """Writes the headers that csrc/generate.py generates."""
    runpy.run_path(str(ROOT / "csrc/generate.py"))["write_headers"]()


@pytest.mark.usefixtures("generated")
def test_the_driver_compiles_with_these_kernels() -> None:
    command = ["g++", "-fsyntax-only", *FLAGS, f"-I{ROOT / 'csrc'}", "-DISAS=RUN(generic)", str(DRIVER)]
    subprocess.run(command, check=True)


@pytest.mark.long
@pytest.mark.usefixtures("generated")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with the kernels of x86")
@pytest.mark.skipif(
    not (shutil.which(CROSS) and shutil.which(EMULATOR)), reason=f"{CROSS} or {EMULATOR} is not installed"
)
def test_every_kernel_gives_the_bits_of_x86(tmp_path: Path) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        x86_driver = compile_driver("g++", ("generic", "avx2"), tmp_path, pool)
        arm_driver = compile_driver(CROSS, ("generic", "neon"), tmp_path, pool)
        emulated = pool.submit(hashes, EMULATOR, str(arm_driver))
        x86, arm = hashes(str(x86_driver)), emulated.result()
    cases = x86["generic"]
    assert len(cases) > 9000  # fewer: the driver left kernels out
    assert arm["neon"].keys() == arm["generic"].keys() == cases.keys()
    different = [case for case in cases if arm["generic"][case] != cases[case]]
    different += [
        # Sums of squares are added up lane by lane: NEON's order is AVX2's.
        case
        for case in cases
        if arm["neon"][case] != (x86["avx2"] if case.startswith("sum:") else cases)[case]
    ]
    assert not different
