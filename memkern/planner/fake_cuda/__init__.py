"""Fake CUDA: after :func:`install` a torch without CUDA runs autograd on FakeTensors whose device is cuda.

On such tensors every operator is dispatched as on a GPU (boolean dropout masks, no CPU-only attention kernel) and
computes nothing, so that the memory of a GPU can be counted on any machine. For counting only, in a process of its own:
from then on torch reports that CUDA is there. Needs a C++ compiler the first time.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...techniques.options import OptionError

HERE = Path(__file__).parent


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("fake CUDA needs torch")
    return Path(spec.submodule_search_locations[0])


def _build(torch: Path) -> Path:
    """The guard as a shared library, cached in the temporary folder for this source and this torch."""
    source = HERE / "guard.cpp"
    key = hashlib.sha256(source.read_bytes() + (torch / "version.py").read_bytes()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"memkern-fakecuda-{os.getuid()}-{key}.so"
    if library.exists() and library.stat().st_uid == os.getuid():
        return library
    if (cxx := compiler()) is None:
        raise RuntimeError("fake CUDA needs a C++ compiler; install one or name it in CXX")
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / library.name
        options = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-I{torch / 'include'}", f"-L{torch / 'lib'}"]
        subprocess.check_call([cxx, *options, str(source), "-o", str(built), "-lc10", "-ltorch_cpu"])
        shutil.copy(built, library.with_suffix(f".{os.getpid()}"))
    library.with_suffix(f".{os.getpid()}").replace(library)
    return library


def torch_has_gpus() -> bool:
    """Whether torch was built for GPUs, which fake CUDA cannot be added to: says so without importing torch."""
    return any((_torch_folder() / "lib" / name).exists() for name in ("libtorch_cuda.so", "libtorch_hip.so"))


def why_not() -> str | None:
    """Why :func:`install` gives no CUDA tensors; None where it does."""
    if torch_has_gpus():
        return "this torch is built for GPUs and finds none; torch's build for CPUs counts as on a GPU"
    return None if compiler() else "no C++ compiler is found"


def compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")


def install() -> None:
    """Loads the guard, unless torch was built for GPUs. Raises RuntimeError where torch is loaded already."""
    torch = _torch_folder()
    if torch_has_gpus():
        return
    if "torch" in sys.modules:
        raise RuntimeError("fake CUDA must be installed before torch is imported")
    library = _build(torch)
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch / "lib" / name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))


def call(function: Callable[..., Any], **arguments: Any) -> Any:
    """Runs a function in a process with fake CUDA.

    Raises:
        OptionError: the function's own.
        RuntimeError: anything else, also what cannot be sent to another process.
    """
    try:
        request = pickle.dumps((function, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RuntimeError(f"the model cannot be sent to a process with fake CUDA tensors ({error})") from error
    process = subprocess.run([sys.executable, "-m", __name__], input=request, capture_output=True)
    if process.returncode:
        raise RuntimeError(f"on fake CUDA tensors: {process.stderr.decode(errors='replace').strip()[-500:]}")
    result = pickle.loads(process.stdout)
    if isinstance(result, OptionError):
        raise result
    return result
