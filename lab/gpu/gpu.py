"""Finds the machine's GPU (by nvidia-smi, else torch, else CUDA's driver) and the programs of the CUDA toolkit."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

# Runs in a process of its own, so that this one gets no CUDA context.
ASK_TORCH = """
import torch
if torch.cuda.is_available():
    print("%d.%d" % torch.cuda.get_device_capability(0), torch.cuda.get_device_name(0), sep=", ")
"""
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


class Gpu(NamedTuple):
    capability: str  # such as "9.0"
    name: str
    found_by: str


def output(*command: str) -> str | None:
    """What a command prints, or None where it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def tool(name: str) -> str | None:
    """A program of the CUDA toolkit, whose folder may not be on the PATH."""
    folders = [Path("/usr/local/cuda/bin"), *sorted(Path("/usr/local").glob("cuda-*/bin"), reverse=True)]
    return shutil.which(name) or next((str(folder / name) for folder in folders if (folder / name).exists()), None)


def ask_nvidia_smi() -> str | None:
    return output("nvidia-smi", "--query-gpu=compute_cap,name,driver_version,memory.total", "--format=csv,noheader")


def ask_torch() -> str | None:
    return output(sys.executable, "-W", "ignore", "-c", ASK_TORCH)


def ask_driver(library: str = "libcuda.so.1") -> str | None:
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return None
    major, minor, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    cuda.cuDeviceGetAttribute(ctypes.byref(major), CAPABILITY_MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), CAPABILITY_MINOR, device)
    cuda.cuDeviceGetName(name, 256, device)
    return f"{major.value}.{minor.value}, {name.value.decode()}"


def find_gpu() -> Gpu | None:
    """The first GPU, or None."""
    for found_by, ask in (("nvidia-smi", ask_nvidia_smi), ("torch", ask_torch), ("driver", ask_driver)):
        if answer := ask():  # capability, name, ...
            capability, _, name = answer.splitlines()[0].partition(",")
            return Gpu(capability.strip(), name.strip(), found_by)
    return None
