"""Wheels for a machine without a network: `make gpu-wheels` fetches those worth carrying, `make gpu` installs them.

``python -m lab.gpu.wheels fetch [--python 3.12]``, ``python -m lab.gpu.wheels install``. They go into build/gpu/,
which git ignores, and never into the machine's own packages.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys

from .parts import SITE, WHEELS

MOST_BYTES = 60 << 20  # that may travel with a working tree
# Without what they depend on where the machine has it: torch, numpy, triton.
PACKAGES = (
    ("pytest", "hypothesis", "pybind11", "rich", "ninja", "setuptools"),
    ("matplotlib",),
    ("--no-deps", "flashoptim"),
)


def fetch(python: str) -> None:
    """Downloads in the order of what is wanted, and drops what would be too much."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    for packages in PACKAGES:
        before = {*WHEELS.iterdir()}
        command = [sys.executable, "-m", "pip", "download", "-q", "-d", str(WHEELS)]
        command += ["--only-binary=:all:", "--python-version", python, *packages]
        done = subprocess.run(command, check=False)
        fresh = {*WHEELS.iterdir()} - before
        total = sum(file.stat().st_size for file in WHEELS.iterdir())
        if done.returncode or total > MOST_BYTES:
            for file in fresh:
                file.unlink()
            why = f"{total >> 20} MiB in all" if not done.returncode else "not to be had"
            print(f"left out: {' '.join(packages)} ({why})")
    for file in sorted(WHEELS.iterdir()):
        print(f"{file.stat().st_size / 2**20:6.1f} MiB  {file.name}")


def installed(wheel: str) -> bool:
    try:
        importlib.metadata.version(wheel.partition("-")[0])
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def install() -> None:
    """Those packages alone that the machine does not have: its own versions go before."""
    found = [wheel for wheel in sorted(WHEELS.glob("*.whl")) if not installed(wheel.name)]
    if not found:
        print("nothing to install; `make gpu-wheels` on a machine with a network fetches wheels")
        return
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--upgrade"]
    command += ["--target", str(SITE)]
    if subprocess.run([*command, *map(str, found)], capture_output=True, check=False).returncode == 0:
        print(f"{len(found)} wheels")
        return
    for wheel in found:  # one that is for another Python does not keep the others away
        done = subprocess.run([*command, str(wheel)], capture_output=True, text=True, check=False)
        lines = done.stderr.strip().splitlines()
        print(
            f"{wheel.name}: {'installed' if done.returncode == 0 else lines[0] if lines else 'failed'}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["fetch", "install"])
    default = "3.12"
    parser.add_argument("--python", default=default, help=f"of the machine with the GPU (default: {default})")
    args = parser.parse_args()
    if args.action == "fetch":
        fetch(args.python)
    else:
        install()


if __name__ == "__main__":
    main()
